"""The table and the picture of a partition, and the command that makes them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedsim.cli.app import app
from fedsim.errors import FedsimError
from fedsim.partitions import IID, Dirichlet, InterpolatedPathological, Shards
from fedsim.partitions.base import class_counts
from fedsim.reports.partition import draw, summary, tabulate
from fedsim.reports.plots import save

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))


def printed(counts: np.ndarray, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(tabulate(counts, "a title"))
    return console.export_text()


def test_counts_are_those_of_each_client() -> None:
    parts = Dirichlet(0.2, 30, seed=1).indices(LABELS)
    counts = class_counts(LABELS, parts, 12)
    assert counts.shape == (30, 12)
    for row, part in zip(counts, parts, strict=True):
        np.testing.assert_array_equal(row, np.bincount(LABELS[part], minlength=12))


def test_the_distance_is_nought_for_equal_mixes_and_large_for_one_class_each() -> None:
    even = np.full((4, 5), 7)
    assert summary(even)["distance from the overall mix"].startswith("0.00")
    pure = np.diag(np.full(5, 100))
    assert summary(pure)["distance from the overall mix"].startswith("0.80")


def test_empty_clients_are_counted() -> None:
    assert summary(np.array([[3, 0], [0, 0], [0, 0]]))["clients"] == "3, 2 empty"


def test_the_table_names_every_client_of_few_and_the_ends_of_many() -> None:
    few = printed(class_counts(LABELS, Shards(2, 5, seed=1).indices(LABELS), 10))
    assert "a title" in few
    assert "1,200" in few
    assert "…" not in few
    many = printed(class_counts(LABELS, IID(700, seed=1).indices(LABELS), 10))
    assert "…" in many
    assert " 699 " in many
    assert " 350 " not in many


@pytest.mark.parametrize("count", [3, 1000, 10000, 100000])
def test_the_table_fits_a_terminal_of_80_columns(count: int) -> None:
    text = printed(np.full((13, 10), count), width=80)
    assert str(count) in text
    assert "examples" in text
    first = next(line for line in text.splitlines() if line.split()[:1] == ["0"])
    assert "…" not in first


def test_many_classes_are_listed_the_largest_first() -> None:
    counts = np.zeros((2, 100), int)
    counts[0, :8] = 10
    counts[0, 42] = 99
    assert "42 (99), 0 (10), 1 (10), 2 (10), and 5 more" in printed(counts)


@pytest.mark.spanning
@pytest.mark.parametrize("clients", [1, 5, 60, 61, 1500])
@pytest.mark.parametrize("num_classes", [1, 10, 20, 100])
def test_every_shape_of_partition_can_be_drawn_and_saved(
    tmp_path: Path, clients: int, num_classes: int
) -> None:
    labels = LABELS % num_classes
    counts = class_counts(labels, Dirichlet(0.05, clients, seed=1).indices(labels), num_classes)
    figure = draw(counts, "a title that names the partition and costs $5 and $6 " * 4)
    figure.set_dpi(20)
    figure.canvas.draw()
    if clients == 5:
        path = tmp_path / "new" / "picture.png"
        save(figure, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert list(path.parent.iterdir()) == [path]


def test_the_picture_has_each_clients_share_of_each_class() -> None:
    counts = class_counts(LABELS, InterpolatedPathological(0.0, seed=1).indices(LABELS), 10)
    sizes, classes, mixes = draw(counts, "title").axes
    assert [bar.get_height() for bar in sizes.patches] == [5]
    assert [bar.get_height() for bar in classes.patches] == [5]
    shares = np.square(mixes.images[0].get_array())
    np.testing.assert_allclose(np.sort(shares.ravel())[-10:], 0.5)
    np.testing.assert_allclose(shares.sum(0), 1)


CONFIG = """
name = "shown"
[partition]
name = "shards"
clients = 30
shards = 2
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def test_the_command_shows_the_partition_and_says_where_the_picture_is(config: Path) -> None:
    result = CliRunner().invoke(app, ["partition", str(config), "--seed", "7"])
    assert result.exit_code == 0, result.output
    assert "digits: shards (2 a client), 30 clients, seed 7" in result.output
    assert "1,437" in result.output
    assert "runs/shown-partition.png" in result.output
    assert (config.parent / "runs" / "shown-partition.png").stat().st_size > 10_000


def test_the_command_takes_settings_and_a_path_for_the_picture(config: Path) -> None:
    picture = config.parent / "other.png"
    settings = ["--set", "partition.name=iid", "--set", "partition.max-examples=2"]
    result = CliRunner().invoke(app, ["partition", str(config), *settings, "--out", str(picture)])
    assert result.exit_code == 0, result.output
    assert "IID, 30 clients, seed 1, at most 2 examples a client" in result.output
    assert "2 min, 2 median, 2 max" in result.output
    assert picture.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "partition.clients=1000"], "need 2000 shards"),
        (["--set", "data.name=mnist"], "data.download = true"),
        (["--out", "run.toml/picture.png"], "run.toml is not a writable directory"),
        (["--out", "picture.jpg"], "must be a file that ends in .png"),
    ],
)
def test_mistakes_end_with_their_sentence_and_nothing_is_written(
    config: Path, arguments: list[str], sentence: str
) -> None:
    result = CliRunner().invoke(app, ["partition", str(config), *arguments])
    assert isinstance(result.exception, FedsimError)
    assert sentence in str(result.exception)
    assert list(config.parent.iterdir()) == [config]
