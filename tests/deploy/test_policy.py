"""What a node lets a run do with its data."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, fields
from itertools import product
from unittest.mock import MagicMock

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from slow_cases import slow_but

from fedsim import registry
from fedsim.apps import client_app
from fedsim.apps import node as module
from fedsim.config import RunConfig
from fedsim.config.devices import read_work
from fedsim.config.plan import uncalibrated_plan
from fedsim.deploy.policy import NODE, Policy
from fedsim.deploy.services import Node
from fedsim.errors import FedsimError
from fedsim.federation.flower_internals import BUDGET_SPENT, ensure_identity
from fedsim.mechanisms.scaling import ScalingMechanism, clip_factor
from fedsim.privacy import Ledger
from fedsim.privacy.laws import Full, Participation
from fedsim.privacy.noise.lambda_cgd import LambdaCGD
from fedsim.runs.resolve import resolve

PRIVATE = {
    "mechanism": {"name": "clipping", "clip-norm": 1.0},
    "noise": {"multiplier": 1.0},
    "partition": {"clients": 100},
    "engine": {"name": "deployment", "device": "cpu"},
}


RAW = {"name": "adaptive-noise", "unsafe-non-private-raw-statistics": True}


def config(**tables) -> RunConfig:
    return RunConfig.parse({**PRIVATE, **tables})


def node(tmp_path, policy: str):
    path = tmp_path / "node.toml"
    path.write_text(f'superlink = "x:1"\nclient = 0\nclients = 100\n[policy]\n{policy}')
    return path


ONE_FAULT = {
    "less noise": ("least-noise-multiplier = 1.5", {}, "noise.multiplier is 1; .* at least 1.5"),
    "no bound": (
        "least-noise-multiplier = 0.5",
        {"mechanism": {"name": "none"}, "noise": {}},
        "noise.multiplier is 0",
    ),
    "noise that is not stated": (
        "least-noise-multiplier = 0.5",
        {"noise": {"target-epsilon": 8.0}},
        "noise.multiplier is 0",
    ),
    "a larger bound": (
        "largest-clip-norm = 0.5",
        {},
        "mechanism.name is .clipping., which bounds updates by 1; .* at most 0.5",
    ),
    "a bound that is not fixed": (
        "largest-clip-norm = 5.0",
        {"mechanism": {"name": "quantile-clipping"}},
        "mechanism.name is .quantile-clipping., which as set does not bound",
    ),
    "no noise on examples": (
        "least-example-noise-multiplier = 1.0",
        {},
        "client.noise.multiplier is 0",
    ),
    "too small a population": ("least-population = 101", {}, "partition.clients is 100"),
    "a module": ("", {"model": {"name": "os:system"}}, "model.name is 'os:system'"),
    "a model's folder": (
        'files = ["weights"]',
        {"model": {"name": "hf:/private/tiny"}},
        "model.name is '/private/tiny'; here it may lie in ",
    ),
    "a module that only begins alike": (
        'modules = ["mylab"]',
        {"model": {"name": "mylab_evil.models:Net"}},
        "model.name",
    ),
    "weights from anywhere": ("", {"model": {"weights": "/etc/passwd"}}, "model.weights"),
    "weights from beside": (
        'files = ["weights"]',
        {"model": {"weights": "weights/../../secret"}},
        "model.weights",
    ),
    "a data directory": ("", {"data": {"dir": "/home"}}, "data.dir is '/home'"),
}


@pytest.mark.parametrize(("policy", "tables", "why"), ONE_FAULT.values(), ids=ONE_FAULT.keys())
def test_a_run_outside_the_policy_is_refused_by_name_and_limit(tmp_path, policy, tables, why):
    with pytest.raises(FedsimError, match=f"this node's policy refuses the run: {why}"):
        Policy.load(node(tmp_path, policy)).check(config(**tables))


ROUNDS, FLOOR = 8, 1.0
NOISES: dict[str, list[dict[str, object]]] = {
    "banded": [{}, {"bands": 1}, {"bands": 3}, {"coefficients": "1 1"}],
    "blt": [{}, {"coefficients": "0.9 0.9"}, {"coefficients": "1 1"}],
    "lambda-cgd": [{}, {"coefficients": "1.0"}, {"coefficients": "0.0"}],
}
COHORTS: dict[str, list[dict[str, object]]] = {
    "cyclic": [{"groups": 4}, {"groups": 4, "rate": 0.5}],
    "separated": [{"separation": 4}, {"separation": 3, "max-participations": 2}],
    "allocation": [{"participations": 2}, {"participations": 4, "blocks": True}],
    "fixed": [{"size": 10}],
    "buffered": [{}, {"participations": 3}, {"participations": 3, "separation": 4}],
}


def combined_sensitivity(plan) -> float:
    """By all patterns of a client's rounds: the most that it moves C X, for rows of norm 1."""
    participation = plan.sampler.participation(ROUNDS)
    products = np.abs(plan.noise.matrix(ROUNDS).T @ plan.noise.matrix(ROUNDS))
    if plan.amplified:  # each round is a sampled Gaussian of its own
        return math.sqrt(products.diagonal().max())
    squares = [0.0]
    for inside in product((0, 1), repeat=ROUNDS):
        (chosen,) = np.nonzero(inside)
        apart = len(chosen) < 2 or np.diff(chosen).min() >= participation.separation
        if apart and len(chosen) <= participation.participations:
            squares.append(products[np.ix_(chosen, chosen)].sum())
    return math.sqrt(max(squares))


