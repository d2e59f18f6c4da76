"""What strangers send: whatever it is, it is rows or a reason, and nothing else happens."""

from __future__ import annotations

import itertools
import math
import random
import struct
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from fedsim.cohorts import FullCohort
from fedsim.engines import LocalGrid
from fedsim.federation.aggregation.shares import SHARE_ARRAY
from fedsim.federation.arrays import array_record, tensors
from fedsim.federation.flower_internals import CLIENT_RAISED, NODE_UNAVAILABLE
from fedsim.federation.private_metrics import PrivateEvaluation
from fedsim.federation.round_report import failures_in
from fedsim.mechanisms import (
    AdaClip,
    AdaptiveNoise,
    Clipping,
    CoordinateClipping,
    Mechanism,
    NoPrivacy,
    Normalization,
    NormBound,
    PerLayer,
    PrivateScalar,
    QuantileClipping,
)
from fedsim.mechanisms.bounded_values import ValueRange
from fedsim.strategies import DPFedAvg

SHAPES = {"w": (3, 4), "b": (4,)}
D = 16
NODES = 6


def npy(header: str, body: bytes = b"") -> bytes:
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def raw(data: bytes, shape: tuple[int, ...] = (3, 4)) -> Array:
    return Array(dtype="float32", shape=shape, stype="numpy.ndarray", data=data)


def parameters(**changes: Array | None) -> ArrayRecord:
    arrays = {name: Array(np.ones(shape, dtype=np.float32)) for name, shape in SHAPES.items()}
    arrays |= changes
    return ArrayRecord({name: array for name, array in arrays.items() if array is not None})


class Lying(MetricRecord):
    """A record that raises when it is read."""

    def items(self):
        raise MemoryError("no")


BAD_ARRAYS = {
    "73 TiB": raw(npy("{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,), }\n")),
    "10^24 entries": raw(
        npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**12}, {10**12}), }}\n")
    ),
    "a cut header": raw(npy("{'descr': '<f4', 'fortran_or")),
    "a nested header": raw(npy("(" * 900)),
    "a zip archive": raw(b"PK\x03\x04" + bytes(60)),
    "a pickle": raw(npy("{'descr': '|O', 'fortran_order': False, 'shape': (3, 4), }\n", bytes(9))),
    "nothing": raw(b""),
    "another shape": Array(np.ones((4, 3), np.float32)),
    "one number": Array(np.ones((), np.float32)),
    "whole numbers": Array(np.ones((3, 4), np.int64)),
    "text": Array(np.array([["a"] * 4] * 3)),
    "complex numbers": Array(np.ones((3, 4), np.complex64)),
    "another kind": Array(dtype="float32", shape=(3, 4), stype="torch.save", data=b"\x80\x04."),
    "numbers longer than doubles": Array(np.ones((3, 4), np.longdouble)),
    "times": Array(np.zeros((3, 4), "M8[s]")),
    "records": Array(np.zeros((3, 4), [("a", "<f4")])),
    "no rows": Array(np.ones((0, 3, 4), np.float32)),
    "a header of 4 GiB": raw(b"\x93NUMPY\x03\x00" + b"\xff" * 4),
    "more than it says": raw(Array(np.ones((3, 4), np.float32)).data + b"x"),
    "missing": None,
}
NON_FINITE = {
    "NaN": np.full((3, 4), np.nan, np.float32),
    "infinite": np.full((3, 4), np.inf, np.float32),
    "beyond float32": np.full((3, 4), 1e300),
}
BAD_COUNTS = [math.nan, math.inf, -math.inf, -1, -1e-9, 1e300, 10**400, 2**33]
BAD_LISTS = {"of lists": [[1.0]], "of words": ["1"], "longer than any use": [1.0] * 10_001}
ODD_METRICS = [math.nan, math.inf, 1e308, -1e308, 10**400, [1e308, 2.0], [10**400], [], 0.5, [0.5]]


def good() -> RecordDict:
    metrics = MetricRecord({"num-examples": 3, "loss": 0.5})
    return RecordDict({"arrays": parameters(), "metrics": metrics})


