"""FLamby's two tables, from the files it reads: four hospitals' hearts, six regions' tumours.

Source: Ogier du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning
in Realistic Healthcare Settings, 2022 (arXiv 2210.04620).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsim import regular_files
from fedsim.array_types import Array, Bools
from fedsim.datasets.dataset import Dataset
from fedsim.datasets.published_files import SplitArrays, joined, missing, reading
from fedsim.errors import FedsimError
from fedsim.registry import register

# Which complete rows are for testing, in hexadecimal, the first row first: the stratified split of
# FLamby's dataset.py (scikit-learn's train_test_split, seed 43), computed from UCI's four files.
_HEART_TEST = {
    "cleveland": (
        303,
        "040480a020b3c59dc48a03b505c0481087c001ac9430180a847015a598491260f8e2001cebe4",
    ),
    "hungarian": (261, "1100847cb841d42c88700d510093869198d144134848122f693a0411802910ba30"),
    "switzerland": (46, "07863a8c80c0"),
    "va": (130, "464800245b65020eb85b04886003a74580"),
}
_HEART_COMMAND = (
    "curl -f --create-dirs --output-dir {folder} --remote-name-all "
    "'https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
    "processed.{{cleveland,hungarian,switzerland,va}}.data'"
)
# Columns of the files, and what each is scaled by: ranges that hold for people, not found in them.
_AGE, _SEX, _PAIN, _PRESSURE, _CHOLESTEROL, _SUGAR, _ECG, _PULSE, _ANGINA, _DEPRESSION = range(10)
_DIAGNOSIS, _COLUMNS = 13, 14
_NUMBERS = (_AGE, _SEX, _PRESSURE, _CHOLESTEROL, _SUGAR, _PULSE, _ANGINA, _DEPRESSION)
_LARGEST = (100, 1, 200, 600, 1, 200, 1, 6)
_CATEGORIES = ((_PAIN, (2, 3, 4)), (_ECG, (1, 2)))  # the first of each has no feature
_HEART_FEATURES = (
    *("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak"),
    *("cp=2", "cp=3", "cp=4", "restecg=1", "restecg=2"),
)


@register("data", "heart")
@dataclass(frozen=True)
class Heart:
    """Fed-Heart-Disease: whether a patient's heart is diseased, 13 features, four hospitals.

    740 patients (Janosi et al. 1988, UCI), split as FLamby does: 486 for training. Features are
    divided by constants; ``data.normalize`` has them normalised as in FLamby, in each hospital by
    the mean and standard deviation of its training patients, which a private run refuses.
    """

    def __call__(self, directory: Path, normalize: bool, protected: bool = False) -> Dataset:
        """Read ``processed.<hospital>.data`` from ``heart`` in a folder.

        Raises
        ------
        FedsimError
            If a file is missing, or is not the published one.
        """
        if normalize and protected:
            raise FedsimError(
                "data.normalize is true, but the mean and std of heart are found in its hospitals' "
                "patients, and a private run may not use them; leave it false: its features are "
                "divided by constants."
            )
        folder = directory / "heart"
        paths = {name: folder / f"processed.{name}.data" for name in _HEART_TEST}
        if absent := [path.name for path in paths.values() if not path.is_file()]:
            raise missing("heart", folder, f"UCI's {', '.join(absent)}", _HEART_COMMAND)
        splits: dict[bool, list[tuple[str, SplitArrays]]] = {False: [], True: []}
        for name, path in paths.items():
            count, digits = _HEART_TEST[name]
            x, y = _patients(path, count, protected)
            is_test = _bits(digits, count)
            if normalize:
                mean, std = x[~is_test].mean(0), x[~is_test].std(0, ddof=1)
                x = (x - mean) / (std + 1e-9)
            else:
                x = x / np.array([*_LARGEST, 1, 1, 1, 1, 1])
            for part in splits:
                own = is_test == part
                splits[part].append((name, {"x": x[own].astype(np.float32), "y": y[own]}))
        train, test = (joined(splits[part]) for part in (False, True))
        return Dataset.from_arrays(
            "heart",
            train,
            test,
            classes=2,
            source=str(folder),
            protected=protected,
            feature_names=_HEART_FEATURES,
            class_names=("healthy", "diseased"),
        )


def _bits(digits: str, count: int) -> Bools:
    packed = np.frombuffer(bytes.fromhex(digits), dtype=np.uint8)
    return np.unpackbits(packed)[:count].astype(np.bool_)


def _patients(path: Path, count: int, protected: bool) -> tuple[Array, Array]:
    """Features ``[count, 13]`` and diagnoses of the patients without a missing value."""
    wanted = f"UCI's file, in which {count} patients have all that FLamby uses"
    with reading(path, wanted, protected):
        rows = list(csv.reader(regular_files.read_text(path).splitlines()))
        if any(len(row) != _COLUMNS for row in rows):
            raise ValueError(f"a line does not have {_COLUMNS} values")
        used = [[*row[: _DEPRESSION + 1], row[_DIAGNOSIS]] for row in rows]
        table = np.array([row for row in used if "?" not in row], dtype=np.float64)
        if len(table) != count:
            raise ValueError(f"it has {len(table)} patients")
    dummies = [table[:, column] == value for column, values in _CATEGORIES for value in values]
    return np.column_stack([table[:, _NUMBERS], *dummies]), (table[:, -1] != 0).astype(np.int64)


_REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
_TCGA_FILES = ("brca.csv", "train_test_split.csv")
_TCGA_URL = "https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_tcga_brca"
_TCGA_COMMAND = (
    f"curl -f --create-dirs --output-dir {{folder}} --remote-name-all {_TCGA_URL}/brca.csv "
    f"{_TCGA_URL}/dataset_creation_scripts/train_test_split.csv"
)
_TCGA_FEATURES = 39


@register("data", "tcga-brca")
@dataclass(frozen=True)
class TcgaBrca:
    """Fed-TCGA-BRCA: survival with breast cancer, 39 features, six regions.

    1,088 patients of the Cancer Genome Atlas (Liu et al. 2018), split as FLamby does: 866 for
    training. A target is (time, event): days, and 1 for a death then or 0 if the patient was last
    seen then, as `weibull` and `concordance` take them. The regions are ``Northeast``, ``South``,
    ``West``, ``Midwest``, ``Europe`` and ``Canada``.
    """

    def __call__(self, directory: Path, normalize: bool, protected: bool = False) -> Dataset:
        """Read FLamby's ``brca.csv`` and ``train_test_split.csv`` from ``tcga-brca`` in a folder.

        Raises
        ------
        FedsimError
            If a file is missing, or is none of FLamby's.
        """
        if normalize:
            raise FedsimError(
                "data.normalize is true, but tcga-brca has no published mean and std; leave it "
                "false."
            )
        folder = directory / "tcga-brca"
        patients_path, split_path = (folder / name for name in _TCGA_FILES)
        if not (patients_path.is_file() and split_path.is_file()):
            files = f"FLamby's {' and '.join(_TCGA_FILES)}"
            raise missing("tcga-brca", folder, files, _TCGA_COMMAND)
        names, patients = _tumours(patients_path, protected)
        splits: dict[str, dict[str, list[Array]]] = {"train": {}, "test": {}}
        wanted = "FLamby's, with pid and fold2 ('train_0' to 'test_5') of each patient of brca.csv"
        with reading(split_path, wanted, protected):
            for row in csv.DictReader(regular_files.read_text(split_path).splitlines()):
                split, _, region = row["fold2"].partition("_")
                by_region = splits[split].setdefault(_REGIONS[int(region)], [])
                by_region.append(patients[row["pid"]])
            train, test = (
                joined((region, _survival(np.stack(rows))) for region, rows in by_region.items())
                for by_region in splits.values()
            )
        return Dataset.from_arrays(
            "tcga-brca",
            train,
            test,
            source=str(folder),
            protected=protected,
            feature_names=names,
        )


def _survival(table: Array) -> SplitArrays:
    x, y = table[:, :_TCGA_FEATURES], table[:, [-1, -2]]  # the file has E before T
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def _tumours(path: Path, protected: bool) -> tuple[list[str], Mapping[str, Array]]:
    """Names of the features, and of each patient the features, the event and the time ``[41]``."""
    wanted = f"FLamby's, with the columns pid, {_TCGA_FEATURES} features, E and T"
    with reading(path, wanted, protected):
        header, *rows = csv.reader(regular_files.read_text(path).splitlines())
        if len(header) != _TCGA_FEATURES + 3 or header[0] != "pid" or header[-2:] != ["E", "T"]:
            raise ValueError(f"it has {len(header)} columns")
        return header[1:-2], {row[0]: np.array(row[1:], dtype=np.float64) for row in rows}
