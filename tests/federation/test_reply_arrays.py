"""Arrays of strangers: what is not what was asked for is refused before anything is allocated."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from flwr.app import Array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedsim.federation.arrays import LazyArray
from fedsim.federation.replies import MalformedArrayError, float_tensor


def sent(data: object) -> Array:
    array = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=b"")
    array.data = data
    return array


def with_header(text: bytes, body: bytes = bytes(12), version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + body


def header(shape: str = "(3,)", descr: str = "<f4") -> bytes:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()


@given(
    values=arrays.arrays(
        st.sampled_from(["<f2", "<f4", "<f8", ">f4"]), arrays.array_shapes(min_dims=0, min_side=0)
    ),
    fortran=st.booleans(),
)
def test_what_numpy_wrote_is_read_as_numpy_reads_it(values, fortran):
    written = np.asfortranarray(values) if fortran and values.ndim else values
    file = io.BytesIO()
    np.save(file, written)
    read = float_tensor(sent(file.getvalue()), values.shape)
    assert read.numpy().tobytes() == np.array(values, values.dtype.newbyteorder("=")).tobytes()
    assert read.shape == values.shape


def test_what_flower_and_torch_write_is_read():
    for tensor in (torch.ones(2, 3), torch.tensor(2.0), torch.randn(4, 5).T, torch.zeros(0, 3)):
        for array in (Array(tensor), Array(tensor.numpy()), LazyArray(tensor)):
            assert torch.equal(float_tensor(array, tuple(tensor.shape)), tensor)


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", with_header(header()))
    return file.getvalue()


HOSTILE = {
    "73 TiB": with_header(header("(10000000000000,)", "<f8")),
    "10^24 entries": with_header(header("(1000000000000, 1000000000000)")),
    "a negative entry": with_header(header("(-3,)")),
    "a huge number": with_header(header(f"({'9' * 4000},)")),
    "a cut header": with_header(header()[:20]),
    "a nested header": with_header(b"{" * 1000),
    "a header of expressions": with_header(header("(3 if 1 else 2,)")),
    "a pickle": with_header(header(descr="|O")),
    "a structure": with_header(header().replace(b"'<f4'", b"[('a', '<f4')]")),
    "whole numbers": with_header(header(descr="<i4")),
    "complex numbers": with_header(header("(3,)", "<c8"), bytes(24)),
    "a zip archive": zipped(),
    "text": b"hello",
    "nothing": b"",
    "magic and no more": b"\x93NUMPY\x01\x00",
    "an unknown version": with_header(header(), version=b"\x09\x00"),
    "four gigabytes of header": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + header(),
    "too few bytes": with_header(header(), bytes(11)),
    "too many bytes": with_header(header(), bytes(13)),
    "another shape": with_header(header("(4,)"), bytes(16)),
    "another number of dimensions": with_header(header("(3, 1)")),
    "no bytes": "a string",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_anything_else_is_refused_and_costs_no_memory(what):
    array = sent(HOSTILE[what])
    tracemalloc.start()
    with pytest.raises(MalformedArrayError):
        float_tensor(array, (3,))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("stype", ["torch.save", "numpy", "", 3])
def test_an_array_that_says_it_is_serialised_otherwise_is_refused(stype):
    array = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=with_header(header()))
    assert float_tensor(array, (3,)).shape == (3,)
    array.stype = stype
    with pytest.raises(MalformedArrayError, match="serialised as"):
        float_tensor(array, (3,))


@given(position=st.integers(0, 90), value=st.integers(0, 255), cut=st.integers(0, 92))
def test_a_byte_changed_or_lost_gives_an_array_of_that_shape_or_none(position, value, cut):
    data = bytearray(with_header(header()))
    data[position % len(data)] = value
    for changed in (bytes(data), with_header(header())[:cut]):
        try:
            read = float_tensor(sent(changed), (3,))
        except MalformedArrayError:
            continue
        assert read.shape == (3,)


def test_a_tensor_that_never_was_bytes_is_looked_at_too():
    for tensor in (torch.ones(4), torch.ones(3, dtype=torch.int64)):
        with pytest.raises(MalformedArrayError):
            float_tensor(LazyArray(tensor), (3,))
    with pytest.raises(MalformedArrayError, match=r"not torch\.float64"):
        float_tensor(LazyArray(torch.ones(3)), (3,), torch.float64)
