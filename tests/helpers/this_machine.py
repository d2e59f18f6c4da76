"""The machine that runs the tests, as far as the bytes of a float's sum depend on it."""

from __future__ import annotations

from pathlib import Path

import torch

from fedsim.kernels.rows import is_supported


def machine() -> str:
    """Processor, its vector instructions, the build of torch, and whether kernels are compiled."""
    model = "unknown"
    if (cpu := Path("/proc/cpuinfo")).exists():
        names = (line for line in cpu.read_text().splitlines() if line.startswith("model name"))
        model = next(names, "unknown").partition(":")[2].strip() or model
    kernels = "compiled" if is_supported(torch.zeros(1, 1)) else "torch alone"
    capability = torch.backends.cpu.get_cpu_capability()
    return " | ".join((model, capability, f"torch {torch.__version__}", kernels))
