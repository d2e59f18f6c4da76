"""Every mistake of a user, and every failure of the machine, ends in one sentence and a status."""

from __future__ import annotations

import errno
import io
import os
import runpy
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fedsim
from fedsim.cli import main
from fedsim.config import RunConfig
from fedsim.runs.directory import RunDirectory
from fedsim.runs.metrics import MetricsFile

TOML = """
name = "small"
rounds = 1
[partition]
clients = 20
"""
PRIVATE = ["mechanism.name=clipping", "noise.multiplier=1.0"]


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(TOML)


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def everything(path: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(path)): p.read_bytes() if p.is_file() and not p.is_symlink() else None
        for p in path.rglob("*")
    }


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, which must refuse and leave every file as it was; its sentence."""

    def run(*arguments: str, expected: int = 2) -> str:
        before = everything(tmp_path)
        assert status(*arguments) == expected
        told = capsys.readouterr().err
        assert told.startswith("fedsim: "), told
        assert told.count("\n") == 1, told
        assert told.endswith(".\n"), told
        assert len(told) < 1200, told
        assert everything(tmp_path) == before
        return told

    return run


# -- configs ------------------------------------------------------------------------------


def _wrong_values() -> Iterator[str]:
    """For each key of a config, values that it cannot have."""
    for key, value in RunConfig().to_run_config().items():
        yield f"{key}=[1, 2]"
        if isinstance(value, bool):
            yield f"{key}=maybe"
        elif isinstance(value, int):
            yield f"{key}=-1"
            yield f"{key}=9223372036854775808"
            yield f"{key}=2.5"
        elif isinstance(value, float):
            yield f"{key}=nan"
            yield f"{key}=-1.0"
            yield f"{key}=1e31"
        else:
            yield f'{key}="a\\u0000b"'


@pytest.mark.parametrize("change", list(_wrong_values()))
def test_a_value_that_a_key_cannot_have(change: str, refused: Callable[..., str]) -> None:
    told = refused("run", "c.toml", "--set", change)
    assert change.partition("=")[0].split(".")[0] in told


@pytest.mark.parametrize(
    "changes",
    [
        ["rounds=100000000000000000"],
        ["client.steps=9007199254740992"],
        ["partition.clients=1000000000"],
        ["partition.clients=10000000"],
        ["model.name=mlp", "model.widths=10000000000"],
        ["model.name=mlp", "model.widths=9999999,9999999"],
        ["model.name=mlp", "model.widths=" + "8," * 2000 + "8"],
        ["model.name=mlp", "model.widths=" + "9" * 4000],
        ["model.name=mlp"],
        ["model.name=mlp", "model.widths=8,,8"],
        ["model.name=mlp", "model.widths=8", "model.trainable=none.*"],
        ["model.name=adadp-cifar"],
        ["model.name=nowhere:Net"],
        ["model.name=os:getpid"],
        ["model.name=os.path:sep"],
        ["model.name=:"],
        ["task.loss=nowhere:loss"],
        ["engine.name=simulation", "engine.cpus-per-worker=0.5"],
        ["task.metrics=nowhere:metric"],
        ["model.weights=c.toml"],
        ["model.weights=none.safetensors"],
        ["model.weights=."],
        ["data.name=none.npz"],
        ["data.name=c.toml.npz"],
        ["data.name=nothing"],
        ["data.name=mnist"],
        ["data.name=mnist", "data.dir=c.toml"],
        ["data.name=/dev/null.npz"],
        ["data.normalize=true"],
        ["data.train=5:5"],
        ["data.train=0:99999999999"],
        ["data.train=1:" + "9" * 5000],
        ["partition.name=shards", "partition.shards=1000000000"],
        ["partition.name=dirichlet", "partition.alpha=1e-30"],
        ["partition.name=interpolated-pathological", "partition.groups=0;1"],
        ["partition.name=interpolated-pathological", "partition.groups=[/]"],
        ["partition.name=interpolated-pathological", "partition.groups=99999999999999999999"],
        ["client.name=os:getpid"],
        ["client.name=torch.optim:SGD"],
        ["client.schedule=cosine:0"],
        ["client.options=a=1"],
        ["client.options=lr"],
        ["client.state-dir=c.toml"],
        ["client.state-dir=c.toml/below"],
        ["cohort.name=fixed", "cohort.size=21"],
        ["mechanism.private-scalar=loss"],
        ["mechanism.per-layer=true"],
        ["noise.placement=client"],
        [*PRIVATE, "mechanism.private-scalar=accuracy"],
        [*PRIVATE, "mechanism.clip-norm=1e-31"],
        [*PRIVATE, "mechanism.clip-norm=1e10"],
        [*PRIVATE, "noise.max-epsilon=1e-9"],
        ["client.state=server"],
        [*PRIVATE, "evaluate.clients-every=1"],
        [PRIVATE[0], "noise.target-epsilon=1000000.0"],
        [PRIVATE[0], "noise.multiplier=1e-9"],
        ["mechanism.name=quantile-clipping", "noise.multiplier=9.0"],
        ["client.mechanism.name=clipping", "client.noise.multiplier=-1.0"],
        ["client.mechanism.name=clipping", "client.noise.multiplier=1.0", "client.batch-size=999"],
        ["model.personal=fc1.*", "client.state=client", "evaluate.every=0"],
        ["model.personal=fc1.*", "client.state=client", "evaluate.every=0", *PRIVATE],
        ["engine.name=cluster"],
        ["engine.name=ray", "engine.workers=1000000"],
        ["engine.name=deployment", "engine.federation=none"],
        ["engine.device=cuda"] if not torch.cuda.is_available() else ["engine.device=tpu"],
        ["name=../../evil"],
        ["name="],
        ["name=.."],
        ["name=/etc"],
        ["name=größe"],
        ["name=" + "a" * 101],
        ["nonsense=1"],
        ["client.nonsense=1"],
        ["client=1"],
        ["client.lr.deep=1"],
        ["a" * 3000 + "=1"],
        [".".join("a" * 3000) + "=1"],
        ["rounds"],
        ["=1"],
        ["[/bold]=1"],
        ["name=[/bold]"],
    ],
    ids=lambda changes: " ".join(changes)[:60],
)
def test_a_config_that_cannot_be_run(changes: list[str], refused: Callable[..., str]) -> None:
    refused("run", "c.toml", *(word for change in changes for word in ("--set", change)))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"rounds = ",
        b"rounds = 1\nrounds = 2",
        b"[client]\n[client]",
        b"a = " + b"[" * 50_000,
        b"rounds = " + b"9" * 5000,
        b"#" * 2**21,
        b"name = 1",
        b"rounds = 1979-05-27",
        b"rounds = {a = 1}",
        b"client = 3",
        b"[[client]]",
        b"[client.noise.deep]\na = 1",
        b"name = '''a\nb'''",
        b"\x00",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_file_that_is_no_config(
    content: bytes, tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    refused("run", "bad.toml")


# -- places -------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    "out",
    [
        "c.toml",
        "c.toml/x",
        "/proc/x",
        "/proc/self/x",
        "/dev/null",
        "loop",
        "loop/x",
        "a" * 300,
        "own",
    ],
    ids=lambda out: out[:10],
)
def test_a_place_that_is_no_runs(
    out: str, overwrite: list[str], tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "own" / "clients").mkdir(parents=True)
    (tmp_path / "own" / "report.html").write_text("mine")
    assert "--out" in refused("run", "c.toml", "--out", out, *overwrite)


def test_the_directory_of_the_users_own_files_stays_as_it_is(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "mine.txt").write_text("mine")
    (tmp_path / "config.toml").write_text(TOML)
    for overwrite in ([], ["--overwrite"]):
        assert "may be your own files" in refused("run", "c.toml", "--out", ".", *overwrite)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize(
    ("owner", "method"),
    [(MetricsFile, "start"), (MetricsFile, "append"), (RunDirectory, "save_model")],
)
def test_a_disk_that_fails_in_mid_run(
    code: int,
    owner: type,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing = Mock(side_effect=OSError(code, os.strerror(code), "runs/small/some.file"))
    monkeypatch.setattr(owner, method, failing)
    assert status("run", "c.toml") == 1
    told = capsys.readouterr().err
    assert told.startswith(f"fedsim: runs/small/some.file: {os.strerror(code)}.")
    if method == "save_model":  # rounds were made before
        assert "runs/small keeps metrics.csv" in told
        assert "`fedsim run runs/small --resume` resumes it from its first round.\n" in told
    assert told.count("\n") == 1


def test_a_disk_that_is_full_when_the_report_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "report.html"))
    monkeypatch.setattr(RunDirectory, "save_report", failing)
    assert status("run", "c.toml", "-q") == 0
    (record,) = caplog.records
    assert record.exc_info is None
    assert record.getMessage() == (
        "the run is complete, but its report could not be written: [Errno 28] No space left on "
        "device: 'report.html'"
    )


def test_a_directory_that_is_removed_in_mid_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append = MetricsFile.append

    def then_remove(file: MetricsFile, row: Any) -> None:
        append(file, row)
        if row["round"] == 1:
            shutil.rmtree(file.path.parent)

    monkeypatch.setattr(MetricsFile, "append", then_remove)
    assert status("run", "c.toml", "-q") == 1
    assert capsys.readouterr().err == (
        "fedsim: runs/small/model.safetensors: No such file or directory. "
        "Nothing of the run is left in runs/small.\n"
    )


def test_a_library_that_the_memory_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    failing = Mock(side_effect=ImportError("libtorch_cpu.so: failed to map segment"))
    monkeypatch.setattr(RunConfig, "load", failing)
    told = refused("run", "c.toml", expected=1)
    assert "libtorch_cpu.so" in told
    assert "nothing was started" in told
    failing.side_effect = ImportError("cannot import name 'x'")
    with pytest.raises(ImportError, match="cannot import name"):
        main(["run", "c.toml"])


@pytest.mark.parametrize(("address", "expected"), [("", 1), ("10.0.0.1:6379", 2)])
def test_a_ray_that_does_not_start(
    address: str, expected: int, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", Mock(side_effect=Exception("The process died\nunexpectedly")))
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("RAY_ADDRESS", address)
    told = refused("run", "c.toml", "--engine", "ray", expected=expected)
    assert "(The process died unexpectedly)" in told
    assert ray.init.call_args.kwargs["address"] == (address or "local")
    assert ("RAY_ADDRESS" if address else "Ray did not start") in told
    assert signal.getsignal(signal.SIGTERM) == handler


def test_no_config_joins_a_ray_cluster(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """Ray unpickles what the cluster sends, that is, it runs its code."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", Mock(side_effect=AssertionError))
    with Path("c.toml").open("a") as config:
        config.write('\n[engine]\nname = "ray"\naddress = "ray://10.0.0.1:10001"\n')
    assert "did you mean RAY_ADDRESS (an environment variable)?" in refused("run", "c.toml")


