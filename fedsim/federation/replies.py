"""Decoder of Flower replies: the one place where data that a client sent is read into blocks.

A reply becomes a row, or a reason for its failure. Reading never raises, never allocates a size
that a reply merely claims, and trusts no weight or scalar.
"""

from __future__ import annotations

import logging
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from torch import Tensor

from fedsim.errors import printable
from fedsim.federation.arrays import NUMPY, LazyArray
from fedsim.federation.exchange import ERROR_CODES, Instructions
from fedsim.federation.flower_internals import RAISED, SUPERLINK_NODE_ID
from fedsim.federation.round_report import Tally
from fedsim.federation.row_sums import MAX_EXAMPLES
from fedsim.rows.block import Block, Reason

_log = logging.getLogger("fedsim")

MAX_METRICS = 1000
"""Largest number of metrics that a client may report."""
MAX_ENTRIES = 10_000
"""Largest total number of entries in the lists that a client may report."""


_REASONS: Mapping[int, Reason] = {
    **dict.fromkeys(RAISED, "raised"),
    **{code: reason for reason, code in ERROR_CODES.items()},
}


@dataclass(frozen=True)
class Reply:
    """Decoded replies: a block of clients from an engine, or of one client from a message.

    Attributes
    ----------
    block : Block
        Rows and metrics; of one client if it came in a message.
    lists : mapping of name to list of float
        Lists of numbers that this client reports.
    content : RecordDict or None
        The message's content, undecoded; None if there was no message.
    """

    block: Block
    lists: Mapping[str, list[float]] = field(default_factory=dict)
    content: RecordDict | None = None


class _UnusableError(Exception):
    """The reply is unusable, for this reason."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def read_replies(
    replies: Iterable[Message],
    instructions: Instructions,
    tally: Tally,
    *,
    needed: tuple[str, ...] = (),
    units: tuple[str, int] | None = None,
) -> Iterator[Reply]:
    """Decode replies, each into a block of one client; unusable ones into failed blocks.

    Parameters
    ----------
    instructions : Instructions
        The instructions that the replies answer.
    tally : Tally
        Counts the replies of nodes that were not asked, which are dropped.
    needed : tuple of str
        Names of the numbers that a usable reply must report, each finite.
    units : tuple of str and int, optional
        Name and length of the one array of whole numbers, as float64, that each reply must have in
        place of parameters; it is then the block's row as it is.
    """
    client_of = instructions.recipients.client_of
    for reply in replies:
        client = None
        try:
            client = client_of.get(reply.metadata.src_node_id)
            if client is None:
                _count_unknown_node(reply, tally)
                continue
            if reply.has_error():
                raise _UnusableError(error_reason(reply), str(reply.error.reason))
            numbers, lists = _reported(reply.content)
            _require_sound(numbers, instructions.keys.weighted_by, needed)
            rows = _rows(reply.content, instructions, units)
            metrics = {name: np.array([value]) for name, value in numbers.items()}
            block = Block.sent(np.array([client], dtype=np.int64), rows, metrics)
            yield Reply(block, lists, reply.content)
        except GeneratorExit:
            raise
        except _UnusableError as error:
            _log.warning("the reply of client %s is left out: %s", client, printable(error, 400))
            yield _failed(client, error.reason)
        # A malformed reply may raise any exception; it must not end the round.
        except Exception as error:
            _log.warning("the reply of client %s cannot be read: %s", client, printable(error))
            yield _failed(client, "malformed")


def _failed(client: int | None, reason: Reason) -> Reply:
    ids = [] if client is None else [client]
    return Reply(Block.failed(np.array(ids, dtype=np.int64), reason))


def _count_unknown_node(reply: Message, tally: Tally) -> None:
    # For a node that it has lost, Flower sends an error from the SuperLink's id: the client is then
    # missing, and this is not a reply from an unknown node.
    node = reply.metadata.src_node_id
    if not (reply.has_error() and node == SUPERLINK_NODE_ID):
        _log.warning("a reply from node %s, which was not asked, is left out.", node)
        tally.unknown += 1


def error_reason(reply: Message) -> Reason:
    """Why a client failed, by the code of its error reply; "missing" for an unknown code."""
    return _REASONS.get(reply.error.code, "missing")


def _reported(content: RecordDict) -> tuple[dict[str, float], dict[str, list[float]]]:
    """All numbers, and all lists of numbers, in a reply's metric records.

    An integer too large for a float becomes NaN.

    Raises
    ------
    Exception
        If there are more than allowed, or if a list contains something other than numbers.
    """
    numbers: dict[str, float] = {}
    lists: dict[str, list[float]] = {}
    entries = 0
    for record in content.metric_records.values():
        for name, value in record.items():
            if isinstance(value, int | float):
                numbers[str(name)] = _number(value)
            elif isinstance(value, list):
                entries += len(value)
                if entries > MAX_ENTRIES:
                    raise ValueError(f"its lists have more than {MAX_ENTRIES} entries.")
                lists[str(name)] = [_number(entry) for entry in value]
            if len(numbers) + len(lists) > MAX_METRICS:
                raise ValueError(f"it reports more than {MAX_METRICS} metrics.")
    return numbers, lists


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"it reports a {type(value).__name__} among numbers.")
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _require_sound(numbers: Mapping[str, float], weighted_by: str, needed: tuple[str, ...]) -> None:
    """Refuse a reply whose example count is out of range, or that lacks a needed number."""
    examples = numbers.get(weighted_by, 0.0)
    if not 0 <= examples <= MAX_EXAMPLES:
        raise _UnusableError(
            "malformed", f"its '{weighted_by}' is {examples}, not from 0 to {MAX_EXAMPLES:g}."
        )
    for name in needed:
        if name not in numbers:
            raise _UnusableError("malformed", f"it reports no '{name}'.")
        if not math.isfinite(numbers[name]):
            raise _UnusableError("non-finite", f"its '{name}' is {numbers[name]}.")


def _rows(
    content: RecordDict, instructions: Instructions, units: tuple[str, int] | None
) -> Tensor | None:
    """The client's row ``[1, d]``, or its array ``[1, size]``; None for an evaluation."""
    layout = instructions.layout
    if layout is None:
        return None
    arrays = _arrays_of(content, instructions.keys.arrays if units is None else "arrays")
    if units is not None:
        name, size = units
        if set(arrays) != {name}:
            raise _UnusableError(
                "malformed", "it is no share; the client app must bound and noise its own update."
            )
        return float_tensor(arrays[name], (size,), torch.float64).unsqueeze(0)
    surplus = set(arrays) - {entry.name for entry in layout.entries} - set(layout.untrained)
    absent = {entry.name for entry in layout.entries} - set(arrays)
    if surplus or absent:
        fault = f"arrays that the model has not, {min(surplus)}" if surplus else f"no {min(absent)}"
        raise _UnusableError("malformed", f"it has {fault:.200}.")
    # Integer and boolean entries keep the server's value, so that clients' values are not read.
    named = {entry.name: float_tensor(arrays[entry.name], entry.shape) for entry in layout.entries}
    vector = instructions.vector[: layout.d]
    return (layout.flatten(named).to(vector.device) - vector).unsqueeze(0)


