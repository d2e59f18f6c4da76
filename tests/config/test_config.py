from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim import RunConfig, registry
from fedsim.config.describe import flower_table
from fedsim.config.tables import ConfigTable, ObjectTable, is_table
from fedsim.config.values import read_value
from fedsim.errors import FedsimError
from fedsim.runs.resolve import resolve
from fedsim.settings import Constraint, Ge, Le, NamesPath, allowed, settings_of

ROOT = Path(__file__).parents[2]

PRIVATE = ["mechanism.name=clipping", "noise.multiplier=1.0", "cohort.name=poisson"]


def load(tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text("")
    return RunConfig.load(path, overrides)


def test_what_needs_a_key_goes_with_it() -> None:
    early = RunConfig().replace(**{"stop.metric": "validation-loss", "stop.patience": 3})
    assert early.replace(**{"stop.metric": ""}).stop.patience == 10
    assert early.replace(**{"stop.metric": "validation-accuracy"}).stop.patience == 3
    with pytest.raises(FedsimError, match=r"stop\.patience = 4"):
        early.replace(**{"stop.metric": "", "stop.patience": 4})


BAD = {
    ("client.lrr=1",): "unknown key 'client.lrr'; did you mean 'lr'?",
    ("foo.bar=1",): "unknown key 'foo'",
    ("client.name=sdg",): "client.name = 'sdg'; did you mean 'sgd'? It must be",
    ("client.name=adam", "client.momentum=0.9"): (
        "client.momentum = 0.9 has no effect with client.name = 'adam'; it belongs to fednova, "
        "scaffold, sgd. Leave it out, or unset it by --set client.momentum=."
    ),
    (
        "data.classes=7",
    ): "In Python it is part of data= itself: an entry 'classes': 10, or from_table(columns=).",
    ("client.name=adam", "client.beta3=0.9"): "unknown key 'client.beta3'; did you mean 'beta",
    ("client.name=own:Sign", "client.beta=0.9"): "belong in [client.options]",
    ("client.options=lr",): "client.options has 'lr'; it must be of the form key=value.",
    ("client.lr=0.5", "client.options='lr=0.1'"): "client.options.lr and client.lr are both set",
    ("mechanism.name=quantile-clipping", "mechanism.bit-noise=1e-9", "noise.multiplier=1.0"): (
        "mechanism.bit-noise = 1e-09; it must be at least 1e-06."
    ),
    ("model.name=mlp", "model.widths=0"): "model.widths is '0'; it must give each",
    ("client.lr=fast",): "client.lr = 'fast'; it must be a number.",
    ("client.lr=0",): "client.lr = 0; it must be greater than 0.",
    ("client.lr=nan",): "client.lr = nan; it must be a finite number.",
    ("rounds=1.5",): "rounds = 1.5; it must be a whole number.",
    ("title=2026-01-31",): "title = 2026-01-31; it must be a string.",
    ("client.lr=10:30:00",): "client.lr = 10:30:00; it must be a number.",
    ("rounds=0",): "rounds = 0; it must be at least 1.",
    ("seed=-1",): "seed = -1; it must be an integer from 0 to 2^63 - 1.",
    ("data.download=3",): "data.download = 3; it must be true or false.",
    ("cohort=3",): "cohort = 3; it must be a table of settings such as cohort.name.",
    (
        "cohort.name=lottery",
    ): "cohort.name = 'lottery'; it must be 'allocation', 'buffered', 'cyclic', 'fixed', 'full', "
    "'poisson', 'separated' or 'module:name'.",
    (
        "model.name=resnet",
    ): "model.name = 'resnet'; it must be 'adadp-cifar', 'adadp-mnist', 'hf', 'mlp', 'softmax', '",
    ("cohort.name=poisson", "cohort.rate=1.5"): "cohort.rate = 1.5; it must be at most 1.",
    ("partition.alpha=2.0",): "partition.alpha = 2.0 has no effect with partition.name = 'iid'",
    ("cohort.name=fixed", "cohort.size=101"): "cohort.size is 101; it must be from 1 to 100",
    ("noise.multiplier=1.0",): "noise protects only what a mechanism bounds",
    (
        "mechanism.name=median",
        "noise.multiplier=1.0",
    ): "it must be unset with Median",
    ("noise.target-epsilon=1.0",): "noise.target-epsilon is 1.0; it must be unset with NoPrivacy",
    ("mechanism.name=clipping",): "noise.multiplier = ''; it must be a number (0.0 for no noise)",
    (*PRIVATE, "noise.target-epsilon=2.0"): "unset while noise.target-epsilon = 2.0",
    (*PRIVATE, "noise.max-epsilon=0.0"): "noise.max-epsilon = 0.0; it must be greater than 0.",
    ("mechanism.name=clipping", "noise.multiplier=-1.0"): "it must be 0.0, or from 0.001 to 1e9.",
    ("noise.max-epsilon=2.0",): "in a run without a mechanism and noise",
    (*PRIVATE, "evaluate.clients-every=1"): "or evaluate.unprotected = true",
    (*PRIVATE, "mechanism.clip-norm=0.0"): "mechanism.clip-norm = 0.0; it must be at least 1e-30.",
    ("client.steps=5", "client.epochs=2"): "client.epochs = 2 and client.steps = 5; set one",
    ("client.name=adadp-lr", "client.adapt-rounds=4"): (
        "client.adapt-rounds = 4; it must be 0 while client.state = 'reset'"
    ),
    ("client.noise.multiplier=1.0",): "client.mechanism.name = 'none'; it must be set",
    ("client.mechanism.name=clipping",): "client.noise.multiplier = ''; it must be set",
    (
        "client.mechanism.name=clipping",
        "client.noise.multiplier=1.0",
        "client.work=steps.txt",
    ): "client.work is set; it must be empty where clients protect their examples",
    ("client.tol=1.0",): "client.tol = 1.0 has no effect with client.name = 'sgd'",
    ("client.state=server",): "client.state = 'server'; it must be 'reset' or 'client'",
    (
        "name=../../evil",
    ): "name = '../../evil'; it must be 1 to 100 letters a to z, digits, '.', '_' and '-'",
    ("name=",): "name = ''; it must be 1 to 100",
    ("name=...",): "and not only dots",
    ("name=a b",): "any other words go into title",
    ("name=größe",): "any other words go into title",
    ('title="a\\nb"',): "title = 'a\\nb'; it must be without control characters",
    ("rounds=100000000000000000",): "it must be at most 1,000,000,000.",
    ("client.steps=9007199254740992",): "it must be at most 1,000,000.",
    ("client.batch-size=9223372036854775808",): "it must be at most 2^63 - 1.",
    ("partition.clients=1000000000",): "it must be at most 10,000,000.",
    ("server.lr=1e300",): "server.lr = 1e+300; it must be at most 1e+30.",
    ("noise.target-epsilon=1e-9", *PRIVATE[::2]): "from 1e-6 to 1e6",
    ("data.train='5'",): "data.train = '5'; it must be a range such as '10000:'",
    ("data.train='-5:'",): "data.train = '-5:'; it must be a range",
    ("model.weights-for='fc*'",): "it must be unset unless model.weights is set.",
    ("client.epochs=0",): "client.epochs is 0; it must be at least 1",
    ("evaluate.fraction=0.5",): "evaluate.fraction = 0.5; it must be 1.0 unless evaluate.clients",
    ("evaluate.target-share=0.2",): "it must be 0.1 unless evaluate.private = true.",
    ("evaluate.multiplier=2.0",): "it must be unset unless evaluate.private = true.",
    ("evaluate.quantiles=true",): "evaluate.quantiles = true; it must be unset unless",
    ("stop.patience=3",): "stop.patience = 3; it must be 10 unless stop.metric is set.",
    ("checkpoint.every=0", "checkpoint.best=validation-loss"): "checkpoint.best = "
    "'validation-loss'; it must be unset unless checkpoint.every is above 0.",
    ("mechanism.private-scalar-high=3.0",): "must be 1.0 unless mechanism.private-scalar is set.",
}


@pytest.mark.parametrize("overrides", BAD, ids=" ".join)
def test_a_bad_setting_gets_one_sentence_naming_key_value_and_cure(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    with pytest.raises(FedsimError) as error:
        load(tmp_path, *overrides)
    message = str(error.value)
    assert BAD[overrides] in message
    assert "\n" not in message
    assert message.endswith(".")


def test_a_file_that_is_no_toml_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("rounds = ")
    with pytest.raises(FedsimError, match=r"run\.toml is not valid TOML"):
        RunConfig.load(path)
    with pytest.raises(FedsimError, match="cannot read the config"):
        RunConfig.load(tmp_path / "missing.toml")


def test_an_override_without_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="not of the form key=value"):
        load(tmp_path, "client.lr")


def test_a_run_config_has_neither_lists_nor_nulls() -> None:
    flat = RunConfig().to_run_config()
    assert all(type(value) in (bool, int, float, str) for value in flat.values())


def test_flattening_and_toml_lose_nothing(tmp_path: Path) -> None:
    config = load(tmp_path, *PRIVATE, "client.lr=0.25", "model.bias=false")
    assert RunConfig.from_run_config(config.to_run_config()) == config
    assert RunConfig.parse(tomllib.loads(config.to_toml())) == config


@given(
    lr=st.floats(1e-8, 10),
    epochs=st.integers(1, 100),
    clients=st.integers(1, 10_000),
    rate=st.floats(1e-6, 1),
    epsilon=st.floats(0.01, 100),
)
def test_any_valid_config_survives_a_round_trip(
    lr: float, epochs: int, clients: int, rate: float, epsilon: float
) -> None:
    tree: dict[str, Any] = {
        "client": {"lr": lr, "epochs": epochs},
        "partition": {"clients": clients},
        "cohort": {"name": "poisson", "rate": rate},
        "mechanism": {"name": "clipping"},
        "noise": {"target-epsilon": epsilon},
    }
    config = RunConfig.parse(tree)
    assert RunConfig.parse(tomllib.loads(config.to_toml())) == config
    assert RunConfig.from_run_config(config.to_run_config()) == config


def test_flowers_table_in_pyproject_equals_the_flattened_defaults() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert RunConfig.parse(table) == RunConfig()
    assert table == flower_table()
    # What an app's table has can be overridden, for any choice.
    chosen = RunConfig.parse(table | {"partition": table["partition"] | {"name": "dirichlet"}})
    assert chosen.partition.alpha == 0.5


def test_every_experiment_is_a_valid_config() -> None:
    found = (ROOT / "experiments").rglob("*.toml")
    others = {"experiment.toml", "judgement.toml", "pages.toml", "items.toml"}
    paths = [path for path in sorted(found) if path.name not in others]
    assert paths
    for path in paths:
        RunConfig.load(path)


def test_reading_a_config_imports_neither_torch_nor_flower() -> None:
    code = (
        "import sys, fedsim.config; fedsim.config.RunConfig();"
        "sys.exit(bool({'torch', 'flwr', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NO_PATHS = {"name": "it may have no slash"}
"""Settings that speak of files, and why they name none."""


def test_a_setting_that_speaks_of_a_file_is_marked_as_a_path() -> None:
    def unmarked(table: type[ConfigTable]) -> set[str]:
        settings = [setting for setting in settings_of(table) if setting.type is str]
        if issubclass(table, ObjectTable):
            names = registry.names(table.kind)
            settings += [
                s for name in names for s in table.declared_settings(name) if s.type is str
            ]
        words = re.compile(r"\b(files?|folders?|director(y|ies)|paths?)\b")
        keys = {
            table.key(setting.key)
            for setting in settings
            if words.search(setting.doc)
            and not any(isinstance(mark, NamesPath) for mark in setting.metadata)
        }
        inner = (unmarked(s.type) for s in settings_of(table) if is_table(s))
        return keys.union(*inner)

    assert unmarked(RunConfig) == NO_PATHS.keys()


def test_a_config_of_windows_editors_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbfrounds = 7\r\n[client]\r\nlr = 0.5\r\n")
    assert RunConfig.load(tmp_path / "run.toml") == RunConfig().replace(
        **{"rounds": 7, "client.lr": 0.5}
    )


def test_a_config_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    for content, sentence in (
        (b"\xff", "valid TOML"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"rounds = " + b"9" * 5_000, r"not valid TOML: an integer has too many digits\.$"),
        (b"#" * 2**21, "at most 1,048,576 bytes"),
    ):
        (tmp_path / "run.toml").write_bytes(content)
        with pytest.raises(FedsimError, match=sentence):
            RunConfig.load(tmp_path / "run.toml")
    for path in (tmp_path, tmp_path / "none", "/dev/zero"):
        with pytest.raises(FedsimError):
            RunConfig.load(path)


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "..a", "_-", "a" * 100])
def test_a_name_may_stand_in_a_path(name: str) -> None:
    assert RunConfig.parse({"name": name, "title": "Größe 大小 [/bold]"}).name == name


