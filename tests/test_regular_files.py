"""What stands under a file's name and is none is refused, and nobody waits for it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedsim import regular_files
from fedsim.allowed_code import current
from fedsim.apps.user_app import FlowerApp
from fedsim.audit.target_claim import TargetClaim
from fedsim.cli import main
from fedsim.deploy.federation import Federation
from fedsim.deploy.party_files import read_roster
from fedsim.deploy.policy import Policy
from fedsim.errors import FedsimError

TOML = """
name = "small"
rounds = 2
[partition]
clients = 20
[mechanism]
name = "clipping"
[noise]
multiplier = 1.0
"""


@pytest.fixture(autouse=True)
def _nobody_waits() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError("somebody waits for a FIFO")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fifo(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def bound_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


@pytest.mark.parametrize("make", [fifo, bound_socket, lambda path: Path("/dev/zero")])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_only_a_regular_file_is_opened(
    make: Callable[[Path], Path], flags: int, tmp_path: Path
) -> None:
    path = make(tmp_path / "file")
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with pytest.raises(OSError, match="not a regular file") as refused:
        regular_files.opener(path, flags)
    assert refused.value.filename == str(path)
    if before:
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_regular_file_is_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("Größe\r\n".encode())
    (tmp_path / "link").symlink_to("file")
    assert regular_files.read_bytes(tmp_path / "link") == "Größe\r\n".encode()
    assert regular_files.read_text(tmp_path / "link") == "Größe\n"
    assert regular_files.require_all(tmp_path) == tmp_path
    with pytest.raises(IsADirectoryError):
        regular_files.read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        regular_files.read_bytes(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("node.toml", "[policy]", Policy.load),
        ("roster.toml", f"[clients]\n{'a' * 64} = 1", read_roster),
        ("federation.toml", "nodes = 1", lambda path: Federation.load(path.parent)),
        ("claim.toml", "epsilon = 1.0", lambda path: TargetClaim.read(path, {})),
        (
            "pyproject.toml",
            "[tool.flwr.app.components]\nserverapp = 'marked:server'\nclientapp = 'marked:client'",
            lambda path: FlowerApp.load(path.parent).run_config,
        ),
        (
            "pyproject.toml",
            "[tool.fedsim]\ncode = ['outside']",
            lambda _: current().allows("outside"),
        ),
    ],
)
def test_toml_may_begin_with_a_byte_order_mark(
    name: str,
    content: str,
    read: Callable[[Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("marked.py").write_text(
        "import flwr.clientapp, flwr.serverapp\n"
        "client, server = flwr.clientapp.ClientApp(), flwr.serverapp.ServerApp()\n"
    )
    if name == "federation.toml":
        Federation.create(tmp_path, nodes=1, hosts=("127.0.0.1",))
    path = tmp_path / name
    content = path.read_text() if path.exists() else content
    path.write_text(content, "utf-8")
    os.utime(path, (0, 0))  # what a file lists is read again where its time has changed
    plain = repr(read(path))
    path.write_text(content, "utf-8-sig")
    assert repr(read(path)) == plain


# -- by the command -----------------------------------------------------------------------


def sentence(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says of arguments that it refuses."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (1, 2)
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("fedsim: ")
    return told


def by_config(directory: Path, line: str) -> list[str]:
    (directory / "c.toml").write_text(TOML)
    return ["run", "c.toml", "--set", line, "--out", "run"]


@pytest.mark.parametrize("name", ["x_train", "mean", "owner_train"])
def test_a_folder_of_arrays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        np.save(tmp_path / "data" / f"x_{split}.npy", np.zeros((40, 3), np.float32))
        np.save(tmp_path / "data" / f"y_{split}.npy", np.arange(40) % 2)
    fifo(tmp_path / "data" / f"{name}.npy")
    told = sentence(capsys, *by_config(tmp_path, "data.name=./data"))
    assert f"data/{name}.npy could not be read" in told
    assert "not a regular file" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "setting", ["model.weights", "client.work", "devices.trace", "noise.ledger-key"]
)
def test_a_file_that_a_config_names(
    setting: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    fifo(tmp_path / "file.npy")
    assert setting in sentence(capsys, *by_config(tmp_path, f"{setting}=./file.npy"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("folder", ["MNIST/raw", "cifar-10-batches-py"])
def test_the_files_of_torchvision(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / folder).mkdir(parents=True)
    fifo(tmp_path / "data" / folder / "t10k-images-idx3-ubyte")
    name = "mnist" if "MNIST" in folder else "cifar10"
    assert "not a regular file" in sentence(capsys, *by_config(tmp_path, f"data.name={name}"))


def test_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(fifo(tmp_path / "c.toml"))
    assert "not a regular file" in sentence(capsys, "run", config)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    (directory / "c.toml").write_text(TOML)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(directory / "c.toml"), "--out", str(directory / "run")])
    assert ended.value.code == 0
    return directory / "run"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("metrics.csv", "report"),
        ("metrics.csv", "resume"),
        ("metrics.csv", "verify"),
        ("summary.json", "report"),
        (".fedsim-run", "evaluate"),
        (".fedsim-run", "resume"),
        ("ledger.jsonl", "privacy"),
        ("ledger.jsonl", "resume"),
        ("model.safetensors", "evaluate"),
        ("model.safetensors", "verify"),
        ("config.toml", "evaluate"),
        ("checkpoint", "resume"),
    ],
)
def test_a_runs_directory(
    name: str, command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "run"))
    for path in [damaged / name] if name != "checkpoint" else damaged.rglob("*.safetensors"):
        fifo(path)
    arguments = {
        "report": ["report", str(damaged), "--out", str(tmp_path / "page.html")],
        "resume": ["run", str(damaged), "--resume"],
        "verify": ["verify", str(damaged)],
        "privacy": ["privacy", str(damaged)],
        "evaluate": ["evaluate", str(damaged)],
    }[command]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr()
    # What verification says of metrics is another test's.
    assert ended.value.code in (0, 1) if command == "verify" else ended.value.code in (1, 2)
    assert "Traceback" not in told.err + told.out


def test_a_federations_files(tmp_path: Path) -> None:
    federation = Federation.create(tmp_path / "f", nodes=1, hosts=("127.0.0.1",))
    node, roster = federation.node(0), federation.roster
    fifo(federation.directory / "federation.toml")
    with pytest.raises(FedsimError):
        Federation.load(federation.directory)
    with pytest.raises(FedsimError, match="not a regular file"):
        read_roster(fifo(roster))
    with pytest.raises(FedsimError, match="not a regular file"):
        Policy.load(fifo(node / "node.toml"))


@pytest.mark.parametrize("command", ["evaluate", "public"])
def test_a_model_that_was_cut_off(
    command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "run"))
    model = damaged / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-100])
    arguments = ["evaluate"] if command == "evaluate" else ["export", "--public", "--out", "pub"]
    told = sentence(capsys, arguments[0], str(damaged), *arguments[1:])
    assert "model.safetensors" in told