def changed_whole_numbers(content: RecordDict, instructions: Instructions) -> list[str]:
    """Names of integer and boolean entries whose bytes differ from those that the client was sent.

    Nothing is decoded: the values themselves are never used.
    """
    if instructions.layout is None:
        return []
    arrays, sent = _arrays_of(content, instructions.keys.arrays), instructions.arrays
    names = [n for n in instructions.layout.untrained if n in arrays and n in sent]
    return [name for name in names if arrays[name].data != sent[name].data]


def _arrays_of(content: RecordDict, key: str) -> ArrayRecord:
    records = content.array_records
    if key in records:
        return records[key]
    if len(records) != 1:
        raise _UnusableError(
            "malformed", f"it has {len(records)} array records and none is called '{key}'."
        )
    return next(iter(records.values()))


_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 4096
_HEADER = re.compile(
    rb"\{'descr': '([<>]f[248])', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\), ?\} *\n"
)


class MalformedArrayError(ValueError):
    """The array is not serialised as expected, or has another shape or dtype."""


def float_tensor(array: Array, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Decode a floating-point array that must have this shape; do not write to the result.

    The bytes are parsed here rather than by `numpy.load`, which would allocate whatever size the
    header claims. Only the header that numpy writes for a floating-point array is accepted.

    Parameters
    ----------
    array : Array
        Array from a client: its fields are unverified claims.
    shape : tuple of int
    dtype : torch.dtype, optional
        Required dtype; by default float16, float32 and float64 are all accepted.

    Raises
    ------
    MalformedArrayError
        If it is anything else.
    """
    if array.stype != NUMPY:
        raise MalformedArrayError(f"it is serialised as {array.stype!r:.60}, not {NUMPY!r}.")
    values = array.tensor if isinstance(array, LazyArray) else _read(array.data, shape)
    if values.shape != shape:
        raise MalformedArrayError(f"its shape is {_short(values.shape)}, not {_short(shape)}.")
    if not values.is_floating_point() or dtype not in (None, values.dtype):
        expected = "floating point" if dtype is None else str(dtype)
        raise MalformedArrayError(f"its dtype is {values.dtype}, not {expected}.")
    return values


def _read(data: object, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(data, bytes) or data[:6] != _MAGIC:
        raise MalformedArrayError("its bytes are not a numpy array.")
    size, start = _header_bounds(data)
    header = _HEADER.fullmatch(data, start, start + size)
    if header is None:
        raise MalformedArrayError("its header is not one of a floating-point array.")
    descr, fortran, dimensions = header.groups()
    claimed = tuple(int(number) for number in dimensions.split(b",") if number.strip())
    if claimed != shape:
        raise MalformedArrayError(f"its shape is {_short(claimed)}, not {_short(shape)}.")
    dtype = np.dtype(descr.decode())
    count = math.prod(shape)
    if len(data) != start + size + count * dtype.itemsize:
        raise MalformedArrayError(f"it is {len(data)} bytes long, which its header contradicts.")
    flat = np.frombuffer(data, dtype, count, start + size)
    values = flat.reshape(shape, order="F" if fortran == b"True" else "C")
    # torch accepts native byte order only, and warns of memory that is not writable: copy.
    return torch.from_numpy(np.array(values, dtype=dtype.newbyteorder("="), order="C"))


def _header_bounds(data: bytes) -> tuple[int, int]:
    """Length of the header's text, and the position where it begins."""
    version = data[6:8]
    form = {b"\x01\x00": "<H", b"\x02\x00": "<I", b"\x03\x00": "<I"}.get(version)
    if form is None or len(data) < 8 + struct.calcsize(form):
        raise MalformedArrayError("its bytes are not a numpy array.")
    (size,) = struct.unpack_from(form, data, 8)
    if size > _MAX_HEADER:
        raise MalformedArrayError(f"its header claims {size} bytes.")
    return size, 8 + struct.calcsize(form)


def _short(shape: tuple[int, ...]) -> str:
    text = str(tuple(shape))
    return text if len(text) <= 60 else f"{text[:60]}..."