def bad_contents() -> dict[str, tuple[RecordDict, str]]:
    """Contents that no mechanism can use, each with its reason."""
    metrics = MetricRecord({"num-examples": 3, "loss": 0.5})
    found: dict[str, tuple[RecordDict, str]] = {
        f"an array: {name}": (
            RecordDict({"arrays": parameters(w=array), "metrics": metrics}),
            "malformed",
        )
        for name, array in BAD_ARRAYS.items()
    }
    for name, values in NON_FINITE.items():
        record = RecordDict({"arrays": parameters(w=Array(values)), "metrics": metrics})
        found[f"an array: {name}"] = (record, "non-finite")
    for count in BAD_COUNTS:
        lying = MetricRecord({"loss": 0.5})
        dict.__setitem__(lying._data, "num-examples", count)  # what the wire may hold
        found[f"num-examples: {count!s:.9}"] = (
            RecordDict({"arrays": parameters(), "metrics": lying}),
            "malformed",
        )
    for name, values in BAD_LISTS.items():
        lying = MetricRecord({"num-examples": 3})
        dict.__setitem__(lying._data, "m", values)
        found[f"a list: {name}"] = (
            RecordDict({"arrays": parameters(), "metrics": lying}),
            "malformed",
        )
    for name, record in {
        "no records": RecordDict(),
        "no arrays": RecordDict({"metrics": metrics}),
        "surplus": RecordDict({"arrays": parameters(v=Array(np.ones(2))), "metrics": metrics}),
        "two records": RecordDict({"a": parameters(), "b": parameters(), "metrics": metrics}),
        "a config": RecordDict({"arrays": ConfigRecord({"w": 1}), "metrics": metrics}),
        "a record that raises": RecordDict({"arrays": parameters(), "metrics": Lying()}),
        "too many numbers": RecordDict(
            {"arrays": parameters(), "metrics": MetricRecord({f"m{i}": i for i in range(2000)})}
        ),
    }.items():
        found[name] = (record, "malformed")
    return found


BAD = bad_contents()

MECHANISMS: dict[str, Mechanism] = {
    "none": NoPrivacy("num-examples"),
    "uniform": NoPrivacy("uniform"),
    "clipping": Clipping(1.0),
    "normalization": Normalization(1.0),
    "norm-bound": NormBound(1.0),
    "quantile": QuantileClipping(initial_clip_norm=0.5, bit_noise=0.2),
    "adaclip": AdaClip(clip_norm=1.0),
    "adaptive": AdaptiveNoise(clip_norm=1.0, beta=1.0, threshold=0.0),
    "coordinates": CoordinateClipping(clip_value=0.1),
    "layers": PerLayer(QuantileClipping(initial_clip_norm=0.5, bit_noise=0.2)),
    "scalar": PrivateScalar(Clipping(1.0), name="loss", high=1.0),
}


def strategy(mechanism: Mechanism, **settings) -> DPFedAvg:
    private = mechanism.guarantee == "gaussian"
    return DPFedAvg(
        **{
            "mechanism": mechanism,
            "cohort": FullCohort(NODES),
            "seed": 1,
            "noise_multiplier": 1e-6 if private else 0.0,
            **settings,
        }
    )


def initial() -> ArrayRecord:
    return array_record({name: torch.zeros(shape) for name, shape in SHAPES.items()})


class Round:
    """A round that is configured, whose replies are made by hand."""

    def __init__(self, made: DPFedAvg) -> None:
        self.strategy = made
        grid = LocalGrid(_nobody(), num_nodes=NODES)
        self.asked = list(made.configure_train(1, initial(), ConfigRecord(), grid))

    def reply(self, client: int, content: RecordDict) -> Message:
        return Message(content, reply_to=self.asked[client])

    def aggregate(self, replies: list[Message]) -> dict[str, torch.Tensor] | None:
        arrays, self.metrics = self.strategy.aggregate_train(1, replies)
        self.report = self.strategy.report
        assert self.report is not None
        return None if arrays is None else tensors(arrays)


def _nobody():
    from flwr.clientapp import ClientApp

    return ClientApp()


@pytest.mark.spanning
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("what", BAD)
def test_a_bad_reply_is_as_if_it_never_came_and_is_counted_with_its_reason(what, mechanism):
    content, reason = BAD[what]
    rounds = [Round(strategy(MECHANISMS[mechanism])) for _ in range(2)]
    expected = rounds[0].aggregate([rounds[0].reply(k, good()) for k in range(1, NODES)])
    got = rounds[1].aggregate(
        [rounds[1].reply(0, content), *(rounds[1].reply(k, good()) for k in range(1, NODES))]
    )
    assert expected is not None
    assert got is not None
    assert all(torch.equal(got[name], expected[name]) for name in SHAPES)
    assert all(torch.isfinite(value).all() for value in got.values())
    assert (rounds[1].report.usable, rounds[1].report.failed) == (NODES - 1, 1)
    assert {k: v for k, v in rounds[1].report.reasons.items() if v} == {reason: 1}