@pytest.mark.parametrize(
    ("key", "value"),
    [("rounds", "9" * 5000), ("data.name", "[" * 20_000), ("name", "a" * 101)],
    ids=["digits", "brackets", "letters"],
)
def test_a_sentence_stays_short_however_long_the_value_is(
    tmp_path: Path, key: str, value: str
) -> None:
    with pytest.raises(FedsimError) as error:
        load(tmp_path, f"{key}={value}")
    assert len(str(error.value)) < 400


def test_what_is_generated_from_the_code_is_as_the_code_is() -> None:
    scope = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    for name, made in scope["FILES"].items():
        assert (ROOT / name).read_text() == made(), f"{name}: run docs/generate.py"


@pytest.mark.parametrize(
    ("text", "value"),
    [(".5", 0.5), ("-.5e-1", -0.05), ("1.", 1.0), ("0.5", 0.5), ("1e-3", 1e-3), (".", "."),
     (".5x", ".5x"), ("1.2.3", "1.2.3"), ("...", "...")],
)  # fmt: skip
def test_values_are_read_as_people_type_them(text: str, value: object) -> None:
    assert read_value(f" {text} ") == value


def test_a_number_may_begin_with_its_point() -> None:
    settings = ["client.lr=.25", "partition.name=dirichlet", "partition.alpha=.5"]
    config = RunConfig.from_overrides(settings)
    assert (config.client.lr, config.partition.alpha) == (0.25, 0.5)


