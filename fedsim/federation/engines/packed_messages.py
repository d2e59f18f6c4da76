"""Packing of messages into few objects, however many arrays a model has.

Flower's deployment runtime stores and sends each record, array and chunk of an array as a separate
object, which takes about ten milliseconds of the SuperLink's time an object and node: a model of
one layer makes eight objects, one of sixty layers a hundred and twenty. Here the records are
serialised together, in Flower's own format, and cut into pieces of 16 MiB.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Written

from fedsim.federation.flower_internals import deliver

# Below the 20 MiB of Flower's own chunks, which proxies between nodes and SuperLink let pass.
_PIECE = 1 << 24
# Protobuf serialises at most 2 GiB.
_LARGEST = 1 << 30
_NAME = "fedsim.packed."
_KEY = "piece"


def pack_messages(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with their arrays in pieces, and their other records if those are all equal.

    Messages with the same arrays share the pieces, which Flower then stores once.
    """
    contents = [
        {
            name: dict(value)
            for name, value in message.content.items()
            if not isinstance(value, ArrayRecord)
        }
        for message in messages
    ]
    same_records = all(records == contents[0] for records in contents)
    pieces_of: dict[tuple[tuple[str, str, int], ...], dict[str, ConfigRecord]] = {}
    for message in messages:
        content = message.content
        names = list(content if same_records else content.array_records)
        # Keyed by identity, since comparing large arrays would be slow. The ids stay unique, since
        # the messages keep the arrays alive.
        arrays = tuple(
            (name, entry, id(array))
            for name, record in content.array_records.items()
            for entry, array in record.items()
        )
        if arrays not in pieces_of:
            pieces_of[arrays] = _pieces(content, names)
        yield deliver(message, _with_pieces(content, names, pieces_of[arrays]))


def pack(content: RecordDict, names: Collection[str]) -> RecordDict:
    """The content with the records of these names in pieces.

    Content with nothing to pack, or with more than 1 GiB of arrays, is returned unchanged.
    """
    return _with_pieces(content, names, _pieces(content, names))


def _pieces(content: RecordDict, names: Collection[str]) -> dict[str, ConfigRecord]:
    packed = RecordDict({name: content[name] for name in names})
    arrays = (array for record in packed.array_records.values() for array in record.values())
    if not packed or sum(len(array.data) for array in arrays) > _LARGEST:
        return {}
    data = recorddict_to_proto(packed).SerializeToString()
    starts = range(0, len(data), _PIECE)
    return {
        f"{_NAME}{number}": ConfigRecord({_KEY: data[start : start + _PIECE]})
        for number, start in enumerate(starts)
    }


def _with_pieces(
    content: RecordDict, names: Collection[str], pieces: dict[str, ConfigRecord]
) -> RecordDict:
    """Content with the pieces in place of the packed records."""
    if not pieces:
        return content
    result = RecordDict({name: content[name] for name in content if name not in names})
    for name, piece in pieces.items():
        result[name] = piece
    return result


def is_packed(content: RecordDict) -> bool:
    """Whether a content has packed records."""
    return f"{_NAME}0" in content


def unpack(content: RecordDict) -> RecordDict:
    """Inverse of `pack`.

    Raises
    ------
    Exception
        Of any type, if the pieces are malformed: they may come from an untrusted client.
    """
    pieces: list[bytes] = []
    records = content.config_records
    while (name := f"{_NAME}{len(pieces)}") in records:
        piece = records[name][_KEY]
        if not isinstance(piece, bytes):
            raise TypeError(f"{name} is {type(piece).__name__}, not bytes.")
        pieces.append(piece)
    restored = recorddict_from_proto(Written.FromString(b"".join(pieces)))
    for name in content:
        if not name.startswith(_NAME):
            restored[name] = content[name]
    return restored


def answer_packed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Mod of a ClientApp that unpacks packed messages, and packs the replies to them."""
    if not message.has_content() or not is_packed(message.content):
        return call_next(message, context)
    reply = call_next(deliver(message, unpack(message.content)), context)
    return (
        deliver(reply, pack(reply.content, list(reply.content))) if reply.has_content() else reply
    )