# -- what a terminal gets -----------------------------------------------------------------

HOSTILE = "\x1b[2J\x07\rfedsim"


@pytest.mark.parametrize(
    "words", [HOSTILE, "x" * 5000, "x y " * 1250], ids=["control", "long", "long words"]
)
def test_names_and_values_reach_a_terminal_as_text_and_shortened(
    words: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    for arguments in (
        ["run", words],
        ["run", "c.toml", "--set", f"data.name={words}"],
        ["run", "c.toml", "--set", f"data.options={words}"],
        ["run", "c.toml", "--set", f"log.to={words}"],
        ["run", "c.toml", "--set", f"{words}=1"],
    ):
        assert refused(*arguments, expected=_status_of(arguments, words))[:-1].isprintable()
    name = words.replace("/", "")
    if not name.isprintable():
        return  # such an entry of a file is no array of the data set
    np.savez(tmp_path / "own.npz", **USABLE, **{f"{name}_train": np.zeros(2)})
    told = refused("run", "c.toml", "--set", "data.name=./own.npz")
    assert " of shape (2,)" in told
    assert told[:-1].isprintable()


def _status_of(arguments: list[str], words: str) -> int:
    # A path that is too long is the system's to refuse.
    is_path = words in arguments or arguments[-1].startswith("data.name=")
    return 1 if is_path and len(words) > 1000 else 2


def test_nothing_advises_to_unpickle(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "own").mkdir()
    for key, array in USABLE.items():
        np.save(tmp_path / "own" / f"{key}.npy", array)
    (tmp_path / "own" / "x_test.npy").write_bytes(b"\x80\x04N.")
    told = refused("run", "c.toml", "--set", "data.name=./own")
    assert "own/x_test.npy could not be read" in told
    assert "pickle" not in told


def test_normalising_by_dates_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "own").mkdir()
    for key, array in {**USABLE, "mean": np.zeros(1, "M8[s]"), "std": np.ones(1)}.items():
        np.save(tmp_path / "own" / f"{key}.npy", array)
    told = refused("run", "c.toml", "--set", "data.name=./own")
    assert "mean.npy and std.npy of own could not be read" in told


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        np._core._exceptions._ArrayMemoryError((2**60,), np.dtype(float)),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_machine_without_enough_memory(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunDirectory, "save_model", Mock(side_effect=error))
    assert status("run", "c.toml") == 1
    assert capsys.readouterr().err.startswith("fedsim: there is not enough memory (")


