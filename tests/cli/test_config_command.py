"""`fedsim config`: every key is explained, and what is written reads as what was chosen."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim import RunConfig, registry
from fedsim.cli import main
from fedsim.config.describe import keys, schema, template

CHOICES = {
    "data.name": "data", "partition.name": "partition", "model.name": "model",
    "client.name": "client", "cohort.name": "cohort", "server.optimizer": "server",
    "mechanism.name": "mechanism", "client.mechanism.name": "mechanism",
}  # fmt: skip


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


ROBUST = {"krum", "median", "trimmed-mean"}
"""Mechanisms of updates alone, and without noise."""


def chosen(draw: dict[str, str]) -> RunConfig:
    changes: dict[str, object] = dict(draw)
    if draw["model.name"] == "mlp":
        changes["model.widths"] = [8, 4]
    for table in ("", "client."):
        if draw[f"{table}mechanism.name"] not in {"none", *ROBUST}:
            changes[f"{table}noise.multiplier"] = 1.0
    return RunConfig().replace(**changes)


some_choices = (
    st.fixed_dictionaries(
        {key: st.sampled_from(registry.names(kind)) for key, kind in CHOICES.items()}
    )
    .filter(lambda draw: draw["client.mechanism.name"] not in ROBUST)
    .filter(lambda draw: draw["cohort.name"] != "buffered")  # which needs devices with a clock
    .map(chosen)
)


@given(some_choices)
def test_any_choice_of_things_survives_toml_and_flower_and_a_template(config: RunConfig) -> None:
    assert RunConfig.from_run_config(config.to_run_config()) == config
    assert RunConfig.parse(config.to_tree()) == config
    assert RunConfig.parse(tomllib.loads(config.to_toml())) == config
    assert RunConfig.parse(tomllib.loads(template(config))) == config
    flat = config.to_run_config()
    assert all(type(value) in (bool, int, float, str) for value in flat.values())


@given(some_choices, some_choices)
def test_choosing_other_things_leaves_nothing_of_the_old_ones(a: RunConfig, b: RunConfig) -> None:
    changes = {key: b.to_run_config()[key] for key in CHOICES}
    extra = {"model.widths": "" if b.model.name != "mlp" else "8,4"}
    for table in ("", "client."):
        amount = f"{table}noise.multiplier"
        extra[amount] = b.to_run_config()[amount]
    assert a.replace(**changes, **extra) == b


def test_no_key_is_without_description() -> None:
    assert len(keys()) > 110
    assert [key.name for key in keys() if not key.doc.endswith(".")] == []
    assert [key.name for key in keys() if len(key.doc) < 9] == []


def test_every_key_of_every_choice_is_in_the_schema() -> None:
    tables = schema()["properties"]
    adam = next(b for b in tables["client"]["allOf"] if _name(b, "name") == "adam")
    assert {"beta1", "lr", "batch-size", "mechanism"} <= adam["then"]["properties"].keys()
    assert "momentum" not in adam["then"]["properties"]
    assert all(p.get("description") for p in adam["then"]["properties"].values())


def _name(branch: dict, selector: str) -> str:
    return branch["if"]["properties"][selector]["const"]


def test_what_init_writes_is_the_config_that_was_chosen(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    choices = ["client.name=adam", "client.lr=0.5"]
    arguments = ["config", "init", "--out", str(out)]
    for choice in choices:
        arguments += ["--set", choice]
    assert status(*arguments) == 0
    assert RunConfig.load(out) == RunConfig.from_overrides(choices)
    assert status(*arguments) == 2  # and nothing is overwritten


def test_the_commands_say_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("config", "list", "client") == 0
    assert "adadp-lr" in capsys.readouterr().out
    assert status("config", "explain", "client.tol") == 0
    assert "It belongs to adadp-lr." in capsys.readouterr().out
    for key, changeable in (("noise.max-epsilon", True), ("rounds", True), ("client.lr", False)):
        assert status("config", "explain", key) == 0
        assert ("A resumed run may change it" in capsys.readouterr().out) is changeable
    for choice in ("partition.iid", "data.mnist", "client.mechanism.median", "task.cross-entropy"):
        assert status("config", "explain", choice) == 0, choice
    assert "It has no keys of its own." in capsys.readouterr().out
    assert status("config", "schema") == 0
    assert json.loads(capsys.readouterr().out)["properties"]["client"]
    for arguments, sentence in (
        (["list", "colour"], "KIND is 'colour'; did you mean 'cohort'? It must be data, partition"),
        (["explain", "client.toll"], "did you mean 'client.tol'?"),
        (["explain", "momentum"], "did you mean 'client.momentum'"),
        (["explain", "learning_rate"], "did you mean 'client.lr', 'server.lr', "),
        (["explain", "server.learning_rate"], "did you mean 'server.lr'?"),
        (["explain", "cohort.fraction"], "did you mean 'cohort.rate'?"),
        (["explain", "fashion_mnist"], "did you mean 'data.fashion-mnist'?"),
        (["explain", "fedavg"], "did you mean 'client.sgd', "),
        (["explain", "acc"], "did you mean 'task.metrics'?"),
        (["explain", "partition.adam"], "there is no key 'partition.adam'"),
        (["init", "--set", "client.name=adamm"], "did you mean 'adam'?"),
    ):
        assert status("config", *arguments) == 2
        assert sentence in capsys.readouterr().err


def test_a_key_of_several_choices_has_one_heading_and_a_line_for_each(capsys) -> None:
    assert status("config", "explain", "client.lr") == 0
    text = capsys.readouterr().out
    assert text.startswith("client.lr\n    ")
    assert text.count("client.lr") == 1
    assert text.count("greater than 0") == 1
    words = " ".join(text.split())
    for choice, default in (("adam", 0.001), ("fednova, scaffold, sgd", 0.1)):
        assert f"{choice}: The learning rate of local steps. By default {default}." in words
    # Where choices differ in what they allow, each says so.
    assert status("config", "explain", "cohort.rate") == 0
    assert capsys.readouterr().out.count("It is a number") == 2


@pytest.mark.parametrize("width", [40, 64, 80])
def test_no_key_and_no_word_of_a_table_is_cut(width: int, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    names = {key.name.rpartition(".")[0] for key in keys()} - {""}
    for table in (*sorted(names), "mechanism.adaptive-noise", "data.files"):
        assert status("config", "explain", table) == 0
        assert "…" not in capsys.readouterr().out, (table, width)


def test_a_resolved_config_says_what_the_rules_choose(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        'rounds = 1\n[data]\nname = "digits"\n[model]\nname = "mlp"\nwidths = [8]\n'
    )
    for options, path, kernels in (
        ([], "auto", {"auto"}),
        (["--resolved"], "layered", {"eager", "compiled"}),
    ):
        assert status("config", "show", "run.toml", *options) == 0
        client = tomllib.loads(capsys.readouterr().out)["client"]
        assert client["path"] == path
        assert client["kernel"] in kernels
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.toml"]
