"""A config's `module:Name` is imported, and called, only where the process's owner allows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from typer.testing import CliRunner

import fedsim
from fedsim import RunConfig, allowed_code, registry
from fedsim.allowed_code import AllowedCode, allow
from fedsim.apps import client_app, server_app
from fedsim.cli import main
from fedsim.cli.app import app as commands
from fedsim.deploy.policy import NODE, Policy
from fedsim.deploy.services import SUPERLINK, SuperLink
from fedsim.errors import FedsimError
from fedsim.federation.flower_internals import ensure_identity

TABLES = ("data", "partition", "model", "client", "cohort", "mechanism", "client.mechanism")
"""With a key `name`; each has options, as `server` and `task` have."""

PAYLOAD = """
import os
from functools import partial
from os import system
from pathlib import Path

Path({canary!r}).touch()

class Wrong:
    def __init__(self, **options):
        Path({canary!r}).touch()

class Outer:
    from subprocess import Popen

shell = partial(os.system)
"""


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists as soon as anything of a stranger's package has run."""
    canary, packages, here = tmp_path / "canary", tmp_path / "packages", tmp_path / "here"
    for place in (packages / "strange", here):
        place.mkdir(parents=True)
    (packages / "strange" / "__init__.py").write_text(PAYLOAD.format(canary=str(canary)))
    (packages / "strange" / "inner.py").write_text(PAYLOAD.format(canary=str(canary)))
    monkeypatch.syspath_prepend(packages)
    monkeypatch.chdir(here)
    _forget_modules()  # other tests have modules of their own by these names
    yield canary
    _forget_modules()


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("strange", "mine")]:
        del sys.modules[name]


def hostile(name: str, canary: Path) -> dict[str, dict[str, object]]:
    """A config for each key that can name code, which tries to run a command."""
    options = {"command": f"touch {canary}"}
    tables: dict[str, dict[str, object]] = {
        f"{table}.name": {f"{table}.name": name, f"{table}.options": options} for table in TABLES
    }
    tables["server.optimizer"] = {"server.optimizer": name, "server.options": options}
    tables["task.loss"] = {"task.loss": name, "task.options": options}
    tables["task.metrics"] = {"task.metrics": f"{name}(command='touch {canary}')"}
    for key in ("mechanism.name", "client.mechanism.name"):
        tables[key][key.replace("mechanism.name", "noise.multiplier")] = 1.0
    return tables


BASE = {"partition.clients": 4, "rounds": 1, "engine.device": "cpu"}
KEYS = tuple(hostile("", Path()))
NAMES = ("os:system", "strange:Wrong", "strange.inner:Wrong", "mine:os.system", "mine:shell")


def refused(error: FedsimError, key: str) -> bool:
    """Whether it is one sentence that names the key, and a line to add where any would do."""
    said = str(error)
    one = said.count("\n") == 0 and said.endswith(".") and key in said
    return one and (
        "of the standard library" in said or "code = [" in said or "modules = [" in said
    )


