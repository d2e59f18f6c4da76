"""The palette's promises, computed: contrast (WCAG 2.2), and distances as others see them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from fedsim.reports.plots import COLOURS, DARK, DASHES, LIGHT, MARKERS, Theme, titled

# Machado, Oliveira & Fernandes 2009, severity 1, on linear RGB.
SEEN_BY = {
    "everybody": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(colour: str) -> np.ndarray:
    shares = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    lights = sorted(linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
    share = to_xyz @ np.clip(rgb, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(share > 0.008856, np.cbrt(share), 7.787 * share + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN_BY)
def test_every_two_series_differ_for_everybody(theme: Theme, eyes: str) -> None:
    places = [lab(np.asarray(SEEN_BY[eyes]) @ linear(colour)) for colour in theme.series]
    distances = [np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2)]
    assert min(distances) >= 25


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_everything_stands_out_from_what_is_behind_it(theme: Theme) -> None:
    for behind in (theme.background, theme.surface):
        assert all(contrast(colour, behind) >= 3 for colour in (*theme.series, theme.frame))
        assert all(contrast(text, behind) >= 4.5 for text in (theme.ink, theme.muted, theme.accent))


def test_colour_is_never_alone() -> None:
    assert len(set(DASHES)) == len(set(MARKERS)) == len(LIGHT.series) == len(DARK.series)
    assert set(COLOURS.values()) <= set(LIGHT.series)


def test_no_other_file_has_a_palette_of_its_own() -> None:
    root = Path(__file__).parents[2]
    others = {
        str(path.relative_to(root)): re.findall(
            r"#[0-9a-f]{6}\b|\btab(?:10|20)\b", path.read_text()
        )
        for folder in ("fedsim", "experiments")
        for path in (root / folder).rglob("*.py")
        if path.name != "plots.py"
    }
    greys = {"experiments/xu/beale.py": ["#cccccc"]}  # contour lines
    assert {path: colours for path, colours in others.items() if colours} == greys


def test_a_title_keeps_its_lines_and_wraps_the_long_ones():
    title = titled(4.0, 3.0, "Accuracy by rate\n" + "word " * 20).get_suptitle()
    first, *others = title.splitlines()
    assert first == "Accuracy by rate"
    assert len(others) > 1
    assert max(map(len, others)) <= 40
