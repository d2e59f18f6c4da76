"""What runs say that they have spent: from ledgers, over all runs that share them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

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
from fedsim.privacy.verification import model_metadata
from fedsim.reports.verification import verify_run
from fedsim.runs.callbacks import RunStatus
from fedsim.runs.preflight import check
from fedsim.runs.record import RunResult
from fedsim.runs.resolve import driver_charges_examples, resolve
from fedsim.runs.run_ledgers import RunLedgers
from fedsim.runs.runner import drive

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
        config = own(EXAMPLES, client__lr=rate, privacy__ledger=str(tmp_path / "shared.jsonl"))
        result = fedsim.run(config, out=tmp_path / f"run-{number}")
        ledger = Ledger.read(tmp_path / "shared-examples.jsonl")
        worst = ledger.epsilon(1e-5)
        assert result.privacy.epsilon == worst == result.metrics[-1]["example-epsilon"]
        histories = [history.accountant for history in ledger.histories.values()]
        assert worst == max(accountant.epsilon(1e-5) for accountant in histories)
        assert result.privacy.cost.releases == 2 * number * ledger.entries[0].event.count
        spent.append(worst)
    assert spent[0] < spent[1] < spent[2]
    # The same config once more is another run, whatever it repeats.
    assert fedsim.run(config).privacy.epsilon > spent[2]


def test_a_client_has_spent_what_it_spent_in_runs_of_whatever_name_that_share_a_ledger(tmp_path):
    shared = own(EXAMPLES, privacy__ledger=str(tmp_path / "shared.jsonl"))
    first = fedsim.run(own(shared, client__lr=0.1, name="one")).privacy
    second = fedsim.run(own(shared, client__lr=0.2, name="two")).privacy
    assert second.cost.releases == 2 * first.cost.releases
    assert second.epsilon > first.epsilon
    # So does a run in Flower's simulation, whose driver writes the lines.
    third = driven_by_messages(own(shared, client__lr=0.3, name="three")).privacy
    assert third.cost.releases == 3 * first.cost.releases


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
    result = driven_by_messages(config)
    assert result.ended == expected.ended == "budget"
    assert "round 2 would exceed client.noise.max-epsilon" in result.why
    assert len(result.metrics) == len(expected.metrics) == 1
    assert result.privacy.epsilon == after_one
    for name, value in expected.arrays.to_torch_state_dict().items():
        assert torch.equal(value, result.arrays.to_torch_state_dict()[name])


def test_over_messages_one_client_without_budget_ends_the_run(tmp_path):
    shared = own(EXAMPLES, seed=7, privacy__ledger=str(tmp_path / "shared.jsonl"))
    spent = fedsim.run(own(shared, rounds=1)).privacy
    (path,) = tmp_path.glob("*-examples.jsonl")
    ledger = Ledger(path)
    (entry, *_) = ledger.entries
    ledger.record(replace(entry, round=2, clients=(0,)))  # of this one alone
    budget = ledger.epsilon(shared.client.noise.delta)
    assert budget > spent.epsilon
    config = own(shared, client__lr=0.2, rounds=3, client__noise__max_epsilon=budget)
    result = driven_by_messages(config)
    assert "round 1 would exceed client.noise.max-epsilon = " in result.why
    assert "of client 0 at delta" in result.why
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
    for result in (fedsim.run(both), driven_by_messages(both)):
        assert result.ended == "finished"
        assert [row["usable"] for row in result.metrics] == [5, 0, 0]


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
    assert about["release"] == resolve(CLIENTS).release
    assert all(check.passed for check in verify_run(one))


def test_every_place_that_shows_an_epsilon_calls_it_simulated(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CLIENTS.to_toml())
    invoke = CliRunner().invoke
    said = invoke(app, ["run", str(path), "--out", str(tmp_path / "run")]).output
    assert re.search(r"eps \d+\.\d\d \(simulated\)", said)
    assert "epsilon (simulated) = " in said
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
    for arguments in ([], ["--public-key", str(public)]):
        assert invoke(app, ["verify", run, *arguments]).exit_code == 0
    (said,) = json.loads(invoke(app, ["privacy", run, "--json"]).output)
    assert said["simulated"]
    assert said["lines"] == 4
    assert 0 < said["misses"]["0.01"] < 1
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    output = invoke(app, ["verify", run])
    assert output.exit_code == 1
    assert "FAILS" in output.output
    output = invoke(app, ["verify", run, "--json"])
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
    assert not driver_charges_examples(resolved.config)
    server = Ledger(delta=1e-5)
    server.record(Entry(event=Event(noise_multiplier=0.0, law=PoissonLaw())))
    ledgers = RunLedgers(federation.to_run_config(), server)
    (statement,) = ledgers.statements
    assert "in a ledger that the client keeps" in str(statement)


def test_a_clients_budget_that_allows_no_round_is_refused_at_once(tmp_path):
    config = own(EXAMPLES, client__noise__max_epsilon=0.1)
    with pytest.raises(FedsimError, match=r"client\.noise\.max-epsilon = 0\.1.*at least"):
        fedsim.run(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_noise_that_fits_no_client_is_refused_where_clients_sizes_are_public():
    config = own(
        EXAMPLES,
        client__batch_size=0,
        client__mechanism__name="quantile-clipping",
        client__mechanism__bit_noise=1e-4,
    )
    with pytest.raises(FedsimError, match=r"bit-noise 0.0001 and \d+ expected rows"):
        check(resolve(config))
    check(resolve(own(config, mechanism__name="clipping", noise__multiplier=1.0)))


def test_what_makes_a_claim_worthless_is_said_before_the_first_round(tmp_path, caplog):
    fedsim.run(own(CLIENTS, rounds=1, noise__delta=0.05), out=tmp_path / "run")
    said = [record.getMessage() for record in caplog.records]
    assert any("delta = 0.05 is at least 1 / 20, the population" in one for one in said)
    caplog.clear()
    fedsim.run(own(CLIENTS, rounds=1), out=tmp_path / "other")
    assert not caplog.records
    examples = own(EXAMPLES, rounds=1, client__noise__delta=0.2)
    fedsim.run(examples, out=tmp_path / "examples")
    said = [record.getMessage() for record in caplog.records]
    assert any("is at least 1 / 287, a client's examples" in one for one in said)


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
