"""An ordinary Flower client: nothing here has to do with privacy."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from numpy_app import task

app = ClientApp()


def read(message: Message):
    return {name: array.numpy() for name, array in message.content["arrays"].items()}


@app.train()
def train(message: Message, context: Context) -> Message:
    features, labels = task.load(int(context.node_config["partition-id"]))
    model = task.fit(read(message), features, labels)
    arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in model.items()})
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    features, labels = task.load(int(context.node_config["partition-id"]))
    found = task.accuracy(read(message), features, labels)
    metrics = MetricRecord({"num-examples": len(labels), "accuracy": found})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
