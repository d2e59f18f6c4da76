"""What every package trains in `benchmarks.peers`: tasks, their networks and examples, clocks.

It imports numpy and torch only, since the packages' environments import it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quickstarts import networks

EXAMPLES = Path(__file__).parents[2] / "examples"
TEST = 2000
"""Test examples of synthetic data."""


@dataclass(frozen=True)
class Task:
    """A federation: each client makes one pass over its examples, and means are uniform.

    Attributes
    ----------
    name, about : str
    clients, examples, cohort, rounds, batch : int
        Clients, examples of each, clients a round, rounds, batch size.
    lr : float
        Clients' rate; the server adds the mean update.
    shape : tuple of int
        An example's, as the network takes it; whole numbers below ``vocabulary`` if that is set.
    classes, vocabulary : int
    source : str
        Name of the real data's .npz file; empty if there are synthetic examples only.
    clip_norm, multiplier : float
        Bound on the updates' norms, and the noise's standard deviation on their sum over that
        bound; 0 without privacy.
    """

    name: str
    about: str
    clients: int
    examples: int
    cohort: int
    rounds: int
    batch: int
    lr: float
    shape: tuple[int, ...]
    classes: int
    vocabulary: int = 0
    source: str = ""
    clip_norm: float = 0.0
    multiplier: float = 0.0

    def scaled(self, share: float) -> Task:
        """The same task with a share of its clients, and of its cohort."""
        clients = max(4, round(share * self.clients))
        cohort = min(max(2, round(share * self.cohort)), clients)
        return replace(self, clients=clients, cohort=cohort)

    def network(self) -> nn.Module:
        """The network with its initial weights, the same in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return NETWORKS[self.name.removesuffix("-dp")](self)


CIFAR = Task(
    name="cifar10",
    about="pfl-research's CIFAR-10 benchmark, IID",
    clients=1000,
    examples=50,
    cohort=50,
    rounds=1500,
    batch=10,
    lr=0.1,
    shape=(3, 32, 32),
    classes=10,
    source="cifar10",
)
COHORT_OF_NOISE, MULTIPLIER = 1000, 0.6161
"""The benchmark's noise is that of a cohort of 1,000 users of 10^6: epsilon 2 at delta 10^-6."""
TASKS = {
    task.name: task
    for task in (
        CIFAR,
        replace(
            CIFAR,
            name="cifar10-dp",
            about="pfl-research's CIFAR-10 benchmark, IID, with central privacy",
            clip_norm=0.4,
            multiplier=MULTIPLIER * CIFAR.cohort / COHORT_OF_NOISE,
        ),
        Task(
            name="mnist",
            about="PFLlib's quick start: its CNN for MNIST and its settings, examples split IID",
            clients=20,
            examples=2624,
            cohort=20,
            rounds=100,
            batch=10,
            lr=0.005,
            shape=(1, 28, 28),
            classes=10,
            source="mnist",
        ),
        Task(
            name="femnist",
            about="FEMNIST's CNN (Reddi et al. 2021) on synthetic images of its shape",
            clients=350,
            examples=200,
            cohort=10,
            rounds=100,
            batch=20,
            lr=0.0316,
            shape=(1, 28, 28),
            classes=62,
        ),
        Task(
            name="lora",
            about="a transformer of 10 M parameters that classifies synthetic sequences of 32 "
            "words; LoRA of rank 4 on queries and values, and the head, are trained",
            clients=200,
            examples=50,
            cohort=20,
            rounds=100,
            batch=10,
            lr=0.1,
            shape=(32,),
            classes=10,
            vocabulary=1000,
        ),
    )
}


