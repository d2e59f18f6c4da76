"""What runs say that they have spent: from ledgers, over all runs that share them."""

from __future__ import annotations

import json
import re

import pytest
import torch
from flwr.app import ArrayRecord
from rich.console import Console
from typer.testing import CliRunner

import fedsim
from fedsim import RunConfig
from fedsim.cli.app import app
from fedsim.cli.progress import Progress
from fedsim.engines import LocalGrid
from fedsim.errors import FedsimError
from fedsim.federation.engines.client_app import client_app
from fedsim.federation.round_report import failures_in
from fedsim.privacy import Entry, Event, Ledger
from fedsim.privacy.laws import PoissonLaw
from fedsim.privacy.manifest import new_key
from fedsim.privacy.verification import model_metadata, verify
from fedsim.runs.callbacks import RunStatus
from fedsim.runs.directory import RunDirectory
from fedsim.runs.factories import ledger_dir
from fedsim.runs.preflight import check
from fedsim.runs.record import RunResult
from fedsim.runs.resolve import resolve
from fedsim.runs.run_ledgers import RunLedgers
from fedsim.runs.runner import _needs_state_dir, drive

CLIENTS = RunConfig().replace(
    **{
        "rounds": 3,
        "partition.clients": 20,
        "cohort.name": "poisson",
        "cohort.rate": 0.5,
        "mechanism.name": "clipping",
        "noise.multiplier": 2.0,
        "evaluate.every": 0,
    }
)
EXAMPLES = RunConfig().replace(
    **{
        "rounds": 2,
        "partition.clients": 5,
        "client.batch-size": 41,
        "client.mechanism.name": "clipping",
        "client.noise.multiplier": 1.5,
        "evaluate.every": 0,
    }
)


def own(config: RunConfig, **changes: object) -> RunConfig:
    return config.replace(
        **{key.replace("__", ".").replace("_", "-"): v for key, v in changes.items()}
    )


def test_the_statement_is_that_of_the_ledgers_over_all_runs_that_share_them(tmp_path):
    spent = []
    for number in (1, 2, 3):
        rate = number / 10  # of one seed: with another, clients have other examples
        config = own(EXAMPLES, client__lr=rate, client__state_dir=str(tmp_path / "state"))
        result = fedsim.run(config, out=tmp_path / f"run-{number}")
        ledgers = sorted((tmp_path / "state").rglob("client-*.jsonl"))
        worst = max(Ledger.read(path).epsilon(1e-5) for path in ledgers)
        assert result.privacy.epsilon == worst == result.metrics[-1]["example-epsilon"]
        assert (
            result.privacy.cost.releases
            == 2 * number * Ledger.read(ledgers[0]).entries[0].event.count
        )
        spent.append(worst)
    assert spent[0] < spent[1] < spent[2]
    # The same config once more is another run, whatever it repeats.
    assert fedsim.run(config).privacy.epsilon > spent[2]


@pytest.mark.parametrize(("first", "second"), [(CLIENTS, EXAMPLES), (EXAMPLES, CLIENTS)])
def test_no_run_takes_the_place_of_one_that_protected_others(first, second, tmp_path):
    """Else clients' ledgers alone would speak for releases that no client protected."""
    out = tmp_path / "run"
    fedsim.run(first, out=out)
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(FedsimError, match="cannot be added up at example level"):
        fedsim.run(second, out=out, overwrite=True)
    assert files == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    # Nor later, once it has been replaced by one of its own sort.
    fedsim.run(own(first, client__lr=0.2), out=out, overwrite=True)
    with pytest.raises(FedsimError, match="choose another --out"):
        fedsim.run(second, out=out, overwrite=True)


