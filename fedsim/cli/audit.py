"""`fedsim audit`: attack what a config claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from fedsim.cli.console import Output, check_out
from fedsim.config import RunConfig


def audit(
    config: Annotated[Path, typer.Argument(help="The TOML file that describes the run.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key: `noise.multiplier=2.0`."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The picture, a PNG; `runs/<name>-audit.png` if unset.")
    ] = None,
    runs: Annotated[
        int,
        typer.Option(help="Runs without a canary, and as many with, in each world; 0: no worlds."),
    ] = 300,
    rounds: Annotated[int, typer.Option(help="Rounds of each of these runs, at most.")] = 2,
    canaries: Annotated[int, typer.Option(help="Canaries of the one run; 0 leaves it out.")] = 512,
    confidence: Annotated[
        float, typer.Option(help="Probability with which a true claim is accepted.")
    ] = 0.99,
    seed: Annotated[int, typer.Option(help="Another seed makes another audit.")] = 1,
    deep: Annotated[
        bool, typer.Option("--deep", help="Look at ten times the releases for noise of few seeds.")
    ] = False,
) -> None:
    """Attack what a config claims, through the strategy and the engine that it would run on.

    Tests look at whole runs of the config's own length: is what is released white noise of the
    claimed size, new in every round, down to its last bit; are clients sampled as the ledger says;
    how far does one client, alone or among several, move the sum and whatever else leaves a round;
    is every release charged, at what it costs, and does a budget stop the run.

    A canary is an adversarial client. It is put into federations where it shows most; many runs
    with it and without it give the false positives and false negatives of a membership-inference
    attack, and these are compared with the trade-off curve that the ledger's (epsilon, delta)
    allows, for every epsilon. Another attack flips a coin for each of many
    canaries in one run of the config's own length, and guesses the coins (Steinke, Nasr and
    Jagielski 2023; Mahloujifar, Melis and Chaudhuri 2024).

        fedsim audit run.toml --runs 2000

    The exit status is 0 when no violation is detected and 1 when one is. An audit can detect a
    violation; that it does not is no proof. The data, the model and the client algorithm play no
    part: the claim holds for any update that a client may send.
    """
    settings = RunConfig.load(config, set_ or [])
    path = out or Path("runs") / f"{settings.name}-audit.png"
    check_out(path, ".png")
    # Only now: a mistake in the config should not wait for torch and matplotlib.
    from fedsim.audit import WORLDS
    from fedsim.audit.config_audit import ConfigAudit
    from fedsim.audit.report import draw, tabulate
    from fedsim.federation.engines.process import use_one_thread
    from fedsim.reports.plots import save
    from fedsim.runs.metrics import duration

    use_one_thread()
    console = Output()
    # As docs/audit.md measures: ten seconds of whole runs, and as many of the default worlds.
    seconds = 10 + 10 * runs / 300 * max(rounds, 1) / 2
    console.print(
        f"Takes about {duration(seconds)} of one core; larger --runs and --rounds, longer."
    )
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("runs", total=2 * runs * len(WORLDS))
        verdict, assumed = ConfigAudit(settings, rounds).run(
            runs=runs,
            canaries=canaries,
            confidence=confidence,
            seed=seed,
            deep=deep,
            tick=lambda finished: progress.advance(task, finished),
        )
    console.print(tabulate(verdict, assumed))
    save(draw(verdict, settings.name), path, dpi=150)
    console.print(f"picture: {path}", soft_wrap=True)
    if not verdict.accepted:
        raise typer.Exit(1)
