"""Benchmarks of federated learning by name, from the files that LEAF and TFF publish.

A benchmark is read from ``data.dir/<name>``. Its owners are the data's own: writers, characters of
plays, users, celebrities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedsim import optional_packages, regular_files
from fedsim.array_types import Array
from fedsim.datasets.arrays import cause
from fedsim.datasets.dataset import Dataset
from fedsim.datasets.published_files import (
    SPLITS,
    TFF,
    Leaf,
    SplitArrays,
    labels,
    missing,
    reading,
    tff_command,
)
from fedsim.errors import FedsimError
from fedsim.process import refuse_larger_than_memory
from fedsim.registry import register


class Benchmark:
    """A published data set with owners.

    Attributes
    ----------
    name : str
        Its name in fedsim, and that of its folder.
    formats : tuple of Leaf or TFF
        Formats that it is published in.
    command : str
        The shell command that fetches one of them into ``{folder}``.
    """

    name: ClassVar[str]
    formats: ClassVar[tuple[Leaf | TFF, ...]]
    command: ClassVar[str]

    def __call__(self, directory: Path, normalize: bool, protected: bool = False) -> Dataset:
        """Read it from a folder; see `load` for parameters.

        Raises
        ------
        FedsimError
            If its files are missing, damaged, or of two formats.
        """
        if normalize:
            raise FedsimError(
                f"data.normalize is true, but {self.name} has no published mean and std; leave it "
                "false."
            )
        folder = directory / self.name
        found = [(one, place) for one in self.formats if (place := one.place(folder))]
        if len(found) > 1:
            raise FedsimError(
                f"'{folder}' has both {' and '.join(one.files for one, _ in found)}, which are "
                "split differently; it must have one of them."
            )
        if not found:
            files = ", or ".join(one.files for one in self.formats)
            raise missing(self.name, folder, files, self.command)
        published, place = found[0]
        train, test = (
            self.prepared(published.read(place, split, protected), place, protected)
            for split in SPLITS
        )
        return Dataset.from_arrays(
            self.name,
            train,
            test,
            classes=published.classes,
            vocabulary=published.vocabulary,
            source=str(folder),
            protected=protected,
        )

    def prepared(self, arrays: SplitArrays, place: Path, protected: bool) -> SplitArrays:
        """Arrays of a split, after what its files leave to be done."""
        return arrays


def _characters(images: Any, classes: Any) -> SplitArrays:
    x = np.asarray(images, dtype=np.float32).reshape(len(images), 28, 28)
    return {"x": x, "y": labels(classes)}


@register("data", "femnist")
@dataclass(frozen=True)
class FEMNIST(Benchmark):
    """FEMNIST: handwritten digits and letters by writer, 62 classes, 28x28 grey.

    Pixels are in [0, 1], and the paper is 1. LEAF's JSON (Caldas et al. 2018) has the writers that
    its ``preprocess.sh`` was told; TFF's HDF5 has 3,400, with 671,585 training and 77,483 test
    images.
    """

    name = "femnist"
    formats = (
        Leaf(_characters, classes=62),
        TFF("fed_emnist", ("pixels", "label"), _characters, classes=62),
    )
    command = tff_command("fed_emnist")


LEAF_ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
TFF_ALPHABET = (
    "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
)
LENGTH = 80  # characters of a sequence, in both


def _token_table(alphabet: str, first: int, other: int) -> Array:
    """Token of each character code below 256, counted from ``first``; ``other`` for all others."""
    table = np.full(256, other, dtype=np.int16)
    table[[ord(character) for character in alphabet]] = first + np.arange(len(alphabet))
    return table


# In LEAF a character outside the alphabet is -1, no token; in TFF it has one, after the alphabet.
_LEAF_TOKENS = _token_table(LEAF_ALPHABET, 0, -1)
PAD = 0
OTHER, BEGIN, END = range(len(TFF_ALPHABET) + 1, len(TFF_ALPHABET) + 4)
_TFF_TOKENS = _token_table(TFF_ALPHABET, 1, OTHER)


def _text_tokens(texts: Sequence[str], length: int) -> Array:
    """LEAF's tokens ``[n, length]`` of texts of that length."""
    if any(len(text) != length for text in texts):
        raise ValueError(f"a text is not {length} characters long")
    codes = np.frombuffer("".join(texts).encode("utf-32-le"), dtype="<u4")
    tokens: Array = _LEAF_TOKENS[np.minimum(codes, 255)].reshape(len(texts), length)
    return tokens


