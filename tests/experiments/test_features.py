"""Features for Das et al.'s rows, from a network whose weights the user has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.models import resnet18
from torchvision.transforms.functional import normalize, resize

from experiments.das.features import FILE, Extractor, write_features
from experiments.framework.run import find, load
from fedsim import datasets
from fedsim.errors import FedsimError

SMALL = Extractor(dataset="cifar10", weights="weights.pth", side=48)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A few images, and a network of random weights."""
    draws = np.random.default_rng(0)
    images = draws.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(8) % 10
    np.savez(
        tmp_path / "cifar10.npz",
        x_train=images[:5],
        y_train=labels[:5],
        x_test=images[5:],
        y_test=labels[5:],
    )
    torch.manual_seed(0)
    torch.save(resnet18().state_dict(), tmp_path / "weights.pth")
    return tmp_path


def test_a_feature_row_is_of_its_own_image_and_ten_long(data: Path) -> None:
    write_features(SMALL, data, data / FILE)
    rows = datasets.load(FILE, directory=data)
    network = resnet18()
    network.load_state_dict(torch.load(data / "weights.pth"))
    before_last = torch.nn.Sequential(*list(network.children())[:-1]).eval()
    for image, row in zip(
        datasets.load("cifar10", directory=data).test.x, rows.test.x, strict=True
    ):
        scaled = resize(image[None] / 255, [48, 48], antialias=True)
        scaled = normalize(scaled, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        with torch.no_grad():
            alone = before_last(scaled).flatten()
        assert torch.allclose(row, 10 * alone / alone.norm(), atol=1e-4)
    assert rows.train.x.shape == (5, 512)
    assert rows.train.y.tolist() == [0, 1, 2, 3, 4]


def test_weights_that_are_missing_or_something_else_are_one_sentence(data: Path) -> None:
    weights = data / "weights.pth"
    torch.save({"w": torch.zeros(3)}, weights)
    with pytest.raises(FedsimError, match=r"cannot be read; features\.weights must be the file"):
        write_features(SMALL, data, data / FILE)
    weights.write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(FedsimError, match="cannot be read"):
        write_features(SMALL, data, data / FILE)
    weights.unlink()
    with pytest.raises(FedsimError, match=r"weights\.pth is not there"):
        write_features(SMALL, data, data / FILE)
    assert not (data / FILE).exists()


@pytest.mark.slow
def test_features_are_made_once_and_every_run_reads_them(data: Path) -> None:
    (data / "cifar10.npz").rename(data / "cifar100.npz")
    (data / "weights.pth").rename(data / "resnet18-f37072fd.pth")
    (data / "out").mkdir()
    written = set()
    for _ in range(2):
        experiment = load(find("das-features"), data=data)
        experiment.prepare(data / "out")
        written |= {path.stat().st_mtime_ns for path in experiment.data.glob(FILE)}
    assert len(written) == 1
    assert experiment.data.parent == data / "out"
    assert next(iter(experiment.members().values()))["features"]["dataset"] == "cifar100"


def test_features_of_the_users_own_are_read_in_place_of_any_made(data: Path) -> None:
    np.savez(
        data / FILE,
        x_train=np.ones((10, 3), np.float32),
        y_train=np.arange(10),
        x_test=np.ones((10, 3), np.float32),
        y_test=np.arange(10),
    )
    experiment = load(find("das-features"), data=data)
    experiment.prepare(data / "out")
    assert experiment.data == data
    assert not (data / "out").exists()
