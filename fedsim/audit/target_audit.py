"""Loads a target by its name, and audits it: attacks, checks of noise and sampling, a verdict.

A target is a callable of this process or, if it is named, one that runs in a process of its own,
perhaps with other packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.arguments import check_arguments
from fedsim.audit import catalogue, causes
from fedsim.audit import noise_checks as noise
from fedsim.audit.attacks import (
    ADAPTIVE_WORLDS,
    NEARLY_ZERO_NORM,
    TARGET_WORLDS,
    AttackResult,
    Observations,
    Target,
    TargetWorld,
    clip_norm_follows_rows,
)
from fedsim.audit.causes import RowCauses
from fedsim.audit.federation import SHAPES, SyntheticFederation, TargetRelease
from fedsim.audit.findings import Finding, Part, invariant
from fedsim.audit.noise_checks import NoiseSample
from fedsim.audit.sampling_checks import Sampled
from fedsim.audit.target_claim import ReleaseClaim
from fedsim.audit.verdict import Verdict, check_numbers, risk_of_attack
from fedsim.errors import FedsimError

MIN_RUNS, MAX_RUNS = 30, 1000
MAX_OVERRUN = 100
"""Largest factor by which `MIN_RUNS` may take longer than ``seconds``."""
MAX_SILENT = 64
"""Number of rounds of silent federations for checks of noise, which compare all pairs."""

SECONDS_TO_END = 30.0
"""Time that a target's process has to end by itself."""
LOOKS_GAUSSIAN = 0.01
"""p-value of the distribution's check above which noise is assumed to be Gaussian."""

_NOISE = (
    *(noise.layer_sizes, noise.coordinate_sizes, noise.means, noise.exact_repeats),
    *(noise.round_pairs, noise.round_pairs_without_signs, noise.coordinate_pairs),
)
_GAUSSIAN = (noise.extremes, noise.shape)


