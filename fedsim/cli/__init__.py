"""The `fedsim` command: one file per subject, most of them one subcommand."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from click import Command
    from click.exceptions import ClickException

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with the status of the table in `fedsim.cli.boundary`.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process if unset.
    """
    # These must be set before Flower and torch are imported: Flower must not send telemetry or
    # look for updates, and each process must use one thread.
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if any(option.startswith("error") for option in sys.warnoptions):
        # Python's -W error: shown, but libraries warn while they are imported.
        warnings.simplefilter("default")
    from fedsim.cli.boundary import guarded, open_standard_streams

    open_standard_streams()
    words = sys.argv[1:] if arguments is None else arguments
    _announce_imports(words)
    try:
        status = guarded(lambda: _command(words))
    except KeyboardInterrupt:
        status = 130  # a second Ctrl-C, while the first was being handled
    sys.exit(status)


def _announce_imports(arguments: Sequence[str]) -> None:
    """Print "importing" on a terminal, as imports take seconds; the next output overwrites it."""
    silent = {"-q", "--quiet", "--json", "-h", "--help"}
    if not arguments or arguments[0] != "run" or silent & set(arguments):
        return
    with suppress(OSError, ValueError):  # lost output is reported at the end of the command
        if sys.stdout.isatty():
            sys.stdout.write("importing\r")
            sys.stdout.flush()


@cache
def _subcommands() -> Command:
    """All subcommands, built from their functions' signatures; cached, as it takes 0.1 seconds."""
    import typer

    from fedsim.cli.app import app

    return typer.main.get_command(app)


def _command(arguments: Sequence[str]) -> int:
    from click.exceptions import Abort, ClickException, NoArgsIsHelpError

    from fedsim.errors import FedsimError

    try:
        status = _subcommands().main(list(arguments), prog_name="fedsim", standalone_mode=False)
    except Abort:
        raise KeyboardInterrupt from None
    except NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" Try `{context.command_path} --help`." if context else ""
        # Both typer and click append a suggestion of similar names: keep one of equal sentences.
        sentences = dict.fromkeys(re.split(r"(?<=[.?]) ", error.format_message()))
        message = re.sub(r"(?<![.?])$", ".", " ".join(sentences))
        raise FedsimError(_in_terms_of_keys(error, message) + hint) from None
    return status if isinstance(status, int) else 0


def _in_terms_of_keys(error: ClickException, message: str) -> str:
    """The message for an unknown option of a command that has --set, if it is a config's key."""
    from click.exceptions import NoSuchOption

    if not isinstance(error, NoSuchOption) or error.ctx is None:
        return message
    if not any("--set" in parameter.opts for parameter in error.ctx.command.params):
        return message
    from fedsim.config.describe import keys
    from fedsim.synonyms import keys_like

    option = error.option_name.lstrip("-")
    if option in ("run-config", "federation-config", "config"):  # Flower's and others'
        return f"No such option '{error.option_name}'. Did you mean '--set KEY=VALUE'?"
    known = [key.name for key in keys()]
    if like := keys_like(option, known):
        sets = " or ".join(f"--set {key}=VALUE" for key in like)
        return f"No such option '{error.option_name}'. Did you mean {sets}?"
    return message
