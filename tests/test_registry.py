"""One file is one thing more: it is found, described, checked and run, and nothing else changes."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any

import pytest
from sample_kinds import CLASSES, IMPORTS

import fedsim
from fedsim import RunConfig, registry
from fedsim.errors import FedsimError
from fedsim.settings import Doc, Gt, settings_of


def sample_file(kind: str, name: str = "sample-thing") -> str:
    """A file that registers the sample of a kind under a name."""
    decorator = f'@register("{kind}", "{name}")'
    return f"from fedsim.registry import register\n{IMPORTS}\n{decorator}{CLASSES[kind]}"


CHOOSE = {"server": "server.optimizer", "metric": "task.metrics", "loss": "task.loss"}
BASE = {
    "rounds": 2,
    "partition.clients": 5,
    "client.batch-size": 20,
    "mechanism.name": "clipping",
    "noise.multiplier": 0.5,
    "cohort.name": "poisson",
}


@pytest.fixture
def one_more(tmp_path, monkeypatch, request):
    """A file in the folder of a kind's package, as if it had always been there."""
    kind = request.param
    text = sample_file(kind)
    assert len(text.splitlines()) <= 80
    (tmp_path / "sample_thing.py").write_text(text)
    package = importlib.import_module(registry.KINDS[kind].packages[0])
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    yield kind
    sys.modules.pop(f"{package.__name__}.sample_thing", None)
    registry._registered.pop((kind, "sample-thing"), None)


@pytest.mark.parametrize("one_more", CLASSES, indirect=True)
def test_a_thing_of_any_kind_is_one_file_that_runs_by_its_name(one_more: str) -> None:
    key = CHOOSE.get(one_more, f"{one_more}.name")
    assert "sample-thing" in registry.names(one_more)
    config = RunConfig().replace(**(BASE | {key: "sample-thing"}))
    settings = settings_of(registry.find(one_more, "sample-thing", key))
    flat = config.to_run_config()
    table = key.split(".")[0]
    shown = [s for s in settings if s.name not in ("clients", "seed")]
    if one_more != "metric":  # whose options stand in brackets
        assert all(flat[f"{table}.{s.key}"] == s.default and s.doc for s in shown)
    assert RunConfig.from_run_config(flat) == config
    result = fedsim.run(config)
    assert len([row for row in result.metrics if row["round"]]) == 2


def test_nothing_lists_by_hand_what_is_found_by_its_file() -> None:
    """A name of a thing with no place in the code but its own file, and where it is a default."""
    root = Path(fedsim.__file__).parent
    allowed = {"adadp-noise", "shards", "dirichlet", "auc"}
    for kind in registry.KINDS:
        for name in set(registry.names(kind)) & allowed:
            own = registry._built_in(kind)[name].rpartition(".")[2] + ".py"
            said = [p for p in root.rglob("*.py") if p.name != own and f'"{name}"' in p.read_text()]
            # What is suggested where a name is unknown need not know every name.
            assert {p.name for p in said} <= {"policy.py", "synonyms.py"}, name


