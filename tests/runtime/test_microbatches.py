"""Batches with plain values next to tensors: every micro-batch has the values, unless they are those of samples."""

import pytest
import torch

from pipefit.errors import DataError
from pipefit.runtime.microbatches import cut, feed_of, pair_of

X = torch.arange(8.0).view(4, 2)


@pytest.mark.parametrize("values", [["a", "b", "c", "d"], [1.0, 2.0, 3.0, 4.0], [[1], [2, 3], [], ["d"]], [None] * 4])
def test_a_list_with_a_plain_value_for_each_sample_is_refused(values):
    for batch in ({"x": X, "values": values}, (X, values), [X, {"inner": (values, 1)}]):
        with pytest.raises(DataError, match="the batch has 4 samples and a list of 4 plain values"):
            cut(batch, 2)
        assert len(cut(batch, 1)) == 1


@pytest.mark.parametrize("values", ["text", 2.5, None, ("a", "b", "c", "d"), [1, 2, 3], [1, 2, 3, 4, 5], []])
def test_other_plain_values_are_in_every_micro_batch(values):
    parts = cut({"x": X, "values": values}, 2)
    assert [part["values"] for part in parts] == [values, values]
    assert torch.equal(torch.cat([part["x"] for part in parts]), X)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)], layout=layout)
    for batch in ((nested, X), (X, {"y": nested})):
        with pytest.raises(DataError, match=r"a batch has a nested tensor, .* pad it"):
            feed_of(batch, 1, 0, "train")


def test_a_sparse_tensor_is_only_in_one_micro_batch():
    sparse = X.to_sparse()
    assert cut(sparse, 1) == [sparse]
    with pytest.raises(DataError, match=r"expected dense tensors .* microbatches=1"):
        cut(sparse, 2)


def test_gradients_behind_a_batch_are_refused_not_lost():
    computed, leaf = X.clone().requires_grad_() * 2, X.clone().requires_grad_()
    for batch in ((computed, X), {"x": computed}):
        with pytest.raises(DataError, match=r"input was computed with gradients.* detach\(\) it, or make what"):
            pair_of(batch, trains=True)
    for target in (computed, {"y": leaf}):
        with pytest.raises(DataError, match=r"target requires a gradient, .* detach\(\) the target"):
            pair_of((X, target), trains=True)
    for batch in ((leaf, X), {"x": leaf}):
        assert pair_of(batch, trains=True)
    assert pair_of((computed, leaf))
