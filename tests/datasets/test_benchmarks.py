"""Benchmarks by name, read from small files of the published formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import benchmark_files as files
import numpy as np
import pytest
import torch
from slow_cases import slow_but

from fedsim.datasets import load
from fedsim.datasets.benchmarks import LEAF_ALPHABET, TFF_ALPHABET
from fedsim.errors import FedsimError

h5py = pytest.importorskip("h5py")


def test_femnist_is_the_same_images_in_leafs_and_in_tffs_format(tmp_path: Path) -> None:
    files.leaf_femnist(tmp_path / "leaf")
    data = load("femnist", directory=tmp_path / "leaf")
    assert data.train.x.shape == (12, 1, 28, 28)
    assert data.train.y.tolist() == [61, 0, 10, 35] * 3
    assert data.train.columns["owner"].tolist() == [user for user in files.USERS for _ in range(4)]
    path = next((tmp_path / "leaf/femnist/train").glob("all_data_1_*"))
    content = json.loads(path.read_text())["user_data"][files.USERS[1]]
    np.testing.assert_array_equal(
        data.train.x[4:8].reshape(4, 784), np.asarray(content["x"], dtype=np.float32)
    )
    clients = {user: {} for user in files.USERS}
    for split in ("train", "test"):
        for number, user in enumerate(files.USERS):
            path = next((tmp_path / f"leaf/femnist/{split}").glob(f"all_data_{number}_*"))
            content = json.loads(path.read_text())["user_data"][user]
            pixels = np.asarray(content["x"], dtype=np.float32).reshape(-1, 28, 28)
            clients[user] = {"pixels": pixels, "label": np.asarray(content["y"], dtype=np.int32)}
        files.write_tff(tmp_path / f"tff/femnist/fed_emnist_{split}.h5", clients)
    same = load("femnist", directory=tmp_path / "tff")
    assert (same.num_classes, data.num_classes, data.found_in) == (62, 62, {})
    for user in files.USERS:  # HDF5 has its clients in alphabetical order
        own, theirs = (one.train.columns["owner"] == user for one in (data, same))
        assert torch.equal(data.train.x[own], same.train.x[theirs])
        assert torch.equal(data.train.y[own], same.train.y[theirs])


def test_leafs_shakespeare_has_80_characters_and_the_next_one(tmp_path: Path) -> None:
    files.leaf_shakespeare(tmp_path)
    data = load("shakespeare", directory=tmp_path)
    assert len(LEAF_ALPHABET) == data.num_classes == data.vocabulary == 80
    assert data.train.x.shape == (12, 80)
    for row in range(6):
        text = "".join(LEAF_ALPHABET[token] for token in data.train.x[row].tolist())
        assert text == files.TEXT[row : row + 80]
        assert LEAF_ALPHABET[int(data.train.y[row])] == files.TEXT[row + 80]
    # The next example's text is this one's, moved by one character.
    assert torch.equal(data.train.x[1:6, :-1], data.train.x[:5, 1:])
    assert data.train.columns["owner"].tolist() == [files.PLAYERS[0]] * 6 + [files.PLAYERS[1]] * 6


def test_tffs_shakespeare_predicts_each_character_of_a_snippet_and_its_end(tmp_path: Path) -> None:
    files.tff_shakespeare(tmp_path)
    data = load("shakespeare", directory=tmp_path)
    assert data.num_classes == data.vocabulary == len(TFF_ALPHABET) + 4 == 90
    # 200 characters with begin and end are 202 tokens, three sequences of 81; 14 are one.
    assert data.train.x.shape == (8, 80)
    decoded = dict(enumerate(TFF_ALPHABET, start=1))
    decoded |= {0: "", 88: "<", 89: ">"}
    for rows, text in ((range(3), files.TEXT[:200]), ([3], "Who's there?")):
        owner = data.train.columns["owner"][rows[0]]
        assert owner == sorted(files.PLAYERS)[0]
        tokens = np.concatenate(
            [[*data.train.x[row, :1].tolist(), *data.train.y[row].tolist()] for row in rows]
        )
        assert "".join(decoded[token] for token in tokens) == f"<{text}>"
    assert torch.equal(data.train.x[:, 1:], data.train.y[:, :-1])
    assert torch.equal(data.train.mask, data.train.y != 0)


def test_stack_overflow_has_the_words_of_the_published_list(tmp_path: Path) -> None:
    files.tff_stackoverflow(tmp_path, words=10_050)
    data = load("stackoverflow", directory=tmp_path)
    assert data.num_classes == data.vocabulary == 10_004
    assert (data.train.x.dtype, data.train.x.shape) == (torch.int16, (4, 20))
    other, begin, end = 10_001, 10_002, 10_003
    assert data.train.y[0].tolist() == [1, 10_000, other, end] + [0] * 16
    assert data.train.x[0].tolist() == [begin, 1, 10_000, other, end] + [0] * 15
    assert data.train.mask[0].tolist() == [True] * 4 + [False] * 16
    assert data.train.x[1].tolist() == [begin] + [2] * 19  # longer than 20 words: cut, and no end
    assert data.train.y[1].tolist() == [2] * 20
    assert data.train.columns["owner"].tolist() == [7, 7, 12, 12]


def test_a_training_set_beyond_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.tff_stackoverflow(tmp_path)
    monkeypatch.setattr("fedsim.process.memory", lambda: 100)
    with pytest.raises(FedsimError, match=r"stackoverflow_train\.h5 needs .* GiB; it must fit"):
        load("stackoverflow", directory=tmp_path)


def test_a_file_that_claims_more_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    files.tff_femnist(tmp_path)
    with h5py.File(tmp_path / "femnist/fed_emnist_train.h5", "a") as file:
        file.create_dataset("examples/z/pixels", shape=(10**9, 28, 28), dtype="f4")
        file.create_dataset("examples/z/label", shape=(10**9,), dtype="i4")
    with pytest.raises(FedsimError, match=r"fed_emnist_train\.h5 needs 2,9.* GiB; it must fit"):
        load("femnist", directory=tmp_path)


def test_a_user_that_leafs_file_lists_twice_is_refused(tmp_path: Path) -> None:
    files.leaf_femnist(tmp_path)
    path = next((tmp_path / "femnist/train").glob("*.json"))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"users": content["users"] * 2}))
    with pytest.raises(FedsimError, match="it lists a user twice"):
        load("femnist", directory=tmp_path)


def test_tffs_cifar100_has_owners_and_its_test_clients_are_others(tmp_path: Path) -> None:
    files.tff_cifar100(tmp_path)
    data = load("cifar100", directory=tmp_path, normalize=True)
    assert (data.train.x.shape, data.num_classes) == ((6, 3, 32, 32), 100)
    assert data.train.columns["owner"].tolist() == ["0"] * 3 + ["1"] * 3
    assert "owner" not in data.test.columns
    assert data.mean is not None
    with h5py.File(tmp_path / "cifar100/fed_cifar100_train.h5") as file:
        images = file["examples/1/image"][()]
    np.testing.assert_array_equal(data.train.x[3:].numpy().transpose(0, 2, 3, 1), images)


def test_celeba_has_the_images_that_leaf_names_at_its_size(tmp_path: Path) -> None:
    files.leaf_celeba(tmp_path)
    data = load("celeba", directory=tmp_path)
    assert (data.train.x.shape, data.train.x.dtype) == ((4, 3, 84, 84), torch.uint8)
    assert data.train.y.tolist() == [1, 0, 0, 1]
    assert data.train.columns["owner"].tolist() == ["2880", "2880", "2937", "2937"]
    # Their colours, up to what JPEG changes.
    red = data.train.x[:, 0].float().mean((1, 2))
    assert torch.allclose(red, torch.tensor([20.0, 40.0, 60.0, 80.0]), atol=3)


def test_heart_is_split_and_normalised_as_in_flamby(tmp_path: Path) -> None:
    files.heart(tmp_path)
    data = load("heart", directory=tmp_path, normalize=True)
    scaled = load("heart", directory=tmp_path)
    assert float(scaled.train.x.min()) >= 0
    assert float(scaled.train.x.max()) <= 1
    counts = {"cleveland": (199, 104), "hungarian": (172, 89), "switzerland": (30, 16)}
    for hospital, numbers in ({**counts, "va": (85, 45)}).items():
        own = [split.columns["owner"] == hospital for split in (data.train, data.test)]
        assert tuple(int(one.sum()) for one in own) == numbers
        x = data.train.x[own[0]]
        ages = x[:, data.feature_names.index("age")]
        assert abs(float(ages.mean())) < 1e-5
        assert abs(float(ages.std()) - 1) < 1e-5
        assert not x[:, data.feature_names.index("chol")].any()  # the same for all of a hospital
    assert data.num_classes == 2


def test_tcga_brcas_targets_are_time_and_event_and_its_owners_regions(tmp_path: Path) -> None:
    files.tcga_brca(tmp_path)
    data = load("tcga-brca", directory=tmp_path)
    assert (data.train.x.shape, data.train.y.shape) == ((48, 39), (48, 2))
    assert (len(data.test), data.num_classes) == (12, 0)
    ages = data.train.x[:, 0]
    torch.testing.assert_close(data.train.y[:, 0], 5000 - 40 * ages)
    assert {*data.train.y[:, 1].tolist()} == {0.0, 1.0}
    owners = data.train.columns["owner"].tolist()
    assert sorted({*owners}) == sorted(
        ["Northeast", "South", "West", "Midwest", "Europe", "Canada"]
    )
    assert data.feature_names == tuple(files.TCGA_FEATURES)


COMMANDS = {
    "femnist": "tff-datasets-public/fed_emnist.tar.bz2 | tar -xj -C {folder}",
    "shakespeare": "tff-datasets-public/shakespeare.tar.bz2 | tar -xj -C {folder}",
    "stackoverflow": "tff-datasets-public/stackoverflow.word_count.tar.bz2 | tar -xj -C {folder}",
    "celeba": "./preprocess.sh -s niid --sf 1.0 -k 5 -t sample",
    "heart": "--output-dir {folder} --remote-name-all 'https://archive.ics.uci.edu/",
    "tcga-brca": "https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_tcga_brca/",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_missing_files_are_named_with_the_command_that_fetches_them(
    name: str, tmp_path: Path
) -> None:
    directory = tmp_path / "my data"
    with pytest.raises(FedsimError) as error:
        load(name, directory=directory)
    sentence = str(error.value)
    assert sentence.startswith(f"data.name is '{name}', but '{directory / name}' does not have ")
    assert COMMANDS[name].format(folder=f"'{directory / name}'") in sentence
    with pytest.raises(FedsimError, match=r"data\.normalize is true, but|does not have"):
        load(name, directory=directory, normalize=True)


Writer = Callable[[Path], None]
DAMAGED: dict[str, tuple[str, Writer, str]] = {
    "leaf": ("femnist", files.leaf_femnist, "femnist/train/all_data_1_niid_1_keep_0_train_9.json"),
    "tff": ("femnist", files.tff_femnist, "femnist/fed_emnist_train.h5"),
    "snippets": ("shakespeare", files.tff_shakespeare, "shakespeare/shakespeare_test.h5"),
    "sentences": ("stackoverflow", files.tff_stackoverflow, "stackoverflow/stackoverflow_test.h5"),
    "words": ("stackoverflow", files.tff_stackoverflow, f"stackoverflow/{files.WORD_COUNTS}"),
    "cifar100": ("cifar100", files.tff_cifar100, "cifar100/fed_cifar100_train.h5"),
    "celeba": ("celeba", files.leaf_celeba, "celeba/raw/img_align_celeba/000003.jpg"),
    "heart": ("heart", files.heart, "heart/processed.va.data"),
    "tcga-brca": ("tcga-brca", files.tcga_brca, "tcga-brca/brca.csv"),
    "folds": ("tcga-brca", files.tcga_brca, "tcga-brca/train_test_split.csv"),
}


@pytest.mark.parametrize("damage", ["truncated", "wrong", "empty", "a folder"])
@pytest.mark.parametrize("case", slow_but(4, DAMAGED))
def test_a_damaged_file_gets_one_sentence_that_names_it(
    case: str, damage: str, tmp_path: Path
) -> None:
    name, write, path = DAMAGED[case]
    write(tmp_path)
    file = tmp_path / path
    content = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(content[: len(content) * 2 // 5])
    elif damage == "wrong":
        file.write_bytes(b"pid,name\n3,SECRET-4711\n")
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        file.mkdir()
    for protected in (False, True):
        if case == "celeba" and protected:
            data = load(name, directory=tmp_path, protected=True)
            assert data.train.columns["unusable"].tolist() == [False, False, True, False]
            continue
        with pytest.raises(FedsimError) as error:
            load(name, directory=tmp_path, protected=protected)
        sentence = str(error.value)
        assert file.name in sentence
        assert "; it must " in sentence or "fetch" in sentence
        assert "\n" not in sentence
        assert not protected or "4711" not in sentence


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (
            lambda f: files.write_leaf(f, {"u": ([[0.5] * 784], [1, 2])}, "train"),
            "differ in length",
        ),
        (lambda f: files.write_leaf(f, {"u": ([[0.5] * 783], [1])}, "train"), "reshape"),
        (lambda f: files.write_leaf(f, {"u": ([["a"] * 784], [1])}, "train"), "convert"),
        (lambda f: files.write_leaf(f, {"u": ([[0.5] * 784], [62])}, "train"), "below 62"),
        (lambda f: files.write_leaf(f, {"u": ([[0.5] * 784], [1.5])}, "train"), "from 0 up"),
        (lambda f: files.write_leaf(f, {"u": ([], [])}, "train"), "no examples"),
    ],
)
def test_what_is_wrong_in_leafs_files_is_said(write: Writer, sentence: str, tmp_path: Path) -> None:
    files.leaf_femnist(tmp_path)
    shutil.rmtree(tmp_path / "femnist/train")
    write(tmp_path / "femnist")
    with pytest.raises(FedsimError, match=sentence):
        load("femnist", directory=tmp_path)


def test_a_private_run_keeps_the_other_examples_of_a_file_with_bad_ones(tmp_path: Path) -> None:
    files.leaf_femnist(tmp_path)
    pixels = [[0.5] * 784] * 3
    files.write_leaf(tmp_path / "femnist", {"z": (pixels, [1, 62, None])}, "train")
    data = load("femnist", directory=tmp_path, protected=True)
    own = data.train.columns["owner"] == "z"
    assert data.train.columns["unusable"][own].tolist() == [False, True, True]
    assert data.num_classes == 62


def test_characters_outside_leafs_alphabet_are_refused_and_in_a_private_run_unusable(
    tmp_path: Path,
) -> None:
    files.leaf_shakespeare(tmp_path)
    place = tmp_path / "shakespeare" / "data"
    text = "\u00e9" + files.TEXT[:79]
    files.write_leaf(place, {"z": ([text, files.TEXT[:80]], ["a", "a"])}, "train")
    with pytest.raises(FedsimError, match="x_train"):
        load("shakespeare", directory=tmp_path)
    data = load("shakespeare", directory=tmp_path, protected=True)
    assert data.train.columns["unusable"][data.train.columns["owner"] == "z"].tolist() == [
        True,
        False,
    ]


def test_files_of_two_publishers_are_refused(tmp_path: Path) -> None:
    files.leaf_femnist(tmp_path)
    files.tff_femnist(tmp_path)
    with pytest.raises(FedsimError, match=r"has both LEAF.* and TensorFlow Federated"):
        load("femnist", directory=tmp_path)


def test_celebas_names_are_names_and_no_paths(tmp_path: Path) -> None:
    files.leaf_celeba(tmp_path)
    files.write_leaf(tmp_path / "celeba", {"1": (["../../../secret.jpg"], [1.0])}, "train")
    with pytest.raises(FedsimError, match="a name, not a path"):
        load("celeba", directory=tmp_path)


def test_heart_is_not_normalised_by_patients_in_a_private_run(tmp_path: Path) -> None:
    files.heart(tmp_path)
    with pytest.raises(FedsimError, match="may not use them; leave it false"):
        load("heart", directory=tmp_path, normalize=True, protected=True)
