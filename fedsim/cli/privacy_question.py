"""The questions of `fedsim privacy`: about options, a config, a ledger, a run, clients' ledgers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from fedsim.config import RunConfig, Scalar
from fedsim.config.devices import assumption, lateness
from fedsim.config.plan import (
    entropy,
    evaluation_events,
    may_stop,
    resolve_bands,
    uncalibrated_plan,
)
from fedsim.config.run_config import read_config
from fedsim.errors import FedsimError
from fedsim.privacy import Adjacency, Event, Ledger, Question
from fedsim.privacy.assumptions import DECLARED_SENTENCES, large_delta
from fedsim.privacy.events import law_named, simple_laws
from fedsim.privacy.plan import is_user_code
from fedsim.runs.run_ledgers import RunLedgers, delta_of, node_ledgers
from fedsim.synonyms import closest


@dataclass(frozen=True)
class Source:
    """The contents of the command's argument SOURCE.

    Attributes
    ----------
    question : Question
        A question about a planned run, or about further rounds of an existing one.
    ledger : Ledger or None
        The ledger that further rounds would extend: the server's, or that of the client that has
        spent most.
    ledgers : RunLedgers
        All ledgers that were read.
    declarations : tuple of str
        Sentences on the parts of the mechanism that a config's user declares, and on what is
        assumed of its devices.
    smallest : int or None
        Number of examples of the smallest client of a config, at example level.
    """

    question: Question = field(default_factory=Question)
    ledger: Ledger | None = None
    ledgers: RunLedgers = field(default_factory=RunLedgers)
    declarations: tuple[str, ...] = ()
    smallest: int | None = None

    def large_delta(self, question: Question) -> str:
        """Warning that a question's delta is useless for its number of rows; empty if it is not."""
        return large_delta(question.delta, question.level, self.smallest or question.law.population)


def read_source(source: Path | None, overrides: list[str], delta: float | None) -> Source:
    """Read the command's argument.

    Raises
    ------
    FedsimError
        If it is no config, no ledger, no run's directory and no directory of clients' ledgers.
    """
    if source is None:
        if overrides:
            raise FedsimError(f"--set {overrides[0]} changes a config; name the config first.")
        return Source()
    if source.suffix == ".toml":
        return _config_source(resolve_bands(RunConfig.load(source, overrides)))
    if not source.is_dir():
        if not source.exists():
            raise FedsimError(
                f"there is no file or folder {source}; SOURCE must be a config, a ledger, or a "
                "directory of a run or of clients' ledgers."
            )
        ledger = Ledger.read(source)
        config = source.parent / "config.toml"
        if delta is None:
            delta = delta_of(read_config(config) if config.is_file() else {})
        ledgers = RunLedgers(server=ledger, other_delta=delta)
        return Source(_further_rounds(ledger, delta), ledger, ledgers)
    nodes = node_ledgers(source, {"client.state-dir": str(source)})
    if nodes and not (source / "config.toml").exists():
        delta = 1e-5 if delta is None else delta
        return _examples_source(RunLedgers(examples=[*map(Ledger.read, nodes)], other_delta=delta))
    return _run_source(source, delta)


def _config_source(config: RunConfig) -> Source:
    user_parts, of_devices = set[str](), ""
    if config.private:
        plan = uncalibrated_plan(config, config.mechanism.make())
        user_parts, of_devices = {*plan.user_parts}, assumption(config.to_run_config())
    elif config.protects:
        of_devices = lateness(config.to_run_config())
    if config.client.private and is_user_code(config.client.mechanism.make()):
        user_parts.add("bound")
    question, smallest = _config_question(config)
    return Source(
        question,
        declarations=(
            *(sentence for part, sentence in DECLARED_SENTENCES.items() if part in user_parts),
            *filter(None, [of_devices]),
        ),
        smallest=smallest,
    )


def _run_source(run: Path, delta: float | None) -> Source:
    ledgers = RunLedgers.read(run, delta=delta)
    server = ledgers.server or Ledger.read(run / "ledger.jsonl")  # raises if there is none
    ledgers = replace(ledgers, server=server)
    if ledgers.examples and not server.statement(ledgers.delta).private:
        return _examples_source(ledgers)
    question = replace(_further_rounds(server, ledgers.delta), may_stop=may_stop(ledgers.config))
    return Source(question, server, ledgers)


def _examples_source(ledgers: RunLedgers) -> Source:
    delta = ledgers.example_delta
    worst = max(ledgers.examples, key=lambda ledger: ledger.epsilon(delta))
    return Source(_further_rounds(worst, delta), worst, ledgers)