def own_module() -> None:
    Path("mine.py").write_text(
        "import os\nfrom functools import partial\nshell = partial(os.system)\n"
    )


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", NAMES)
def test_no_config_of_a_strangers_runs_code_of_its_choice(name, key, canary, tmp_path):
    own_module()
    config = RunConfig().replace(**BASE, **hostile(name, canary)[key])
    with pytest.raises(FedsimError) as caught:
        fedsim.run(config, out=tmp_path / "run")
    assert refused(caught.value, key), caught.value
    assert not canary.exists()
    assert not (tmp_path / "run").exists()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended, whose directory somebody gives away."""
    fedsim.run(RunConfig().replace(**BASE), out=tmp_path / "given")
    return tmp_path / "given"


@pytest.mark.spanning
@pytest.mark.parametrize("name", ["os:system", "strange:Wrong"])
@pytest.mark.parametrize("table", ["model", "data"])
def test_no_run_directory_of_a_strangers_runs_code_of_its_choice(name, table, canary, run, capfd):
    text = (run / "config.toml").read_text()
    options = f'[{table}.options]\ncommand = "touch {canary}"\n'
    lines = text.splitlines(keepends=True)
    start = lines.index(f"[{table}]\n")
    end = next((i for i in range(start + 1, len(lines)) if lines[i][0] == "["), len(lines))
    shared = ("dtype", "weights", "trainable", "personal", "fix", "dir", "download", "normalize",
              "train", "test", "validation")  # fmt: skip
    kept = [line for line in lines[start + 1 : end] if line.split(" = ")[0] in shared]
    lines[start + 1 : end] = [f'name = "{name}"\n', *kept, options]
    (run / "config.toml").write_text("".join(lines))
    shutil.rmtree(run / "checkpoint")  # --resume would say that another model began
    for command in (
        ("evaluate", str(run)),
        ("export", str(run), "--to", "safetensors"),
        ("report", str(run)),
        ("compare", str(run), str(run)),
        ("privacy", str(run)),
        ("verify", str(run)),
        ("run", str(run), "--resume"),
        ("run", str(run / "config.toml"), "--out", str(run / "again")),
        ("config", "show", str(run / "config.toml")),
        ("partition", str(run / "config.toml")),
        ("tune", str(run / "config.toml")),
        ("sweep", str(run / "config.toml"), "--over", "seed=1,2", "--out", str(run / "sweep")),
        ("audit", str(run / "config.toml")),
        ("deploy", "init", str(run / "fed"), "--split", str(run / "config.toml")),
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        said = capfd.readouterr().err
        assert "Traceback" not in said
        # Verifying says that this is not the config that the run left.
        allowed = (1,) if command[0] == "verify" else (0, 2)
        assert ended.value.code in allowed, (command, said)
        assert not canary.exists(), command
        # What needs the model or the data says that it is refused; the rest reads files only.
        if command[0] in ("evaluate", "tune", "sweep") or "--resume" in command:
            assert ended.value.code == 2, command
            assert "standard library" in said or 'code = ["strange"]' in said, (command, said)
    if table == "model":
        with pytest.raises(FedsimError, match=r"model\.name"):
            fedsim.load(run).model  # noqa: B018


def on_the_server(changes: dict[str, object]) -> None:
    config = RunConfig().replace(**BASE, **{"engine.name": "deployment"}, **changes)
    context = Context(1, 0, {}, RecordDict(), config.to_run_config())
    server_app.app(None, context)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", ["os:system", "strange:Wrong", "mine:Wrong"])
def test_no_bundle_runs_code_of_its_choice_on_the_server(name, key, canary, tmp_path, monkeypatch):
    Path("mine.py").write_text(PAYLOAD.format(canary=str(canary)))
    SuperLink(tmp_path).save()
    monkeypatch.setenv("FEDSIM_RUNS", str(tmp_path / "runs"))
    for settings in ({SUPERLINK: str(tmp_path / "superlink.toml")}, {}):
        with monkeypatch.context() as process:
            for variable, value in settings.items():
                process.setenv(variable, value)
            with pytest.raises(FedsimError) as caught:
                on_the_server(hostile(name, canary)[key])
        assert refused(caught.value, key), caught.value
        assert not canary.exists()


def test_a_server_allows_what_its_own_file_lists(canary, tmp_path, monkeypatch):
    SuperLink(tmp_path, modules=("strange",)).save()
    monkeypatch.setenv(SUPERLINK, str(tmp_path / "superlink.toml"))
    with pytest.raises(FedsimError, match="a class that is not a"):
        on_the_server({"partition.name": "strange:Wrong"})
    assert canary.exists()  # imported, which runs it, and no object made of it
    with pytest.raises(FedsimError, match="'os' is of the standard library"):
        on_the_server({"model.name": "os:system"})
    with pytest.raises(FedsimError, match="put it into a file of its own"):
        on_the_server({"model.name": "__main__:Network"})
    assert allowed_code.current().includes_user_code  # outside of the app


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", ["os:system", "strange:Wrong", "mine:Wrong"])
@pytest.mark.parametrize("with_policy", [True, False])
@pytest.mark.parametrize("engine", ["deployment", "simulation"])
def test_no_run_brings_code_of_its_choice_to_a_node(
    engine, with_policy, name, key, canary, tmp_path, monkeypatch
):
    Path("mine.py").write_text(PAYLOAD.format(canary=str(canary)))
    if with_policy:
        (tmp_path / "node.toml").write_text("clients = 4\n[policy]\n")
        monkeypatch.setenv(NODE, str(tmp_path / "node.toml"))
    ensure_identity(1)
    config = RunConfig().replace(**BASE, **{"engine.name": engine}, **hostile(name, canary)[key])
    context = Context(1, 7, {"partition-id": 0}, RecordDict(), config.to_run_config())
    for kind in ("train", "evaluate"):
        content = RecordDict({"config": ConfigRecord({"server-round": 1})})
        # Not every node makes every thing: then it fails at something else, of an empty message.
        with pytest.raises((FedsimError, ValueError)) as caught:
            client_app.app(Message(content, 7, kind), context)
        assert not canary.exists()
        if with_policy or engine == "deployment":
            assert refused(caught.value, key), caught.value


def test_the_current_directory_is_the_users_and_what_is_installed_there_is_not(canary, tmp_path):
    own = "def net(input_shape, num_classes): ...\n"
    installed = Path(".venv/lib/python3.11/site-packages")
    Path("mine/deep").mkdir(parents=True)
    Path("mine/deep/nets.py").write_text(own)
    assert registry.load("model.name", "mine.deep.nets:net").__name__ == "net"
    installed.mkdir(parents=True)
    (installed / "strange_too.py").write_text(own)
    sys.path.insert(0, str(installed.absolute()))
    try:
        with pytest.raises(FedsimError, match=r'add code = \["strange_too"\]'):
            registry.load("model.name", "strange_too:net")
    finally:
        sys.path.remove(str(installed.absolute()))
    Path("linked.py").symlink_to(tmp_path / "packages" / "strange" / "__init__.py")
    with pytest.raises(FedsimError, match="'linked' is not under"):
        registry.load("model.name", "linked:Wrong")
    Path("mine/strange").symlink_to(tmp_path / "packages" / "strange")
    with pytest.raises(FedsimError, match=r"'mine\.strange\.inner' is not under"):
        registry.load("model.name", "mine.strange.inner:Wrong")
    assert not canary.exists()


EVIL = """
from collections import OrderedDict
from pathlib import Path
from torch import nn

