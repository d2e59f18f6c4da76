"""Names that other libraries use for keys and values, and fedsim's names for them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

_POISSON, _FIXED = "cohort.rate (with cohort.name = 'poisson')", "cohort.size (with 'fixed')"
_WIDTHS = "model.widths (with model.name = 'mlp')"
_COLUMNS = "data.columns (as in data.columns = 'y=income,owner=hospital')"
_ALPHA = "partition.alpha (with partition.name = 'dirichlet')"
_CLIP = "mechanism.clip-norm", "client.mechanism.clip-norm"
_RATE = "client.lr", "server.lr"
_LORA = "adapter.{} (with adapter.name = 'lora')"
_TARGET = "noise.target-epsilon", "client.noise.target-epsilon"
_NOISE = "noise.multiplier", "client.noise.multiplier"

KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "learning-rate", "eta", "step-size", "server-lr", "client-lr"), _RATE),
    "momentum": ("client.momentum", "server.momentum"),
    **dict.fromkeys(
        ("batch-size", "batch", "batchsize", "local-batch-size"), ("client.batch-size",)
    ),
    **dict.fromkeys(("epochs", "local-epochs", "num-epochs", "e"), ("client.epochs",)),
    **dict.fromkeys(("steps", "local-steps", "num-steps"), ("client.steps",)),
    **dict.fromkeys(("mu", "proximal-mu", "fedprox"), ("client.proximal",)),
    **dict.fromkeys(
        ("algorithm", "optim", "optimizer", "type"), ("client.name", "server.optimizer")
    ),
    "name": ("task.loss", "server.optimizer"),
    **dict.fromkeys(("num-rounds", "server-rounds", "num-server-rounds"), ("rounds",)),
    **dict.fromkeys(("random-seed", "random-state"), ("seed",)),
    **dict.fromkeys(("clients", "num-clients", "n-clients", "population"), ("partition.clients",)),
    **dict.fromkeys(("alpha", "dirichlet-alpha"), (_ALPHA,)),
    "dataset": ("data.name",),
    **dict.fromkeys(("target", "targets", "label", "labels", "owner", "features"), (_COLUMNS,)),
    **dict.fromkeys(("metrics", "metric", "evaluation"), ("task.metrics",)),
    **dict.fromkeys(("loss", "criterion"), ("task.loss",)),
    **dict.fromkeys(("clip-norm", "clip", "clipping-norm", "l2-norm-clip", "max-grad-norm"), _CLIP),
    **dict.fromkeys(("target-epsilon", "epsilon", "eps"), _TARGET),
    "delta": ("noise.delta", "client.noise.delta"),
    **dict.fromkeys(("max-epsilon", "budget"), ("noise.max-epsilon", "client.noise.max-epsilon")),
    **dict.fromkeys(("multiplier", "noise-multiplier", "sigma", "z"), _NOISE),
    **dict.fromkeys(("fraction", "fraction-fit", "fraction-train"), (_POISSON,)),
    **dict.fromkeys(("rate", "sample-rate", "sampling-rate"), (_POISSON,)),
    **dict.fromkeys(("size", "clients-per-round", "cohort-size", "num-sampled"), (_FIXED,)),
    **dict.fromkeys(
        ("widths", "hidden", "hidden-sizes", "hidden-units", "layers", "width"), (_WIDTHS,)
    ),
    **dict.fromkeys(("workers", "num-workers", "n-jobs", "jobs"), ("engine.workers",)),
    **dict.fromkeys(("device", "gpu", "gpus", "cuda"), ("engine.device",)),
    **dict.fromkeys(("interval", "eval-every"), ("evaluate.every",)),
    **dict.fromkeys(("r", "lora-r"), (_LORA.format("rank"),)),
    "lora-alpha": (_LORA.format("alpha"),),
    "target-modules": (_LORA.format("targets"),),
    **dict.fromkeys(("address", "ray-address"), ("RAY_ADDRESS (an environment variable)",)),
}
"""fedsim's keys by their names elsewhere; where several tables have one, the likeliest first.

