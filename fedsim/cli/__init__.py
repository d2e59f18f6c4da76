"""The `fedsim` command: a file a subject, most of them one subcommand."""

from fedsim.cli.boundary import main

__all__ = ["main"]