class TargetError(FedsimError):
    """A target could not be run; ``reason`` says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} could not be run: {reason.rstrip('.')}.")
        self.reason = reason


@dataclass(eq=False)
class TargetAudit:
    """An audit of a target.

    Parameters
    ----------
    target : callable
        Function from a `SyntheticFederation` to its releases.
    claim : ReleaseClaim
    seconds : float
        Approximate time for all runs.
    runs : int
        Runs without, and runs with the canary, of each attack; 0 for as many as ``seconds`` allow.
    seed : int
    """

    target: Target
    claim: ReleaseClaim
    seconds: float
    runs: int
    seed: int
    _zero_norm: float = field(default=0.0, init=False)

    def verdict(self, confidence: float, others: Sequence[Finding] = ()) -> Verdict:
        """Make all runs, and decide whether they refute the claim.

        Parameters
        ----------
        confidence : float
        others : sequence of Finding
            Findings of the caller's own checks, which share the risk.

        Raises
        ------
        FedsimError
            If the target cannot be run, or does not release models.
        """
        zero_rows = self._zero_rows()
        self._zero_norm = 0.0 if zero_rows.p_value else NEARLY_ZERO_NORM
        worlds = self._worlds()
        runs = self.runs or self._affordable_runs(2 * len(worlds))
        silent = self._silent_runs()
        risk = risk_of_attack(confidence, len(worlds), checked=True)
        results = [self._runs_of(world, runs, number) for number, world in enumerate(worlds, 1)]
        two_worlds = [result.attack(risk) for result in results]
        samples = self._samples([silent, results[0].present])
        findings = [*others, *self._noise_findings(silent)]
        findings += self._row_findings(results, silent, samples)
        findings += [] if samples is None else causes.sample_causes(samples)
        findings += [zero_rows, *self._epsilon_findings()]
        return Verdict(self.claim.claim, tuple(two_worlds), tuple(findings), confidence)

    def _worlds(self) -> list[TargetWorld]:
        """Worlds for the claim. A canary of zeros is only visible under add-remove adjacency."""
        add_remove = self.claim.adjacency == "add-remove"
        chosen = [world for world in TARGET_WORLDS if world.canary_norm or add_remove]
        if self.claim.adaptive:
            chosen = list(ADAPTIVE_WORLDS)
        return [replace(world, zero_norm=self._zero_norm) for world in chosen]

    def _silent_federation(self, seed: int) -> SyntheticFederation:
        """A federation in which all rows are zero."""
        silent = replace(TARGET_WORLDS[0], canary_norm=0.0, zero_norm=self._zero_norm)
        return silent.federation(self.claim, True, seed)

    def _zero_rows(self) -> Finding:
        """Check that rows of zeros are released like any others."""
        fault = None
        try:
            released = self.target(self._silent_federation(self.seed))
            if not np.isfinite(released.models).all():
                fault = "a model that is not finite"
        except TargetError as error:
            fault = error.reason
        finding = invariant("one run of rows of zeros", fault, "a release like any other")
        return _named(finding, "plan", "rows of zeros", "a division by the length of a row")

    def _affordable_runs(self, sides: int) -> int:
        """Number of runs of each side of an attack that fit into ``seconds``."""
        durations: list[float] = []
        while not durations or (len(durations) < 3 and sum(durations) < self.seconds):
            started = time.perf_counter()
            self.target(self._silent_federation(self.seed + len(durations)))
            durations.append(time.perf_counter() - started)
        one = min(durations)
        if sides * MIN_RUNS * one > MAX_OVERRUN * self.seconds:
            raise FedsimError(
                f"one run of the target takes {one:.2g} s, and an audit needs at least {sides} "
                f"times {MIN_RUNS} runs; claim fewer rounds, or set --runs or more --seconds."
            )
        return int(np.clip(self.seconds / one / sides, MIN_RUNS, MAX_RUNS))

    def _silent_runs(self) -> Observations:
        runs = max(2, MAX_SILENT // self.claim.rounds)
        federations = [self._silent_federation(self.seed + k) for k in range(runs)]
        silent = Observations.collect(self.target, self.claim, federations)
        if not np.isfinite(silent.moves).all():
            raise FedsimError("for short rows the target released a model that is not finite.")
        return silent

    def _runs_of(self, world: TargetWorld, runs: int, number: int) -> AttackResult:
        first = self.seed + 10_000_000 * number
        federations = [
            world.federation(self.claim, present, first + k)
            for present in (False, True)
            for k in range(runs)
        ]
        # Observed together, since a number may be released on one side only.
        return AttackResult(
            world, self.claim, *Observations.collect(self.target, self.claim, federations).halves
        )

    def _noise_findings(self, silent: Observations) -> Iterator[Finding]:
        moves = silent.moves
        # Rows are the same in all runs, so that differences between runs are noise.
        present = noise.presence(np.diff(moves, axis=0))
        yield _named(present, "noise", "presence", causes.absence_cause(moves))
        if not present.p_value:
            return
        tests = _NOISE if self.claim.adaptive else (*_NOISE, *_GAUSSIAN)
        sample = self._sample(silent)
        if self.claim.white_noise:
            checks = [check for check in catalogue.NOISE if check.test in tests]
            yield from causes.noise_causes(sample, checks)
        if self.claim.adaptive:
            falls = clip_norm_follows_rows(silent, sample.examined)
            yield _named(falls, "bound", "a clip norm that adapts", "its update has the wrong sign")

    def _sample(self, silent: Observations) -> NoiseSample:
        """Noise of silent federations, scaled to size one, since its scale is not known.

        The scale may differ between rounds if it is the same in all runs, like a public rate.
        """
        ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES]).tolist()
        layers = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        axes = (2,) if self.claim.adaptive else (0, 2)
        return NoiseSample.from_noise(causes.scaled(silent.moves, axes), layers)

    def _is_gaussian(self, silent: Observations) -> bool:
        """Whether noise is claimed to be Gaussian or, if only epsilon is claimed, looks like it."""
        if self.claim.noise_multiplier is not None or self.claim.shift is None:
            return self.claim.shift is not None
        return noise.shape(self._sample(silent)).p_value > LOOKS_GAUSSIAN

    def _row_findings(
        self, results: list[AttackResult], silent: Observations, samples: Sampled | None
    ) -> Iterator[Finding]:
        measured = self._is_gaussian(silent)
        without_noise = float((silent.moves == 0).all((0, 1)).mean())
        row_causes = RowCauses(results, causes.oversampling(samples), without_noise)
        for result in results:
            if measured:
                yield _named(result.finding(), "bound", result.world.name, row_causes.cause(result))
            if result.world.in_all_arrays and not self.claim.adaptive:
                yield _named(result.grid(), "noise", "low bits", "noise has too few values")
            if result.present.statistics.shape[-1]:
                fault = "a released number shows it" if result.without_noise else None
                finding = invariant("numbers released beside", fault, "no number shows it")
                cause = "statistics are released without noise"
                yield _named(finding, "plan", f"what else leaves, {result.world.name}", cause)

    def _samples(self, observations: list[Observations]) -> Sampled | None:
        """All cohorts as a sample; None if they are not visible, or nothing is claimed of them."""
        ids = [
            [np.array(cohort, dtype=np.int64) for cohort in run]
            for observed in observations
            for run in observed.sampled
        ]
        if self.claim.noise_multiplier is None or not ids:
            return None
        claim = self.claim
        return Sampled.from_cohorts(ids, claim.round_event, claim.population, claim.row + "s")

    def _epsilon_findings(self) -> list[Finding]:
        claim = self.claim
        if claim.epsilon is None or claim.noise_multiplier is None:
            return []
        cost = claim.claim.epsilon
        fault = None if cost <= claim.epsilon * (1 + 1e-3) else f"epsilon {cost:.4g}"
        finding = invariant(
            f"{claim.rounds} rounds of multiplier {claim.noise_multiplier:g}",
            fault,
            f"epsilon {claim.epsilon:.4g}, as claimed",
        )
        return [_named(finding, "ledger", "epsilon claimed", "the accountant counts too little")]


def _named(finding: Finding, part: Part, name: str, cause: str) -> Finding:
    return replace(finding, part=part, name=name, cause=cause)


@check_arguments
def audit_target(
    target: Callable[[SyntheticFederation], Any],
    claim: ReleaseClaim,
    *,
    seconds: float = 25.0,
    runs: int = 0,
    confidence: float = 0.99,
    seed: int = 1,
    others: Sequence[Finding] = (),
) -> Verdict:
    """Audit the claim of a target, whose results may be all that `TargetRelease.from_result` takes.

    ``others`` are findings of the caller's own checks, which share the risk.

    Raises
    ------
    FedsimError
        If an argument is not allowed, or the target cannot be run.
    """
    check_numbers(confidence, runs or None)

    def release(federation: SyntheticFederation) -> TargetRelease:
        try:
            return TargetRelease.from_result(target(federation), federation)
        except FedsimError:
            raise
        except Exception as raised:
            name = getattr(target, "__name__", type(target).__name__)
            reason = f"{type(raised).__name__}: {raised}"
            raise TargetError(f"the target {name}", reason) from raised

    try:
        return TargetAudit(release, claim, seconds, runs, seed).verdict(confidence, others)
    except FedsimError:
        raise
    except (ValueError, TypeError) as error:
        raise FedsimError(f"the target cannot be audited: {error}") from error


@check_arguments
@contextmanager
def open_target(name: str, python: str = "", seconds: float = 25.0) -> Iterator[Target]:
    """Open a target by name, in a process of its own: whatever it does ends that process alone.

    Parameters
    ----------
    name : str
        ``module:callable`` or ``path/to/file.py:callable``.
    python : str
        Python interpreter of another environment; it needs numpy there. Empty for this one's.
    seconds : float
        As for `audit_target`. A run is ended if `MIN_RUNS` like it would take `MAX_OVERRUN`
        times as long.

    Raises
    ------
    FedsimError
        If there is no such target, its result is not a release, or a run does not end.
    """
    if not 0 < seconds <= 1e6:
        raise FedsimError(f"seconds is {seconds}; it must be above 0, and at most 1e6.")
    try:
        process = subprocess.Popen(
            [python or sys.executable, str(Path(__file__).with_name("federation.py")), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
    except OSError as error:
        raise FedsimError(
            f"--python is {python}, which cannot be run: {error.strerror}."
        ) from error
    with tempfile.TemporaryDirectory() as directory:
        try:
            yield _RemoteTarget(name, process, directory, MAX_OVERRUN * seconds / MIN_RUNS)
        finally:
            # If the process has ended, closing the pipe writes what it did not read, and fails.
            with suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
            try:
                process.wait(timeout=SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass
class _RemoteTarget:
    """A target in a process, which is ended if one run takes longer than ``limit`` seconds."""

    name: str
    process: subprocess.Popen[str]
    directory: str
    limit: float
    _ending: str = field(default="its process has ended", init=False)

    def __call__(self, federation: SyntheticFederation) -> TargetRelease:
        request = asdict(federation)
        for key in ("rows", "examples"):
            path = f"{self.directory}/{key}.npy"
            np.save(path, request[key])
            request[key] = path
        timer = threading.Timer(self.limit, self._end)
        timer.daemon = True
        timer.start()
        line = self._answer_to(json.dumps(request) + "\n")
        timer.cancel()
        answer = json.loads(line) if line else {"error": self._ending}
        if "error" in answer:
            raise TargetError(f"--target {self.name}", answer["error"])
        answer["models"] = np.load(answer["models"])
        return TargetRelease.from_result(answer, federation)

    def _end(self) -> None:
        self._ending = f"one run has not ended after {self.limit:.3g} s (--seconds may be more)"
        self.process.kill()

    def _answer_to(self, request: str) -> str:
        """One line; empty if the process has ended."""
        sends, receives = self.process.stdin, self.process.stdout
        assert sends is not None
        assert receives is not None
        try:
            sends.write(request)
            sends.flush()
            return receives.readline()
        except BrokenPipeError:
            return ""
