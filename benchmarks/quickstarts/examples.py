"""Data of the two quick starts, converted from local arrays to each package's and fedsim's form."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
CENTRAL = "central"
"""Owner of the test examples that belong to no client."""


def write_mnist(arrays: Path, folder: Path, share: float = 1.0) -> None:
    """Write MNIST's four files in torchvision's form, from an .npz of uint8 arrays.

    With a share below 1, they have only the first images.
    """
    names = {"train": "train", "test": "t10k"}
    folder.mkdir(parents=True, exist_ok=True)
    with np.load(arrays) as file:
        for split, name in names.items():
            first = round(share * len(file[f"y_{split}"]))
            images, labels = file[f"x_{split}"][:first], file[f"y_{split}"][:first]
            (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
            (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))


def idx(array: Array) -> bytes:
    """An array of whole numbers from 0 to 255, in MNIST's idx format."""
    sizes = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return sizes + array.astype(np.uint8).tobytes()


def write_pfllib(split: Path, folder: Path, clients: int) -> None:
    """Write the examples that PFLlib's script has split among clients, for `fedsim_rounds`.

    PFLlib evaluates the loss on all training examples and the accuracy on all test examples, so in
    clients.npz the test examples are both. In judged.npz they are the clients' test examples only.
    """
    parts: dict[str, list[dict[str, Array]]] = {
        name: [
            # Unpickling is safe here: the script wrote these files on this machine.
            np.load(split / name / f"{client}.npz", allow_pickle=True)["data"].tolist()
            for client in range(clients)
        ]
        for name in ("train", "test")
    }
    x = {name: np.concatenate([part["x"] for part in parts[name]]) for name in parts}
    y = {name: np.concatenate([part["y"] for part in parts[name]]) for name in parts}
    sizes = [len(part["y"]) for part in parts["train"]]
    np.savez(
        folder / "clients.npz",
        x_train=x["train"][:, 0],
        y_train=y["train"],
        owner_train=np.repeat(np.arange(clients), sizes),
        x_test=np.concatenate([x["test"], x["train"]])[:, 0],
        y_test=np.concatenate([y["test"], y["train"]]),
    )
    np.savez(folder / "judged.npz", x=x["test"], y=y["test"])