def _next_character(texts: Any, following: Any) -> SplitArrays:
    y = _text_tokens(following, 1)[:, 0]
    return {"x": _text_tokens(texts, LENGTH), "y": y.astype(np.int64)}


def _shifted(rows: Array) -> SplitArrays:
    """Sequences, and the tokens that follow each of theirs; padding does not count."""
    return {"x": rows[:, :-1], "y": rows[:, 1:], "mask": rows[:, 1:] != PAD}


def _snippets(snippets: Any) -> SplitArrays:
    """Sequences of each snippet, with its begin and end, in TFF's way: the last one is padded."""
    rows = [np.empty((0, LENGTH + 1), dtype=np.int16)]
    for snippet in snippets:
        tokens = _TFF_TOKENS[np.frombuffer(bytes(snippet), dtype=np.uint8)]
        padding = [PAD] * (-(len(tokens) + 2) % (LENGTH + 1))
        rows.append(np.concatenate([[BEGIN], tokens, [END], padding]).reshape(-1, LENGTH + 1))
    return _shifted(np.concatenate(rows).astype(np.int16))


@register("data", "shakespeare")
@dataclass(frozen=True)
class Shakespeare(Benchmark):
    """Shakespeare: the next character in what each character of a play says.

    LEAF's JSON (Caldas et al. 2018) has 80 characters and the one that follows, as a class of its
    alphabet of 80. TFF's HDF5 has 715 speakers' snippets, which become sequences of 80 characters,
    each with the one that follows, over the 90 tokens of its tutorials: 86 characters, padding, any
    other, begin and end. Both alphabets are constants: nothing is found in the data.
    """

    name = "shakespeare"
    formats = (
        Leaf(_next_character, classes=len(LEAF_ALPHABET), vocabulary=len(LEAF_ALPHABET)),
        TFF("shakespeare", ("snippets",), _snippets, classes=END + 1, vocabulary=END + 1),
    )
    command = tff_command("shakespeare")


WORDS, SENTENCE = 10_000, 20  # of the vocabulary; of a sequence
ANY_OTHER_WORD, SENTENCE_BEGIN, SENTENCE_END = range(WORDS + 1, WORDS + 4)
_WORD_COUNTS = "stackoverflow.word_count"


def _sentences(sentences: Any, words: Mapping[bytes, int]) -> SplitArrays:
    """Rows of many sentences at once: NumPy's calls a sentence would take most of the time."""
    split = [sentence.split(None, SENTENCE)[:SENTENCE] for sentence in sentences]
    lengths = np.array([len(each) for each in split], dtype=np.int64)
    tokens = [words.get(word, ANY_OTHER_WORD) for each in split for word in each]
    rows = np.full((len(split), SENTENCE + 1), PAD, dtype=np.int16)
    rows[:, 0] = SENTENCE_BEGIN
    rows[:, 1:][np.arange(SENTENCE) < lengths[:, None]] = tokens
    short = np.flatnonzero(lengths < SENTENCE)
    rows[short, 1 + lengths[short]] = SENTENCE_END
    return _shifted(rows)


@dataclass(frozen=True)
class _StackOverflow(TFF):
    """Its HDF5, whose 135,818,730 training sentences are converted into arrays allocated once."""

    @property
    def files(self) -> str:
        return f"{super().files}, with {_WORD_COUNTS}"

    def place(self, folder: Path) -> Path | None:
        return super().place(folder) if (folder / _WORD_COUNTS).is_file() else None

    def read(self, place: Path, split: str, protected: bool) -> SplitArrays:
        words = _words(place / _WORD_COUNTS)
        path = place / f"{self.stem}_{split}.h5"
        with self.clients(path, protected) as clients:
            counts = {client: len(data["tokens"]) for client, data in clients.items()}
            total = sum(counts.values())
            refuse_larger_than_memory(total * (5 * SENTENCE + 8), str(path))
            x, y = (np.empty((total, SENTENCE), dtype=np.int16) for _ in range(2))
            arrays = {"x": x, "y": y, "mask": np.empty(x.shape, dtype=np.bool_)}
            stop = 0
            for data in clients.values():
                part = self.convert(data["tokens"][()], words)
                start, stop = stop, stop + len(part["y"])
                for key, array in arrays.items():
                    array[start:stop] = part[key]
            return arrays | {"owner": np.repeat(_ids(list(counts)), list(counts.values()))}