def published(file: str, name: str) -> Callable[..., nn.Module]:
    """A network of the examples, which are no package."""
    spec = importlib.util.spec_from_file_location("nets", EXAMPLES / file / "nets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., nn.Module] = getattr(module, name)
    return found


class LowRank(nn.Module):
    """A frozen linear map, and a trained one of a low rank beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes ``[..., width]``."""
        out: Tensor = self.frozen(x) + self.up(self.down(x))
        return out


class Block(nn.Module):
    """Attention and a dense layer, each after a norm; only the low-rank maps are trained."""

    def __init__(self, width: int, heads: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.value = LowRank(width, rank), LowRank(width, rank)
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        dense = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.dense = nn.Sequential(*dense)
        for module in (self.key, self.out, self.first, self.second, self.dense):
            module.requires_grad_(False)

    def forward(self, h: Tensor) -> Tensor:
        """Shapes ``[B, L, width]``."""
        x = self.first(h)
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = h + self.dense(self.second(h))
        return out


class Transformer(nn.Module):
    """Reads all words at once; the mean of its outputs goes to the head."""

    def __init__(
        self, vocabulary: int, length: int, classes: int, width: int = 320, layers: int = 8
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width).requires_grad_(False)
        self.places = nn.Parameter(0.02 * torch.randn(length, width), requires_grad=False)
        self.blocks = nn.Sequential(*(Block(width, 8, 4) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Words ``[B, L]`` to logits ``[B, classes]``."""
        h: Tensor = self.blocks(self.words(x) + self.places)
        logits: Tensor = self.head(h.mean(1))
        return logits


NETWORKS: Mapping[str, Callable[[Task], nn.Module]] = {
    "cifar10": lambda task: published("pfl", "cnn")(task.shape, task.classes),
    "mnist": lambda task: networks.mnist(),
    "femnist": lambda task: published("benchmarks", "femnist")(task.classes),
    "lora": lambda task: Transformer(task.vocabulary, task.shape[0], task.classes),
}


def write(task: Task, folder: Path, real: Path | None) -> Path:
    """Write a task's examples in fedsim's form, once.

    Parameters
    ----------
    task : Task
    folder : Path
    real : Path or None
        A folder with the real data's .npz files, of uint8 arrays x_train, y_train, x_test, y_test.

    Returns
    -------
    Path
        An .npz file: ``owner_train`` has each example's client. Images are uint8, channels last.
    """
    needed = task.clients * task.examples
    kind = "real" if real and task.source else "synthetic"
    path = folder / f"{task.name.removesuffix('-dp')}-{kind}-{needed}.npz"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    if real and task.source:
        if not (real / f"{task.source}.npz").is_file():
            raise SystemExit(f"{real} has no {task.source}.npz; without --data it is synthetic.")
        with np.load(real / f"{task.source}.npz") as file:
            arrays = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
        if needed > len(arrays["y_train"]):
            raise SystemExit(f"{task.name} needs {needed:,} examples; the file has fewer.")
        chosen = rng.permutation(len(arrays["y_train"]))[:needed]
        arrays |= {name: arrays[name][chosen] for name in ("x_train", "y_train")}
    else:
        arrays = synthetic(task, needed, rng)
    arrays["owner_train"] = np.repeat(np.arange(task.clients), task.examples)
    folder.mkdir(parents=True, exist_ok=True)
    words: dict[str, Any] = {"vocabulary": task.vocabulary} if task.vocabulary else {}
    unfinished = path.with_suffix(".part.npz")
    np.savez(unfinished, **arrays, **words, classes=task.classes)
    unfinished.replace(path)
    return path


def synthetic(task: Task, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """Noise, a third of which is replaced by what its class has at the same place."""
    channels, *sides = task.shape
    shape = (channels,) if task.vocabulary else (*sides, channels) if channels > 1 else (*sides,)
    top = task.vocabulary or 256
    kind = np.int16 if task.vocabulary else np.uint8
    own = rng.integers(top, size=(task.classes, *shape), dtype=kind)
    arrays: dict[str, Any] = {}
    for split, size in (("train", count), ("test", TEST)):
        y = rng.integers(task.classes, size=size)
        x = rng.integers(top, size=(size, *shape), dtype=kind)
        for start in range(0, size, 5000):
            part = slice(start, start + 5000)
            shown = rng.random(x[part].shape, dtype=np.float32) < 1 / 3
            np.copyto(x[part], own[y[part]], where=shown)
        arrays |= {f"x_{split}": x, f"y_{split}": y}
    return arrays


@dataclass(frozen=True)
class Examples:
    """A task's examples on the device.

    Attributes
    ----------
    clients : list of (Tensor, Tensor)
        Inputs ``[n, *shape]`` and classes ``[n]`` of each client.
    test : (Tensor, Tensor)
    """

    clients: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """What a package is asked to run, by `benchmarks.peers`.

    Attributes
    ----------
    task, share
        Of `TASKS`, and the share of its clients.
    rounds : int
    seconds : float
        The run ends with the round that ends after so many seconds of rounds.
    device : str
        "cpu" or "cuda".
    workers : int
        Processes or threads on a CPU, for packages that have several.
    data, out : str
        The file of examples, and where the result goes.
    """

    task: str
    share: float
    rounds: int
    seconds: float
    device: str
    workers: int
    data: str
    out: str

    @classmethod
    def asked(cls) -> Job:
        """The job on the command line, as JSON."""
        return cls(**json.loads(sys.argv[1]))

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def described(self) -> Task:
        """The task at its size."""
        return TASKS[self.task].scaled(self.share)


@cache
def examples(job: Job) -> Examples:
    """Read the job's examples; images are divided by 255, channels first."""
    task = job.described
    with np.load(job.data) as file:
        found = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}

    def inputs(array: np.ndarray[Any, Any]) -> Tensor:
        x = torch.from_numpy(array)
        if task.vocabulary:
            return x.long().to(job.device)
        images = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()
        return images.to(job.device).float() / 255

    x, y = inputs(found["x_train"]), torch.from_numpy(found["y_train"]).long().to(job.device)
    clients = list(zip(torch.split(x, task.examples), torch.split(y, task.examples), strict=True))
    labels = torch.from_numpy(found["y_test"]).long().to(job.device)
    return Examples(clients, (inputs(found["x_test"]), labels))


def train(model: nn.Module, job: Job, client: int) -> None:
    """One pass of SGD over a client's examples, in place, for packages that leave it to users."""
    task, (x, y) = job.described, examples(job).clients[client]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=task.lr)
    model.train()
    for batch in torch.split(torch.randperm(len(y), device=y.device), task.batch):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class Rounds:
    """Clock of a run's rounds; the first begins when it is made."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def end(self) -> bool:
        """End a round; whether the time is up."""
        if self.job.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        return math.fsum(self.seconds) >= self.job.seconds

    @torch.no_grad()
    def report(self, model: nn.Module, version: str) -> None:
        """Write the rounds' seconds, and the final model's accuracy on the test examples."""
        x, y = examples(self.job).test
        model.to(self.job.device).eval()
        pairs = zip(torch.split(x, 500), torch.split(y, 500), strict=True)
        correct = sum(int((model(part).argmax(1) == of).sum()) for part, of in pairs)
        result = {
            "seconds": self.seconds,
            "accuracy": correct / len(y),
            "versions": f"{version}, torch {torch.__version__}, Python {sys.version.split()[0]}",
            "gpu": torch.cuda.get_device_name() if self.job.device == "cuda" else "",
        }
        Path(self.job.out).write_text(json.dumps(result))