@pytest.mark.parametrize("config", [CLIENTS, EXAMPLES])
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 5}, "seed = 5; it must be 1, "),
        ({"partition__max_examples": 90}, "partition.max-examples = 90; it must be "),
        ({"partition__name": "shards"}, "partition.name = 'shards'; it must be "),
        ({"data__train": "0:1200"}, "data.train = '0:1200'; it must be "),
    ],
)
def test_no_run_takes_the_place_of_one_that_dealt_to_other_clients(config, changes, key, tmp_path):
    """What the two cost a client does not add up: its examples are in many of the other's."""
    config = own(config, seed=1, rounds=1)
    fedsim.run(config, out=tmp_path / "run")
    with pytest.raises(FedsimError, match=f"^{re.escape(key)}.* choose another --out"):
        fedsim.run(own(config, **changes), out=tmp_path / "run", overwrite=True)
    # Who claims nothing adds nothing up.
    free = own(config, **changes, mechanism__name="none", noise__multiplier="")
    free = own(free, client__mechanism__name="none", client__noise__multiplier="")
    if config is CLIENTS:
        fedsim.run(free, out=tmp_path / "run", overwrite=True)


def test_clients_ledgers_are_not_left_behind_by_a_run_that_keeps_them_elsewhere(tmp_path):
    fedsim.run(EXAMPLES, out=tmp_path / "run")
    elsewhere = own(EXAMPLES, client__lr=0.2, client__state_dir=str(tmp_path / "state"))
    with pytest.raises(FedsimError, match=r"ledgers are in .*run/clients; this run's would be in"):
        fedsim.run(elsewhere, out=tmp_path / "run", overwrite=True)
    kept = own(EXAMPLES, client__lr=0.2, client__state_dir=str(tmp_path / "run" / "clients"))
    result = fedsim.run(kept, out=tmp_path / "run", overwrite=True)
    assert result.privacy.before > 0


def test_a_client_has_spent_what_it_spent_in_runs_of_whatever_name_on_whatever_engine(tmp_path):
    shared = own(EXAMPLES, client__state_dir=str(tmp_path / "state"))
    first = fedsim.run(own(shared, client__lr=0.1, name="one")).privacy
    second = fedsim.run(own(shared, client__lr=0.2, name="two")).privacy
    assert second.cost.releases == 2 * first.cost.releases
    assert second.epsilon > first.epsilon
    # A run in Flower's simulation keeps its clients' ledgers where one on the local engine does.
    assert _needs_state_dir(EXAMPLES.replace(**{"engine.name": "simulation"}))
    kept = RunDirectory(tmp_path / "run").clients
    simulated = EXAMPLES.replace(**{"client.state-dir": str(kept)})
    assert ledger_dir(simulated, None) == ledger_dir(EXAMPLES, tmp_path / "run") == kept


def test_a_run_stops_in_good_order_before_a_clients_budget_is_exceeded(tmp_path):
    whole = fedsim.run(EXAMPLES)
    after_one = whole.metrics[0]["example-epsilon"]
    config = own(EXAMPLES, rounds=5, client__noise__max_epsilon=after_one * 1.001)
    result = fedsim.run(config, out=tmp_path / "run")
    assert result.ended == "budget"
    assert "round 2 would exceed client.noise.max-epsilon" in result.why
    assert result.privacy.epsilon == after_one <= after_one * 1.001
    assert len(result.metrics) == 1
    assert (tmp_path / "run" / "model.safetensors").is_file()
    # What the first round released, and nothing else.
    one = fedsim.run(own(EXAMPLES, rounds=1))
    for name, value in one.arrays.to_torch_state_dict().items():
        assert torch.equal(value, result.arrays.to_torch_state_dict()[name])


def driven_by_messages(config: RunConfig) -> RunResult:
    """As Flower's runtimes do it: each client answers a message, and knows its budget alone."""
    resolved = resolve(config.replace(**{"engine.name": "simulation"}))
    app = client_app(lambda _: resolved.trainer)
    return drive(resolved, LocalGrid(app, num_nodes=config.partition.clients))


