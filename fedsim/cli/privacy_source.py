"""What `fedsim privacy` is asked about: a plan, a config, a ledger, a run, clients' ledgers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsim.config import RunConfig
from fedsim.config.instantiate import make
from fedsim.config.plan import (
    cohort,
    entropy,
    extrapolation,
    made_noise,
    stopping,
    with_added_noise,
    with_config_figures,
)
from fedsim.errors import FedsimError
from fedsim.privacy import ClientLedgers, Ledger, Question, Statement, claimed
from fedsim.privacy.adversary import DECLARED_SENTENCES
from fedsim.privacy.calibration import Extrapolation
from fedsim.privacy.claims import FIXED, Stopping
from fedsim.privacy.durable import archived
from fedsim.privacy.plan import ReleasePlan, of_user
from fedsim.runs.record import clients_ledgers, ending, read_config


@dataclass(frozen=True)
class Source:
    """A source, read.

    Attributes
    ----------
    question : Question
        What it says of a run to come, or of further rounds.
    ledger : Ledger or None
        What it has released: at example level, of the client that has spent most.
    server : Ledger or None
        The server's.
    clients : path or None
        Where clients' ledgers are.
    examples_delta : float
        At which these are asked.
    directory : path or None
        Of the run.
    extrapolated : Extrapolation or None
        Of a config whose noise is a larger cohort's.
    group : int
        How many clients one person may own, as a config says.
    declared : tuple of str
        Sentences on what a config's user answers for.
    """

    question: Question = field(default_factory=Question)
    ledger: Ledger | None = None
    server: Ledger | None = None
    clients: Path | None = None
    examples_delta: float = 1e-5
    directory: Path | None = None
    extrapolated: Extrapolation | None = None
    group: int = 1
    declared: tuple[str, ...] = ()

    def statements(self, delta: float) -> list[Statement]:
        """What its ledgers say: of the server's releases where it made private ones, and of the
        clients' own where they have any."""
        end = self._end
        kept = None if self.clients is None else _clients(self.clients, self.examples_delta)
        server = None if self.server is None else self._of_server(self.server, delta)
        return claimed(server, None if kept is None else kept.statement(stopping=end))

    @property
    def _config(self) -> Path | None:
        """The run's, if it has one."""
        path = None if self.directory is None else self.directory / "config.toml"
        return path if path is not None and path.is_file() else None

    @property
    def _end(self) -> Stopping:
        """Whether what was released might end the run."""
        if self.directory is None or self._config is None or self.server is None:
            return FIXED
        flat, (ended, _) = read_config(self._config), ending(self.directory)
        return stopping(flat, self.server.rounds_made, ended)

    def _of_server(self, server: Ledger, delta: float) -> Statement:
        statement = server.statement(delta, stopping=self._end)
        return (
            statement
            if self._config is None
            else with_config_figures(RunConfig.load(self._config), statement)
        )


def read_source(source: Path | None, overrides: list[str], delta: float | None) -> Source:
    """Read what the command was given.

    Raises
    ------
    FedsimError
        If it is none of these things.
    """
    if source is None:
        if overrides:
            raise FedsimError(f"--set {overrides[0]} changes a config; name the config first.")
        return Source()
    if source.suffix == ".toml":
        config = RunConfig.load(source, overrides)
        figure = extrapolation(config, config.rounds)
        return Source(
            _configured(config),
            extrapolated=figure,
            group=config.privacy.group,
            declared=tuple(_declared(config)),
        )
    if not source.is_dir():
        ledger = Ledger.read(source)
        return Source(_continued(ledger, _delta(source.parent, delta)), ledger, ledger)
    if _has_clients(source):
        return _of_clients(source, 1e-5 if delta is None else delta)
    examples_delta = _delta(source, delta, "client.noise.delta")
    delta = _delta(source, delta)
    server = Ledger.read(source / "ledger.jsonl")
    clients = _clients_of(source)
    if clients is not None and not server.statement(delta).private:
        return replace(_of_clients(clients, examples_delta), server=server, directory=source)
    question = _continued(server, delta)
    if (settings := source / "config.toml").is_file():
        question = replace(question, stopping=stopping(read_config(settings)))
    return Source(question, server, server, clients, examples_delta, source)


