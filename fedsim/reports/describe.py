"""Description of a run in sentences: its config, and how it ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedsim.config import Scalar
from fedsim.config.devices import work_sentence
from fedsim.privacy import Entry

Flat = Mapping[str, Scalar]


def description(config: Flat, released: Entry | None = None, objects: Collection[str] = ()) -> str:
    """One paragraph on the data, the model, a round, and the privacy mechanism.

    A key that this version does not have is left out, not guessed.

    Parameters
    ----------
    config : mapping
    released : Entry, optional
        The ledger's entry of the last round, whose law describes how its clients were sampled.
    objects : collection of str
        The parts ("model", "data", "partition") that were Python objects instead of the config's.
    """
    sentences = [
        _trained(config, objects),
        _round(config, released),
        _work(config),
        _bounded(config, released),
    ]
    sentences.append(_examples(config))
    return " ".join(sentence for sentence in sentences if sentence)


def ending_sentence(summary: Mapping[str, object], rounds: int, planned: object) -> str:
    """A sentence or two on how the run ended."""
    outcome = summary.get("ended")
    if outcome == "finished":
        return f"It finished {'its only round' if rounds == 1 else f'all {rounds:,} rounds'}."
    if not summary:
        return (
            f"It is still running, was interrupted or ended in an error, after round {rounds} of "
            f"{planned}; this page shows the rounds that it finished."
        )
    why = str(summary.get("why") or "It ended early.")
    return f"It reached round {rounds} of {planned}. {why}"


def _trained(config: Flat, objects: Collection[str]) -> str:
    model, data = config.get("model.name"), config.get("data.name")
    clients, rounds = config.get("partition.clients"), config.get("rounds")
    partition = None if "partition" in objects else config.get("partition.name")
    spread = _SPREADS.get(str(partition), f"distributed by {partition} among")
    named = _MODELS.get(str(model), f"The model {model}")
    if model == "softmax" and config.get("task.loss", "cross-entropy") != "cross-entropy":
        named = "A linear model"
    if "model" in objects:
        named = "A model given in Python (model=)"
    if "data" in objects:
        data = "data given in Python (data=)"
    return (
        f"{named}, trained for {_count(rounds, 'round')} on {data}, whose examples are {spread} "
        f"{_count(clients, 'client')}."
    )


_SPREADS = {
    "iid": "distributed at random among",
    "by-owner": "held by their owners,",
    "None": "distributed among",
}
_MODELS = {"softmax": "Softmax regression", "mlp": "A multilayer perceptron"}


def _round(config: Flat, released: Entry | None) -> str:
    clients, name = config.get("partition.clients"), config.get("cohort.name")
    if released is not None and isinstance(clients, int):
        return released.event.law.round_sentence(clients)
    return f"Clients of a round are sampled by {name}." if name else ""


def _work(config: Flat) -> str:
    steps, epochs = config.get("client.steps"), config.get("client.epochs")
    batch, rate = config.get("client.batch-size"), config.get("client.lr")
    one, many = ("step", "steps") if steps else ("pass", "passes")
    own = work_sentence(str(config.get("client.work", "")), many)
    work = own or _count(steps or epochs, one, many)
    batches = f"batches of {batch}" if batch else "all its examples at once"
    name = _ALGORITHMS.get(str(config.get("client.name")), str(config.get("client.name")))
    at_rate = f" at rate {rate:g}" if isinstance(rate, int | float) else ""
    return f"A client trains with {name}{at_rate}: {work} over {batches}."


_ALGORITHMS = {"sgd": "SGD", "adam": "Adam", "rmsprop": "RMSProp"}


def _bounded(config: Flat, released: Entry | None) -> str:
    mechanism = config.get("mechanism.name")
    if mechanism in (None, "none"):
        return "Updates are neither bounded nor noised by the server." if mechanism else ""
    noise = _noise(config, "noise")
    norm = _norm(config, "mechanism")
    where = "there is added"
    if released is not None:
        by_clients = released.noised_by_clients
        where = "clients add, in shares," if by_clients else "the server adds"
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