@pytest.mark.parametrize(
    "values",
    [
        np.ones((3, 4), ">f4"),
        np.ones((3, 4), ">f8"),
        np.asfortranarray(np.ones((3, 4), "<f4")),
        np.ones((3, 4), "<f2"),
    ],
    ids=["big-endian", "big-endian doubles", "by columns", "halves"],
)
def test_numbers_in_another_order_of_bytes_or_axes_are_the_same_numbers(values):
    rounds = [Round(strategy(NoPrivacy("uniform"))) for _ in range(2)]
    sent = RecordDict({"arrays": parameters(w=Array(values)), "metrics": MetricRecord({"m": 1})})
    expected = rounds[0].aggregate([rounds[0].reply(k, good()) for k in range(NODES)])
    got = rounds[1].aggregate([rounds[1].reply(k, sent) for k in range(NODES)])
    assert expected is not None
    assert got is not None
    assert all(torch.equal(got[name], expected[name]) for name in SHAPES)


def test_what_a_mechanism_needs_and_a_reply_has_not_is_malformed():
    without = RecordDict({"arrays": parameters(), "metrics": MetricRecord({"other": 1})})
    for name, malformed in (("none", 1), ("scalar", 1), ("clipping", 0), ("uniform", 0)):
        one = Round(strategy(MECHANISMS[name]))
        one.aggregate([one.reply(0, without), *(one.reply(k, good()) for k in range(1, NODES))])
        assert one.report.reasons["malformed"] == malformed
    loss = RecordDict(
        {"arrays": parameters(), "metrics": MetricRecord({"num-examples": 1, "loss": math.nan})}
    )
    one = Round(strategy(MECHANISMS["scalar"]))
    one.aggregate([one.reply(0, loss)])
    assert (one.report.reasons["non-finite"], one.report.reasons["missing"]) == (1, NODES - 1)


def test_no_weight_makes_the_exact_mean_of_others_impossible():
    heavy = RecordDict(
        {
            "arrays": parameters(w=Array(np.full((3, 4), 1e5, np.float32))),
            "metrics": MetricRecord({"num-examples": 2**32}),
        }
    )
    one = Round(strategy(NoPrivacy("num-examples")))
    got = one.aggregate([one.reply(0, heavy), *(one.reply(k, good()) for k in range(1, NODES))])
    assert got is not None
    assert torch.equal(got["w"], torch.ones(3, 4))
    assert one.report.reasons["malformed"] == 1


def test_a_client_without_examples_has_not_failed():
    empty = RecordDict({"arrays": parameters(), "metrics": MetricRecord({"num-examples": 0})})
    one = Round(strategy(NoPrivacy("num-examples")))
    one.aggregate([one.reply(0, empty), *(one.reply(k, good()) for k in range(1, NODES))])
    assert (one.report.usable, one.report.failed) == (NODES, 0)


def test_errors_duplicates_and_strangers_are_told_apart():
    one = Round(strategy(Clipping(1.0)))
    errors = [
        Message(Error(code, "no data"), reply_to=one.asked[client])
        for client, code in ((0, CLIENT_RAISED), (1, NODE_UNAVAILABLE))
    ]
    stranger = Message(RecordDict(), 99, "train")
    unknown = Message(good(), reply_to=stranger)
    first = one.reply(2, good())
    one.aggregate([*errors, unknown, first, first, one.reply(3, good()), unknown])
    reasons = {reason: count for reason, count in one.report.reasons.items() if count}
    # Clients 4 and 5 never replied; client 1's node is gone.
    assert reasons == {"raised": 1, "missing": 3, "duplicate": 1, "unknown": 2}
    assert (one.report.asked, one.report.usable, one.report.failed) == (6, 2, 4)


def test_the_first_reply_of_a_client_decides():
    late = Round(strategy(Clipping(1.0)))
    late.aggregate([late.reply(0, BAD["no arrays"][0]), late.reply(0, good())])
    assert late.report.usable == 0
    assert (late.report.reasons["malformed"], late.report.reasons["duplicate"]) == (1, 1)


def reports(values: list[object], weights: list[float] | None = None) -> MetricRecord | None:
    made = Round(strategy(NoPrivacy("uniform")))
    replies = []
    for client, value in enumerate(values):
        metrics = MetricRecord({"num-examples": 1.0 if weights is None else weights[client]})
        dict.__setitem__(metrics._data, "m", value)
        replies.append(made.reply(client, RecordDict({"a": parameters(), "metrics": metrics})))
    made.aggregate(replies)
    return made.metrics


