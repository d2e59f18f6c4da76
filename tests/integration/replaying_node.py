"""A SuperNode that replays replies: ``python replaying_node.py HOW SECONDS ARGUMENTS``.

The last as for `fedsim.deploy.flower_programs`. It says in its log what it has sent again.
"""

import importlib
import sys
import time

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedsim.deploy import flower_programs

loop = importlib.import_module("flwr.supernode.start_client_internal")
honest = loop._push_messages


class Replaying:
    """A node's connection, which keeps every reply of training and sends some of them again.

    ``twice``: each reply again at once, as it was and as another reply to the same message.
    ``beside``: the first round's reply before each later one. ``instead``: in its place.
    """

    def __init__(self, how):
        self.how = how
        self.replies = []
        self.contents = {}

    def push(self, state, object_store, send, push_object):
        def keeps_object(run_id, session_id, object_id, content):
            self.contents[object_id] = content
            push_object(run_id, session_id, object_id, content)

        def sends(message, tree, runtime):
            if message.metadata.message_type != "train":
                return send(message, tree, runtime)
            if self.replies and self.how in ("beside", "instead"):
                self.replay(*self.replies[0], "old", send, push_object)
            if self.replies and self.how == "instead":
                return set(), ""
            self.replies.append((message, tree))
            # All of it: what the SuperLink has of another node's equal object it does not ask for.
            for part in iterate_object_tree(tree):
                while not (content := object_store.get(part.object_id)):
                    time.sleep(0.05)
                self.contents[part.object_id] = content
            return send(message, tree, runtime)

        sent = len(self.replies)
        honest(state, object_store, sends, keeps_object)
        if self.how == "twice":
            for message, tree in self.replies[sent:]:
                self.replay(message, tree, "same", send, push_object)
                again = self.other(message)
                self.replay(again, get_object_tree(again), "another", send, push_object)

    def other(self, message):
        """The same content under another id."""
        whole = inflate_object_from_contents(
            message.metadata.message_id, dict(self.contents), keep_object_contents=True
        )
        metadata = message.metadata
        metadata.created_at += 0.001
        metadata.ttl -= 0.001
        again = Message(whole.content, metadata=metadata)
        again.metadata.__dict__["_message_id"] = again.object_id
        for object_id, part in get_all_nested_objects(again).items():
            self.contents[object_id] = part.deflate()
        return again

    def replay(self, message, tree, which, send, push_object):
        wanted, session_id = send(message, tree, 1.0)
        for object_id in wanted:
            push_object(message.metadata.run_id, session_id, object_id, self.contents[object_id])
        print(f"replayed {which} (objects wanted: {len(wanted)})", flush=True)


if __name__ == "__main__":
    loop._push_messages = Replaying(sys.argv[1]).push
    flower_programs.run_supernode(float(sys.argv[2]), sys.argv[3:])