@pytest.mark.parametrize("noise", registry.names("noise"))
def test_no_noise_of_a_servers_gets_round_the_least_multiplier(tmp_path, noise):
    policy = Policy.load(node(tmp_path, f"least-noise-multiplier = {FLOOR}"))
    admitted, refused = 0, 0
    cohorts = [(name, o) for name in registry.names("cohort") for o in COHORTS.get(name, [{}])]
    walked = product(NOISES.get(noise, [{}]), cohorts, (0.9, 1.0, 3.0, 30.0))
    for options, (cohort, of_cohort), multiplier in walked:
        tables = {
            "rounds": ROUNDS,
            "noise": {"name": noise, "multiplier": multiplier, **options},
            "cohort": {"name": cohort, **of_cohort},
            **({"devices": {"duration": 60.0}} if cohort == "buffered" else {}),
        }
        try:
            run = config(**tables)
            plan = uncalibrated_plan(run, run.mechanism.make())
        except FedsimError:
            continue  # nobody can run it
        exact = plan.noise.multiplier
        if plan.noise.correlated:
            exact /= combined_sensitivity(plan)
        elif cohort == "buffered":  # as many Gaussians as releases that a client can be in
            exact /= math.sqrt(plan.sampler.participation(ROUNDS).participations)
        try:
            policy.check(run)
        except FedsimError:
            refused += 1
            assert exact < 1.05 * FLOOR, tables
        else:
            admitted += 1
            assert exact >= FLOOR * (1 - 1e-9), tables
    assert admitted
    assert refused


BUFFERED = {
    "rounds": 6,
    "cohort": {"name": "buffered", "concurrency": 40, "buffer": 20, "participations": 4},
    "devices": {"duration": 60.0},
}


def test_noise_of_a_buffered_cohort_is_shared_by_the_releases_of_a_client(tmp_path):
    policy = Policy.load(node(tmp_path, "least-noise-multiplier = 1.0"))
    policy.check(config(**BUFFERED, noise={"multiplier": 2.0}))
    with pytest.raises(
        FedsimError, match=r"noise.multiplier = 1.9, over the root of the releases .*, is 0.95; "
    ):
        policy.check(config(**BUFFERED, noise={"multiplier": 1.9}))


def test_a_private_buffered_run_without_declared_seconds_is_no_run_for_a_node(on_a_node):
    on_a_node("")
    flat = config(**BUFFERED).to_run_config() | {"devices.duration": 0.0}
    with pytest.raises(FedsimError, match=r"devices.duration = 0.0; it must be above 0"):
        client_app.train(message("train"), Context(1, 7, {"partition-id": 0}, RecordDict(), flat))


def test_a_node_answers_only_requests_that_are_in_the_public_schedule(tmp_path, monkeypatch):
    run = config(**BUFFERED, client={"batch-size": 10})
    schedule = resolve(run.replace(**{"engine.name": "local"})).devices.schedule
    own = (schedule.client_ids == 0) & (schedule.releases > 0)
    rounds = (schedule.versions[own] + 1).tolist()
    assert 1 <= len(rounds) <= 4
    for number in range(8):
        if number in rounds:
            assert trains(tmp_path, monkeypatch, "", run, round=number).has_content()
            continue
        with pytest.raises(FedsimError, match=f"in round {number}, in which the schedule of"):
            trains(tmp_path, monkeypatch, "", run, round=number)
    # The round that counts is the one that is trained, whatever else the message has.
    other = next(number for number in range(1, 7) if number not in rounds)
    decoy = {"a": ConfigRecord({"server-round": rounds[0]})}
    with pytest.raises(FedsimError, match=f"in round {other}, in which the schedule of"):
        trains(tmp_path, monkeypatch, "", run, round=other, records=decoy)


