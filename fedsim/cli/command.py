"""Commands whose help says what their positional arguments are, and a group of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from click import Context, Parameter
from click.exceptions import Abort
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from fedsim.allowed_code import allow

__all__ = ["Command", "ConfigCommand", "Group"]


class Command(TyperCommand):
    """A command that shows the help of each `typer.Argument`.

    Click 8.5 has a help of its own for arguments, and overwrites with it the one that typer 0.20
    noted; Flower allows no newer typer.
    """

    def __init__(
        self,
        name: str | None,
        *,
        callback: Callable[..., Any],
        params: list[Any],
        **settings: Any,
    ) -> None:
        hints = get_type_hints(callback, include_extras=True)
        for param in params:
            if isinstance(param, TyperArgument) and param.name is not None:
                (told,) = hints[param.name].__metadata__
                param.help = told.help
        super().__init__(name, callback=callback, params=params, **settings)


class ConfigCommand(Command):
    """A command that runs code which a config, or a run's own, names: it has ``--allow-code``."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.params.append(
            TyperOption(
                param_decls=["--allow-code"],
                metavar="NAME",
                multiple=True,
                expose_value=False,
                callback=_allow_code,
                help="A module or package that the config may name, though it is not under the "
                "current directory; may be given several times.",
            )
        )


def _allow_code(_context: Context, _parameter: Parameter, names: tuple[str, ...]) -> None:
    allow(names)


class Group(TyperGroup):
    """A group that leaves Ctrl-C to the command's boundary; typer itself ends without a word."""

    def invoke(self, ctx: Context) -> Any:
        """Run a subcommand."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Abort from None
