"""Optional packages, and the extra of ``fedsim-dp`` that installs each."""

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
    "trackio": "trackio",
    "wandb": "wandb",
}


def require(what: str, *packages: str) -> None:
    """Refuse a feature whose optional packages are not installed.

    Raises
    ------
    FedsimError
        Saying that ``what`` needs the package, and which extra installs it.
    """
    for package in packages:
        if find_spec(package) is None:
            raise FedsimError(f"{what} needs {package}, {absent(package)}")


def absent(package: str) -> str:
    """End of a sentence: the package is not installed, and how to install it."""
    return f"which is not installed; `pip install 'fedsim-dp[{EXTRAS[package]}]'` has it."


def of_import(error: ImportError) -> str | None:
    """Message about a package that an import did not find; None if no extra has it."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRAS:
        return None
    return f"this needs {package}, {absent(package)}"