@pytest.mark.parametrize(
    "tables",
    [
        {"noise": {"name": "blt", "multiplier": 1.0, "coefficients": "1 1"}},
        {"noise": {"name": "lambda-cgd", "multiplier": 1.0, "coefficients": "1.0"}},
    ],
)
def test_fifty_rounds_of_cancelling_noise_are_not_fifty_rounds_of_noise(tmp_path, tables):
    with pytest.raises(
        FedsimError, match=r"over the sensitivity of .* noise, is 0\.\d+; .* least 1"
    ):
        Policy.load(node(tmp_path, "least-noise-multiplier = 1.0")).check(
            config(rounds=50, cohort={"name": "full"}, **tables)
        )


class OwnNoise(LambdaCGD):
    """Noise of a run's own, which says of itself that it protects."""

    def sensitivity(self, participation):
        return 1e-6


class OwnCohort(Full):
    """A cohort of a run's own, which says that a client is in one round."""

    def participation(self, rounds):
        return Participation(rounds, most=1)


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"noise": {"name": f"{__name__}:OwnNoise", "multiplier": 5.0}}, "noise.name"),
        (
            {
                "noise": {"name": "lambda-cgd", "multiplier": 5.0},
                "cohort": {"name": f"{__name__}:OwnCohort"},
            },
            "cohort.name",
        ),
    ],
)
def test_what_a_runs_own_code_says_of_its_noise_is_not_believed(tmp_path, tables, key):
    policy = Policy.load(node(tmp_path, f'least-noise-multiplier = 1.0\nmodules = ["{__name__}"]'))
    with pytest.raises(FedsimError, match=f"{key} names code of the run's own, Own"):
        policy.check(config(**tables))


@dataclass(frozen=True)
class Halving(ScalingMechanism):
    """A bound of a run's own, at half of a number."""

    twice: float = 1.0

    def scales(self, norms, round_state, unit):
        return clip_factor(norms, self.twice / 2, unit)

    def radius(self, round_state, d):
        return self.twice / 2


NORMS = {
    "its own": ({"name": f"{__name__}:Halving"}, 0.5),
    "its own, longer": ({"name": f"{__name__}:Halving", "options": {"twice": 2.2}}, 1.1),
    "clipping": ({"name": "clipping", "clip-norm": 1.0}, 1.0),
    "normalization": ({"name": "normalization", "clip-norm": 2.0}, 2.0),
    "norm-bound": ({"name": "norm-bound", "clip-norm": 0.1}, 0.1),
    "each layer": ({"name": "clipping", "clip-norm": 0.1, "per-layer": True}, math.inf),
    "each coordinate": ({"name": "coordinate-clipping", "clip-value": 1e-6}, math.inf),
    "adapting": ({"name": "quantile-clipping"}, math.inf),
    "whitened": ({"name": "adaclip", "clip-norm": 0.1}, math.inf),
    "of raw rows": ({"name": "adaptive-noise", "clip-norm": 0.1}, math.inf),
    "beside a number": (
        {"name": "clipping", "clip-norm": 1.0, "private-scalar": "loss"},
        1.0,
    ),
    "none": ({"name": "none"}, math.inf),
}


@pytest.mark.parametrize(("mechanism", "norm"), NORMS.values(), ids=NORMS.keys())
def test_the_bound_itself_says_how_long_an_update_may_be(tmp_path, mechanism, norm):
    limits = f'largest-clip-norm = 1.0\nevaluation = true\nmodules = ["{__name__}"]'
    policy = Policy.load(node(tmp_path, limits))
    run = config(mechanism=mechanism, **({"noise": {}} if mechanism["name"] == "none" else {}))
    if norm <= 1.0:
        policy.check(run)
        return
    words = f"bounds updates by {norm:g}" if norm < math.inf else "does not bound updates by a"
    with pytest.raises(FedsimError, match=f"mechanism.name is '{mechanism['name']}', .*{words}"):
        policy.check(run)


