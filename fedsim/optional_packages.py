"""Packages that can be absent, and what of ``fedsim-dp`` installs each."""

from __future__ import annotations

from importlib.util import find_spec

from fedsim.errors import FedsimError

EXTRAS = {
    "PIL": "vision",
    "datasets": "flwr-datasets",
    "flwr_datasets": "flwr-datasets",
    "h5py": "hdf5",
    "matplotlib": "plots",
    "mlflow": "mlflow",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "opacus": "opacus",
    "pyarrow": "flwr-datasets",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "tokenizers": "huggingface",
    "torchvision": "vision",
    "trackio": "trackio",
    "transformers": "huggingface",
    "wandb": "wandb",
}

BASE = ("flwr", "torch")
"""Packages that accounting works without: ``pip install --no-deps`` leaves them out."""


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
    extra = "" if package in BASE else f"[{EXTRAS[package]}]"
    return f"which is not installed; `pip install 'fedsim-dp{extra}'` has it."


def missing_package_message(error: ImportError) -> str | None:
    """Message about a package that an import did not find; None if it is none of fedsim's."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in (*EXTRAS, *BASE):
        return None
    return f"this needs {package}, {absent(package)}"