def _ids(clients: list[str]) -> Array:
    """Client ids, as numbers if all are, which take a fraction of the memory."""
    numeric = all(client.isascii() and client.isdecimal() for client in clients)
    return np.array([int(client) for client in clients] if numeric else clients)


def _words(path: Path) -> Mapping[bytes, int]:
    """Tokens, from 1, of the first words of the published list, the most frequent first."""
    with reading(path, f"TFF's list of {WORDS:,} words or more, 'word count' a line", False):
        lines = (line.split() for line in regular_files.read_bytes(path).splitlines()[:WORDS])
        words = [line[0] for line in lines if len(line) == 2]
        if len(words) < WORDS:
            raise ValueError(f"it has {len(words):,} words")
    return {word: token for token, word in enumerate(words, start=1)}


@register("data", "stackoverflow")
@dataclass(frozen=True)
class StackOverflow(Benchmark):
    """Stack Overflow: the next word in sentences of 342,477 users (TFF, 2019).

    Tokens as Reddi et al. 2021 have them: padding 0, the 10,000 most frequent words of TFF's
    published list from 1 on, then any other word, begin and end. A sequence has 20 tokens; a
    shorter sentence has an end. The training sentences need 14 GiB of memory.
    """

    name = "stackoverflow"
    formats = (
        _StackOverflow(
            "stackoverflow",
            ("tokens",),
            _sentences,
            classes=SENTENCE_END + 1,
            vocabulary=SENTENCE_END + 1,
        ),
    )
    command = tff_command("stackoverflow", "stackoverflow.word_count")


SIDE = 84  # of LEAF's images, in pixels
_IMAGES = "img_align_celeba"


def _image_names(names: Any, smiling: Any) -> SplitArrays:
    return {"x": np.array(names, dtype=np.str_), "y": labels(smiling)}


@register("data", "celeba")
@dataclass(frozen=True)
class CelebA(Benchmark):
    """CelebA: whether a celebrity smiles, 84x84 in colour, 9,343 celebrities (LEAF).

    LEAF's JSON names the images of ``img_align_celeba`` (Liu et al. 2015), which are read and
    scaled as its model does.
    """

    name = "celeba"
    formats = (Leaf(_image_names, classes=2),)
    command = (
        "git clone https://github.com/TalwalkarLab/leaf && cd leaf/data/celeba && ./preprocess.sh "
        "-s niid --sf 1.0 -k 5 -t sample (after what its README.md says of data/raw, and with "
        "data.dir = 'leaf/data')"
    )

    def prepared(self, arrays: SplitArrays, place: Path, protected: bool) -> SplitArrays:
        """The images in place of their names. One that cannot be read has class -1 if private."""
        optional_packages.require("data.name = 'celeba'", "PIL")
        raw = next((p for p in (place / "raw", place) if (p / _IMAGES).is_dir()), None)
        if raw is None:
            raise FedsimError(
                f"'{place}' has neither raw/{_IMAGES} nor {_IMAGES}; it must have CelebA's aligned "
                "images, as LEAF's data/celeba/README.md says."
            )
        names, y = arrays["x"], arrays["y"].copy()
        refuse_larger_than_memory(len(names) * 3 * SIDE**2, str(raw / _IMAGES))
        x = np.zeros((len(names), SIDE, SIDE, 3), dtype=np.uint8)
        for row, name in enumerate(names):
            try:
                x[row] = _image(raw / _IMAGES, str(name))
            except MemoryError:
                raise
            except Exception as error:  # the image is untrusted: PIL may raise any type
                if not protected:
                    raise FedsimError(
                        f"{raw / _IMAGES} lacks a usable {name} ({cause(error)}), which LEAF's "
                        "JSON names; it must have all of CelebA's aligned images."
                    ) from None
                y[row] = -1
        return arrays | {"x": x, "y": y}


def _image(folder: Path, name: str) -> Array:
    from PIL import Image

    if Path(name).name != name:
        raise ValueError("a name, not a path, is wanted")
    with Image.open(regular_files.require(folder / name)) as image:
        return np.asarray(image.resize((SIDE, SIDE)).convert("RGB"))
