from __future__ import annotations

import copy
import pickle

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedsim.federation.arrays import LazyArray, array_record, tensors


def test_a_lazy_array_looks_like_flowers_own():
    values = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    lazy, plain = LazyArray(values), Array(values.numpy())
    assert (lazy.dtype, lazy.shape, lazy.stype) == (plain.dtype, plain.shape, plain.stype)
    assert lazy.data == plain.data
    assert np.array_equal(lazy.numpy(), plain.numpy())


def test_a_lazy_array_is_the_same_object_on_the_wire():
    values = torch.randn(5, generator=torch.Generator().manual_seed(1))
    lazy, plain = LazyArray(values), Array(values.numpy())
    assert lazy.object_id == plain.object_id
    received = Array.inflate(lazy.deflate(), dict(lazy.slice_array()))
    assert np.array_equal(received.numpy(), values.numpy())


def test_nothing_is_serialised_until_somebody_asks_for_bytes():
    record = array_record({"w": torch.zeros(3)})
    tensors(record)["w"], record["w"].numpy()
    assert "_data" not in record["w"].__dict__


def test_training_in_place_on_the_numpy_view_leaves_the_record_alone():
    record = array_record({"w": torch.zeros(3)})
    record["w"].numpy()[:] = 7.0
    record.to_torch_state_dict()["w"].fill_(7.0)
    assert tensors(record)["w"].tolist() == [0.0, 0.0, 0.0]


def test_a_lazy_array_pickles_even_after_its_object_id_was_read():
    lazy = LazyArray(torch.arange(3.0))
    _ = lazy.object_id
    copied = pickle.loads(pickle.dumps(lazy))
    assert type(copied) is Array
    assert copied.numpy().tolist() == [0.0, 1.0, 2.0]


def test_assigned_bytes_replace_the_tensor():
    lazy = LazyArray(torch.zeros(2))
    lazy.data = Array(np.array([1.0, 2.0], dtype=np.float32)).data
    assert lazy.numpy().tolist() == [1.0, 2.0]
    assert lazy.tensor.tolist() == [1.0, 2.0]


def test_tensors_reads_plain_arrays_and_scalars():
    record = ArrayRecord({"a": Array(np.float32([1, 2])), "s": Array(np.array(3.0))})
    read = tensors(record)
    assert read["a"].tolist() == [1.0, 2.0]
    assert read["s"].shape == ()


def test_a_copied_content_shares_no_container_with_its_source():
    source = RecordDict(
        {
            "arrays": array_record({"w": torch.zeros(2)}),
            "plain": ArrayRecord([np.ones(2)]),
            "config": ConfigRecord({"list": [1, 2], "x": "y"}),
            "metrics": MetricRecord({"list": [1.0]}),
        }
    )
    own = copy.deepcopy(source)
    own["arrays"]["w"].data = Array(np.float32([5, 5])).data
    own["plain"].to_numpy_ndarrays(keep_input=False)
    own["config"]["list"].append(3)
    own["metrics"]["list"].append(2.0)
    assert tensors(source["arrays"])["w"].tolist() == [0.0, 0.0]
    assert len(source["plain"]) == 1
    assert source["config"]["list"] == [1, 2]
    assert source["metrics"]["list"] == [1.0]
