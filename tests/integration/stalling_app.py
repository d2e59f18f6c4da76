"""fedsim's own client app, with clients that fail at stages of secure aggregation.

A test copies this file into a directory that has `faults`, with a line "ROUND CLIENT STAGE FAULT"
for each. Every stage that a client begins is written to `begun` there, with the number of lines
that the server's ledger has then.
"""

import os
import signal
import time
from pathlib import Path

from fedsim.apps import client_app
from fedsim.federation.aggregation.secagg import client as secagg_client

PLACE = Path(__file__).parent
app = client_app.app


def failing(stage):
    own = getattr(secagg_client, f"_{stage}")

    def answer(entries, context, *arguments):
        server_round, client = entries["context"].split(b"|")[2].decode(), context.node_config
        lines = sum(file.read_bytes().count(b"\n") for file in PLACE.glob("runs/*/ledger.jsonl"))
        with (PLACE / "begun").open("a") as file:
            file.write(f"{server_round} {stage} {lines}\n")
        act(f"{server_round} {client['partition-id']} {stage}")
        return own(entries, context, *arguments)

    return answer


def act(case):
    faults = dict(line.rsplit(" ", 1) for line in (PLACE / "faults").read_text().splitlines())
    match faults.get(case):
        case "raises":
            raise ArithmeticError("as scheduled")
        case "dies":
            os._exit(9)
        case "hangs":
            time.sleep(3600)
        case "stops":
            os.kill(os.getpid(), signal.SIGSTOP)


for name in ("keys", "shares", "masked", "unmask"):
    setattr(secagg_client, f"_{name}", failing(name))
