"""``python -m fedsim``: the command."""

from __future__ import annotations

from fedsim.cli import main

if __name__ == "__main__":
    main()
