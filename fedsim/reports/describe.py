"""A run in a reader's words: what its config says, names of its metrics, its numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from fedsim.config import Scalar
from fedsim.privacy import Entry

Flat = Mapping[str, Scalar]


def description(config: Flat, released: Entry | None = None) -> str:
    """One paragraph: the data, the model, a round, what protects it.

    A key that this version does not have is left out, not guessed.

    Parameters
    ----------
    config : mapping
    released : Entry, optional
        The last line of its ledger, whose law says how a round's clients were drawn.
    """
    sentences = [_trained(config), _round(config, released), _work(config), _bounded(config)]
    sentences.append(_examples(config))
    return " ".join(sentence for sentence in sentences if sentence)


def ending_sentence(summary: Mapping[str, object], rounds: int, planned: object) -> str:
    """How the run ended, in a sentence."""
    outcome = summary.get("ended")
    if outcome == "finished":
        went_through = "its only round" if rounds == 1 else f"all its {_count(rounds, 'round')}"
        return f"It went through {went_through}."
    if not summary:
        return (
            f"It has not ended in good order, and reached round {rounds} of {planned}: this is "
            "what it had left by then."
        )
    why = str(summary.get("why") or "It ended early.")
    return f"It reached round {rounds} of {planned}. {why}"


def _trained(config: Flat) -> str:
    model, data = config.get("model.name"), config.get("data.name")
    clients, rounds = config.get("partition.clients"), config.get("rounds")
    partition = config.get("partition.name")
    spread = f", {_SPREADS.get(str(partition), f'dealt out by {partition}')}" if partition else ""
    named = _MODELS.get(str(model), f"The model {model}")
    return (
        f"{named} was to be trained on {data}, held by {_count(clients, 'client')}{spread}, for "
        f"{_count(rounds, 'round')}."
    )


_SPREADS = {"iid": "dealt out at random", "by-owner": "each with the examples that it owns"}
_MODELS = {"softmax": "Softmax regression", "mlp": "A multilayer perceptron"}


def _round(config: Flat, released: Entry | None) -> str:
    clients, name = config.get("partition.clients"), config.get("cohort.name")
    if released is not None and isinstance(clients, int):
        return released.event.law.round_sentence(clients)
    return f"Who takes part in a round is drawn by {name}." if name else ""


def _work(config: Flat) -> str:
    steps, epochs = config.get("client.steps"), config.get("client.epochs")
    batch, rate = config.get("client.batch-size"), config.get("client.lr")
    work = _count(steps, "step") if steps else _count(epochs, "pass", "passes")
    batches = f"batches of {batch}" if batch else "all its examples at once"
    name = _ALGORITHMS.get(str(config.get("client.name")), str(config.get("client.name")))
    at_rate = f" at rate {rate:g}" if isinstance(rate, int | float) else ""
    return f"A client works with {name}{at_rate}: {work} over {batches}."


_ALGORITHMS = {"sgd": "SGD", "adam": "Adam", "rmsprop": "RMSProp"}


def _bounded(config: Flat) -> str:
    mechanism = config.get("mechanism.name")
    if mechanism in (None, "none"):
        return "Updates are neither bounded nor noised by the server." if mechanism else ""
    noise = _noise(config, "noise")
    norm = _norm(config, "mechanism")
    where = {
        "server": "the server adds",
        "client": "clients add, in shares,",
    }.get(str(config.get("noise.placement")), "there is")
    return f"Each update is bounded by {mechanism}{norm}; to their sum {where} {noise}."


def _examples(config: Flat) -> str:
    mechanism = config.get("client.mechanism.name")
    if mechanism in (None, "none"):
        return ""
    return (
        f"Each client protects its examples: their gradients are bounded by {mechanism}"
        f"{_norm(config, 'client.mechanism')}, and to the sum of each batch it adds "
        f"{_noise(config, 'client.noise')}."
    )


def _norm(config: Flat, table: str) -> str:
    names = {"quantile-clipping": "initial-clip-norm", "coordinate-clipping": "clip-value"}
    key = names.get(str(config.get(f"{table}.name")), "clip-norm")
    value = config.get(f"{table}.{key}")
    return f" ({key.replace('-', ' ')} {value:g})" if isinstance(value, int | float) else ""


def _noise(config: Flat, table: str) -> str:
    multiplier = config.get(f"{table}.multiplier")
    if multiplier == 0:
        return "no noise"
    if isinstance(multiplier, int | float):
        return f"Gaussian noise of {multiplier:.4g} times the bound"
    return "Gaussian noise"


def _count(value: object, one: str, many: str = "") -> str:
    if not isinstance(value, int | float):
        return f"{value} {many or one + 's'}"
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def brief(value: float | None, percent: bool = False) -> str:
    """Four digits, or a share of a hundred; a dash where there is no number.

    Examples
    --------
    >>> brief(0.92504, percent=True), brief(1234567), brief(0.00001234), brief(None)
    ('92.50 %', '1,234,567', '1.234e-05', '–')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    if percent:
        return f"{100 * value:.2f} %"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """In the two largest units.

    Examples
    --------
    >>> duration(0.04), duration(61), duration(7325)
    ('0.04 s', '1 min 1 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def size(count: float) -> str:
    """Bytes in the unit that leaves three digits.

    Examples
    --------
    >>> size(2960), size(3.2e9), size(math.nan)
    ('2.96 kB', '3.2 GB', '–')
    """
    if not math.isfinite(count):
        return brief(count)
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {units[power]}"


PREFIXES = {
    "test": "test examples",
    "validation": "validation examples",
    "clients": "clients' examples",
    "train": "while training",
}
"""Beginnings of a metric's columns, and whose examples it is then about."""