def test_over_messages_a_clients_budget_ends_the_run_with_the_same_model(tmp_path):
    after_one = fedsim.run(own(EXAMPLES, rounds=1)).privacy.epsilon
    config = own(EXAMPLES, rounds=5, client__noise__max_epsilon=after_one * 1.001)
    expected = fedsim.run(config)
    result = driven_by_messages(own(config, client__state_dir=str(tmp_path)))
    assert result.ended == expected.ended == "budget"
    assert "round 2 would exceed client.noise.max-epsilon of 5 of the clients" in result.why
    assert len(result.metrics) == len(expected.metrics) == 1
    assert result.privacy.epsilon == after_one
    for name, value in expected.arrays.to_torch_state_dict().items():
        assert torch.equal(value, result.arrays.to_torch_state_dict()[name])


def test_over_messages_one_client_without_budget_ends_the_run(tmp_path):
    first = own(EXAMPLES, seed=7, client__state_dir=str(tmp_path / "state"))
    spent = fedsim.run(first).metrics
    for path in (tmp_path / "state").rglob("client-[1-4].jsonl"):
        path.unlink()
    budget = spent[1]["example-epsilon"]
    config = own(first, client__lr=0.2, rounds=3, client__noise__max_epsilon=budget)
    result = driven_by_messages(config)
    assert "round 1 would exceed client.noise.max-epsilon of 1 of the clients" in result.why
    assert not result.metrics
    assert result.privacy.epsilon == budget


def test_where_cohorts_are_secret_a_client_without_budget_fails_alone(tmp_path):
    after_one = fedsim.run(own(EXAMPLES, rounds=1)).privacy.epsilon
    both = own(
        EXAMPLES,
        rounds=3,
        mechanism__name="clipping",
        noise__multiplier=1.0,
        client__noise__max_epsilon=after_one * 1.001,
    )
    apart = own(both, client__state_dir=str(tmp_path))
    for result in (fedsim.run(both), driven_by_messages(apart)):
        assert result.ended == "finished"
        assert [row["failed-budget"] for row in result.metrics] == [0, 5, 5]


def test_a_budget_of_a_client_needs_clients_that_protect_their_examples():
    with pytest.raises(FedsimError, match=r"client\.noise\.max-epsilon = 2\.0"):
        own(CLIENTS, client__noise__max_epsilon=2.0)


def test_equal_runs_have_equal_heads_and_equal_model_files(tmp_path):
    for name in ("one", "two"):
        fedsim.run(CLIENTS, out=tmp_path / name)
    one, two = (tmp_path / name for name in ("one", "two"))
    assert Ledger.read(one / "ledger.jsonl").heads == Ledger.read(two / "ledger.jsonl").heads
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    about = model_metadata(one / "model.safetensors")
    assert about["ledger-lines"] == 4
    assert about["release"] == Ledger.read(one / "ledger.jsonl").entries[0].release
    assert all(check.passed for check in verify(one, CLIENTS.noise.delta))


def test_an_overwritten_run_counts_whatever_the_new_one_repeats(tmp_path):
    first = fedsim.run(CLIENTS, out=tmp_path / "run")
    again = fedsim.run(CLIENTS, out=tmp_path / "run", overwrite=True)
    assert again.privacy.epsilon > first.privacy.epsilon
    assert again.privacy.cost.releases == 6
    assert again.privacy.head == first.privacy.head
    other = fedsim.run(own(CLIENTS, client__lr=0.2), out=tmp_path / "run", overwrite=True)
    alone = fedsim.run(own(CLIENTS, client__lr=0.2)).privacy.epsilon
    assert alone == first.privacy.epsilon < other.privacy.epsilon
    assert other.privacy.cost.releases == 9
    assert f"this run's own would be epsilon {alone:.4g}" in str(other.privacy)
    assert len(list((tmp_path / "run" / "archive").rglob("ledger.jsonl"))) == 2
    assert all(check.passed for check in verify(tmp_path / "run", CLIENTS.noise.delta))