def test_listing_what_there_is_waits_for_nothing() -> None:
    code = (
        "import sys; from fedsim import registry;"
        "names = [n for k in registry.KINDS for n in registry.names(k)]; assert 'adam' in names;"
        "sys.exit(bool({'torch', 'flwr', 'fedsim.mechanisms.adaclip'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_path_stays_as_it_is_while_a_users_file_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may be going through it, as Ray does for what it brings along."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_net_of_mine.py").write_text("import a_part_of_it\ndef layers(): ...\n")
    (tmp_path / "a_part_of_it.py").touch()
    before = sys.path, list(sys.path)

    def seen_elsewhere() -> bool:
        with ThreadPoolExecutor() as threads:
            return threads.submit(importlib.util.find_spec, "a_net_of_mine").result() is not None

    with registry.current_directory_importable():
        assert (sys.path, list(sys.path)) == before
        assert sys.path is before[0]
        assert not seen_elsewhere()
        assert importlib.util.find_spec("a_net_of_mine") is not None
    try:
        assert registry.load("model.name", "a_net_of_mine:layers").__name__ == "layers"
    finally:
        for name in ("a_net_of_mine", "a_part_of_it"):
            sys.modules.pop(name, None)
    assert importlib.util.find_spec("a_net_of_mine") is None


def test_a_users_file_comes_before_what_is_installed_and_a_bare_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    for name in ("one_file", "one_folder"):
        (installed / f"{name}.py").touch()
    (tmp_path / "one_file.py").touch()
    (tmp_path / "one_folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(installed)
    with registry.current_directory_importable():
        file, folder = (importlib.util.find_spec(name) for name in ("one_file", "one_folder"))
    assert file is not None
    assert file.origin == str(tmp_path / "one_file.py")
    assert folder is not None
    assert folder.origin == str(installed / "one_folder.py")


@pytest.mark.parametrize("kind", sorted(registry.KINDS))
def test_every_setting_of_every_thing_is_described(kind: str) -> None:
    filled = {"clients", "seed", "population", "adjacency", "path", "rounds", "participation"}
    for name in registry.names(kind):
        for setting in settings_of(registry.find(kind, name, kind)):
            assert setting.doc.endswith(".") or setting.name in filled, (kind, name, setting.name)


def plugged(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    entries = tuple(EntryPoint(name, value, registry.PLUGINS) for name, value in points)
    monkeypatch.setattr(registry, "_entry_points", lambda: entries)


def test_an_installed_package_adds_a_thing_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "their_package.py").write_text(sample_file("client", "theirs"))
    monkeypatch.syspath_prepend(tmp_path)
    plugged(monkeypatch, ("client.theirs", "their_package:Sign"))
    config = RunConfig().replace(**{"client.name": "theirs", "client.lr": 0.5})
    assert config.client.lr == 0.5
    with pytest.raises(FedsimError, match=r"client\.lr = 0\.0; it must be greater than 0"):
        config.replace(**{"client.lr": 0.0})


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ([("client.sgd", "a:B")], "called client 'sgd', which is fedsim's own; rename it"),
        ([("client.x", "a:B"), ("client.x", "c:D")], "which is another plugin's; rename it"),
        ([("client.x", "no_such_module_anywhere:B")], "the plugin no_such_module_anywhere:B"),
        ([("client.x", "math:sqrt2")], "which cannot be imported"),
        ([("client.x", "math:pi")], "is not callable"),
    ],
)
def test_a_plugin_that_cannot_be_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, points: list[tuple[str, str]], sentence: str
) -> None:
    plugged(monkeypatch, *points)
    with pytest.raises(FedsimError, match=sentence):
        RunConfig().replace(**{"client.name": "x"})


def test_a_setting_that_a_table_has_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bad_plugin.py").write_text(
        "import dataclasses\nfrom fedsim.clients import SGD\n"
        "@dataclasses.dataclass(frozen=True)\nclass Bad(SGD):\n    epochs: int = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plugged(monkeypatch, ("client.bad", "bad_plugin:Bad"))
    with pytest.raises(FedsimError, match=r"'bad' has a setting 'epochs', which is a key of every"):
        RunConfig().replace(**{"client.name": "bad"})


def test_a_namesake_in_another_directory_is_not_taken_for_ones_own(tmp_path, monkeypatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "namesake.py").write_text(
            "from torch.nn import Identity\nclass Net(Identity): ...\n"
        )
    monkeypatch.delitem(sys.modules, "namesake", raising=False)
    monkeypatch.chdir(tmp_path / "one")
    net = registry.find("model", "namesake:Net", "model.name")
    assert registry.find("model", "namesake:Net", "model.name") is net
    monkeypatch.chdir(tmp_path / "two")
    with pytest.raises(FedsimError, match=r"has imported .*one/namesake\.py, not .*two/"):
        registry.find("model", "namesake:Net", "model.name")
    monkeypatch.chdir(tmp_path)
    assert registry.find("model", "namesake:Net", "model.name") is net
    del sys.modules["namesake"]


Rate = Annotated[float, Gt(0), Doc("A rate.")]


@dataclass
class Documented:
    shared: Rate = 0.1
    own: Rate = 0.2
    """The rate of
    this class."""
    bare: int = 1


@dataclass
class Inheriting(Documented):
    bare: int = 2
    "A number."


def test_a_fields_docstring_is_its_help_and_comes_before_its_types() -> None:
    docs = {setting.name: setting.doc for setting in settings_of(Inheriting)}
    assert docs == {"shared": "A rate.", "own": "The rate of this class.", "bare": "A number."}
    assert {s.name: s.doc for s in settings_of(Documented)} == docs | {"bare": ""}


def test_a_class_without_source_is_checked_and_has_no_help() -> None:
    names: dict[str, Any] = {"__name__": __name__, "dataclass": dataclass}
    exec('@dataclass\nclass Unseen:\n    own: int = 1\n    "Help."', names)
    (setting,) = settings_of(names["Unseen"])
    assert (setting.doc, setting.read(2)) == ("", 2)