def test_a_rule_and_a_range_of_a_setting_are_both_in_its_allowed_values() -> None:
    @dataclass
    class Steps:
        even: Annotated[int, Ge(2), Le(8), Constraint(lambda n: n % 2 == 0, "an even number")] = 2

    (setting,) = settings_of(Steps)
    assert allowed(setting) == "an even number and between 2 and 8"


@pytest.mark.parametrize("key", [None, 3, (1, 2), b"name"])
@pytest.mark.parametrize("where", ["", "client", "model.options"])
def test_a_key_that_is_no_string_is_refused(key: Any, where: str) -> None:
    tree: dict[Any, Any] = {key: 1}
    for table in reversed(where.split(".") if where else []):
        tree = {table: tree}
    sentence = re.escape(f"{key!r} is a key of {where or 'the config'}; a key must be a string.")
    with pytest.raises(FedsimError, match=sentence):
        RunConfig.parse(tree)
    if not where:
        with pytest.raises(FedsimError, match=sentence):
            RunConfig.from_run_config(tree)


def test_a_key_of_very_many_parts_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    for key in (".".join(["a"] * 66), "[" + " . ".join(['"a.b"'] * 70) + "]", "'a'." * 65 + "b"):
        config.write_text(f"rounds = 3\n  {key} = 1\n")
        with pytest.raises(FedsimError, match="a dotted key has more than 64 parts"):
            RunConfig.load(config)
    title = ".".join(["a"] * 99)  # of a value, parts are not counted
    config.write_text(f'title = "{title}"\nclient.lr = 0.5\n')
    assert RunConfig.load(config).title == title


