"""Batches with plain values next to tensors: every micro-batch has the values, unless they are those of samples."""

import pytest
import torch

from pipefit.errors import DataError
from pipefit.runtime.microbatches import cut

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
