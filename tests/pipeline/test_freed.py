"""Nothing of a Pipeline remains when nobody has it any more; of one that spills, when it was closed."""

import gc
from collections import Counter

import pytest
import torch
from tests.pipelines import grouped
from torch import nn

from pipefit import Pipeline, Spilled
from pipefit.errors import InfeasibleError, ModelError
from pipefit.spill import rank

KINDS = {
    "one stage": {"stages": 1},
    "1f1b": {"stages": 3},
    "zero bubble": {"stages": 3, "schedule": "zb-h1"},
    "copies": {"stages": 2, "replicas": 2},
    "shared optimizer": {"stages": 2, "replicas": 2, "shard": "optimizer"},
    "shared weights": {"stages": 2, "replicas": 2, "shard": "weights"},
    "asynchronous": {"stages": 3, "schedule": "pipedream"},
    "replayed": {"stages": 3, "recompute": "layer"},
    "half precision": {"stages": 2, "precision": "bf16"},
    "spilled": {"stages": [2, 2, 2], "chunks": 3, "schedule": "spilled", "spill": Spilled()},
    "spilled, steps on the host": {
        "stages": [2, 2, 2],
        "chunks": 3,
        "schedule": "spilled",
        "spill": Spilled(step_on="host", activations=True),
    },
}


def momentum(weights):
    return torch.optim.SGD(weights, 0.1, momentum=0.9)


def train(kind, closes):
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    options = grouped(loss=nn.functional.mse_loss, optimizer=momentum, microbatches=4, **KINDS[kind])
    pipe = Pipeline(layers, **options)
    pipe.fit([torch.randn(2, 8, 8).unbind()] * 2)
    if closes:
        pipe.close()


def living():
    """The objects of pipefit, and tensors, by their classes."""
    gc.collect()
    classes = Counter(type(one) for one in gc.get_objects())
    return {kind: n for kind, n in classes.items() if kind.__module__.startswith("pipefit.") or kind is nn.Parameter}


@pytest.mark.parametrize(
    ("kind", "closes"), [*((kind, True) for kind in KINDS), *((kind, False) for kind in KINDS if "spill" not in kind)]
)
def test_all_that_a_pipeline_made_is_freed_with_it(kind, closes):
    train(kind, closes)  # what is made once for each process
    before = living()
    for _ in range(2):
        train(kind, closes)
    assert living() == before


def test_a_model_whose_weights_another_pipeline_keeps_is_refused():
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    options = grouped(loss=nn.functional.mse_loss, optimizer=momentum, microbatches=4, **KINDS["spilled"])
    Pipeline(layers, **options).close()
    with pytest.raises(ModelError, match=r"^0\.weight has no memory: its numbers are with another Pipeline"):
        Pipeline(layers, loss=nn.functional.mse_loss, optimizer=momentum, microbatches=4)


def test_a_frozen_weight_whose_numbers_share_one_memory_is_no_stand_in():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers[0].bias = nn.Parameter(torch.ones(1).expand(8), requires_grad=False)
    pipe = Pipeline(layers, loss=nn.functional.mse_loss, optimizer=momentum, microbatches=4)
    assert pipe.step(*torch.randn(2, 8, 8)) > 0


def test_a_pipeline_without_room_for_its_slots_leaves_no_hooks(monkeypatch):
    class Full(rank.Arena):
        def __init__(self, sizes, counts, device):
            if sizes:
                raise MemoryError("full")
            super().__init__(sizes, counts, device)

    monkeypatch.setattr(rank, "Arena", Full)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    options = grouped(loss=nn.functional.mse_loss, optimizer=momentum, microbatches=4, **KINDS["spilled"])
    with pytest.raises(InfeasibleError, match="has no room for the slots"):
        Pipeline(layers, **options)
    assert not any(weight._post_accumulate_grad_hooks for weight in layers.parameters())