def test_a_name_is_no_option_of_a_command() -> None:
    assert RunConfig.from_overrides(["name=a-rf"]).name == "a-rf"
    with pytest.raises(FedsimError, match=r"name = '-rf'; it must be .* nor '-' first"):
        RunConfig.from_overrides(["name=-rf"])


def test_a_key_with_one_legal_value_takes_it_unless_it_is_set() -> None:
    scaffold = RunConfig.parse({"client": {"name": "scaffold"}})
    assert (scaffold.client.state, scaffold.mechanism.weighting) == ("client", "uniform")
    assert scaffold.implied == (("client", "state"), ("mechanism", "weighting"))
    # It is implied, not chosen: with another algorithm it is the default again, and the other way.
    sgd = scaffold.replace(**{"client.name": "sgd"})
    assert sgd == RunConfig.parse({})
    assert not sgd.implied
    assert sgd.replace(**{"client.name": "scaffold"}) == scaffold
    kept = RunConfig.parse({"client": {"state": "client"}}).replace(**{"client.lr": 0.5})
    assert kept.client.state == "client"
    assert not kept.implied
    # What is set is not changed; the trainer refuses it.
    assert RunConfig.parse({"client": {"name": "ditto", "state": "reset"}}).client.state == "reset"
    assert RunConfig.from_run_config(scaffold.to_run_config()) == scaffold


@pytest.mark.parametrize("name", registry.names("client"))
def test_every_algorithm_runs_by_its_name_alone_or_names_a_key_with_several_values(
    name: str,
) -> None:
    config = RunConfig.parse({"client": {"name": name}, "partition": {"clients": 4}})
    if name == "fedrep":
        with pytest.raises(FedsimError, match=r"model\.personal is empty"):
            resolve(config)
        evaluated = {"evaluate.every": 0, "model.personal": "*.weight"}
        assert resolve(config.replace(**evaluated)).config.client.state == "client"
    else:
        notes = resolve(config).notes
        assert len(notes) == len(config.implied)