def test_a_run_without_a_round_has_the_cost_of_those_it_overwrote(tmp_path):
    first = fedsim.run(CLIENTS, out=tmp_path / "run").privacy.epsilon
    spent = own(CLIENTS, noise__max_epsilon=1.01 * first)
    again = fedsim.run(spent, out=tmp_path / "run", overwrite=True)
    assert (again.ended, again.privacy.epsilon) == ("budget", first)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    saved = fedsim.load(tmp_path / "run").privacy
    assert (saved.epsilon, saved.before, saved.cost.releases) == (first, 3, 3)
    command = ["privacy", str(tmp_path / "run"), "--verify"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output


def test_overwritten_clients_ledgers_count_too(tmp_path):
    first = fedsim.run(EXAMPLES, out=tmp_path / "run")
    again = fedsim.run(EXAMPLES, out=tmp_path / "run", overwrite=True)
    assert again.privacy.epsilon > first.privacy.epsilon
    assert again.privacy.cost.releases == 2 * first.privacy.cost.releases
    assert "made by earlier runs" in str(again.privacy)


def test_a_run_that_cannot_be_added_to_what_is_archived_is_refused_untouched(tmp_path):
    fedsim.run(CLIENTS, out=tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    fixed = own(CLIENTS, cohort__name="fixed", cohort__size=5, cohort__rate="")
    with pytest.raises(FedsimError, match=r"cohort.name = 'fixed'.*replace-one.*another --out"):
        fedsim.run(fixed, out=tmp_path / "run", overwrite=True)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_every_place_that_shows_an_epsilon_calls_it_simulated(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CLIENTS.to_toml())
    invoke = CliRunner().invoke
    said = invoke(app, ["run", str(path), "--out", str(tmp_path / "run")]).output
    assert re.search(r"eps \d+\.\d\d \(simulated\)", said)
    assert "at client level, simulated" in " ".join(said.replace("│", " ").split())
    header, row, *_ = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=True))["simulated"] == "1"
    assert "simulated" in invoke(app, ["privacy", str(tmp_path / "run")]).output
    assert "simulated" in invoke(app, ["privacy", str(path)]).output
    system = own(CLIENTS, noise__entropy="system")
    result = fedsim.run(system)
    assert not result.privacy.simulated
    assert result.metrics[-1]["simulated"] == 0
    assert "simulated" not in str(result.privacy).lower()


def test_the_command_verifies_signs_and_speaks_json(tmp_path):
    key = tmp_path / "key.pem"
    public = new_key(key)
    fedsim.run(own(CLIENTS, noise__ledger_key=str(key)), out=tmp_path / "run")
    invoke = CliRunner().invoke
    run = str(tmp_path / "run")
    for arguments in (["--verify"], ["--public-key", str(public)]):
        assert invoke(app, ["privacy", run, *arguments]).exit_code == 0
    (said,) = json.loads(invoke(app, ["privacy", run, "--json"]).output)
    assert said["simulated"]
    assert said["lines"] == 4
    assert 0 < said["misses"]["0.01"] < 1
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    output = invoke(app, ["privacy", run, "--verify"])
    assert output.exit_code == 1
    assert "FAILS" in output.output
    output = invoke(app, ["privacy", run, "--verify", "--json"])
    assert output.exit_code == 1
    assert {check["passed"] for check in json.loads(output.output)} == {True, False}


def test_a_key_that_is_none_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(FedsimError, match=r"noise\.ledger-key"):
        fedsim.run(own(CLIENTS, noise__ledger_key=str(tmp_path / "none")), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["data.npz", "metrics.csv", "empty"])
def test_a_file_that_is_no_ledger_is_no_claim_of_privacy(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"" if name == "empty" else b"PK\x03\x04 or whatever\n" + bytes(99))
    with pytest.raises(FedsimError, match="ledger"):
        CliRunner().invoke(app, ["privacy", str(path)], catch_exceptions=False)


