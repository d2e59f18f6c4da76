"""The policy of a node: which runs it accepts, and what they may do with its data."""

from __future__ import annotations

import fcntl
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from flwr.app import ConfigRecord, Message

from fedsim import regular_files
from fedsim.allowed_code import AllowedCode, inherited
from fedsim.config import RunConfig
from fedsim.config.devices import declared_schedule
from fedsim.config.plan import cohort, entropy, uncalibrated_plan
from fedsim.config.release_keys import modules_in_config, path_keys, text_options
from fedsim.deploy.party_files import Names, read_table
from fedsim.errors import FedsimError
from fedsim.privacy.laws.base import is_shipped
from fedsim.privacy.laws.buffered import Buffered
from fedsim.settings import Ge, Gt, Lt, NotAllowedError, Text


def _read_limit(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    raise NotAllowedError("a number from 0, or inf for no limit")


_Limit = Annotated[float, Text(_read_limit, str)]
_Floor = Annotated[float, Ge(0)]

NODE = "FEDSIM_NODE"
"""Environment variable with the path of the node's ``node.toml``, for its app."""

_ROUNDS = "rounds-joined"


TEMPLATE = """
# [policy]
# data = "data.npz"                     # this client's own examples, from this directory
# state-dir = "state"                   # where its ledger and its state are
# modules = []                          # what a run may name as module:Name
# files = []                            # directories from which a run may name files
# least-noise-multiplier = 0.0          # of the updates' release
# least-share-noise-multiplier = 0.0    # of this node's own share of that noise, over the bound
# largest-clip-norm = inf               # of updates
# least-example-noise-multiplier = 0.0  # of this client's own releases
# largest-epsilon = inf                 # of this client's own ledger, at example level
# delta = 1e-5                          # at which that epsilon is computed
# least-population = 1                  # clients that the run declares
# most-rounds = 0                       # rounds that it joins, over all runs; 0: any number
# evaluation = true                     # whether metrics leave the node; false where a floor is set
# secure-aggregation = false            # whether shares leave under masks alone, in sums
"""
"""The table `policy` of a new ``node.toml``: all keys at their defaults, commented out."""


@dataclass(frozen=True)
class Policy:
    """Minimum noise and other limits of one node; a run outside is refused before data is read.

    A node knows the run's config and the messages sent to it. Noise that it adds itself (on
    examples, or on its share) it checks when it adds it, from its own data, and it checks that
    nobody else can know that noise. It cannot check the noise that the server adds.

    Attributes
    ----------
    data : str
        Path of an ``.npz`` file with this client's own examples, relative to the directory of
        ``node.toml``. Empty to use its part of the run's data set.
    state_dir : str
        Directory of the client's ledger and state, likewise relative; a run's own
        ``client.state-dir`` is ignored.
    modules : tuple of str
        Installed modules or packages that a run may name as ``module:Name``.
    files : tuple of str
        Directories from which a run may name files (``data.dir``, ``model.weights``,
        ``adapter.weights``, ``client.work``).
    least_noise_multiplier : float
        Minimum noise multiplier of the release of updates, wherever its noise is added. Rounds
        whose noise is correlated are one Gaussian together: their multiplier is that of the fresh
        draws over the sensitivity, which the node computes itself.
    largest_clip_norm : float
        Largest norm that an update may have in the sum, in any round.
    least_share_noise_multiplier : float
        Minimum standard deviation, in units of the bound, of the noise that this node adds to its
        share. In an honest run of K clients with noise multiplier z it is at least ``z / sqrt(K)``.
    least_example_noise_multiplier : float
        Minimum noise multiplier for releases of this client's per-example gradients.
    largest_epsilon, delta : float
        Budget of this client's own ledger over all runs, at example level: a round that would
        exceed it is refused, given the numbers of examples and steps alone. A run with a budget of
        its own keeps the smaller one, at the smaller delta.
    least_population : int
        Minimum number of clients that a run must declare.
    most_rounds : int
        Maximum number of rounds in which the client takes part, over all runs; 0 for any number.
    evaluation : bool or None
        Whether the node answers evaluations and sends training losses with its updates, which no
        noise protects. None: yes, unless a minimum noise or ``largest_epsilon`` is set.
    secure_aggregation : bool
        Whether the node sends shares only under masks, so that the server sees sums but no share.
    clients : int
        Number of clients, from ``node.toml``; a request that divides the noise among more clients
        is refused. 0 if unknown.
    directory : Path
        Directory of ``node.toml``.
    """

    data: str = ""
    state_dir: str = "state"
    modules: Names = ()
    files: Names = ()
    least_noise_multiplier: _Floor = 0.0
    largest_clip_norm: _Limit = math.inf
    least_share_noise_multiplier: _Floor = 0.0
    least_example_noise_multiplier: _Floor = 0.0
    largest_epsilon: _Limit = math.inf
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    least_population: Annotated[int, Ge(0)] = 1
    most_rounds: Annotated[int, Ge(0)] = 0
    evaluation: bool | None = None
    secure_aggregation: bool = False
    clients: int = 0
    directory: Path = Path()

    @classmethod
    def here(cls, config: RunConfig) -> Self | None:
        """The policy of the node that this process serves.

        None for the virtual clients of a simulation, which belong to the user. A node that was
        started without a policy has the default one, which allows a run no modules or files.
        """
        path = os.environ.get(NODE)
        if path is not None:
            return cls.load(Path(path))
        return None if config.engine.name == "simulation" else cls()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the table ``policy`` of a ``node.toml``.

        Raises
        ------
        FedsimError
            If it cannot be read, or has an unknown key or an invalid value.
        """
        try:
            tree = regular_files.read_toml(path)
        except (OSError, ValueError) as error:
            raise FedsimError(f"this node's policy cannot be read: {error}.") from None
        table, clients = tree.get("policy", {}), tree.get("clients", 0)
        if not isinstance(table, dict):
            raise FedsimError("this node's policy is not a table; it must be written as [policy].")
        if type(clients) is not int or clients < 0:
            raise FedsimError(f"node.toml has clients = {clients!r}; it must be a whole number.")
        fields = ("directory", "clients")
        values = read_table(table, cls, "this node's policy", filled_in=fields)
        return cls(**values, clients=clients, directory=path.parent.absolute())

    @property
    def answers_evaluation(self) -> bool:
        """Whether the node sends metrics of its data."""
        floors = (
            self.least_noise_multiplier,
            self.least_share_noise_multiplier,
            self.least_example_noise_multiplier,
        )
        if self.evaluation is None:
            return not any(floors) and self.largest_epsilon == math.inf
        return self.evaluation

    def with_node_budget(self, config: RunConfig) -> RunConfig:
        """The config with its budget lowered to this node's own, where that is smaller."""
        if self.largest_epsilon == math.inf:
            return config
        noise = config.client.noise
        declared = math.inf if noise.max_epsilon is None else noise.max_epsilon
        # Epsilon grows as delta shrinks, so that the smaller of each keeps both budgets.
        return config.replace(
            **{
                "client.noise.max-epsilon": min(self.largest_epsilon, declared),
                "client.noise.delta": min(self.delta, noise.delta),
            }
        )

    @classmethod
    def process_allowed_code(cls) -> AllowedCode:
        """Modules that a config may name, in a process that serves a node.

        In a simulation these are the modules that the starting process allowed.
        """
        path = os.environ.get(NODE)
        if path is not None:
            return cls.load(Path(path)).code
        return inherited() or cls().code

    @property
    def code(self) -> AllowedCode:
        """Modules that a run may name."""
        return AllowedCode(self.modules, file="node.toml")

    @property
    def data_file(self) -> str:
        """Path of the client's own examples, or the empty string."""
        return str(self.directory / self.data) if self.data else ""

    @property
    def state(self) -> Path:
        """Directory of the client's ledger and state."""
        return self.directory / self.state_dir

    def check(self, config: RunConfig) -> None:
        """Refuse a run whose config is outside this node's limits.

        Raises
        ------
        FedsimError
            With the setting that is outside, and the limit.
        """
        self._check_code_and_files(config)
        private_examples = config.client.private
        example_multiplier = (config.client.noise.multiplier or 0.0) if private_examples else 0.0
        self._check_noise(config)
        _require_at_least(
            "client.noise.multiplier", example_multiplier, self.least_example_noise_multiplier
        )
        _require_at_least("partition.clients", config.partition.clients, self.least_population)
        self._check_norm(config)
        if self.largest_epsilon < math.inf and not example_multiplier:
            raise _refusal(
                "client.noise.multiplier is 0; here largest-epsilon is set, which only noise on "
                "examples can meet"
            )
        self._check_entropy(config)
        self._check_metrics(config)

    def _check_noise(self, config: RunConfig) -> None:
        """Refuse less noise on the release of updates than the policy's minimum."""
        least = self.least_noise_multiplier
        if not least:
            return
        if not config.private:  # noise does not protect where the mechanism gives no guarantee
            raise _limit_error("noise.multiplier", 0.0, least)
        plan = uncalibrated_plan(config, config.mechanism.make())
        key, multiplier = "noise.multiplier", plan.noise.multiplier
        parts: dict[str, object] = {"noise.name": plan.noise}
        if plan.noise.correlated or isinstance(plan.sampler, Buffered):
            # All rounds that a client can be in are one Gaussian, whose sensitivity follows from
            # the cohort and the noise's coefficients: computed here, from the run's settings.
            parts["cohort.name"] = plan.sampler
        for name, part in parts.items():
            if not is_shipped(part):
                raise _refusal(
                    f"{name} names code of the run's own, {type(part).__name__}, whose guarantee a "
                    "node cannot compute; here least-noise-multiplier is set"
                )
        if plan.noise.correlated:
            key = f"{key} = {multiplier:g}, over the sensitivity of {config.noise.name} noise,"
            multiplier /= plan.law.sensitivity
        elif isinstance(plan.sampler, Buffered):
            key = f"{key} = {multiplier:g}, over the root of the releases that a client is in,"
            multiplier /= plan.law.sensitivity
        _require_at_least(key, multiplier, least)

    def _check_norm(self, config: RunConfig) -> None:
        """Refuse a bound on updates above the policy's limit."""
        limit = self.largest_clip_norm
        if limit == math.inf:
            return
        from fedsim.runs.factories import mechanism  # needs torch

        norm = mechanism(config.mechanism).largest_norm
        if norm == math.inf:
            raise _refusal(
                f"mechanism.name is {config.mechanism.name!r}, which as set does not bound updates "
                f"by a fixed norm; here they may have at most {limit:g}"
            )
        if norm > limit:
            raise _refusal(
                f"mechanism.name is {config.mechanism.name!r}, which bounds updates by {norm:g}; "
                f"here they may have at most {limit:g}"
            )

    def _check_metrics(self, config: RunConfig) -> None:
        """Refuse a run that needs metrics of this client's data, if the node sends none."""
        if self.answers_evaluation:
            return
        scalar = config.mechanism.private_scalar
        if scalar and not _adds_noise(config):
            raise _refusal(
                f"mechanism.private-scalar is {scalar!r}; here no metrics leave the node without "
                "noise of its own"
            )
        if config.client.private and config.evaluate.unprotected:
            raise _refusal(
                "evaluate.unprotected is true; here no metrics of examples that noise protects "
                "leave the node without noise"
            )

    def _check_entropy(self, config: RunConfig) -> None:
        """Refuse noise of this node that follows from the run's seed, and could be subtracted."""
        floors = (self.least_noise_multiplier, self.least_share_noise_multiplier)
        shares = any(floors) and _adds_noise(config)
        examples = self.least_example_noise_multiplier > 0 or self.largest_epsilon < math.inf
        if (shares or examples) and entropy(config) != "system":
            raise _refusal(
                "noise.entropy is 'config', and noise that this node adds would follow from the "
                "run's seed; here it must be 'system'"
            )

    def check_training(self, message: Message, config: RunConfig, client: int) -> bool:
        """Whether the reply to a message for training will contain anything of this node's data.

        Raises
        ------
        FedsimError
            If such a reply would have less noise, or fewer masks, than the policy or the run says;
            or if the schedule of a buffered cohort has none of this client in the message's round.
        """
        from fedsim.federation.aggregation.secagg.protocol import stage_of
        from fedsim.federation.aggregation.shares import share_entries  # needs torch

        stage = stage_of(message)
        # Of the stages of secure aggregation, only "masked" sends anything of the client's data.
        if stage not in (None, "masked"):
            return False
        self.check_masked(masked=stage is not None, config=config)
        self.check_share(share_entries(message), config)
        _check_scheduled(message, config, client)
        return True

    def check_masked(self, *, masked: bool, config: RunConfig) -> None:
        """Refuse to send a share without masks if the policy or the run requires masks."""
        if masked:
            return
        if self.secure_aggregation:
            raise _refusal(
                "the server asks for this node's share without a mask; here secagg.threshold must "
                "be set"
            )
        if config.secagg.threshold:
            raise _refusal(
                "secagg.threshold is set, and the server asks for this node's share without a mask"
            )

    def check_share(self, request: ConfigRecord | None, config: RunConfig) -> None:
        """Refuse a message that asks for less noise than the policy's minimum.

        Parameters
        ----------
        request : ConfigRecord or None
            Entries about a share in the server's message; None if it asks for the update itself.
        config : RunConfig

        Raises
        ------
        FedsimError
            With the request, and the limit.
        """
        if request is None:
            if self.least_share_noise_multiplier:
                raise _refusal(
                    "the server asks for the update without this node's noise; here "
                    "noise.placement must be 'client'"
                )
            if _adds_noise(config):
                raise _refusal(
                    "noise.placement is 'client', and the server asks for the update without this "
                    "node's noise; here it must ask for a share"
                )
            return
        from fedsim.federation.aggregation.shares import share_multiplier  # needs torch

        multiplier = request.get("share-noise-multiplier")
        if not isinstance(multiplier, int | float):
            raise _refusal(f"share-noise-multiplier is {multiplier!r}; it must be a number")
        _require_at_least("share-noise-multiplier", multiplier, self.least_noise_multiplier)
        # A share's noise shrinks with the number of clients, which the server declares: limit it to
        # the number that the node's owner knows.
        clients = min(config.partition.clients, self.clients or config.partition.clients)
        shares = request.get("share-asked")
        if not isinstance(shares, int) or not 1 <= shares <= clients:
            raise _refusal(
                f"share-asked is {shares!r}; it must be from 1 to {clients}, the clients that the "
                "run declares and this node knows of"
            )
        _require_at_least(
            "share-noise-multiplier over the root of share-asked",
            share_multiplier(multiplier, shares),
            self.least_share_noise_multiplier,
        )

    def _check_code_and_files(self, config: RunConfig) -> None:
        # An imported module runs code as the node's user, and a file may leak through an error
        # message or by training on it: both need the owner's permission.
        flat = config.to_run_config()
        defaults = RunConfig().to_run_config()
        for key, name, module in modules_in_config(config):
            if not self.code.allows(module):
                raise _refusal(f"{key} is {name!r}; {self.code.refusal(module)}")
        values = []  # pairs, since the options of two metrics may have the same key
        for key, mark in path_keys(config).items():
            value = str(flat.get(key, ""))
            # Of a run's examples nothing is read where the node has a file of its own.
            if self.data and key in ("data.name", "data.dir"):
                continue
            # Defaults are allowed: they name no private file.
            if mark.use != "operator" and not mark.is_name(value) and value != defaults.get(key):
                values.append((key, value.removeprefix(mark.prefix)))
        # The options of allowed code do not say which of them are paths.
        values += [(key, text) for key, text in text_options(config) if _may_be_path(text)]
        # Compare real paths, since a symbolic link could lead out of an allowed directory.
        allowed = [os.path.realpath(self.directory / name) for name in self.files]
        for key, value in values:
            path = Path(os.path.realpath(os.path.expanduser(value)))
            if value and not any(path.is_relative_to(directory) for directory in allowed):
                raise _refusal(f"{key} is {value!r}; here it may lie in {list(self.files)}")
        if config.client.state_dir and self.directory == Path():
            raise _refusal(
                f"client.state-dir is {config.client.state_dir!r}; here only a node.toml, named by "
                f"the SuperNode's environment variable {NODE}, says where clients' state is kept"
            )

    def check_evaluation(self, config: RunConfig) -> None:
        """Refuse an evaluation that the policy does not allow, or that the run does not declare."""
        if not self.answers_evaluation and not self._has_noise(config):
            raise _refusal("evaluation is asked for; here it is off")
        # A private config with clients-every above 0 must also set evaluate.unprotected or
        # evaluate.private, so that it has declared how metrics are shown.
        if not config.evaluate.clients_every:
            raise _refusal("evaluation is asked for, and evaluate.clients-every is 0")

    def _has_noise(self, config: RunConfig) -> bool:
        """Whether the run declares noise on metrics of at least the updates' minimum."""
        floors = self.least_share_noise_multiplier, self.least_example_noise_multiplier
        if self.evaluation is not None or any(floors) or self.largest_epsilon < math.inf:
            return False
        noise = config.evaluate.multiplier or 0.0
        return config.evaluate.private and noise >= self.least_noise_multiplier

    def join(self, client: int) -> None:
        """Count a round on disk before the client joins it; refuse it above ``most_rounds``.

        Without a limit, rounds are not counted.
        """
        if not self.most_rounds:
            return
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Locked and synced before training, so that concurrent runs and a crash cannot bypass the
        # limit.
        descriptor = regular_files.opener(
            self.state / f"{_ROUNDS}-{client}", os.O_RDWR | os.O_CREAT, 0o600
        )
        with open(descriptor, "r+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read().strip()
            if text and not text.isdigit():
                raise _refusal(f"its file {_ROUNDS} holds no number")
            rounds = int(text or 0)
            if rounds >= self.most_rounds:
                raise _refusal(f"it has joined {rounds} rounds; the limit is {self.most_rounds}")
            file.seek(0)
            file.write(f"{rounds + 1}\n")
            file.flush()
            os.fsync(file.fileno())


def _check_scheduled(message: Message, config: RunConfig, client: int) -> None:
    """Refuse a request that the public schedule of a buffered cohort does not have.

    The node simulates the schedule from the run's settings. So it is asked for at most
    ``cohort.participations`` releases, ``cohort.separation`` apart, which the charge counts on.
    """
    from fedsim.federation.engines.client_app import round_of  # needs torch

    schedule = declared_schedule(config, cohort(config))
    if schedule is None:
        return
    number = round_of(message)
    if not 1 <= number <= config.rounds or client not in schedule.starting(number)[0]:
        raise _refusal(
            f"the server asks for an update in round {number}, in which the schedule of "
            f"cohort.name = 'buffered' has none of client {client} (at most cohort.participations "
            f"= {schedule.cohort.participations}, cohort.separation = "
            f"{schedule.cohort.separation} apart)"
        )


def _adds_noise(config: RunConfig) -> bool:
    """Whether this node is to add noise to its update before it sends it."""
    return config.secagg.placement(config.noise).at_clients


def _may_be_path(text: str) -> bool:
    """Whether an option could name a file outside the current directory, or one that exists."""
    begins = text[:1] in ("/", "~") or text[:5].lower() == "file:"
    return begins or ".." in Path(text).parts or os.path.lexists(text)


def _refusal(reason: str) -> FedsimError:
    return FedsimError(f"this node's policy refuses the run: {reason}.")


def _require_at_least(key: str, value: float, limit: float) -> None:
    if not value >= limit:
        raise _limit_error(key, value, limit)


def _limit_error(key: str, value: float, limit: float) -> FedsimError:
    return _refusal(f"{key} is {value:g}; here it must be at least {limit:g}")