def test_a_run_within_the_policy_is_let_in(tmp_path):
    Policy.load(
        node(
            tmp_path,
            "least-noise-multiplier = 1.0\nlargest-clip-norm = 1.0\nleast-population = 100\n"
            f'modules = ["mylab"]\nfiles = ["{tmp_path}/weights"]',
        )
    ).check(
        config(model={"name": "mylab.models:Net", "weights": f"{tmp_path}/weights/a.safetensors"})
    )


@pytest.mark.parametrize("name", ["mylab.models:Net", "mylab:Net", "theirs.nets:Net"])
def test_a_run_may_name_any_of_the_listed_modules_and_what_is_in_them(tmp_path, name):
    policy = Policy.load(node(tmp_path, 'modules = ["mylab", "theirs.nets"]'))
    policy.check(config(model={"name": name}))
    for beside in ("theirs:Net", "theirs.other:Net"):
        with pytest.raises(
            FedsimError, match=r"here a run may name only \['mylab', 'theirs.nets'\]"
        ):
            policy.check(config(model={"name": beside}))


@pytest.mark.parametrize(
    "policy",
    [
        *("least-nois = 1.0", "least-noise-multiplier = -1.0", "least-noise-multiplier = nan"),
        *('least-noise-multiplier = "2"', "modules = [3]", "most-rounds = true", "data = 3"),
        *("most-rounds = 1.5", "evaluation = 1", "["),
    ],
)
def test_a_policy_that_cannot_be_understood_lets_nobody_in(tmp_path, policy):
    with pytest.raises(FedsimError, match="this node's policy"):
        Policy.load(node(tmp_path, policy))


def test_a_client_joins_at_most_so_many_rounds_over_all_processes(tmp_path):
    path = node(tmp_path, "most-rounds = 3")
    for _ in range(3):
        Policy.load(path).join(0)
    with pytest.raises(FedsimError, match="it has joined 3 rounds; the limit is 3"):
        Policy.load(path).join(0)
    Policy.load(path).join(1)
    assert (tmp_path / "state" / "rounds-joined-0").read_text() == "3\n"


def test_a_count_that_cannot_be_read_is_no_leave_to_join(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "rounds-joined-0").write_text("many")
    with pytest.raises(FedsimError, match="holds no number"):
        Policy.load(node(tmp_path, "most-rounds = 3")).join(0)


def context_of(config: RunConfig) -> Context:
    return Context(1, 7, {"partition-id": 0}, RecordDict(), config.to_run_config())


def message(kind: str) -> Message:
    ensure_identity(1)
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    return Message(content, 7, kind)


@pytest.fixture
def on_a_node(tmp_path, monkeypatch):
    def serve(policy: str):
        monkeypatch.setenv(NODE, str(node(tmp_path, policy)))

    return serve


def test_the_app_refuses_before_it_trains_or_evaluates(on_a_node):
    on_a_node("least-noise-multiplier = 2.0")
    for handler in (client_app.train, client_app.evaluate):
        with pytest.raises(FedsimError, match=r"refuses the run: noise\.multiplier is 1"):
            handler(message("train"), context_of(config()))


def test_a_node_that_answers_no_evaluation_says_so(on_a_node):
    on_a_node("evaluation = false")
    with pytest.raises(FedsimError, match="evaluation is asked for; here it is off"):
        client_app.evaluate(message("evaluate"), context_of(config()))


def test_a_simulation_config_does_not_get_round_a_nodes_policy(on_a_node):
    on_a_node("least-noise-multiplier = 2.0")
    hostile = config(engine={"name": "simulation", "device": "cpu"})
    with pytest.raises(FedsimError, match="refuses the run"):
        client_app.train(message("train"), context_of(hostile))


def test_a_node_without_a_policy_lets_a_run_name_no_module(monkeypatch):
    monkeypatch.delenv(NODE, raising=False)
    with pytest.raises(FedsimError, match=r"model\.name is 'os:system'"):
        client_app.train(message("train"), context_of(config(model={"name": "os:system"})))


