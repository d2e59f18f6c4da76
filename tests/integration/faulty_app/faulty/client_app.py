"""Clients that do as they are told: `faults` is "CLIENT=FAULT@ROUND", comma-separated."""

import os
import time

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.app import Message as Reply
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message, context):
    metrics = MetricRecord({"client-id": context.node_config["partition-id"]})
    return Reply(RecordDict({"metrics": metrics}), reply_to=message)


@app.train()
def train(message, context):
    client = context.node_config["partition-id"]
    fault = fault_of(client, message.content["config"]["server-round"], context.run_config)
    arrays = {"w": np.full(3, 1.0 + client)}
    if fault == "raise":
        raise ArithmeticError("as I was told")
    if fault == "die":
        os._exit(9)
    if fault == "hang":
        time.sleep(3600)
    if fault == "slow":
        time.sleep(15)
    if fault == "nan":
        arrays["w"][1] = np.nan
    if fault == "shape":
        arrays["w"] = np.ones((2, 2))
    if fault == "keys":
        arrays = {"v": arrays["w"]}
    record = ArrayRecord({name: Array(value) for name, value in arrays.items()})
    if fault == "garbage":
        record["w"] = Array(dtype="float64", shape=(3,), stype="numpy.ndarray", data=b"\x80junk")
    metrics = MetricRecord({"num-examples": 1})
    return Reply(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


def fault_of(client, server_round, run_config):
    for order in filter(None, str(run_config["faults"]).split(",")):
        who, _, what = order.partition("=")
        fault, _, when = what.partition("@")
        if int(who) == client and (not when or int(when) == server_round):
            return fault
    return ""