def test_what_is_not_finite_stands_in_no_mean(caplog):
    metrics = reports([0.5, math.nan, math.inf, 1e308, 10**400, 1.5])
    assert metrics["m"] == 1.0
    told = "4 numbers that clients report are left out of the mean, as they are not finite (m 4)."
    assert told in caplog.text
    assert "m" not in reports([math.nan, 1e308])


def test_a_clients_names_write_no_lines_of_their_own_into_the_log(caplog):
    forged = "m\n\x1b[2Kfedsim: epsilon 0.1"
    made = Round(strategy(NoPrivacy("uniform")))
    metrics = MetricRecord({"num-examples": 1.0, forged: math.nan})
    made.aggregate([made.reply(0, RecordDict({"a": parameters(), "metrics": metrics}))])
    assert "m??[2Kfedsim: epsilon 0.1 1" in caplog.text
    ranges = [ValueRange("accuracy", 0.0, 1.0)]
    PrivateEvaluation.warn_of_unreported(
        Mock(released=Mock(ranges=ranges), _has_warned=False), {forged}
    )
    assert "replies have m??[2Kfedsim: epsilon 0.1." in caplog.text


def test_lists_are_averaged_entry_by_entry_as_flower_does():
    assert reports([[1.0, 2.0], [3, 6]], [1.0, 3.0])["m"] == [2.5, 5.0]
    # One of another length, or with an entry that is not finite, has no part in it.
    assert reports([[1.0, 2.0], [3.0, 4.0], [7.0], [math.nan, 1.0]])["m"] == [2.0, 3.0]
    assert "m" not in reports([[math.inf, 2.0]])


def test_a_strangers_words_are_one_plain_line_of_the_log(caplog):
    words = "x\x1b[2J\r\n\x00\u202e fedsim: all is well." + "y" * 10**5
    one = Round(strategy(Clipping(1.0)))
    named = ArrayRecord({words: Array(np.ones(2, np.float32)), **parameters()})
    error = Message(Error(CLIENT_RAISED, words), reply_to=one.asked[1])
    one.aggregate([one.reply(0, RecordDict({"arrays": named})), error])
    assert (one.report.reasons["malformed"], one.report.reasons["raised"]) == (1, 1)
    assert "all is well" in caplog.text
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert len(record.getMessage()) < 500


def test_a_users_aggregation_gets_what_clients_sent_in_their_order_and_ends_no_run(caplog):
    seen: list[RecordDict] = []

    def aggregate(records: list[RecordDict], key: str) -> MetricRecord:
        seen.extend(records)
        return MetricRecord({"n": len(records)})

    contents = [good() for _ in range(NODES)]
    for k, content in enumerate(contents):
        content.metric_records["metrics"]["loss"] = float(k)
    one = Round(strategy(NoPrivacy("uniform"), train_metrics_aggr_fn=aggregate))
    one.aggregate([one.reply(k, content) for k, content in reversed([*enumerate(contents)])])
    assert one.metrics == MetricRecord({"n": NODES})
    assert seen == contents

    def fail(records: list[RecordDict], key: str) -> MetricRecord:
        raise KeyError("loss")

    one = Round(strategy(NoPrivacy("uniform"), train_metrics_aggr_fn=fail))
    assert one.aggregate([one.reply(0, good())]) is not None
    assert one.metrics is None
    assert "aggregating the metrics failed" in caplog.text


def shares_of(rng: random.Random, placement: str) -> RecordDict:
    """A share, or almost one."""
    usable = rng.choice([1, 1, 1, 0, math.nan, 10**400, -1])
    metrics = MetricRecord({})
    if rng.random() < 0.9:
        dict.__setitem__(metrics._data, "share-usable", usable)
    size = rng.choice([D, D, D + 1, D + 2, D - 1, 0])
    kind = rng.choice(["f8", "f8", "f8", "f4", "i8"])
    scale = rng.choice([1e-3, 2.0**25, 1e200, 1e308])
    with np.errstate(over="ignore"):
        values = (np.ones(size) * (1.0 if kind == "i8" else scale)).astype(kind)
    return RecordDict({"arrays": ArrayRecord({SHARE_ARRAY: Array(values)}), "metrics": metrics})


