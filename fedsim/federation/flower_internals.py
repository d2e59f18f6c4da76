"""All that fedsim uses of Flower beyond its public interface."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo as NodeInfo
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError as ObjectPushError
from flwr.supercore.run import Run as Run
from flwr.supercore.task_identity import TaskIdentity
from httpx import HTTPStatusError as HTTPStatusError

from fedsim.errors import FedsimError

SUPERLINK_NODE_ID = 1
BUDGET_SPENT = 4096
"""Error code of a fedsim client whose own privacy budget does not allow the request."""
TIMED_OUT = 4097
"""Error code of a fedsim client that exceeded its time limit, counted from its own start."""
MALFORMED, NON_FINITE = 4098, 4099
"""Error codes that replace an unusable update where a block becomes messages."""
CLIENT_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
NODE_UNAVAILABLE = ErrorCode.NODE_UNAVAILABLE
RAISED = frozenset(
    getattr(ErrorCode, name)
    for name in (
        "LOAD_CLIENT_APP_EXCEPTION",
        "CLIENT_APP_RAISED_EXCEPTION",
        "MOD_FAILED_PRECONDITION",
        "INVALID_FAB",
        "CLIENT_APP_CRASHED",
    )
    if hasattr(ErrorCode, name)
)
"""Flower's codes of errors in a client's app; with its other codes the client counts as missing."""


def ensure_identity(run_id: int) -> None:
    """Allow this process to create messages.

    ``Message(...)`` reads the sender from a process-wide global that Flower's runtimes set. Outside
    of them it is set here; inside, their values are kept.
    """
    for name, value in (("run_id", run_id), ("node_id", SUPERLINK_NODE_ID), ("task_id", 1)):
        try:
            getattr(TaskIdentity, name)
        except RuntimeError:
            setattr(TaskIdentity, name, value)


def empty_run(run_id: int) -> Run:
    """A Flower run with an id and no other information."""
    return Run.create_empty(run_id=run_id)


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message the id that its reply will name."""
    message.metadata.__dict__["_message_id"] = message_id


def send_as(message: Message, message_id: str, run_id: int) -> None:
    """Give a message the id that its reply will name, and the run that it is sent in."""
    set_message_id(message, message_id)
    message.metadata.__dict__["_run_id"] = run_id


def deliver(message: Message, content: RecordDict) -> Message:
    """A shallow copy of a message, with other content."""
    delivered: Any = copy.copy(message)
    delivered.__dict__["_content"] = content
    return delivered  # type: ignore[no-any-return]


def has_expired(message: Message) -> bool:
    """Whether a message's time to live is over, so that a SuperLink refuses it."""
    return message.metadata.created_at + message.metadata.ttl <= time.time()


def renew(message: Message) -> None:
    """Begin a message's time to live again; Flower then gives it a new id."""
    message.metadata.created_at = time.time()


def unavailable(message_id: str, run_id: int) -> Message:
    """Flower's error reply for a message that has expired or was never sent."""
    request = Message(RecordDict(), SUPERLINK_NODE_ID, "system")
    send_as(request, message_id, run_id)
    reason = "the message has expired, or there is none of this id."
    return error_reply(request, ErrorCode.MESSAGE_UNAVAILABLE, reason)


def error_reply(message: Message, code: int, reason: str) -> Message:
    """Reply with an error in place of content."""
    return Message(Error(code, reason), reply_to=message)


def client_id(node_config: Mapping[str, bool | int | float | str]) -> int:
    """A node's client id: its node config's ``partition-id``.

    Raises
    ------
    FedsimError
        If it has none.
    """
    client = node_config.get("partition-id")
    if not isinstance(client, int) or isinstance(client, bool):
        raise FedsimError(
            f"node-config 'partition-id' is {client!r}; it must be this client's id, an integer."
        )
    return client
