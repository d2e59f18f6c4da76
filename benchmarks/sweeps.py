"""`python -m benchmarks.sweeps`: cost of a sweep of thirty members, in units of one run.

README's first config (softmax on the digits, 100 rounds, private) is run alone and as a sweep of
thirty members (five rates, six seeds), each as a command, in turns. Reported are the CPU seconds of
all their processes with imports, the least of ``--times``. One member's files must have the same
bytes as those of the run alone.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

RATES, SEEDS = "0.1,0.2,0.3,0.4,0.5", "1,2,3,4,5,6"
MOST = 6.0
"""Most that a sweep of thirty may cost, in units of one run."""

SAME = ("config.toml", "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=2, help="how often each is measured")
    single, sweep = measured(parser.parse_args().times)
    print(
        f"one run {single:.1f} CPU s, a sweep of thirty {sweep:.1f}: {sweep / single:.1f} times as "
        f"much (at most {MOST:g})"
    )


def measured(times: int) -> tuple[float, float]:
    """CPU seconds of one run, and of the sweep."""
    singles, sweeps = [], []
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "digits.toml"
        config.write_text(first_config())
        for number in range(times):
            alone, together = Path(place) / f"alone-{number}", Path(place) / f"sweep-{number}"
            seed = ["--set", "seed=3", "--set", "client.lr=0.3"]
            singles.append(cpu_seconds("run", str(config), *seed, "--out", str(alone)))
            axes = ["--over", f"client.lr={RATES}", "--over", f"seed={SEEDS}"]
            sweeps.append(cpu_seconds("sweep", str(config), *axes, "--out", str(together)))
            for name in SAME:
                member = together / "client.lr=0.3,seed=3" / name
                assert member.read_bytes() == (alone / name).read_bytes(), name
    return min(singles), min(sweeps)


def first_config() -> str:
    """README's first config."""
    readme = Path(__file__).parents[1] / "README.md"
    found = re.search(r'```toml title="digits.toml"\n(.*?)```', readme.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def cpu_seconds(*arguments: str) -> float:
    """CPU seconds of a fedsim command, with its start-up."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "fedsim", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