def test_what_a_client_keeps_and_trains_on_is_where_its_node_says(on_a_node, tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(module, "resolve_node", lambda *words: built.append(words) or MagicMock())
    on_a_node('state-dir = "kept"\ndata = "own.npz"')
    kept = {"name": "adadp-lr", "state": "client", "state-dir": "/somewhere/else"}
    context = context_of(config(client=kept))
    context.node_config["data"] = "/somewhere/else.npz"
    module.trainer_for(context)
    ((settings, client, data),) = built
    assert settings.client.state_dir == str(tmp_path / "kept")
    assert (client, data) == (0, str(tmp_path / "own.npz"))


SECRET = "root:x:0:0"


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"client": {"work": "/etc/passwd"}}, "client.work is '/etc/passwd'"),
        ({"client": {"work": "kept/work.txt"}}, "client.work is 'kept/work.txt'"),
        ({"adapter": {"name": "lora", "weights": "/etc"}}, "adapter.weights is '/etc'"),
        ({"data": {"name": ".."}}, r"data.name is '\.\.'"),
        ({"data": {"name": "files"}}, "data.name is 'files'"),
        ({"data": {"name": "records"}}, "data.name is 'records'"),
    ],
)
def test_no_file_of_a_nodes_can_be_named_without_its_leave(tmp_path, tables, why):
    with pytest.raises(FedsimError, match=f"this node's policy refuses the run: {why}"):
        Policy.load(node(tmp_path, "")).check(config(**tables))


@pytest.mark.parametrize("data", [{"dir": "/srv/data"}, {"name": "/srv/data.npz"}])
def test_a_node_with_a_file_of_its_own_does_not_ask_where_the_runs_data_are(tmp_path, data):
    run = config(data=data)
    with pytest.raises(FedsimError, match="this node's policy refuses the run: data"):
        Policy.load(node(tmp_path, "")).check(run)
    own = Policy.load(node(tmp_path, 'data = "data.npz"'))
    own.check(run)
    with pytest.raises(FedsimError, match=r"model\.weights"):
        own.check(config(data=data, model={"weights": "/srv/weights"}))


def test_options_of_allowed_code_that_are_paths_lie_where_the_owner_says(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    policy = Policy.load(node(tmp_path, 'modules = ["my.nets"]\nfiles = ["weights"]'))
    for value in ("/etc/x", "file:/etc/x", "~/x", "weights/../here", "here", f"{tmp_path}/a/../x"):
        for table, key in (("model", "model"), ("data", "data")):
            hostile = config(**{table: {"name": "my.nets:Net", "options": {"file": value}}})
            with pytest.raises(
                FedsimError, match=rf"{key}\.options\.file is '{value}'; here it may"
            ):
                policy.check(hostile)
    for value in (str(tmp_path / "weights/a"), "weights/a", "relu", "org/model", "", 3):
        policy.check(config(model={"name": "my.nets:Net", "options": {"file": value}}))


def test_every_metrics_options_are_checked_also_where_two_have_options_of_one_name(tmp_path):
    policy = Policy.load(node(tmp_path, 'modules = ["my.metrics"]\nfiles = ["/allowed"]'))
    metrics = 'my.metrics:A(file="/etc/shadow"), my.metrics:B(file="/allowed/b")'
    with pytest.raises(FedsimError, match=r"task\.metrics\.file is '/etc/shadow'; here it may"):
        policy.check(config(task={"metrics": metrics}))


def test_a_run_says_where_state_is_kept_on_no_node_without_a_policy(monkeypatch, tmp_path):
    monkeypatch.delenv(NODE, raising=False)
    kept = config(client={"name": "adadp-lr", "state": "client", "state-dir": str(tmp_path)})
    with pytest.raises(FedsimError, match=r"refuses the run: client\.state-dir is .* FEDSIM_NODE"):
        client_app.train(message("train"), context_of(kept))


def test_work_that_is_drawn_names_no_file(tmp_path):
    Policy.load(node(tmp_path, "")).check(config(client={"work": "whole(1,3)"}))


def test_what_is_in_a_file_that_is_no_list_of_work_is_not_told(tmp_path):
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    with pytest.raises(FedsimError, match="contains values other than whole numbers") as refused:
        read_work(tmp_path / "secret", 3)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("policy", "tables", "key"),
    [
        ("least-noise-multiplier = 1.0", {"mechanism": RAW}, "noise.multiplier is 0"),
        (
            "least-example-noise-multiplier = 1.0",
            {"client": {"mechanism": RAW, "noise": {"multiplier": 1.0}}},
            "client.noise.multiplier is 0",
        ),
    ],
)
def test_noise_beside_what_has_no_guarantee_is_none(tmp_path, policy, tables, key):
    with pytest.raises(FedsimError, match=key):
        Policy.load(node(tmp_path, policy)).check(config(**tables))


SHARES = {"multiplier": 1.0, "placement": "client"}
PRIVATE_EXAMPLES = {"mechanism": {"name": "clipping"}, "noise": {"multiplier": 1.0}}


