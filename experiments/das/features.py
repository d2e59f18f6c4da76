"""Features of a data set's images from torchvision's ResNet-18, with weights the user provides."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedsim import datasets
from fedsim.errors import FedsimError
from fedsim.settings import Ge

FILE = "features.npz"
NORM = 10.0
_BATCH = 64
# Normalisation of the images on which torchvision's weights were trained.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """Data set and network for `write_features`.

    Attributes
    ----------
    dataset : str
        Data set of images ``[N, 3, H, W]``, such as "cifar100".
    weights : str
        File with the weights of torchvision's ResNet-18, in the data set's folder.
    side : int
        Side in pixels to which images are scaled.
    """

    dataset: str
    weights: str
    side: Annotated[int, Ge(32)] = 224


def write_features(extractor: Extractor, data: Path, path: Path) -> None:
    """Write the features of both splits, float32 ``[N, 512]``, to ``path`` atomically.

    A row is the input of the network's last layer, scaled to norm 10, for which the experiment's
    rate is chosen. It depends on its own image only, so that it reveals nothing of others.

    Raises
    ------
    FedsimError
        If the data set or the weights are missing or of another kind.
    """
    from torchvision.models import resnet18  # seconds to import, and most runs need none of it

    dataset = datasets.load(extractor.dataset, directory=data)
    if dataset.train.x.shape[1] != 3 or dataset.train.x.dtype != torch.uint8:
        raise FedsimError(
            f"features.dataset is '{extractor.dataset}', of shape {dataset.input_shape}; it must "
            "be a data set of images of three channels, such as cifar100."
        )
    network = resnet18()
    _read(network, data / extractor.weights)
    network.fc = torch.nn.Identity()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network.to(device).eval()
    x_train, x_test = (
        torch.cat(
            [
                _features(network, images.to(device), extractor.side)
                for images in torch.split(split.x, _BATCH)
            ]
        ).numpy()
        for split in (dataset.train, dataset.test)
    )
    unfinished = path.with_name(f".{path.name}")  # np.savez appends .npz to other names
    y_train, y_test = dataset.train.y.numpy(), dataset.test.y.numpy()
    np.savez(unfinished, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    unfinished.replace(path)


def _read(network: torch.nn.Module, weights: Path) -> None:
    try:
        network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as error:
        cause = "is not there" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise FedsimError(
            f"{weights} {cause}; features.weights must be the file of torchvision's ResNet-18 "
            "weights (resnet18-f37072fd.pth from download.pytorch.org/models), or put a "
            f"{FILE} of your own into --data."
        ) from error


@torch.inference_mode()
def _features(network: torch.nn.Module, images: Tensor, side: int) -> Tensor:
    """Features ``[B, 512]`` of a batch of images, uint8 ``[B, 3, H, W]``."""
    x = torch.nn.functional.interpolate(
        images.float() / 255, size=(side, side), mode="bilinear", antialias=True
    )
    mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (_MEAN, _STD))
    rows = network((x - mean) / std)
    return (NORM * torch.nn.functional.normalize(rows)).cpu()
