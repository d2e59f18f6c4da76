"""Commands whose help says what their positional arguments are, and a group of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from click import Context
from click.exceptions import Abort
from typer.core import TyperArgument, TyperCommand, TyperGroup

__all__ = ["Command", "Group"]


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


class Group(TyperGroup):
    """A group that leaves Ctrl-C to the command's boundary; typer itself ends without a word."""

    def invoke(self, ctx: Context) -> Any:
        """Run a subcommand."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Abort from None
