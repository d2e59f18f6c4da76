"""The guard on code: a bundle that is more than a config gets in nowhere."""

from __future__ import annotations

import importlib
import importlib.util
import io
import zipfile

import pytest
import tomli_w
from flwr.cli.build import build_fab_from_disk

from fedsim.config import RunConfig
from fedsim.deploy import flower_programs
from fedsim.deploy.bundle import CLIENT_APP, SERVER_APP, check_bundle, write_app
from fedsim.errors import FedsimError


def bundle(files: dict[str, bytes | str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return content.getvalue()


def project(*, project=(), flwr=(), components=()) -> str:
    apps = {"serverapp": SERVER_APP, "clientapp": CLIENT_APP, **dict(components)}
    app = {"publisher": "fedsim", "components": apps, "config": {"rounds": 1}, **dict(flwr)}
    about = {"name": "fedsim-run", "version": "1.0.0", "dependencies": [], **dict(project)}
    return tomli_w.dumps({"project": about, "tool": {"flwr": {"app": app}}})


HONEST = {"pyproject.toml": project(), ".info/CONTENT": "pyproject.toml,x,1"}


@pytest.mark.parametrize(
    ("component", "app"), [("serverapp", SERVER_APP), ("clientapp", CLIENT_APP)]
)
def test_what_flower_builds_of_our_app_is_let_in(tmp_path, component, app):
    directory = write_app(tmp_path / "app", RunConfig().to_tree())
    built = build_fab_from_disk(directory)
    check_bundle(built if isinstance(built, bytes) else built[0], component, app)


HOSTILE = {
    "code beside the config": {**HONEST, "fedsim/apps/client_app.py": "import os"},
    "a module that shadows another": {**HONEST, "numpy.py": ""},
    "a file outside": {**HONEST, "../../evil.py": ""},
    "a second pyproject of another case": {**HONEST, "PyProject.toml": project()},
    "no manifest": {"pyproject.toml": project()},
    "no pyproject": {".info/CONTENT": "", "setup.py": ""},
    "another app": {**HONEST, "pyproject.toml": project(components={"clientapp": "os:system"})},
    "no app": {**HONEST, "pyproject.toml": project(components={"clientapp": ""})},
    "an app that is a table": {**HONEST, "pyproject.toml": project(components={"clientapp": {}})},
    "packages": {**HONEST, "pyproject.toml": project(project={"dependencies": ["evil"]})},
    "a publisher that is a path": {**HONEST, "pyproject.toml": project(flwr={"publisher": "../x"})},
    "a name that is a path": {**HONEST, "pyproject.toml": project(project={"name": "a/../b"})},
    "a version that is a path": {
        **HONEST,
        "pyproject.toml": project(project={"version": "1/../.."}),
    },
    "no TOML": {**HONEST, "pyproject.toml": b"\xff\x00"},
    "tables that are none": {**HONEST, "pyproject.toml": "tool = 3\nproject = []"},
    "a bomb": {**HONEST, "pyproject.toml": b"#" * (64 << 20)},
}


@pytest.mark.parametrize("files", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_bundle_that_is_more_than_a_config_is_refused(files):
    with pytest.raises(FedsimError, match="bundle"):
        check_bundle(bundle(files), "clientapp", CLIENT_APP)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"x" * 100, bundle(HONEST)[:-30]])
def test_what_is_no_bundle_is_refused(content):
    with pytest.raises(FedsimError, match="bundle"):
        check_bundle(content, "clientapp", CLIENT_APP)


def test_a_file_that_is_there_twice_is_refused():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("pyproject.toml", project())
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("pyproject.toml", project())
    with pytest.raises(FedsimError, match="bundle"):
        check_bundle(content.getvalue(), "clientapp", CLIENT_APP)


@pytest.fixture
def runtime(monkeypatch):
    """Flower's module that runs a node's app, given back as it was."""
    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    for name in ("install_from_fab", "get_load_client_app_fn"):
        monkeypatch.setattr(module, name, getattr(module, name))
    return module


def test_a_node_runs_its_installed_app_and_writes_nothing_of_a_bundle(
    runtime, tmp_path, monkeypatch
):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    flower_programs._guarded_program("client", CLIENT_APP)
    runtime.install_from_fab(bundle(HONEST), skip_prompt=True)
    load = runtime.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    assert load("evil/app", "9", "0" * 64) is importlib.import_module("fedsim.apps.client_app").app
    assert list(tmp_path.iterdir()) == []


def test_a_node_refuses_a_hostile_bundle(runtime):
    flower_programs._guarded_program("client", CLIENT_APP)
    with pytest.raises(FedsimError, match="may contain no code"):
        runtime.install_from_fab(bundle(HOSTILE["code beside the config"]), skip_prompt=True)


def test_a_server_refuses_a_hostile_bundle_before_it_is_extracted(monkeypatch):
    module = importlib.import_module("flwr.superlink.runtime.run_serverapp")
    extracted: list[bytes] = []
    monkeypatch.setattr(
        module, "install_from_fab", lambda content, **_options: extracted.append(content)
    )
    flower_programs._guarded_program("server", SERVER_APP)
    with pytest.raises(FedsimError, match="may contain no code"):
        module.install_from_fab(bundle(HOSTILE["code beside the config"]), skip_prompt=True)
    assert extracted == []
    module.install_from_fab(bundle(HONEST), skip_prompt=True)
    assert len(extracted) == 1