@pytest.mark.parametrize(
    ("policy", "tables"),
    [
        ("least-noise-multiplier = 1.0", {"noise": {**SHARES, "entropy": "config"}}),
        (
            "least-noise-multiplier = 1.0",
            {"noise": SHARES, "engine": {"name": "simulation", "device": "cpu"}},
        ),
        (
            "least-example-noise-multiplier = 1.0",
            {"client": PRIVATE_EXAMPLES, "noise": {"multiplier": 1.0, "entropy": "config"}},
        ),
    ],
)
def test_noise_of_a_nodes_own_may_not_follow_from_the_runs_seed(tmp_path, policy, tables):
    with pytest.raises(FedsimError, match=r"refuses the run: noise\.entropy is 'config'"):
        Policy.load(node(tmp_path, policy)).check(config(**tables))


def test_noise_of_a_nodes_own_from_the_operating_system_is_let_in(tmp_path):
    policy = "least-noise-multiplier = 1.0\nleast-example-noise-multiplier = 1.0"
    Policy.load(node(tmp_path, policy)).check(config(client=PRIVATE_EXAMPLES, noise=SHARES))


def test_losses_without_noise_are_metrics_too(tmp_path):
    unprotected = config(client=PRIVATE_EXAMPLES, evaluate={"unprotected": True})
    Policy.load(node(tmp_path, "")).check(unprotected)
    with pytest.raises(FedsimError, match=r"refuses the run: evaluate\.unprotected is true"):
        Policy.load(node(tmp_path, "evaluation = false")).check(unprotected)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"share-noise-multiplier": 0.0}, "share-noise-multiplier is 0; here .* at least 1"),
        ({"share-noise-multiplier": float("nan")}, "share-noise-multiplier is nan"),
        ({"share-noise-multiplier": "much"}, "share-noise-multiplier is 'much'; .* a number"),
        ({"share-asked": 10**9}, "share-asked is 1000000000; .* 100"),
        ({"share-asked": 0}, "share-asked is 0"),
    ],
)
def test_a_server_cannot_talk_a_node_out_of_the_noise_on_its_share(on_a_node, words, why):
    on_a_node("least-noise-multiplier = 1.0")
    request = message("train")
    asked = {"share-noise-multiplier": 1.0, "share-asked": 10, **words}
    request.content.config_records["config"].update(asked)
    with pytest.raises(FedsimError, match=f"this node's policy refuses the run: {why}"):
        client_app.train(request, context_of(config(noise=SHARES)))


def test_a_server_cannot_have_the_bare_update_where_shares_are_declared(on_a_node):
    on_a_node("")
    with pytest.raises(FedsimError, match="asks for the update without this node's noise"):
        client_app.train(message("train"), context_of(config(noise=SHARES)))


def test_a_server_cannot_have_metrics_that_the_run_does_not_declare(on_a_node):
    on_a_node("")
    with pytest.raises(FedsimError, match=r"asked for, and evaluate\.clients-every is 0"):
        client_app.evaluate(message("evaluate"), context_of(config()))


@pytest.mark.parametrize(
    ("policy", "words", "declared", "why"),
    [
        # 1.755 / sqrt(10^6) is 0.0018 of the bound, where ten clients leave 0.555.
        ("least-noise-multiplier = 1.0", {"share-asked": 10**6}, 10**6, "from 1 to 10, the clien"),
        ("least-noise-multiplier = 1.0", {"share-asked": 11}, 10**6, "share-asked is 11"),
        ("least-share-noise-multiplier = 0.56", {}, 10, r"is 0\.554\d*; here .* at least 0\.56"),
        (
            "least-share-noise-multiplier = 0.3",
            {"share-noise-multiplier": 0.9},
            10,
            r"is 0\.2846",
        ),
    ],
)
def test_the_noise_of_a_share_is_held_against_the_clients_that_the_node_knows(
    tmp_path, monkeypatch, policy, words, declared, why
):
    path = tmp_path / "node.toml"
    path.write_text(f"clients = 10\n[policy]\n{policy}\n")
    monkeypatch.setenv(NODE, str(path))
    request = message("train")
    asked = {"share-noise-multiplier": 1.755, "share-asked": 10}
    honest = {**asked, **words}
    request.content.config_records["config"].update(honest)
    run = config(noise={**SHARES, "multiplier": 1.755}, partition={"clients": declared})
    with pytest.raises(FedsimError, match=f"this node's policy refuses the run: .*{why}"):
        client_app.train(request, context_of(run))
    Policy.load(path).check(run)  # so nothing else is refused
    lenient = Policy(least_share_noise_multiplier=0.55, clients=10)
    lenient.check_share(ConfigRecord(asked), run)


