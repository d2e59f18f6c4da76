"""`python -m benchmarks.language_models`: private adapters beside peft and a plain loop.

The models and texts of examples/huggingface: GPT-2's and Llama's kind, trained on docstrings and
adapted to the code of 150 modules, of which each is a client (user-level sampling: a Poisson sample
of owners, whose whole update is clipped). The loop adapts the same base by peft, with the same law,
noise multiplier, local steps and rates, and draws of its own. Perplexity is of sequences of every
fifth text; CPU time is of the rounds after the first, of both in turns and in one process.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fedsim
from fedsim import RunConfig
from fedsim.datasets import Dataset

EXAMPLE = Path(__file__).parents[1] / "examples" / "huggingface"
CLIENTS, RATE, ROUNDS, STEPS, BATCH, TESTED = 150, 0.2, 5, 3, 8, 500
RANK, CLIP, LR, DELTA = 2, 0.5, 0.5, 1e-4
TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="where the example's data are, if made before")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        data = options.data
        if data is None:
            data = Path(directory)
            make = [sys.executable, str(EXAMPLE / "make_data.py"), "--out", directory]
            subprocess.run(make, check=True)
        show(data.absolute(), range(1, options.seeds + 1), Path(directory))


def show(data: Path, seeds: range, out: Path) -> None:
    table = Table(title="Perplexity of test texts (mean and range over seeds), and CPU time")
    for column in ("model", "epsilon", "before", "fedsim", "peft and a loop", "CPU time, times"):
        table.add_column(column)
    for kind in TARGETS:
        texts = fedsim.datasets.load(str(data / "code.csv"), **settings_of_texts(data, kind))
        texts = texts.ranged(test=f":{TESTED}")
        before = perplexity(loaded(data, kind), texts)
        for epsilon in (2.0, 8.0):
            ours, theirs, ratios = [], [], []
            for seed in seeds:
                model, multiplier, seconds = by_fedsim(data, kind, epsilon, seed, out)
                ours.append(perplexity(model, texts))
                measured, reference = by_peft(loaded(data, kind), kind, texts, multiplier, seed)
                theirs.append(measured)
                ratios.append(seconds / reference)
            spreads = [
                f"{statistics.mean(v):.2f} ({min(v):.2f}-{max(v):.2f})" for v in (ours, theirs)
            ]
            times = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            table.add_row(kind, f"{epsilon:.0f}", f"{before:.2f}", *spreads, times)
            print(kind, epsilon, f"z {multiplier:.3f}", ours, theirs, ratios, flush=True)
    Console(width=120).print(table)


def settings_of_texts(data: Path, kind: str) -> dict[str, Any]:
    return {
        "columns": "x=body,owner=module",
        "types": "body=tokens:32",
        "tokenizer": str(data / kind),
    }


def loaded(data: Path, kind: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(data / kind)


class Clock(fedsim.Callback):
    """CPU time at the end of each round."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_round(self, status: Any) -> None:
        self.times.append(time.process_time())


def by_fedsim(
    data: Path, kind: str, epsilon: float, seed: int, out: Path
) -> tuple[Any, float, float]:
    """Adapted model, noise multiplier, and seconds of the rounds after the first."""
    targets = ",".join(f"*.{name}" for name in TARGETS[kind])
    texts = settings_of_texts(data, kind)
    config = RunConfig.from_overrides([
        f"seed={seed}", f"rounds={ROUNDS}", f"data.name={data / 'code.csv'}",
        *(f"data.{key}={value}" for key, value in texts.items()),
        "partition.name=by-owner", f"partition.clients={CLIENTS}", f"model.name=hf:{data / kind}",
        "adapter.name=lora", f"adapter.rank={RANK}", f"adapter.targets={targets}",
        f"client.lr={LR}", f"client.batch-size={BATCH}",
        f"client.steps={STEPS}", "cohort.name=poisson", f"cohort.rate={RATE}",
        "mechanism.name=clipping", f"mechanism.clip-norm={CLIP}", f"noise.target-epsilon={epsilon}",
        f"noise.delta={DELTA}", "evaluate.every=0", "evaluate.unprotected=true",
        "checkpoint.every=0", "engine.device=cpu", "engine.workers=1",
    ])  # fmt: skip
    clock, directory = Clock(), out / f"{kind}-{epsilon}-{seed}"
    fedsim.run(config, out=directory, callbacks=[clock])
    saved = fedsim.load(directory)
    multiplier = float(saved.config.noise.multiplier or 0)
    seconds = clock.times[-1] - clock.times[-ROUNDS]
    return saved.model.model, multiplier, seconds


