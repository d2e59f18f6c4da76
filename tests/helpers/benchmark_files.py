"""Small files in the formats of the published benchmarks: what a user would have fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

USERS = ("f3795_00", "f0002_10", "a user")
PLAYERS = ("THE_TRAGEDY_OF_HAMLET_HAMLET", "MACBETH_ROSS")
TEXT = "To be, or not to be: that is the question;\n " * 40
WORD_COUNTS = "stackoverflow.word_count"


def write_leaf(folder: Path, users: Mapping[str, tuple[list[Any], list[Any]]], split: str) -> Path:
    """LEAF's JSON, one file a user, as it has several files too."""
    (folder / split).mkdir(parents=True, exist_ok=True)
    for number, (user, (x, y)) in enumerate(users.items()):
        path = folder / split / f"all_data_{number}_niid_1_keep_0_{split}_9.json"
        content = {"users": [user], "num_samples": [len(y)], "user_data": {user: {"x": x, "y": y}}}
        path.write_text(json.dumps(content))
    return path


def write_tff(path: Path, clients: Mapping[str, Mapping[str, Any]]) -> None:
    """TFF's HDF5: ``examples/<client>/<field>``."""
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for client, fields in clients.items():
            for name, values in fields.items():
                file.create_dataset(f"examples/{client}/{name}", data=values)


def leaf_femnist(folder: Path, users: int = 3) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 2)):
        images = {
            user: ((rng.integers(0, 256, (count, 784)) / 255).tolist(), [61, 0, 10, 35][:count])
            for user in USERS[:users]
        }
        write_leaf(folder / "femnist", images, split)


def tff_femnist(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 2)):
        clients = {
            user: {
                "pixels": rng.random((count, 28, 28), dtype=np.float32),
                "label": np.arange(count, dtype=np.int32),
            }
            for user in USERS
        }
        write_tff(folder / "femnist" / f"fed_emnist_{split}.h5", clients)


def leaf_shakespeare(folder: Path) -> None:
    for split, start in (("train", 0), ("test", 400)):
        pairs = [(TEXT[i : i + 80], TEXT[i + 80]) for i in range(start, start + 6)]
        players = {player: ([x for x, _ in pairs], [y for _, y in pairs]) for player in PLAYERS}
        write_leaf(folder / "shakespeare" / "data", players, split)  # where LEAF itself has them


def tff_shakespeare(folder: Path) -> None:
    for split in ("train", "test"):
        clients = {
            player: {"snippets": [TEXT[:200].encode(), b"Who's there?"]} for player in PLAYERS
        }
        write_tff(folder / "shakespeare" / f"shakespeare_{split}.h5", clients)


def tff_stackoverflow(folder: Path, words: int = 10_000) -> None:
    place = folder / "stackoverflow"
    for split in ("train", "test"):
        clients = {
            f"{user:08}": {
                "tokens": [b"word1 word10000 unheard-of", b" ".join([b"word2"] * 30)],
                "title": [b"", b""],
            }
            for user in (7, 12)
        }
        write_tff(place / f"stackoverflow_{split}.h5", clients)
    lines = (f"word{number} {words + 1 - number}\n" for number in range(1, words + 1))
    (place / WORD_COUNTS).write_text("".join(lines))


def tff_cifar100(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        clients = {
            str(client): {
                "image": rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8),
                "label": np.array([99, 0, 50]),
                "coarse_label": np.array([0, 1, 2]),
            }
            for client in range(2)
        }
        write_tff(folder / "cifar100" / f"fed_cifar100_{split}.h5", clients)


def leaf_celeba(folder: Path) -> None:
    from PIL import Image

    place = folder / "celeba"
    images = place / "raw" / "img_align_celeba"
    images.mkdir(parents=True)
    for number in range(1, 9):
        colour = (20 * number, 0, 255 - 20 * number)
        Image.new("RGB", (178, 218), colour).save(images / f"{number:06}.jpg")
    for split, names in (("train", [1, 2, 3, 4]), ("test", [5, 6, 7, 8])):
        names = [f"{number:06}.jpg" for number in names]
        celebrities = {"2880": (names[:2], [1.0, 0.0]), "2937": (names[2:], [0.0, 1.0])}
        write_leaf(place, celebrities, split)


HEART = {"cleveland": 303, "hungarian": 261, "switzerland": 46, "va": 130}
"""Patients of each file that have all values that FLamby uses."""


def heart(folder: Path) -> None:
    place = folder / "heart"
    place.mkdir(parents=True)
    for seed, (name, count) in enumerate(HEART.items()):
        rng = np.random.default_rng(seed)
        lines = ["63,1,3,?,0,0,2,?,?,?,?,?,?,1"]  # one that is left out
        for _ in range(count):
            age, pain, ecg = rng.integers(30, 80), rng.integers(1, 5), rng.integers(0, 3)
            sick = int(rng.integers(0, 5) * (age > 55))
            lines.append(f"{age},1,{pain},130,{200 + seed},0,{ecg},{150 - sick},0,1.5,?,?,?,{sick}")
        (place / f"processed.{name}.data").write_text("\n".join(lines) + "\n")


TCGA_FEATURES = ["age_at_index", *(f"race_{number}" for number in range(37)), "stage, NOS"]


def tcga_brca(folder: Path, patients: int = 10) -> None:
    place = folder / "tcga-brca"
    place.mkdir(parents=True)
    rng = np.random.default_rng(0)
    names = ",".join(f'"{name}"' if "," in name else name for name in TCGA_FEATURES)
    table, folds = [f"pid,{names},E,T"], ["pid,fold,fold2"]
    for number in range(patients * 6):
        pid, region = f"TCGA-A{number}", number % 6
        age, dead = int(rng.integers(26, 90)), int(rng.integers(0, 2))
        values = [age, *rng.integers(0, 2, 38), float(dead), float(5000 - 40 * age)]
        table.append(",".join(map(str, [pid, *values])))
        split = "test" if number // 6 % 5 == 4 else "train"
        folds.append(f"{pid},{split},{split}_{region}")
    table.append(table[-1].replace(pid, "TCGA-ZZ"))  # a patient of no fold
    (place / "brca.csv").write_text("\n".join(table) + "\n")
    (place / "train_test_split.csv").write_text("\n".join(folds) + "\n")