def test_a_floor_on_the_share_takes_no_bare_update(tmp_path):
    policy = Policy.load(node(tmp_path, "least-share-noise-multiplier = 0.1"))
    with pytest.raises(FedsimError, match=r"noise\.placement must be 'client'"):
        policy.check_share(None, config())


@pytest.mark.parametrize("floor", ["least-noise-multiplier = 1.0", "largest-epsilon = 6.0",
                                   "least-share-noise-multiplier = 0.1",
                                   "least-example-noise-multiplier = 0.5"])  # fmt: skip
def test_where_a_floor_is_set_metrics_stay_at_home_unless_their_owner_says_otherwise(
    tmp_path, floor
):
    asks = config(client=PRIVATE_EXAMPLES, evaluate={"clients-every": 1, "unprotected": True})
    policy = Policy.load(node(tmp_path, floor))
    with pytest.raises(FedsimError, match="evaluation is asked for; here it is off"):
        policy.check_evaluation(asks)
    with pytest.raises(FedsimError, match=r"evaluate\.unprotected is true"):
        policy.check(asks)
    Policy.load(node(tmp_path, f"{floor}\nevaluation = true")).check_evaluation(asks)
    Policy.load(node(tmp_path, "")).check_evaluation(asks)


def test_metrics_with_the_noise_that_updates_must_have_may_leave(tmp_path):
    def asks(multiplier):
        evaluate = {"clients-every": 1, "private": True, "multiplier": multiplier}
        return config(**PRIVATE, evaluate=evaluate)

    policy = Policy.load(node(tmp_path, "least-noise-multiplier = 1.5"))
    policy.check_evaluation(asks(1.5))
    with pytest.raises(FedsimError, match="evaluation is asked for; here it is off"):
        policy.check_evaluation(asks(1.4))
    for line in ("evaluation = false", "least-share-noise-multiplier = 0.1"):
        stricter = Policy.load(node(tmp_path, f"least-noise-multiplier = 1.5\n{line}"))
        with pytest.raises(FedsimError, match="evaluation is asked for; here it is off"):
            stricter.check_evaluation(asks(2.0))


def test_a_loss_that_enters_the_sum_without_the_nodes_noise_is_a_metric(tmp_path):
    policy = Policy.load(node(tmp_path, "evaluation = false"))
    scalar = {**PRIVATE["mechanism"], "private-scalar": "loss"}
    with pytest.raises(FedsimError, match=r"refuses the run: mechanism\.private-scalar is 'loss'"):
        policy.check(config(mechanism=scalar))
    policy.check(config(mechanism=scalar, noise=SHARES))


@pytest.mark.parametrize(
    "policy",
    ["delta = 0.0", "delta = 1.0", "delta = nan", "largest-epsilon = -1.0", "largest-epsilon = nan",
     "least-share-noise-multiplier = nan", 'evaluation = "no"'],
)  # fmt: skip
def test_a_budget_that_is_none_lets_nobody_in(tmp_path, policy):
    with pytest.raises(FedsimError, match="this node's policy says"):
        Policy.load(node(tmp_path, policy))


def trains(
    tmp_path, monkeypatch, policy: str, run: RunConfig, round: int = 1, records=None
) -> Message:
    """The reply of a node with forty examples of its own to an update's message."""
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(50, 4)).astype("float32"), draws.integers(0, 2, 50)
    np.savez(tmp_path / "own.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:],
             classes=2)  # fmt: skip
    monkeypatch.setenv(NODE, str(node(tmp_path, f'data = "own.npz"\n{policy}')))
    ensure_identity(1)
    built = module.resolve_node(
        run.replace(**{"client.state-dir": str(tmp_path / "elsewhere")}),
        0,
        str(tmp_path / "own.npz"),
    )
    content = RecordDict(
        {
            **(records or {}),
            "config": ConfigRecord({"server-round": round}),
            "arrays": built.initial_arrays,
        }
    )
    return client_app.train(Message(content, 7, "train"), context_of(run))


