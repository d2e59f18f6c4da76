"""Write what follows from the code: `make generate`, and a test that it has been run."""

from __future__ import annotations

from pathlib import Path

import tomli_w

from fedsim.config.flower import flower_table

ROOT = Path(__file__).parents[1]
HEAD = "[tool.flwr.app.config]\n"


def pyproject() -> str:
    """pyproject.toml with Flower's table as it should be; it is the file's last."""
    text = (ROOT / "pyproject.toml").read_text()
    tree = {"tool": {"flwr": {"app": {"config": flower_table()}}}}
    table = tomli_w.dumps(tree)
    return text[: text.index(HEAD)] + table[table.index(HEAD) :]


def main() -> None:
    """Write them all."""
    (ROOT / "pyproject.toml").write_text(pyproject())


if __name__ == "__main__":
    main()
