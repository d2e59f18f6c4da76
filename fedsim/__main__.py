"""``python -m fedsim``: the same as the command ``fedsim``."""

from __future__ import annotations

from fedsim.cli import main

if __name__ == "__main__":
    main()