OPERATORS = {
    *("asked", "usable", "failed", "ignored-nodes", "clients-per-second", "seconds"),
    *("bytes-down", "bytes-up", "virtual-seconds"),
}
"""Columns that only the operator knows, and those that begin with ``failed-``."""


QUANTILES = ("min", "p10", "median", "p90", "max")
"""Ends of the columns that say how a metric spreads over clients."""


EXAMPLE_COUNTS = {"clients-num-examples", "train-num-examples", "train-fresh-state"}


def learning_columns(columns: Iterable[str]) -> dict[str, dict[str, str]]:
    """Columns by metric and by whose examples it is about, in their order.

    Examples
    --------
    >>> learning_columns(["round", "test-loss", "train-loss", "clients-per-second"])
    {'loss': {'test': 'test-loss', 'train': 'train-loss'}}
    """
    metrics: dict[str, dict[str, str]] = {}
    columns = list(columns)
    spreads = {f"{column}-{end}" for column in columns for end in QUANTILES}
    for column in columns:
        prefix, _, name = column.partition("-")
        known = column in OPERATORS | EXAMPLE_COUNTS or (prefix == "clients" and column in spreads)
        if prefix in PREFIXES and name and not known:
            metrics.setdefault(name, {})[prefix] = column
    return metrics


_ABBREVIATION = re.compile(r"\b(auc|f1|mae|mse|r2|rmse)\b")


def display_name(column: str, *, title: bool = False) -> str:
    """A column's or metric's name as it is said; a ``title`` begins with a capital.

    Examples
    --------
    >>> display_name("test-auc"), display_name("average-precision", title=True)
    ('test AUC', 'Average precision')
    """
    text = _ABBREVIATION.sub(lambda match: match[0].upper(), column.replace("-", " "))
    return text[:1].upper() + text[1:] if title else text


def headline_columns(columns: Iterable[str]) -> dict[str, str]:
    """The column to tell of each metric, and its name: on test examples, else at clients.

    Examples
    --------
    >>> headline_columns(["test-loss", "clients-loss", "train-loss", "clients-accuracy"])
    {'test-loss': 'loss', 'clients-accuracy': "clients' accuracy"}
    """
    headlines = {}
    for name, whose in learning_columns(columns).items():
        words = display_name(name)
        if "test" in whose:
            headlines[whose["test"]] = words
        elif "clients" in whose:
            headlines[whose["clients"]] = f"clients' {words}"
    return headlines


def is_share(name: str, values: Iterable[float]) -> bool:
    """Whether a metric reads better as a share of a hundred."""
    real = [value for value in values if math.isfinite(value)]
    shares = bool(re.search(r"accuracy|precision|recall|share|fraction|rate$|top-k", name))
    return shares and all(0 <= value <= 1 for value in real)


def lowest_is_best(name: str) -> bool:
    """Whether less of a metric is better, as far as its name tells."""
    return bool(re.search(r"loss|error|perplexity|mse|mae|rmse", name))


def tail_mean(values: Sequence[float], count: int = 5) -> float | None:
    """Mean of the last few numbers; None if there are fewer."""
    real = [value for value in values if math.isfinite(value)][-count:]
    return math.fsum(real) / count if len(real) == count else None
