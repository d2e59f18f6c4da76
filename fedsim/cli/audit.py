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

from fedsim.cli.console import (
    CONFIG_ARGUMENT,
    Output,
    Overrides,
    check_out,
    panel_option,
)
from fedsim.config import RunConfig
from fedsim.errors import FedsimError

if TYPE_CHECKING:
    from fedsim.audit import Verdict


_target = partial(panel_option, "Code that is not fedsim's")
_claim = partial(panel_option, "Its claims, in place of a file")


def audit(
    config: Annotated[Path | None, CONFIG_ARGUMENT] = None,
    set_: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Draw a picture, a PNG.")] = None,
    seconds: Annotated[float, typer.Option(help="How long the attacks may take, about.")] = 25.0,
    runs: Annotated[
        int | None,
        typer.Option(
            help="Runs with a canary, and as many without, in each federation; by default as many "
            "as fit in --seconds."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of each of these runs, at most; 2 of a config.")
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="Probability that a correct claim passes the audit.")
    ] = 0.99,
    seed: Annotated[int, typer.Option(help="Another seed makes another audit.")] = 1,
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
    """Test what a config's mechanism, sampler, noise and rows promise, and attack its claim.

    The tests examine the config's own objects: whether any row adds more than the bound says;
    whether clients are sampled as often as the sampler's law says; whether released noise is white,
    normal, of the claimed size and never repeated; with example-level privacy, how far one example
    moves a sum in the config's own model; whether each release has its line in the ledger.

    The attacks put an adversarial client, the canary, into small federations in which it is easiest
    to detect. Many runs with it and without it give the false-positive and false-negative rates of
    a membership-inference attack, which are compared with the trade-off curve that the claimed
    (epsilon, delta) allows, for every epsilon.

        fedsim audit run.toml --seconds 100

    Code that is not fedsim's is attacked in the same way, by what it releases:

        fedsim audit --target mine.py:train --claim claim.toml

    The exit status is 0 when no violation is detected, 1 when one is, and 2 when nothing could be
    tested. An audit can detect a violation; that it detects none is no proof.
    """
    from fedsim.federation.engines.process import use_one_thread

    use_one_thread()
    if out is not None:
        check_out(out, ".png")
    claimed: dict[str, Any] = {
        "noise-multiplier": noise_multiplier,
        "clip-norm": clip_norm,
        "rate": rate,
        "epsilon": epsilon,
        "delta": delta,
        "adjacency": adjacency,
    }
    options: dict[str, Any] = {
        "seconds": seconds,
        "runs": runs or 0,
        "confidence": confidence,
        "seed": seed,
    }
    if target and config is None:
        _refuse_options({"set", "allow-code"}, "a config; this audit is of a --target")
        if rate is not None and rate < 1:
            claimed["sampling"] = "fixed" if adjacency == "replace-one" else "poisson"
        claimed["rounds"] = rounds
        name = target.rpartition(":")[2]
        verdict, assumptions = _audit_target(target, python, claim, claimed, options)
    elif config is not None and not target:
        of_targets = claimed.keys() | {"claim", "python"}
        _refuse_options(of_targets, "--target; a config states its own claims")
        from fedsim.audit.config_audit import audit_config

        settings = RunConfig.load(config, set_ or [])
        name = settings.name
        verdict, assumptions = audit_config(
            settings, rounds=2 if rounds is None else rounds, **options
        )
    else:
        raise FedsimError("an audit takes a config or a --target; name one of them.")
    _show(verdict, assumptions, name, out, everything=all_, as_json=as_json)
    if not verdict.accepted:
        raise typer.Exit(1)


def _refuse_options(names: Set[str], place: str) -> None:
    """Refuse options of the other kind of audit, which would be ignored."""
    context = get_current_context()
    for option in context.command.params:
        is_set = context.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT
        if is_set and option.opts[0].removeprefix("--") in names:
            raise FedsimError(f"{option.opts[0]} belongs to {place}.")


def _audit_target(
    target: str,
    python: str,
    claim: Path | None,
    plain: Mapping[str, object],
    options: Mapping[str, Any],
) -> tuple[Verdict, Mapping[str, str]]:
    from fedsim.audit import TargetClaim, audit_target, open_target

    claimed = TargetClaim.read(claim, plain)
    with open_target(target, python, options["seconds"]) as opened_target:
        verdict = audit_target(opened_target, claimed, **options)
    return verdict, {"target": target, **claimed.assumptions}


def _show(
    verdict: Verdict,
    assumptions: Mapping[str, str],
    name: str,
    path: Path | None,
    *,
    everything: bool,
    as_json: bool,
) -> None:
    from fedsim.audit.report import draw, tabulate
    from fedsim.reports.plots import save

    console = Output()
    if path is not None:
        save(draw(verdict, name), path, dpi=150)
    if as_json:
        typer.echo(json.dumps({"assumed": dict(assumptions), **verdict.to_dict()}, indent=2))
        return
    console.print(tabulate(verdict, assumptions, everything=everything))
    if path is not None:
        console.print_files({path: "the picture"})