# -- data sets ----------------------------------------------------------------------------


def npy(header: bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + data


def archive(replaced: dict[str, bytes | None], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as file:
        for key, array in USABLE.items():
            plain = io.BytesIO()
            np.save(plain, array)
            member = replaced.get(key, plain.getvalue())
            if member is not None:
                file.writestr(f"{key}.npy", member)
    return content.getvalue()


def arrays(**changed: Any) -> bytes:
    content = io.BytesIO()
    np.savez(content, **{**USABLE, **changed})
    return content.getvalue()


USABLE = {
    "x_train": np.zeros((40, 3), dtype=np.float32),
    "y_train": np.arange(40) % 2,
    "x_test": np.zeros((4, 3), dtype=np.float32),
    "y_test": np.arange(4) % 2,
}
HEADER = "{'descr': '%s', 'fortran_order': False, 'shape': %s, }"
CLAIMS = {
    "73 TiB": HEADER % ("<f4", (20 * 10**12,)),
    "10^24": HEADER % ("<f4", (10**24,)),
    "overflow": HEADER % ("<f4", (2**62, 8)),
    "negative": HEADER % ("<f4", (-40, 3)),
    "objects": HEADER % ("|O", (40, 3)),
    "nested": HEADER % ("<f4", "(" * 3000 + ")" * 3000),
    "cut": "{'descr': '<f4', 'fortran_ord",
    "code": "__import__('os').system('touch evil')",
    "dtype": HEADER % ("<q9", (40, 3)),
    "long dtype": HEADER % ("<U1000000000", (40,)),
    "structured": "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (120,), }",
    "shape": "{'descr': '<f4', 'fortran_order': False, 'shape': 'x', }",
    "keys": "{'descr': '<f4'}",
    "number": "7",
    "nothing": "",
}


def _bomb() -> bytes:
    """A directory that claims 8 GiB for a few bytes."""
    plain = bytearray(archive({"x_train": npy((HEADER % ("<f4", (2**31,))).encode())}))
    at = plain.index(b"PK\x01\x02")
    plain[at + 24 : at + 28] = (2**32 - 100).to_bytes(4, "little")
    return bytes(plain)


HOSTILE: dict[str, bytes] = {
    **{name: archive({"x_train": npy(header.encode())}) for name, header in CLAIMS.items()},
    "labels of 73 TiB": archive({"y_test": npy((HEADER % ("<i8", (10**13,))).encode())}),
    "bomb": _bomb(),
    "lzma": archive({}, zipfile.ZIP_LZMA),
    "bzip2": archive({}, zipfile.ZIP_BZIP2),
    "version 9": archive({"x_train": npy(b"{}", version=b"\x09\x00")}),
    "no npy": archive({"x_train": b"hello"}),
    "empty member": archive({"x_train": b""}),
    "a key lacks": archive({"x_train": None}),
    "empty": b"",
    "text": b"hello",
    "zip magic": b"PK\x03\x04",
    "zip end": b"PK\x05\x06" + b"\x00" * 18,
    "cut": archive({})[:200],
    "damaged": archive({}).replace(b"PK\x01\x02", b"PK\x01\x03"),
    "one array": npy(HEADER.encode()),
    "pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00N.",
    "labels of 10^9": arrays(y_train=np.full(40, 10**9)),
    "labels of 2^63": arrays(y_train=np.full(40, 2**63 - 1)),
    "labels of 2^64": arrays(y_train=np.full(40, 2**64 - 1, dtype=np.uint64)),
    "labels below 0": arrays(y_train=np.full(40, -1)),
    "float labels": arrays(y_train=np.zeros(40)),
    "labels of strings": arrays(y_train=np.full(40, "a")),
    "two axes": arrays(y_train=np.zeros((40, 1), dtype=int)),
    "NaN": arrays(x_train=np.full((40, 3), np.nan)),
    "complex": arrays(x_train=np.zeros((40, 3), dtype=complex)),
    "times": arrays(x_train=np.zeros((40, 3), dtype="M8[s]")),
    "no examples": arrays(x_train=np.zeros((0, 3), dtype=np.float32)),
    "no features": arrays(x_train=np.zeros((40, 0), dtype=np.float32)),
    "scalar": arrays(x_train=np.float32(1)),
    "too few labels": arrays(y_train=np.zeros(3, dtype=int)),
    "another width": arrays(x_test=np.zeros((4, 5), dtype=np.float32)),
    "objects in mean": arrays(mean=np.array([{}], dtype=object)),
    "words in mean": arrays(mean=np.array(["a"]), std=np.array(["b"])),
    "long mean": arrays(mean=np.zeros(10**5), std=np.ones(10**5)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_data_set(name: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "data.npz").write_bytes(HOSTILE[name])
    assert "data.npz" in refused("run", "c.toml", "--set", "data.name=data.npz")
    assert not (tmp_path / "evil").exists()


# -- models -------------------------------------------------------------------------------


class NaN(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)
        nn.init.constant_(self.weight, float("nan"))


class Infinite(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10, dtype=torch.float64)
        nn.init.constant_(self.weight, 1e300)


class Complex(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10, dtype=torch.complex64)


class Lazy(nn.LazyLinear):
    def __init__(self) -> None:
        super().__init__(10)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)
        self.requires_grad_(False)


class Hungry(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, 10)


class Unreadable(torch.nn.Module):
    def __init__(self) -> None:
        raise OSError(errno.ENOENT, "No such file or directory", "weights.bin")


@pytest.mark.parametrize("model", ["NaN", "Infinite", "Complex", "Lazy", "Frozen", "Hungry"])
def test_a_model_that_cannot_be_trained(model: str, refused: Callable[..., str]) -> None:
    refused("run", "c.toml", "--set", f"model.name={__name__}:{model}", "--allow-code", __name__)


def test_an_error_of_the_users_own_code_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = ("--set", f"model.name={__name__}:Unreadable", "--allow-code", __name__)
    with pytest.raises(SystemExit) as ended:
        main(["run", "c.toml", *own])
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'weights.bin'" in printed
    assert Path(__file__).name in printed
    assert "fedsim/" not in printed.replace(__file__, "")


GOOD = {"fc1.weight": torch.zeros(10, 64), "fc1.bias": torch.zeros(10)}


@pytest.mark.parametrize(
    "changes",
    [
        {"fc1.bias": torch.full((10,), torch.nan)},
        {"fc1.bias": torch.full((10,), 1e300, dtype=torch.float64)},
        {"fc1.bias": torch.zeros(10, dtype=torch.complex64)},
        {"fc1.bias": torch.zeros(10, dtype=torch.int64)},
        {"fc1.bias": torch.zeros(10, dtype=torch.bool)},
        {"fc1.bias": torch.zeros(11)},
        {"[/bold]": torch.zeros(1)},
    ],
    ids=str,
)
def test_weights_that_do_not_fit(
    changes: dict[str, Tensor], tmp_path: Path, refused: Callable[..., str]
) -> None:
    try:
        save_file({**GOOD, **changes}, tmp_path / "w.safetensors")
    except KeyError as dtype:
        pytest.skip(f"this safetensors cannot write {dtype}")
    refused("run", "c.toml", "--set", "model.weights=w.safetensors")


@pytest.mark.parametrize("size", [0, 7, 8, 20, 100, 300])
def test_weights_that_are_cut(size: int, tmp_path: Path, refused: Callable[..., str]) -> None:
    save_file(GOOD, tmp_path / "w.safetensors")
    whole = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(whole[:size])
    refused("run", "c.toml", "--set", "model.weights=w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 8 + whole[8:])
    refused("run", "c.toml", "--set", "model.weights=w.safetensors")


# -- other commands -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "--nonsense",
        "run",
        "run none.toml",
        "run .",
        "run c.toml d.toml",
        "run c.toml --nonsense",
        "run c.toml --seed x",
        "run c.toml --seed -1",
        "run c.toml --engine x",
        "run c.toml --set",
        "partition none.toml",
        "partition c.toml --out c.toml",
        "partition c.toml --out .",
        "partition c.toml --seed -1",
        "partition c.toml --out c.toml/x.png",
        "audit c.toml --out /proc/x/y.png",
        "partition c.toml --set partition.clients=99999",
        "sweep c.toml",
        "sweep c.toml --over seed",
        "sweep c.toml --over seed=",
        "sweep c.toml --over seed=1 --over seed=2",
        "sweep c.toml --over seed=-1",
        "sweep c.toml --over nonsense=1",
        "sweep c.toml --over seed=1,2 --plot client.lr",
        "sweep c.toml --over engine.name=ray",
        "sweep c.toml --over seed=1 --out c.toml",
        "sweep c.toml --over seed=1 --out /proc/x",
        "sweep c.toml --over data.name=nothing",
        "tune c.toml --clients 0",
        "tune c.toml --repeats x",
        "tune none.toml",
        "audit c.toml",
        "audit none.toml",
        "audit c.toml --out c.toml",
        "experiment nonsense",
        "experiment quadratic --out c.toml",
        "experiment quadratic --seeds 0",
        "privacy none.jsonl",
        "deploy",
        "deploy nonsense",
        "deploy init c.toml",
        "deploy init fed --nodes 0",
        "deploy up none",
        "deploy up c.toml",
        "report none",
        "compare none",
        "evaluate c.toml",
        "export c.toml --public",
    ],
)
def test_a_command_that_makes_no_sense(line: str, refused: Callable[..., str]) -> None:
    if line == "deploy":
        assert status("deploy") == 2
        return
    refused(*line.split())


@pytest.mark.parametrize(
    "line",
    ["run c.toml --out", "stats c.toml --out", "sweep c.toml --over seed=1 --out", "run", "report"],
)
def test_a_path_without_a_name_is_no_directory(line: str, refused: Callable[..., str]) -> None:
    assert "is empty; it must name a path" in refused(*line.split(), "")


def test_a_name_is_suggested_once_and_a_file_is_no_run(refused: Callable[..., str]) -> None:
    assert refused("rnu").count("Did you mean 'run'?") == 1
    assert "extra argument (more). Try `fedsim run --help`." in refused("run", "c.toml", "more")
    assert "c.toml is not a run's directory" in refused("report", "c.toml")


def test_a_sweep_leaves_the_users_tables_alone(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "sweep.csv").write_text("mine")
    told = refused("sweep", "c.toml", "--over", "seed=1", "--out", ".")
    assert "--out . holds c.toml, sweep.csv but no run's marker" in told


def test_warnings_of_libraries_end_no_command() -> None:
    """That of click, at typer's import, would be an error by Python's option -W error."""
    environment = {**os.environ, "PYTHONPATH": str(Path(fedsim.__file__).parents[1])}
    command = [sys.executable, "-W", "error", "-m", "fedsim", "--version"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"fedsim {fedsim.__version__}\n"


def test_a_bundle_that_cannot_be_written_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    noise = ("--set", "mechanism.name=clipping", "--set", "noise.multiplier=1.0")
    assert status("run", "c.toml", "-q", *noise, "--out", "private") == 0
    write_text = Path.write_text

    def full(path: Path, *arguments: Any, **settings: Any) -> int:
        write_text(path, *arguments, **settings)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    told = refused("export", "private", "--public", "--out", "new/bundle", expected=1)
    assert told == "fedsim: new/bundle: No space left on device.\n"
    assert not (tmp_path / "new").exists()
    bundle = ("--public", "--out", "c.toml/bundle")
    assert "c.toml/bundle" in refused("export", "private", *bundle, expected=1)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("run c.toml --device cpu", "Did you mean --set engine.device=VALUE?"),
        ("run c.toml --lr 1", "Did you mean --set client.lr=VALUE or --set server.lr=VALUE?"),
        ("sweep c.toml --rounds 3", "Did you mean --set rounds=VALUE?"),
        ("run c.toml --run-config rounds=3", "Did you mean '--set KEY=VALUE'?"),
        ("run c.toml --log-level warn", "did you mean 'warning'? It must be debug,"),
        ("run c.toml --set log.to=tensorbord", "did you mean 'tensorboard'? It must be of"),
        ("privacy -z 1 --rounds 3 --rate 0.1 --size 3", "--rate and --size are 0.1 and 3; give"),
        ("privacy -z 1 --rounds 3 --invocations 0", "--invocations is 0; it must be at least 1."),
        ("privacy c.toml --noises --picture c.jpg", "--picture is c.jpg; it must be a file that"),
        ("privacy c.toml --noises --picture .", "--picture is .; it must be a file that"),
        ("run c.toml --set client.lrr=1", "did you mean 'lr'? [client] takes"),
        ("config list modle", "did you mean 'model'? It must be data,"),
        ("privacy --sampling poison --rounds 3 -z 1", "did you mean 'poisson'? It must be"),
        ("experiment adaclp-mnist", "did you mean 'adaclip-mnist'? It must be one of"),
        ("privacy nothere", "there is no file or folder nothere; SOURCE must be a config,"),
        (
            "run c.toml --set stop.metric=accuracy",
            "stop.metric = 'accuracy'; it must be validation-loss, validation-accuracy, which "
            "data.validation = 0.1 would give.",
        ),
    ],
)
def test_a_near_miss_says_what_was_meant(
    line: str, sentence: str, refused: Callable[..., str]
) -> None:
    assert sentence in refused(*line.split())


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capsys.readouterr().out == f"fedsim {fedsim.__version__}\n"
    assert {"RunConfig", "run"} <= set(dir(fedsim))


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fedsim", "run", "none.toml"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fedsim", run_name="__main__")
    assert ended.value.code == 2


