"""Copies in memory where copies of stages share weights: they have the training as it is, or are known to be old."""

import pytest
import torch
from tests.runtime import jobs

from pipefit.checkpoint.memory import Memory

DATA = jobs.batches(3)


def change_a_weight(pipe):
    with torch.no_grad():
        next(pipe.model.parameters()).mul_(2)


def change_a_state(pipe):
    states = next(iter(pipe.workers[0].optimizers[0].state.values()))
    states["momentum_buffer"].zero_()


def change_a_learning_rate(pipe):
    pipe.workers[0].optimizers[0].param_groups[0]["lr"] = 0.5


def load_weights(pipe):
    pipe.load_state_dict({name: 2 * value for name, value in pipe.state_dict().items()})


CHANGES = [change_a_state, change_a_learning_rate, load_weights]


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "weights"])
def test_a_copy_in_memory_is_known_to_be_old_after_a_change(shard, tmp_path):
    pipe = jobs.pipeline(shard=shard, replicas=2, stages=2, microbatches=4)
    memory = Memory(pipe, tmp_path, every=1)
    changes = CHANGES if shard == "weights" else [change_a_weight, *CHANGES]
    for change in changes:
        pipe.fit(DATA[:1])
        assert not memory.is_newest()
        memory.keep()
        assert memory.is_newest()
        pipe.evaluate(DATA[1:])
        pipe.save(tmp_path / "checkpoints")
        assert memory.is_newest()
        change(pipe)
        assert not memory.is_newest()
    memory.keep()
    with memory.stepping():
        pipe.fit(DATA[:1])
        assert memory.is_newest()