def _further_rounds(ledger: Ledger, delta: float) -> Question:
    """Question about more rounds like the ledger's last one."""
    question = Question(delta=delta, level=ledger.level)
    statement = ledger.statement(delta) if ledger.entries else None
    charged = () if statement is None else statement.entries
    # An event of count 0 is of a round that an earlier charge (a whole plan) covers.
    rounds = (e for e in reversed(charged) if e.kind == "release" and e.event.count)
    last = next(rounds, None)
    if last is None:
        return question
    # A line that pays for further rounds, too, has their invocations.
    covered = 1 if last.through is None else last.through - (last.round or 1) + 1
    return replace(
        question,
        law=last.event.law,
        invocations=max(last.event.count // covered, 1),
        noise_multiplier=last.event.total_noise_multiplier,
        past=tuple(entry.event for entry in charged),
        simulated=0 if statement is None else statement.simulated_mark,
    )


def _config_question(config: RunConfig) -> tuple[Question, int | None]:
    """Question about a config, and the number of examples of its smallest client if that counts."""
    noise = config.noise
    if not config.private and config.client.private:
        return _example_question(config)
    if not config.private:
        raise FedsimError(
            f"mechanism.name = {config.mechanism.name!r} and noise.multiplier = "
            f"{noise.multiplier or 0}, and clients do not protect their examples; the run has no "
            "guarantee, and its epsilon is infinite."
        )
    plan = uncalibrated_plan(config, config.mechanism.make())
    event = plan.event()
    question = Question(
        noise_multiplier=noise.multiplier,
        target_epsilon=noise.target_epsilon,
        rounds=config.rounds,
        delta=noise.delta,
        simulated=plan.simulated_mark(entropy(config)),
        may_stop=may_stop(config.to_run_config()),
        law=event.law,
        invocations=event.count,
        further_events=partial(_evaluations, config),
    )
    return question, None


def _evaluations(config: RunConfig, question: Question, rounds: int) -> list[Event]:
    """Events of a config's private evaluations in so many rounds, at the question's target."""
    if not config.evaluate.private or rounds < config.evaluate.clients_every:
        return []
    changes: dict[str, Scalar] = {"rounds": rounds}
    if question.target_epsilon is not None and config.noise.target_epsilon is not None:
        changes["noise.target-epsilon"] = question.target_epsilon
    return evaluation_events(config.replace(**changes))


def _example_question(config: RunConfig) -> tuple[Question, int]:
    """Question about the client that spends most, and the smallest client's examples."""
    # Needs the data: a client's sampling rate follows from its number of examples.
    from fedsim.runs.data_split import resolve_data
    from fedsim.runs.factories import example_privacy, most_expensive_client

    data = resolve_data(config)
    privacy = example_privacy(config, data)
    worst = most_expensive_client(config, privacy, data.sizes, config.rounds)
    if worst is None or privacy is None:
        raise FedsimError(
            f"partition.clients = {config.partition.clients}; none of them has an example."
        )
    question = Question(
        noise_multiplier=privacy.noise_multiplier,
        rounds=config.rounds,
        delta=config.client.noise.delta,
        level="example",
        simulated=entropy(config) == "config",
        may_stop=may_stop(config.to_run_config()),
        law=worst.law,
        invocations=worst.count // config.rounds,
    )
    return question, min(data.sizes)


def with_sampling(question: Question, sampling: str | None, options: dict[str, Any]) -> Question:
    """The question with the sampling that the command's options set.

    Parameters
    ----------
    question : Question
    sampling : str, optional
        The name of a law; without it, ``rate`` and ``size`` mean Poisson sampling.
    options : dict
        ``rate``, ``size``, ``population``, ``adjacency``; None keeps the question's own value.
    """
    law, set_options = question.law, {name: v for name, v in options.items() if v is not None}
    if "adjacency" in set_options:
        require_choice("--adjacency", set_options["adjacency"], *get_args(Adjacency))
    if sampling is None and not set_options.keys() & {"rate", "size"}:
        return replace(question, law=replace(law, **set_options))
    kind = law_named(require_choice("--sampling", sampling or "poisson", *simple_laws()))
    inherited = ["population", "adjacency"] if type(law) is kind else ["population"]
    set_options = {name: getattr(law, name) for name in inherited} | set_options
    # At example level the number of examples is public, so neighbours are zero-out.
    if question.level == "example" and "zero-out" in kind.neighbours:
        set_options.setdefault("adjacency", "zero-out")
    return replace(question, law=kind.from_options(**set_options))


def with_plan(question: Question, changes: dict[str, Any]) -> Question:
    """The question with values replaced by options; None keeps a value.

    A noise multiplier and a target epsilon exclude each other, so an option for one unsets the
    other. With a budget (``max_epsilon``), a config's target first determines the noise, and the
    question is then how many rounds the budget allows with that noise.
    """
    set_options = {name: value for name, value in changes.items() if value is not None}
    if (invocations := set_options.get("invocations", 1)) < 1:
        raise FedsimError(f"--invocations is {invocations}; it must be at least 1.")
    if "target_epsilon" in set_options and "noise_multiplier" not in set_options:
        question = replace(question, noise_multiplier=None)
    if "noise_multiplier" in set_options and "target_epsilon" not in set_options:
        question = replace(question, target_epsilon=None)
    if (
        "max_epsilon" in set_options
        and "target_epsilon" not in set_options
        and question.target_epsilon
    ):
        multiplier = question.answer().noise_multiplier
        question = replace(question, noise_multiplier=multiplier, target_epsilon=None)
    return replace(question, **set_options)


def require_choice(option: str, value: str, *allowed: str) -> Any:
    """Return ``value``, or raise FedsimError if it is not allowed."""
    if value not in allowed:
        hint = closest("", value, allowed)
        raise FedsimError(f"{option} is {value!r};{hint} must be {', '.join(allowed)}.")
    return value


_AXES: dict[str, type] = {
    "rounds": int,
    "noise-multiplier": float,
    "target-epsilon": float,
    "max-epsilon": float,
    "rate": float,
    "delta": float,
}


def parse_axis(text: str) -> tuple[str, list[int | float]]:
    """Parse ``--over``: the field of a question, and its values."""
    key, _, values = text.partition("=")
    key = require_choice("--over", key.strip(), *_AXES)
    try:
        parsed = [_AXES[key](value) for value in values.split(",")]
    except ValueError:
        raise FedsimError(
            f"--over {text!r} must be KEY=A,B,C, such as rounds=10,100,1000."
        ) from None
    return key.replace("-", "_"), parsed


def with_axis_value(question: Question, key: str, value: float) -> Question:
    """The question with another value on an axis of ``--over``."""
    if key == "rate":
        return with_sampling(question, None, {key: value})
    return with_plan(question, {key: value})