COMMANDS = (
    ("run", "c.toml"),
    ("sweep", "c.toml", "--over", "seed=1,2"),
    ("privacy", "c.toml"),
    ("config", "show", "c.toml"),
)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["client.epochs=2", "client.steps=2"], "client.epochs = 2 and client.steps = 2; set one"),
        (["cohort.name=fixed", "cohort.size=21"], "cohort.size is 21; it must be from 1 to 20"),
        (["noise.multiplier=1.0"], "noise.multiplier is 1.0; it must be unset with NoPrivacy"),
        (["mechanism.name=krum", "noise.target-epsilon=1.0"], "noise.target-epsilon is 1.0; it mu"),
        (["noise.max-epsilon=2.0"], "noise.max-epsilon is 2.0; it must be unset"),
        (["client.mechanism.name=median", "client.noise.multiplier=1.0"], "client.mechanism is gi"),
        ([*PRIVATE, "evaluate.clients-every=1"], "evaluate.clients-every = 1 releases metrics"),
        (
            ["evaluate.clients-every=1", "evaluate.private=true", "evaluate.multiplier=1.0"],
            "evaluate.private is set",
        ),
        ([*PRIVATE, "noise.placement=client", "secagg.threshold=1"], "secagg.threshold = 1 with"),
    ],
)
def test_what_an_object_refuses_each_command_refuses_in_its_sentence(
    settings: list[str], sentence: str, refused: Callable[..., str]
) -> None:
    overrides = [text for setting in settings for text in ("--set", setting)]
    told = {refused(*command, *overrides) for command in COMMANDS}
    assert len(told) == 1
    assert told.pop().startswith(f"fedsim: {sentence}")