def test_what_clients_keep_elsewhere_is_said_and_not_guessed():
    federation = own(EXAMPLES, engine__name="deployment", engine__federation="somewhere")
    resolved = resolve(federation)
    assert resolved.client_ledgers is None
    server = Ledger(delta=1e-5)
    server.record(Entry(event=Event(noise_multiplier=0.0, law=PoissonLaw())))
    ledgers = RunLedgers(federation.to_run_config(), server, None)
    (statement,) = ledgers.statements
    assert "in a ledger that the client keeps" in str(statement)


def test_a_clients_budget_that_allows_no_round_is_refused_at_once(tmp_path):
    config = own(EXAMPLES, client__noise__max_epsilon=0.1)
    with pytest.raises(FedsimError, match=r"client\.noise\.max-epsilon = 0\.1.*at least"):
        fedsim.run(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_noise_that_fits_no_client_is_refused_where_clients_sizes_are_public():
    config = own(
        EXAMPLES, client__batch_size=0, client__mechanism__name="quantile-clipping",
        client__mechanism__bit_noise=1e-4,
    )  # fmt: skip
    with pytest.raises(FedsimError, match=r"bit-noise 0.0001 and \d+ expected rows"):
        check(resolve(config))
    check(resolve(own(config, mechanism__name="clipping", noise__multiplier=1.0)))


def test_what_makes_a_claim_worthless_is_said_before_the_first_round(tmp_path, caplog):
    free = own(CLIENTS, rounds=1, noise__multiplier=0.0)
    fedsim.run(free, out=tmp_path / "run")
    caplog.clear()
    private = own(CLIENTS, rounds=1, noise__delta=0.05)
    result = fedsim.run(private, out=tmp_path / "run", overwrite=True)
    assert result.privacy.epsilon == float("inf")
    said = [record.getMessage() for record in caplog.records]
    assert any("epsilon of all that is released there is infinite" in one for one in said)
    assert any("delta = 0.05 is at least 1 / 20, the population" in one for one in said)
    caplog.clear()
    fedsim.run(own(CLIENTS, rounds=1), out=tmp_path / "other")
    assert not caplog.records
    examples = own(EXAMPLES, rounds=1, client__noise__delta=0.2)
    fedsim.run(examples, out=tmp_path / "examples")
    said = [record.getMessage() for record in caplog.records]
    assert any("is at least 1 / 287, a client's examples" in one for one in said)
    # Where whole clients are protected too, that number is theirs.
    caplog.clear()
    both = own(examples, mechanism__name="clipping", noise__multiplier=1.0)
    fedsim.run(both, out=tmp_path / "both")
    assert not caplog.records


def test_a_private_round_in_which_nobody_was_usable_is_told_of(tmp_path):
    rows = [
        {"round": 1, "epsilon": 1.0, "asked": 4, "usable": 0, "failed": 4, "failed-raised": 4}
        | {"update-norm": 0.1},
        {"round": 2, "epsilon": 1.2, "asked": 4, "usable": 4, "failed": 0},
        {"round": 3, "epsilon": 1.3, "asked": 0, "usable": 0, "failed": 0},
    ]
    assert "In 1 round no client was usable: noise alone was released, and charged." in failures_in(
        rows
    )
    lost = [{k: v for k, v in row.items() if k != "update-norm"} for row in rows]
    assert "In 1 round fewer clients than secagg.threshold: nothing was" in failures_in(lost)
    without = {key: value for key, value in rows[0].items() if key != "epsilon"}
    assert "noise alone" not in failures_in([without])
    console = Console(record=True, width=200)
    config = own(CLIENTS, rounds=3)
    progress = Progress(console, config)
    for row in rows:
        status = RunStatus(config, row["round"], row, ArrayRecord(), protects=True)
        progress.on_round(status)
    assert console.export_text().count("noise alone was released") == 1
