from __future__ import annotations

import numpy as np
import pytest

from fedsim.partitions import Dirichlet, Shards
from fedsim.partitions.flower_datasets import FromFlower, for_flower

pytest.importorskip("flwr_datasets", reason="needs the extra flwr-datasets")

LABELS = np.random.default_rng(1).integers(0, 10, 600)


def hf_dataset():
    from datasets import Dataset

    return Dataset.from_dict({"label": LABELS, "position": np.arange(len(LABELS))})


@pytest.mark.parametrize(
    "ours", [Dirichlet(alpha=0.5, clients=7, seed=3), Shards(shards=2, clients=6)]
)
def test_flower_deals_as_our_partitioner_does(ours):
    theirs = for_flower(ours)
    theirs.dataset = hf_dataset()
    assert theirs.num_partitions == ours.clients
    for client, expected in enumerate(ours.indices(LABELS)):
        assert list(theirs.load_partition(client)["position"]) == expected.tolist()


def test_we_deal_as_flowers_partitioner_does():
    from flwr_datasets.partitioner import IidPartitioner, ShardPartitioner

    for make in (
        lambda: IidPartitioner(num_partitions=5),
        lambda: ShardPartitioner(
            num_partitions=5, partition_by="label", num_shards_per_partition=2
        ),
    ):
        parts = FromFlower(make(), clients=5).indices(LABELS)
        expected = make()
        expected.dataset = hf_dataset()
        for client, part in enumerate(parts):
            assert part.tolist() == sorted(expected.load_partition(client)["position"])
        assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts))


def test_the_number_of_clients_must_be_theirs():
    from flwr_datasets.partitioner import IidPartitioner

    with pytest.raises(ValueError, match="clients is 4; it must be 5"):
        FromFlower(IidPartitioner(num_partitions=5), clients=4).indices(LABELS)
