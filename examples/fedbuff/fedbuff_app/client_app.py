"""An ordinary Flower client, whose answer does not show how long it took."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsim.engines import hold_answers

FEATURES = 6

app = ClientApp()


def load(partition: int, examples: int = 80):
    """One client's examples: two Gaussian clouds, in proportions of its own."""
    random = np.random.default_rng([7, partition])
    labels = random.random(examples) < random.uniform(0.3, 0.7)
    centre = np.where(np.arange(FEATURES) % 2, 1.0, -0.5)
    features = random.normal(size=(examples, FEATURES)) + np.where(labels[:, None], centre, -centre)
    return features, labels.astype(np.float64)


def seconds_for(context: Context) -> float:
    """The declared seconds of a task, where they are real."""
    config = context.run_config
    return float(config["duration"]) if config["real-time"] else 0.0


@app.train(mods=[hold_answers(seconds_for)])
def train(message: Message, context: Context) -> Message:
    features, labels = load(int(context.node_config["partition-id"]))
    weight = message.content["arrays"]["weight"].numpy().copy()
    for _ in range(20):
        error = 1 / (1 + np.exp(-features @ weight)) - labels
        weight -= 0.1 * features.T @ error / len(labels)
    content = {
        "arrays": ArrayRecord({"weight": Array(weight)}),
        "metrics": MetricRecord({"num-examples": len(labels)}),
    }
    return Message(RecordDict(content), reply_to=message)
