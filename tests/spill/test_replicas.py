"""Stages that are spilled and replicated: gradients are summed where they lie, and nothing else changes."""

import pytest
import torch
from tests.pipelines import grouped
from torch import nn

from pipefit import Pipeline
from pipefit.errors import PlanError, ScheduleError
from pipefit.spec.options import Spilled, Updates

pytestmark = pytest.mark.slow


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


class Seldom(nn.Module):
    """Has a weight that only batches with a large first number reach, and one that none does."""

    def __init__(self):
        super().__init__()
        self.usual, self.rare, self.never = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.usual(x)
        return y + self.rare(x) if x[0, 0] > 0.0 else y


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), Seldom(), nn.Tanh(), nn.Linear(16, 4)
    )


def data(steps=4):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(24, 8, generator=generator), torch.randint(0, 4, (24,), generator=generator)) for _ in range(steps)
    ]


def pipeline(spill=None, replicas=(2,), chunks=2, schedule="breadth-first", clip=None, **more):
    settings = {"stages": chunks * max(len(replicas), 1), "chunks": chunks, "replicas": replicas, "microbatches": 6}
    return Pipeline(
        network(),
        **grouped(
            loss=nn.functional.cross_entropy,
            schedule=schedule,
            seed=3,
            clip_norm=clip,
            spill=spill,
            **{"optimizer": adamw, **settings, **more},
        ),
    )


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("how", [{}, {"slots": 1}, {"step_on": "host"}, {"disk": True}, {"optim_slots": 0}], ids=str)
@pytest.mark.parametrize("replicas", [(2,), (3,), (2, 1)])
def test_spilled_replicas_train_as_those_that_hold_everything(replicas, how, clip, tmp_path):
    how = {key: tmp_path / "tier" if key == "disk" else value for key, value in how.items()}
    one, other = pipeline(None, replicas, clip=clip), pipeline(Spilled(**how), replicas, clip=clip)
    for x, y in data():
        assert one.step(x, y) == other.step(x, y)
    assert same(one.state_dict(), other.state_dict())
    other.close()


@pytest.mark.parametrize(("schedule", "chunks", "stages"), [("interleaved", 2, 4), ("gpipe", 1, 2), ("1f1b", 1, 2)])
def test_other_schedules_too(schedule, chunks, stages):
    wish = {"schedule": schedule, "chunks": chunks, "stages": stages, "clip": 0.5}
    one, other = pipeline(None, **wish), pipeline(Spilled(slots=1), **wish)
    for x, y in data():
        assert one.step(x, y) == other.step(x, y)
    assert same(one.state_dict(), other.state_dict())
    other.close()


def test_they_train_as_one_process_that_holds_everything():
    loss = nn.functional.cross_entropy
    one = Pipeline(network(), loss=loss, optimizer=momentum, stages=1, microbatches=6, updates=Updates(seed=3))
    other = pipeline(Spilled(), optimizer=momentum)
    for x, y in data():
        assert one.step(x, y) == pytest.approx(other.step(x, y), rel=1e-6)
    for name, value in other.state_dict().items():
        assert torch.allclose(one.state_dict()[name], value, atol=1e-5)
    other.close()


def test_gradients_are_summed_in_the_slots_and_nowhere_else():
    pipe = pipeline(Spilled())
    pipe.step(*data(1)[0])
    for worker in pipe.workers:
        slots = {slot.bytes.untyped_storage().data_ptr() for slot in worker.spilling.arena._slots["wgrad"]}
        assert set(worker.buckets) == set(worker.stages)
        for buckets in worker.buckets.values():
            assert {flat.untyped_storage().data_ptr() for flat in buckets.flats} <= slots
    pipe.close()


def test_checkpoints_go_between_spilled_replicas_and_one_process(tmp_path):
    batches = data(4)
    whole = pipeline()
    losses = [whole.step(x, y) for x, y in batches]
    first = pipeline(Spilled(disk=tmp_path / "tier"))
    assert [first.step(x, y) for x, y in batches[:2]] == losses[:2]
    assert first.evaluate(batches[:1]) == pytest.approx(first.evaluate(batches[:1]))
    first.save(tmp_path / "a")
    first.close()
    second = pipeline(Spilled(step_on="host"))
    second.load(tmp_path / "a")
    assert [second.step(x, y) for x, y in batches[2:]] == losses[2:]
    assert same(second.state_dict(), whole.state_dict())
    second.close()


def test_a_sharded_optimizer_and_tensor_parallelism_are_refused_in_one_message():
    with pytest.raises((ScheduleError, PlanError), match="a sharded optimizer do not go together"):
        pipeline(Spilled(), shard="optimizer")
