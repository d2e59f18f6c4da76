"""Audit of a config: its mechanism, cohort, noise, number of rounds, and local training.

The claim is attacked on smaller federations of synthetic clients. Two-world runs have few rounds,
with less noise so that they cost the same epsilon as the config's run: a bug shows in two rounds as
well as in two hundred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whitebox.clients import WORLDS
from whitebox.config_evidence import ConfigEvidence, evaluating
from whitebox.metrics_release import MetricsEvidence
from whitebox.strategy_audit import audit
from whitebox.target import StrategyTarget

from fedsim.audit.claim import Claim
from fedsim.audit.config_audit import refuse_without_claim
from fedsim.audit.findings import Finding, findings
from fedsim.audit.verdict import Verdict, check_numbers, silenced_logs
from fedsim.config import RunConfig
from fedsim.runs import factories
from fedsim.runs.preflight import check
from fedsim.runs.resolve import resolve

MAX_ROUNDS = 300
"""Rounds of the one run: more cost time and detect little more."""


def audit_config(
    config: RunConfig,
    *,
    rounds: int = 2,
    runs: int = 300,
    canaries: int = 512,
    checks: bool = True,
    confidence: float = 0.99,
    seed: int = 1,
    deep: bool = False,
    tick: Callable[[int], None] = lambda runs: None,
) -> tuple[Verdict, dict[str, str]]:
    """Audit the claim of a config, and state the audit's assumptions.

    Parameters
    ----------
    config : RunConfig
    rounds : int
        Largest number of rounds of a two-world run.
    runs, canaries, checks, confidence, seed, deep, tick
        As for `strategy_audit.audit`; with 0 runs there are no worlds.

    Returns
    -------
    verdict : Verdict
    assumptions : mapping of name to sentence

    Raises
    ------
    FedsimError
        If an argument is not allowed, or the config claims no privacy at either level, or could not
        be run (with the message of `fedsim run`); before any work.
    """
    check_numbers(confidence, runs or None, canaries)
    refuse_without_claim(config, rounds)
    resolved = resolve(config)
    check(resolved)
    evidence = ConfigEvidence(resolved, seed)
    results: list[Finding] = []
    assumptions: dict[str, str] = {}
    if checks:
        with silenced_logs():
            for clients in evidence.of_examples(max(20, runs // 2)):
                of_examples = findings(clients.checks())
                results += [replace(one, name=f"{one.name}, examples") for one in of_examples]
            results += findings(evidence.checks())
            if config.evaluate.private:
                metrics = MetricsEvidence(evaluating(evidence.smaller), seed)
                of_metrics = findings(metrics.checks())
                results += [replace(one, name=f"{one.name}, metrics") for one in of_metrics]
        if config.client.private:
            assumptions["examples"] = evidence.examples
    if not config.private:
        privacy, sizes = resolved.trainer.privacy, resolved.data.sizes
        worst = factories.most_expensive_client(config, privacy, sizes, config.rounds)
        claim = Claim(() if worst is None else (worst,), config.client.noise.delta)
        return Verdict(claim, (), tuple(results), confidence), assumptions
    two_world_target, one_run_target = evidence.at_most(rounds), evidence.at_most(MAX_ROUNDS)
    whole_target = evidence.full
    verdict = audit(
        two_world_target.strategy,
        rounds=two_world_target.rounds,
        runs=runs,
        worlds=WORLDS if runs else (),
        canaries=canaries,
        one_run=one_run_target,
        full=whole_target,
        checks=checks,
        extra=results,
        confidence=confidence,
        seed=seed,
        deep=deep,
        tick=tick,
    )
    assumptions = evidence.assumptions | assumptions
    if checks:
        assumptions["tests"] = (
            f"the first {_rounds(whole_target)} of {config.rounds:,}, with clients that send "
            "zeros, that move a coordinate each, one or several at once, or that attack"
        )
    if runs:
        assumptions["two worlds"] = (
            f"{runs:,} runs without and {runs:,} with the canary, {_rounds(two_world_target)} at "
            f"noise multiplier {two_world_target.plan.noise.multiplier:.4g}: epsilon "
            f"{verdict.claim.epsilon:.4g}; thresholds from one half, errors from the other"
        )
    if canaries:
        guessed = verdict.attacks[-1]
        assumptions["one run"] = (
            f"{guessed.finding.examined}, {_rounds(one_run_target)} at "
            f"noise multiplier {one_run_target.plan.noise.multiplier:.4g}: epsilon "
            f"{guessed.claim.epsilon:.4g}"
        )
    return verdict, assumptions


def _rounds(target: StrategyTarget) -> str:
    return f"{target.rounds:,} round" + "s" * (target.rounds != 1)
