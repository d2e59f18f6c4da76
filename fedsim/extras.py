"""Packages that only parts of fedsim need, and the extra of the package that brings each."""

from __future__ import annotations

from importlib.util import find_spec

from fedsim.errors import FedsimError

EXTRAS = {
    "datasets": "flwr-datasets",
    "flwr_datasets": "flwr-datasets",
    "matplotlib": "plots",
    "mlflow": "mlflow",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "opacus": "opacus",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "torchvision": "vision",
    "wandb": "wandb",
}


def require(what: str, *packages: str) -> None:
    """Refuse what needs packages that are not installed.

    Raises
    ------
    FedsimError
        Naming ``what`` needs them, and the extra that has them.
    """
    for package in packages:
        if find_spec(package) is None:
            raise FedsimError(f"{what} needs {package}, {absent(package)}")


def absent(package: str) -> str:
    """That a package is not installed, and how it is; for the end of a sentence."""
    return f"which is not installed; `pip install 'fedsim-dp[{EXTRAS[package]}]'` has it."


def of_import(error: ImportError) -> str | None:
    """The sentence of a package that an import lacked; None if it is of no extra."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRAS:
        return None
    return f"this needs {package}, {absent(package)}"