def test_no_loss_goes_with_an_update_where_evaluation_is_off(tmp_path, monkeypatch):
    run = config(client={"batch-size": 10})
    told = trains(tmp_path, monkeypatch, "", run).content["metrics"]
    assert {"num-examples", "loss"} <= told.keys()
    for policy in ("evaluation = false", "least-noise-multiplier = 1.0"):
        told = trains(tmp_path, monkeypatch, policy, run).content["metrics"]
        assert dict(told) == {"num-examples": 40}


LAX = {"multiplier": 1.0, "max-epsilon": 1e6, "delta": 0.5}


@pytest.mark.parametrize(
    "lax",
    slow_but(
        1,
        [
            {"noise": LAX},
            {"noise": {**LAX, "max-epsilon": ""}},
            {"noise": LAX, "epochs": 100},  # one message costs 25
            {"noise": {**LAX, "multiplier": 1e-3}},
            {"noise": LAX, "state-dir": "somewhere/else"},
        ],
    ),
    ids=str,
)
def test_nothing_that_a_server_sends_loosens_a_nodes_own_budget(tmp_path, monkeypatch, lax):
    """The epsilon of the node's own ledger at the node's own delta, whatever is asked for."""
    honest = {"mechanism": {"name": "clipping"}, "batch-size": 4, "noise": {"multiplier": 1.0}}
    # Thirty steps at a rate of 0.1 cost 4.178 at 1e-5, and forty 4.68.
    policy, spent = "largest-epsilon = 4.2\ndelta = 1e-5", []
    rest = {**honest, **lax}
    for number, client in [(1, honest), (2, honest), (3, honest), (4, rest), (1, rest)]:
        run = config(client=client, name=f"run-{len(spent)}")
        reply = trains(tmp_path, monkeypatch, policy, run, number)
        spent.append(Ledger.read(tmp_path / "state" / "client-0.jsonl").epsilon(1e-5))
        assert reply.has_error() == (len(spent) > 3)
        assert not reply.has_error() or reply.error.code == BUDGET_SPENT
    assert spent[0] < spent[1] < spent[2] == spent[3] == spent[4] == pytest.approx(4.178, abs=1e-2)


def test_a_budget_is_kept_by_noise_on_examples_that_nobody_else_knows(tmp_path):
    policy = Policy.load(node(tmp_path, "largest-epsilon = 6.0"))
    with pytest.raises(FedsimError, match=r"client\.noise\.multiplier is 0; .* largest-epsilon"):
        policy.check(config())
    with pytest.raises(FedsimError, match=r"noise\.entropy is 'config'"):
        policy.check(
            config(client=PRIVATE_EXAMPLES, noise={"multiplier": 1.0, "entropy": "config"})
        )
    policy.check(config(client=PRIVATE_EXAMPLES))


def test_what_init_writes_for_a_node_is_every_key_of_a_policy_at_its_default(tmp_path):
    Node(tmp_path, "x:1", 0, 3).save()
    path = tmp_path / "node.toml"
    text = path.read_text()
    assert Policy.load(path) == Policy(clients=3, directory=tmp_path)
    assert Node.load(tmp_path) == Node(tmp_path, "x:1", 0, 3)
    path.write_text(text.replace("\n# ", "\n"))
    written = Policy.load(path)
    assert written == Policy(clients=3, directory=tmp_path, data="data.npz", evaluation=True)
    keys = {field.name.replace("_", "-") for field in fields(Policy)} - {"clients", "directory"}
    assert all(f"\n# {key} = " in text for key in keys)


STRANGE = (0.0, -1.0, 1e-9, 1.754, float("nan"), float("inf"), True, False, 0, -1, 11, 10**18, "10",
           b"10", [10], [1.755], None)  # fmt: skip


def test_whatever_a_message_says_of_a_share_its_noise_is_that_of_the_floor_or_more():
    floors = {"least_noise_multiplier": 1.755, "least_share_noise_multiplier": 0.5549}
    policy = Policy(**floors, clients=10)
    run = config(noise=SHARES, partition={"clients": 10_000_000})
    let_in = []
    for asked, multiplier in product([*STRANGE, 10], [*STRANGE, 1.755]):
        words = {"share-asked": asked, "share-noise-multiplier": multiplier}
        request = ConfigRecord({key: value for key, value in words.items() if value is not None})
        with contextlib.suppress(FedsimError):
            policy.check_share(request, run)
            let_in.append((float(asked), float(multiplier)))
    assert (10.0, 1.755) in let_in
    assert len(let_in) < 20
    assert all(multiplier / asked**0.5 >= 0.5549 for asked, multiplier in let_in)