An address is no key: what connects this machine to another is never read from a config."""

_PROXIMAL = "client.proximal above 0 adds FedProx's term to any client algorithm"
_NETS = "such networks come from a file of your own, as 'nets:{name}' for {name} in nets.py"

NAMES: Mapping[str, Mapping[str, str]] = {
    "data": {
        **dict.fromkeys(("fmnist", "fashion"), "fashion-mnist"),
        "cifar": "cifar10",
        **dict.fromkeys(("emnist", "fed-emnist"), "femnist"),
        "fed-cifar100": "cifar100",
        **dict.fromkeys(("heart-disease", "fed-heart-disease"), "heart"),
        **dict.fromkeys(("tcga", "fed-tcga-brca"), "tcga-brca"),
    },
    "partition": {
        "lda": "dirichlet",
        "natural": "by-owner",
        "non-iid": "dirichlet",
        "noniid": "dirichlet",
    },
    "model": {
        **dict.fromkeys(("linear", "logistic", "logistic-regression"), "softmax"),
        **dict.fromkeys(("dense", "dnn", "fully-connected"), "mlp"),
        **{name: _NETS.format(name=name) for name in ("cnn", "convnet")},
    },
    "loss": {
        **dict.fromkeys(("mse", "l2"), "squared-error"),
        **dict.fromkeys(("mae", "l1"), "absolute-error"),
        **dict.fromkeys(("ce", "nll", "crossentropy"), "cross-entropy"),
        **dict.fromkeys(("bce", "binary-crossentropy"), "binary-cross-entropy"),
        "pinball": "quantile-error",
    },
    "metric": {
        **dict.fromkeys(("acc", "top-1"), "accuracy"),
        **dict.fromkeys(("auroc", "roc-auc"), "auc"),
        **dict.fromkeys(("ap", "auprc"), "average-precision"),
        "ece": "calibration-error",
        "f1-score": "f1",
        "mse": "rmse",
        "ppl": "perplexity",
    },
    "client": {"fedavg": "sgd", "fedprox": _PROXIMAL, "fedadam": "adam"},
    "cohort": {"uniform": "fixed", "random": "fixed", "bernoulli": "poisson", "all": "full"},
    "mechanism": {
        "fedavg": "none",
        **dict.fromkeys(("gaussian", "clip", "dp-fedavg", "dp-sgd", "flat"), "clipping"),
        "normalisation": "normalization",
    },
    "server": {
        "fedavg": "'sgd' at server.lr = 1 adds the mean update, which is FedAvg",
        "fedprox": _PROXIMAL,
        "fedsgd": "sgd",
    },
}
"""fedsim's names of each kind by their names elsewhere, or what to do instead."""


def closest_key(table: str, key: str, keys: Sequence[str]) -> str:
    """A "did you mean" question for an unknown key of a table; empty if no key is close."""
    plain = key.lower().replace("_", "-")
    synonyms = KEYS.get(plain, ())
    in_table = [name.rpartition(".")[2] for name in synonyms if name.rpartition(".")[0] == table]
    close = [name for name in (plain, *in_table) if name in keys]
    if not close and not synonyms:
        close = difflib.get_close_matches(plain, keys, n=1)
    if close:
        return f" did you mean '{close[0]}'?"
    return f" did you mean {' or '.join(synonyms)}?" if synonyms else ""


def keys_like(word: str, known: Sequence[str]) -> list[str]:
    """The dotted keys that a word without a table may mean, likeliest first; none if unknown."""
    plain = word.lower().replace("_", "-")
    meant = [key.partition(" ")[0] for key in KEYS.get(plain, ())]
    same = [key for key in known if plain in (key, key.rpartition(".")[2])]
    return [key for key in dict.fromkeys([*meant, *same]) if key in known][:3]


def closest_argument(name: str, names: Sequence[str]) -> str:
    """A "did you mean" question for an unknown argument of a function; empty if none is close."""
    by_key = {known.replace("_", "-"): known for known in names}
    plain = name.lower().replace("_", "-")
    keys = [key.partition(" ")[0].rpartition(".")[2] for key in KEYS.get(plain, ())]
    close = [key for key in (plain, *keys) if key in by_key]
    close = close or difflib.get_close_matches(plain, by_key, n=1)
    return f" did you mean '{by_key[close[0]]}'?" if close else ""


def closest(kind: str, name: str, known_names: Collection[str]) -> str:
    """Start of the sentence "It must be ...", after a suggestion for an unknown name of a kind."""
    plain = name.lower().replace("_", "-").strip()
    synonym = NAMES.get(kind, {}).get(plain, "")
    if kind == "model" and re.fullmatch(r"(resnet|vgg|densenet|mobilenet|vit)[-a-z]*\d+.*", plain):
        synonym = _NETS.format(name=plain.replace("-", "_"))
    if synonym and synonym not in known_names:
        return f" {synonym}. It"
    same = [word for word in known_names if word.replace("-", "") == plain.replace("-", "")]
    close = [synonym] if synonym else same or difflib.get_close_matches(plain, known_names, n=1)
    return f" did you mean '{close[0]}'? It" if close else " it"
