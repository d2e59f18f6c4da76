"""A message of fedsim's own nodes is a few objects, and says what it said."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from toy_clients import toy_app, toy_instructions

from fedsim.apps import client_app
from fedsim.engines import LocalGrid, StreamingGrid, array_record, tensors
from fedsim.federation.engines import packed_messages
from fedsim.federation.engines.packed_messages import (
    answer_packed,
    is_packed,
    pack,
    pack_messages,
    unpack,
)
from fedsim.federation.flower_internals import ensure_identity


def content_of(layers: int = 2) -> RecordDict:
    arrays = {f"w{n}": torch.randn(3, 2) for n in range(layers)}
    arrays |= {"count": torch.tensor(7), "half": torch.ones(2, dtype=torch.float16)}
    return RecordDict(
        {
            "arrays": array_record(arrays),
            "config": ConfigRecord({"server-round": 3, "key": b"\0\xff", "on": True}),
            "metrics": MetricRecord({"loss": 0.1, "num-examples": 2**40}),
        }
    )


def same(one: RecordDict, other: RecordDict) -> None:
    assert set(one) == set(other)
    assert dict(one["config"]) == dict(other["config"])
    assert dict(one["metrics"]) == dict(other["metrics"])
    for (name, tensor), (other_name, other_tensor) in zip(
        tensors(one["arrays"]).items(), tensors(other["arrays"]).items(), strict=True
    ):
        assert name == other_name
        assert tensor.dtype == other_tensor.dtype
        assert torch.equal(tensor, other_tensor)


@pytest.fixture(autouse=True)
def _identity() -> None:
    ensure_identity(1)


@pytest.mark.parametrize("names", [["arrays"], ["arrays", "config", "metrics"]])
@pytest.mark.parametrize("piece", [1 << 24, 50])
def test_what_is_packed_comes_back_as_it_was_in_however_many_pieces(names, piece, monkeypatch):
    monkeypatch.setattr(packed_messages, "_PIECE", piece)
    content = content_of()
    packed = pack(content, names)
    assert not set(names) & set(packed)
    assert is_packed(packed)
    assert not is_packed(content)
    same(unpack(packed), content)


def test_a_model_of_many_layers_is_no_more_objects_than_one_of_few():
    for layers in (1, 60):
        content = content_of(layers)
        message = Message(pack(content, list(content)), 2, "train")
        assert len(get_all_nested_objects(message)) == 3


def objects_of(contents: list[RecordDict]) -> tuple[int, int]:
    """How many objects a message is, and how many of them all have in common."""
    messages = [Message(content, 2 + n, "train") for n, content in enumerate(contents)]
    objects = [set(get_all_nested_objects(message)) for message in pack_messages(messages)]
    assert len({len(ids) for ids in objects}) == 1
    return len(objects[0]), len(set.intersection(*objects))


def shells(record: ArrayRecord) -> ArrayRecord:
    copy = ArrayRecord()
    for name, array in record.items():
        copy[name] = array
    return copy


def test_clients_that_are_told_different_things_share_the_object_with_the_arrays():
    record = content_of()["arrays"]
    alike, different = (
        [
            RecordDict({"arrays": shells(record), "config": ConfigRecord({"n": n * step})})
            for n in range(3)
        ]
        for step in (0, 1)
    )
    # The message itself and the rest of its content differ; the piece does not.
    assert objects_of(alike) == (3, 2)
    assert objects_of(different) == (4, 1)


def test_clients_that_are_sent_different_arrays_get_each_their_own():
    contents = [content_of() for _ in range(3)]
    messages = [Message(content, 2 + n, "train") for n, content in enumerate(contents)]
    for message, content in zip(pack_messages(messages), contents, strict=True):
        same(unpack(message.content), content)


def test_what_has_nothing_to_pack_or_too_much_stays_as_it_is(monkeypatch):
    empty = RecordDict({"config": ConfigRecord({"a": 1})})
    assert pack(empty, []) is empty
    monkeypatch.setattr(packed_messages, "_LARGEST", 10)
    content = content_of()
    assert pack(content, ["arrays"]) is content


def echo() -> ClientApp:
    app = ClientApp(mods=[answer_packed])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if "config" not in message.content:
            return Message(Error(1, "none"), reply_to=message)
        return Message(message.content, reply_to=message)

    return app


def test_who_sends_a_packed_message_gets_a_packed_reply_and_who_does_not_does_not():
    content, context = content_of(), Context(1, 2, {}, RecordDict(), {})
    packed = echo()(Message(pack(content, ["arrays"]), 2, "train"), context)
    plain = echo()(Message(content, 2, "train"), context)
    assert [is_packed(reply.content) for reply in (packed, plain)] == [True, False]
    same(unpack(packed.content), content)
    arrays = RecordDict({"arrays": content["arrays"]})
    assert echo()(Message(pack(arrays, ["arrays"]), 2, "train"), context).has_error()


def packing_toys() -> ClientApp:
    toys, app = toy_app(), ClientApp(mods=[answer_packed])
    app.train()(toys)
    return app


def test_a_round_of_packed_messages_has_the_replies_of_a_round_of_plain_ones():
    seen = []

    class Noting(LocalGrid):
        def push_messages(self, messages):
            seen.extend(is_packed(message.content) for message in messages)
            return super().push_messages(messages)

    outcomes = []
    for packs in (False, True):
        grid = Noting(packing_toys(), num_nodes=3)
        replies = StreamingGrid(grid, packs=packs).send_and_receive(
            toy_instructions([0, 1, 2], grid)
        )
        outcomes.append(
            {r.metadata.src_node_id: r.content["arrays"]["w"].numpy().tolist() for r in replies}
        )
    assert seen == [False] * 3 + [True] * 3
    assert len(outcomes[0]) == 3
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "piece", [{"piece": b"\xff\xff"}, {"piece": 3}, {"other": b""}, {"piece": "text"}]
)
def test_a_reply_whose_pieces_are_a_strangers_reaches_the_decoder_as_it_is(piece):
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"fedsim.packed.0": ConfigRecord(piece)}), reply_to=message)

    grid = LocalGrid(app, num_nodes=2)
    replies = list(StreamingGrid(grid, packs=True).send_and_receive(toy_instructions([0, 1], grid)))
    assert [list(reply.content) for reply in replies] == [["fedsim.packed.0"]] * 2


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_nodes_policy_sees_what_a_server_has_packed(kind, monkeypatch):
    seen = []
    monkeypatch.setattr(client_app, "_admitted", lambda _context: nullcontext())
    monkeypatch.setattr(
        client_app,
        "_client",
        lambda: (
            lambda message, _context: (
                seen.append(set(message.content)) or Message(RecordDict(), reply_to=message)
            )
        ),
    )
    content = content_of()
    message = Message(pack(content, list(content)), 2, kind)
    client_app.app(message, Context(1, 2, {"partition-id": 0}, RecordDict(), {}))
    assert seen == [set(content)]