def hostile(rng: random.Random) -> RecordDict:
    """Something that a client might send: parts of good and bad replies, put together."""
    content = rng.choice(list(BAD.values()))[0] if rng.random() < 0.6 else good()
    arrays = list(content.array_records.items())
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = dict(arrays)
    if rng.random() < 0.2:
        data = bytearray(parameters()["w"].data)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        records = {"arrays": parameters(w=raw(bytes(data[: rng.randrange(len(data))])))}
    metrics = MetricRecord({})
    for name in ("num-examples", "loss", "accuracy", "eta"):
        if rng.random() < 0.7:
            pool = BAD_COUNTS if rng.random() < 0.3 else ODD_METRICS
            dict.__setitem__(metrics._data, name, rng.choice(pool))
    records[rng.choice(["metrics", "m", "arrays2"])] = metrics
    return RecordDict(records)


CASES = list(itertools.product(MECHANISMS, ["server", "client"]))


@pytest.mark.parametrize(("mechanism", "placement"), CASES)
def test_two_thousand_hostile_replies_crash_nothing_and_leave_nothing_that_is_not_finite(
    mechanism, placement
):
    if placement == "client" and MECHANISMS[mechanism].guarantee == "none":
        pytest.skip("there is no noise to share")
    rng = random.Random(f"{mechanism} {placement}")
    rows = []
    for _ in range(-(-2000 // (NODES * len(CASES)))):
        settings = {} if placement == "server" else {"placement": placement}
        one = Round(strategy(MECHANISMS[mechanism], **settings))
        make = hostile if placement == "server" or rng.random() < 0.3 else None
        replies = [
            one.reply(k, hostile(rng) if make else shares_of(rng, placement))
            for k in range(NODES)
            for _ in range(rng.choice([0, 1, 1, 1, 2]))
        ]
        got = one.aggregate(replies)
        for value in (got or {}).values():
            assert torch.isfinite(value).all()
            # A hostile client moves the mean no further than any other could.
            assert mechanism in ("none", "uniform") or value.abs().max() < 10
        for value in (one.metrics or {}).values():
            assert np.isfinite(np.asarray(value)).all()
        reasons = one.report.reasons
        counted = sum(v for k, v in reasons.items() if k not in ("duplicate", "unknown"))
        assert one.report.usable + counted == NODES
        assert reasons["duplicate"] == len(replies) - len({m.metadata.src_node_id for m in replies})
        rows.append(one.report.row())
    assert "malformed" in failures_in(rows)


def test_hostile_replies_to_an_evaluation_leave_the_mean_of_the_others():
    made = strategy(NoPrivacy("uniform"), fraction_evaluate=1.0)
    grid = LocalGrid(_nobody(), num_nodes=NODES)
    asked = list(made.configure_evaluate(1, initial(), ConfigRecord(), grid))
    lying = MetricRecord({"loss": 0.5})
    dict.__setitem__(lying._data, "num-examples", -1)
    contents = [
        RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 1.0})}),
        RecordDict({"metrics": MetricRecord({"num-examples": 3, "loss": 2.0})}),
        RecordDict({"metrics": MetricRecord({"num-examples": 3, "loss": math.nan})}),
        RecordDict({"metrics": lying}),
        RecordDict({"metrics": Lying()}),
        RecordDict(),
    ]
    replies = [
        Message(content, reply_to=message) for content, message in zip(contents, asked, strict=True)
    ]
    metrics = made.aggregate_evaluate(1, [*replies, *replies])
    assert metrics is not None
    assert dict(metrics) == {"loss": 1.75, "num-examples": 7.0}


@pytest.mark.parametrize("counts", [0, 1])
@pytest.mark.parametrize(
    ("mechanism", "noise"), [(NoPrivacy(), 0.0), (Clipping(clip_norm=1.0), 1.0)]
)
def test_whole_numbers_that_clients_change_are_named_once_in_a_run_without_privacy(
    mechanism, noise, counts, caplog
):
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays = tensors(message.content["arrays"])
        arrays["seen"] = arrays["seen"] + counts
        metrics = MetricRecord({"num-examples": 3})
        content = RecordDict({"arrays": array_record(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    strategy = DPFedAvg(
        mechanism=mechanism, noise_multiplier=noise, cohort=FullCohort(3), fraction_evaluate=0.0
    )
    initial = array_record({"w": torch.ones(2), "seen": torch.tensor(7)})
    result = strategy.start(LocalGrid(app, num_nodes=3), initial, num_rounds=3)
    assert int(tensors(result.arrays)["seen"]) == 7
    said = [r.getMessage() for r in caplog.records if "whole numbers" in r.getMessage()]
    assert len(said) == (counts and isinstance(mechanism, NoPrivacy))
    assert all("clients change seen" in sentence for sentence in said)
