"""`fedsim audit`: attack what a config claims, or what code that is not fedsim's claims."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from click import get_current_context
from click.core import ParameterSource
from rich.progress import Progress

from fedsim.cli.console import CONFIG_ARGUMENT, Output, Overrides, check_out, panel_option
from fedsim.config import RunConfig
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from fedsim.audit import Verdict


_target = partial(panel_option, "Code that is not fedsim's")
_claim = partial(panel_option, "Its claims, in place of a file")


def audit(
    config: Annotated[Path | None, CONFIG_ARGUMENT] = None,
    set_: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The picture, a PNG; `runs/<name>-audit.png` if unset.")
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            help="Runs with a canary, and as many without, in each adversarial federation: 300 of "
            "a config, of a target as many as fit in --seconds; 0 leaves out these attacks on a "
            "config.",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of each of these runs, at most; 2 of a config.")
    ] = None,
    canaries: Annotated[
        int, typer.Option(help="Canaries of the attack on one run; 0 leaves it out.")
    ] = 512,
    confidence: Annotated[
        float, typer.Option(help="Probability that a correct claim passes the audit.")
    ] = 0.99,
    seed: Annotated[int, typer.Option(help="Another seed makes another audit.")] = 1,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Examine ten times as many releases for noise that repeats among seeds."
        ),
    ] = False,
    all_: Annotated[
        bool,
        typer.Option("--all", help="Show every test, not only those that detected a violation."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    target: Annotated[str, _target("What is audited: module:callable, or file.py:callable.")] = "",
    claim: Annotated[Path | None, _target("A TOML file with its claims.")] = None,
    python: Annotated[
        str, _target("The interpreter of another environment, in which the target runs.")
    ] = "",
    seconds: Annotated[float, _target("How long its runs may take, about.")] = 25.0,
    noise_multiplier: Annotated[
        float | None, _claim("Standard deviation of the noise on the sum, over the clip norm.")
    ] = None,
    clip_norm: Annotated[float | None, _claim("The largest L2 norm of a row.")] = None,
    rate: Annotated[
        float | None, _claim("The share of rows in a round; below 1 with Poisson sampling.")
    ] = None,
    epsilon: Annotated[float | None, _claim("The epsilon of all rounds together.")] = None,
    delta: Annotated[float | None, _claim("Of that epsilon.")] = None,
    adjacency: Annotated[
        str | None, _claim("Which neighbours: add-remove, zero-out or replace-one.")
    ] = None,
) -> None:
    """Attack what a config claims, through the strategy and the engine that it would run on.

    Tests look at whole runs of the config's own length: whether what is released is white noise of
    the claimed size, new in every round, down to its last bit; whether clients are sampled as the
    ledger says; how far one client, alone or among several, moves the sum and anything else that
    leaves a round; whether every release is charged what it costs, and a budget stops the run.

    A canary is an adversarial client. It is put into federations in which it is easiest to detect;
    many runs with it and without it give the false-positive and false-negative rates of a
    membership-inference attack, which are compared with the trade-off curve that the ledger's
    (epsilon, delta) allows, for every epsilon. Another attack includes each of many canaries in
    one run of the config's own length by a coin flip, and guesses the coins (Steinke, Nasr and
    Jagielski 2023; Mahloujifar, Melis and Chaudhuri 2024).

        fedsim audit run.toml --runs 2000

    Clients are made up, since the claim must be true of any update that a client may send. Only
    two tests use the config's data, model and client algorithm: two rounds of the run itself, in
    which no random number may be used twice, and with example-level privacy a few examples, none
    of which may move a sum by more than its bound.

    Code that is not fedsim's is audited by what it releases on a synthetic federation:

        fedsim audit --target mine.py:train --claim claim.toml

    The exit status is 0 when no violation is detected, 1 when one is, and 2 when nothing could be
    tested. An audit can detect a violation; that it detects none is no proof.
    """
    from fedsim.federation.engines.process import use_one_thread

    use_one_thread()
    plain: dict[str, Any] = {
        "noise-multiplier": noise_multiplier, "clip-norm": clip_norm, "rate": rate,
        "epsilon": epsilon, "delta": delta, "adjacency": adjacency, "rounds": rounds,
    }  # fmt: skip
    if target and config is None:
        of_configs = {"set", "allow-code", "canaries", "deep"}
        _refuse_options(of_configs, "a config; this audit is of a --target")
        if rate is not None and rate < 1:
            plain["sampling"] = "fixed" if adjacency == "replace-one" else "poisson"
        name = target.rpartition(":")[2]
        path = out or Path("runs") / f"{name}-audit.png"
        check_out(path, ".png")
        options = {
            "seconds": seconds, "runs": runs or 0, "confidence": confidence, "seed": seed,
        }  # fmt: skip
        verdict, assumptions = _audit_target(target, python, claim, plain, options)
    elif config is not None and not target:
        of_targets = (plain.keys() - {"rounds"}) | {"claim", "python", "seconds"}
        _refuse_options(of_targets, "--target; a config states its own claims")
        settings = RunConfig.load(config, set_ or [])
        name, path = settings.name, out or Path("runs") / f"{settings.name}-audit.png"
        check_out(path, ".png")
        verdict, assumptions = _audit_config(
            settings,
            quiet=as_json,
            runs=300 if runs is None else runs,
            rounds=2 if rounds is None else rounds,
            canaries=canaries,
            confidence=confidence,
            seed=seed,
            deep=deep,
        )
    else:
        raise FedsimError("an audit takes a config or a --target; name one of them.")
    _show(verdict, assumptions, name, path, everything=all_, as_json=as_json)
    if not verdict.accepted:
        raise typer.Exit(1)


def _refuse_options(names: Set[str], place: str) -> None:
    """Refuse options of the other kind of audit, which would be ignored."""
    context = get_current_context()
    for option in context.command.params:
        is_set = context.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT
        if is_set and option.opts[0].removeprefix("--") in names:
            raise FedsimError(f"{option.opts[0]} belongs to {place}.")


def _audit_config(
    settings: RunConfig, *, quiet: bool, runs: int, rounds: int, **options: Any
) -> tuple[Verdict, Mapping[str, str]]:
    from fedsim.audit import WORLDS
    from fedsim.audit.config_audit import audit_config
    from fedsim.runs.metrics import duration

    console = Output()
    if not quiet:
        # Measured in docs/audit.md: ten seconds for whole runs, and ten for the adversarial
        # federations at the default --runs and --rounds.
        expected = duration(10 + 10 * runs / 300 * max(rounds, 1) / 2)
        console.print(f"Takes about {expected} of one core; larger --runs and --rounds, longer.")
    hidden = quiet or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("runs", total=2 * runs * len(WORLDS))
        return audit_config(
            settings,
            rounds=rounds,
            runs=runs,
            tick=lambda finished: progress.advance(task, finished),
            **options,
        )


def _audit_target(
    target: str,
    python: str,
    claim: Path | None,
    plain: Mapping[str, object],
    options: Mapping[str, Any],
) -> tuple[Verdict, Mapping[str, str]]:
    from fedsim.audit.outside import TargetClaim, audit_target, open_target

    claimed = TargetClaim.read(claim, plain)
    with open_target(target, python, options["seconds"]) as opened_target:
        verdict = audit_target(opened_target, claimed, **options)
    return verdict, {"target": target, **claimed.assumptions}


def _show(
    verdict: Verdict,
    assumptions: Mapping[str, str],
    name: str,
    path: Path,
    *,
    everything: bool,
    as_json: bool,
) -> None:
    from fedsim.audit.report import draw, tabulate
    from fedsim.reports.plots import save

    console = Output()
    save(draw(verdict, name), path, dpi=150)
    if as_json:
        typer.echo(json.dumps({"assumed": dict(assumptions), **verdict.to_dict()}, indent=2))
        return
    console.print(tabulate(verdict, assumptions, everything=everything))
    console.print(f"picture: {path}", soft_wrap=True)