def by_peft(
    base: Any, kind: str, texts: Dataset, multiplier: float, seed: int
) -> tuple[float, float]:
    """The same by peft, `torch.optim` and a loop over clients."""
    import peft

    torch.manual_seed(seed)
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=8, target_modules=TARGETS[kind], fan_in_fan_out=kind == "gpt2"
    )
    model = peft.get_peft_model(base, settings).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = [p.detach().clone() for p in trained]
    owners = texts.train.columns["owner"]
    clients = [np.flatnonzero(owners == name) for name in dict.fromkeys(owners.tolist())]
    draws, times = np.random.default_rng(seed), []
    for _ in range(ROUNDS):
        total = [torch.zeros_like(w) for w in weights]
        for k in np.flatnonzero(draws.random(CLIENTS) < RATE):
            for parameter, weight in zip(trained, weights, strict=True):
                parameter.data.copy_(weight)
            optimizer = torch.optim.SGD(trained, lr=LR)
            for batch in batches(clients[k], draws):
                optimizer.zero_grad()
                torch.autograd.backward(losses(model, texts, batch).mean())
                optimizer.step()
            update = [p.detach() - w for p, w in zip(trained, weights, strict=True)]
            norm = math.sqrt(sum(float(u.square().sum()) for u in update))
            for sum_of, part in zip(total, update, strict=True):
                sum_of += part * min(1.0, CLIP / max(norm, 1e-12))
        for weight, sum_of in zip(weights, total, strict=True):
            noise = torch.randn_like(weight) * (multiplier * CLIP)
            weight += (sum_of + noise) / (RATE * CLIENTS)
        times.append(time.process_time())
    for parameter, weight in zip(trained, weights, strict=True):
        parameter.data.copy_(weight)
    return perplexity(model, texts), times[-1] - times[0]


def batches(rows: Any, draws: np.random.Generator) -> Iterator[Tensor]:
    """As many batches as local steps, without an example twice before all have been in one."""
    order = np.concatenate([draws.permutation(rows) for _ in range(STEPS * BATCH // len(rows) + 1)])
    size = min(BATCH, len(rows))
    for step in range(STEPS):
        yield torch.from_numpy(order[step * size : (step + 1) * size])


def losses(model: Any, texts: Dataset, rows: Tensor, test: bool = False) -> Tensor:
    """Mean loss of each example's tokens that count, ``[B]``."""
    split = texts.test if test else texts.train
    logits = model(split.x[rows].long(), return_dict=True).logits
    each = F.cross_entropy(logits.transpose(1, 2), split.y[rows].long(), reduction="none")
    assert split.mask is not None
    mask = split.mask[rows]
    return (each * mask).sum(1) / mask.sum(1)


@torch.no_grad()
def perplexity(model: Any, texts: Dataset) -> float:
    """Over all tokens of the test texts."""
    copied = copy.deepcopy(model).eval()
    total = count = 0.0
    assert texts.test.mask is not None
    for rows in torch.split(torch.arange(len(texts.test.x)), 64):
        counts = texts.test.mask[rows].sum(1)
        total += float((losses(copied, texts, rows, test=True) * counts).sum())
        count += float(counts.sum())
    return math.exp(total / count)


if __name__ == "__main__":
    main()