Path({canary!r}).touch()

def Net(input_shape, num_classes):
    return nn.Sequential(OrderedDict(fc1=nn.Linear(64, num_classes)))
"""


@pytest.fixture
def theirs(canary: Path, run: Path) -> Path:
    """A run's directory under the current one, whose config names code that came with it."""
    theirs = Path("runs/theirs")
    shutil.copytree(run, theirs)
    for file in ("theirs/evil.py", "theirs/deep/evil.py", "theirs/pack/__init__.py"):
        path = Path("runs", file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(EVIL.format(canary=str(canary)))
    text = (theirs / "config.toml").read_text()
    text = text.replace('name = "softmax"', 'name = "runs.theirs.evil:Net"')
    text = text.replace("bias = true\n", "")
    (theirs / "config.toml").write_text(text)
    yield theirs
    for name in [n for n in sys.modules if n.split(".")[0] in ("runs", "evil", "linked")]:
        del sys.modules[name]


def test_code_that_a_run_directory_brings_needs_the_option(theirs, canary, capfd):
    shutil.rmtree(theirs / "checkpoint")
    run, config = str(theirs), str(theirs / "config.toml")
    for command in (
        ("evaluate", run),
        ("export", run, "--to", "safetensors"),
        ("run", run, "--resume"),
        ("run", config, "--out", "again"),
        ("tune", config),
        ("sweep", config, "--over", "seed=1,2", "--out", "sweep"),
        ("audit", config),
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        said = capfd.readouterr().err
        assert not canary.exists(), command
        if command[0] != "audit":  # which reads the config's privacy first
            assert ended.value.code == 2, command
            assert "is in a run's directory" in said, said
            assert "give --allow-code runs.theirs.evil" in said, said
    with pytest.raises(FedsimError, match="is in a run's directory"):
        fedsim.load(theirs).model  # noqa: B018
    assert not canary.exists()
    (theirs / ".fedsim-run").rename(theirs / "marker")
    with pytest.raises(FedsimError, match=r"has no \.fedsim-run"):
        fedsim.load(theirs)
    (theirs / "marker").rename(theirs / ".fedsim-run")
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", run, "--allow-code", "runs.theirs.evil"])
    assert ended.value.code == 0
    assert canary.exists()


@pytest.mark.parametrize("key", KEYS)
def test_no_key_names_code_in_a_run_directory(key, theirs, canary, monkeypatch):
    """By any way in which Python could find it."""

    def refused_name(name: str) -> None:
        config = RunConfig().replace(**BASE, **hostile(name, canary)[key])
        with pytest.raises(FedsimError, match="is in a run's directory") as caught:
            fedsim.run(config)
        assert key in str(caught.value)
        assert not canary.exists()

    for module in ("evil", "deep.evil", "pack"):
        refused_name(f"runs.theirs.{module}:Net")
    Path("linked.py").symlink_to(theirs / "evil.py")
    refused_name("linked:Net")
    Path("mine").symlink_to(theirs / "deep", target_is_directory=True)
    refused_name("mine.evil:Net")
    # A link in their directory to a file of the user's is theirs too: they chose it.
    Path("mine.txt").write_text("Net = 3\n")
    (theirs / "chosen.py").symlink_to(Path("mine.txt").absolute())
    refused_name("runs.theirs.chosen:Net")
    for place in ("runs/theirs", str(theirs.absolute())):
        monkeypatch.syspath_prepend(place)
        refused_name("evil:Net")
    monkeypatch.chdir(theirs)
    Path("pyproject.toml").write_text('[tool.fedsim]\ncode = ["evil", "deep"]\n')
    refused_name("evil:Net")
    monkeypatch.chdir("deep")
    refused_name("evil:Net")


@pytest.mark.parametrize(
    "name", ["os", "json.tool", "builtins", "fedsim", "fedsim.runs", "__main__"]
)
def test_the_standard_library_and_fedsims_own_are_never_allowed(name, canary):
    Path("pyproject.toml").write_text(f"[tool.fedsim]\ncode = [{json.dumps(name)}]\n")
    why = "of the standard library or of fedsim" if name != "__main__" else "a file of its own"
    with pytest.raises(FedsimError, match=why):
        registry.load("model.name", f"{name}:anything")
    with pytest.raises(FedsimError, match="--allow-code is"):
        allow([name])
    assert not AllowedCode((name,), file="superlink.toml").allows(name)
    Path("json.py").write_text("def net(): ...\n")
    with pytest.raises(FedsimError, match="'json' is of the standard library"):
        registry.load("model.name", "json:net")


def test_each_way_to_allow_a_package_lets_it_be_named(canary, monkeypatch):
    def named() -> object:
        return registry.load("data.name", "strange.inner:Wrong")

    Path("pyproject.toml").write_text('[tool.fedsim]\ncode = ["strange.other"]\n')
    with pytest.raises(FedsimError, match=r'add code = \["strange.other", "strange.inner"\] to'):
        named()
    assert not canary.exists()
    Path("pyproject.toml").write_text('[tool.fedsim]\ncode = ["strange.inner", "and.another"]\n')
    assert named()
    Path("pyproject.toml").unlink()
    with pytest.raises(FedsimError):
        named()
    Path("c.toml").write_text('name = "c"\n')
    RunConfig.load("c.toml", allow_code=["strange"])
    assert named()


@pytest.mark.parametrize("listed", ["code = 3", 'code = ["a", 3]', "code = ["])
def test_a_project_file_that_cannot_be_understood_is_said(listed, canary):
    Path("pyproject.toml").write_text(f"[tool.fedsim]\n{listed}\n")
    with pytest.raises(FedsimError, match=r"pyproject\.toml"):
        registry.load("data.name", "strange:Wrong")
    assert not canary.exists()


@pytest.mark.parametrize(
    "attribute",
    [
        *("os.system", "system", "shell", "partial", "Outer.Popen", "__builtins__.get"),
        *("__loader__.exec_module", "__class__", "Path", "Path.touch", "os.environ.clear"),
    ],
)
def test_what_ones_own_module_has_imported_is_not_its_own(attribute, tmp_path, canary):
    Path("mine.py").write_text(PAYLOAD.format(canary="imported"))
    with pytest.raises(FedsimError, match=r"of the standard lib|is unknown|no callable"):
        registry.load("model.name", f"mine:{attribute}")


def test_a_partial_of_ones_own_function_is_ones_own(canary):
    Path("mine.py").write_text(
        "from functools import partial\ndef net(width): ...\nnarrow = partial(net, width=3)\n"
    )
    assert callable(registry.load("model.name", "mine:narrow"))


def test_the_option_stands_at_every_command_that_may_run_a_configs_code(canary):
    for name in (
        "run",
        "sweep",
        "evaluate",
        "export",
        "privacy",
        "verify",
        "partition",
        "audit",
        "tune",
    ):
        shown = CliRunner().invoke(commands, [name, "--help"], env={"COLUMNS": "200"})
        assert "--allow-code" in shown.output, name


def test_a_simulations_processes_inherit_what_the_command_allows(monkeypatch, canary):
    monkeypatch.setenv(allowed_code.VARIABLE, "strange,torch.nn")
    inherited = Policy.process_allowed_code()
    assert inherited.includes_user_code
    assert inherited == SuperLink.process_allowed_code()
    assert inherited.allows("strange.inner")
    assert not inherited.allows("torch.optim")
    monkeypatch.setenv(NODE, str(Path("node.toml").absolute()))
    Path("node.toml").write_text("[policy]\n")
    assert not Policy.process_allowed_code().allows("strange")


def test_a_plugin_is_the_users_but_not_a_servers_unless_listed(monkeypatch, canary):
    from importlib.metadata import EntryPoint

    points = (EntryPoint("client.theirs", "strange:Wrong", registry.PLUGINS),)
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    flat = RunConfig().to_run_config()
    with allowed_code.use(AllowedCode(file="superlink.toml")):
        assert RunConfig.from_run_config(flat)  # as ever
        with pytest.raises(FedsimError, match=r'modules = \["strange"\] in superlink\.toml'):
            RunConfig.from_run_config({**flat, "client.name": "theirs"})
    assert not canary.exists()
    assert "theirs" in registry.names("client")


def test_workers_that_are_forked_have_the_commands_list(canary, tmp_path):
    """A loss of one's own module, trained by processes that import nothing of a stranger's."""
    Path("mine.py").write_text(
        "from torch.nn.functional import cross_entropy\ndef loss(outputs, targets):\n"
        "    return cross_entropy(outputs, targets, reduction='none')\n"
    )
    config = RunConfig().replace(**BASE, **{"task.loss": "mine:loss", "engine.workers": 2})
    result = fedsim.run(config)
    assert len(result.metrics) == 2
    assert not canary.exists()


def test_the_check_imports_nothing_at_all(canary):
    code = (
        "import sys; from fedsim.allowed_code import current;"
        "assert not current().allows('strange.inner') and not current().allows('torch.nn');"
        "sys.exit(bool({'strange', 'torch'} & set(sys.modules)))"
    )
    path = os.pathsep.join([str(canary.parent / "packages"), str(Path(fedsim.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )
    assert not canary.exists()