def _of_clients(directory: Path, delta: float) -> Source:
    worst = _clients(directory, delta).worst()
    return Source(_continued(worst, delta), worst, clients=directory, examples_delta=delta)


def _clients(directory: Path, delta: float) -> ClientLedgers:
    return ClientLedgers(directory, delta=delta, read_only=True)


def _clients_of(run: Path) -> Path | None:
    """Where a run's clients keep their ledgers, if that is on this machine."""
    settings = run / "config.toml"
    config = read_config(settings) if settings.is_file() else {}
    return clients_ledgers(run, config)


def _has_clients(directory: Path) -> bool:
    pattern = "client-*.jsonl"
    return any(directory.glob(pattern)) or bool(archived(directory / pattern))


def _delta(directory: Path, delta: float | None, key: str = "noise.delta") -> float:
    settings = directory / "config.toml"
    if delta is None and settings.is_file():
        return float(RunConfig.load(settings).to_run_config().get(key, 1e-5))
    return 1e-5 if delta is None else delta


def _continued(ledger: Ledger, delta: float) -> Question:
    """Further rounds like the last one."""
    question = Question(delta=delta, level=ledger.level)
    if not ledger.charged:
        return question
    last = ledger.charged[-1].event
    return replace(
        question,
        law=last.law,
        invocations=last.count,
        noise_multiplier=last.total_noise_multiplier,
        past=tuple(entry.event for entry in ledger.charged),
        simulated=any(entry.entropy == "config" for entry in ledger.charged),
    )


def _configured(config: RunConfig) -> Question:
    noise = with_added_noise(config).noise
    if not config.private and config.client.private:
        return _examples(config)
    if not config.private:
        raise FedsimError(
            f"mechanism.name = {config.mechanism.name!r} and noise.multiplier = "
            f"{noise.multiplier}, and clients do not protect their examples; the run has no "
            "guarantee, and its epsilon is infinite."
        )
    return Question(
        noise_multiplier=noise.multiplier,
        target_epsilon=noise.target_epsilon,
        rounds=config.rounds,
        delta=noise.delta,
        simulated=entropy(config) == "config",
        stopping=stopping(config.to_run_config()),
        law=_plan(config).law,
        invocations=_plan(config).event().count,
    )


def _plan(config: RunConfig) -> ReleasePlan[Any]:
    """What the server releases in a round; of the bound only its guarantee counts here."""
    return ReleasePlan(
        level="client",
        sampler=cohort(config),
        bound=make(config.mechanism),
        noise=made_noise(config.noise),
    )


def _declared(config: RunConfig) -> Iterator[str]:
    """What is the user's own, and believed."""
    parts = set()
    if config.private:
        parts |= {*_plan(config).declared}
    if config.client.private and of_user(make(config.client.mechanism)):
        parts.add("bound")
    yield from (DECLARED_SENTENCES[part] for part in DECLARED_SENTENCES if part in parts)


def _examples(config: RunConfig) -> Question:
    """The plan of the client that pays most, where clients protect their examples."""
    # How many examples clients have, and so their rates, only the data can say.
    from fedsim.runs.data_split import resolve_data
    from fedsim.runs.local_training import example_privacy, most_expensive_client

    data = resolve_data(config)
    privacy = example_privacy(config, data)
    worst = most_expensive_client(config, privacy, data.split.sizes, config.rounds)
    if worst is None or privacy is None:
        raise FedsimError(f"partition.clients = {config.partition.clients}; none has an example.")
    return Question(
        noise_multiplier=privacy.noise_multiplier,
        rounds=config.rounds,
        delta=config.client.noise.delta,
        level="example",
        simulated=entropy(config) == "config",
        stopping=stopping(config.to_run_config()),
        law=worst.event.law,
        invocations=worst.event.count // config.rounds,
    )
