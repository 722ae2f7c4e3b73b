"""A rehearsal says before a run what the run would say, and counts what it would send and hold."""

from typing import Any

import pytest
import torch.distributed as dist
from tests.pipeline import rehearsal_jobs as jobs

from pipefit.errors import PipefitError
from pipefit.parallel import waiting
from pipefit.pipeline.rehearsal import Rehearsed, rehearse
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.spec.options import Updates
from pipefit.stage.payload import ONLY_SHAPES

pytestmark = pytest.mark.dist

ON_TWO: list[dict[str, Any]] = [
    {"num_ranks": 2},
    {"num_ranks": 2, "schedule": "interleaved", "num_chunks": 2},
    {"num_ranks": 2, "schedule": "zb-h1"},
    {"num_ranks": 2, "schedule": "gpipe", "recompute": "stage"},
    {"num_ranks": 2, "recompute": "layer"},
    {"num_ranks": 2, "schedule": "pipedream", "num_microbatches": 1},
    {"num_ranks": 2, "schedule": "pipedream-2bw"},
    {"num_ranks": 1, "tensor": 2},
]
ON_FOUR: list[dict[str, Any]] = [
    {"num_ranks": 4},
    {"num_ranks": 4, "replicas": (2, 2)},
    {"num_ranks": 4, "replicas": (2, 2), "shard": "optimizer"},
    {"num_ranks": 2, "tensor": 2},
    {"num_ranks": 2, "tensor": 2, "sequence_parallel": True},
]


def rehearsed(kind: str, shape: dict[str, Any], process: int, size: int = 9, clip: float | None = None) -> Rehearsed:
    return rehearse(
        jobs.model(kind),
        jobs.loss(kind),
        jobs.batch(kind, size),
        jobs.plan(kind, **shape),
        process,
        optimizer=jobs.sgd,
        updates=Updates(clip_norm=clip),
    )


@pytest.mark.parametrize(("count", "shapes"), [(2, ON_TWO), (4, ON_FOUR)])
def test_bytes_of_an_update_are_those_of_the_run(count: int, shapes: list[dict[str, Any]]) -> None:
    real = launch(jobs.moved, count, "gpt", shapes, 1.0, threads=1, quiet=True, deadline_s=60)
    for process in range(count):
        for shape, (sent, inside) in zip(shapes, real[process], strict=True):
            found = rehearsed("gpt", shape, process, clip=1.0)
            assert (found.sent_bytes, found.inside_bytes) == (sent, inside), (shape, process)


@pytest.mark.timeout(120)
def test_a_rehearsal_ends_also_in_a_process_that_can_leave_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run that can be repaired."""
    found = rehearsed("gpt", {"num_ranks": 4, "replicas": (2, 2)}, 0)
    monkeypatch.setattr(waiting, "can_leave", True)
    assert rehearsed("gpt", {"num_ranks": 4, "replicas": (2, 2)}, 0).sent_bytes == found.sent_bytes


@pytest.mark.parametrize("kind", ["norms", "convnet"])
def test_batch_norm_frozen_weights_and_idle_ones_are_rehearsed(kind: str) -> None:
    shapes = [{"num_ranks": 2, "replicas": (1, 1)}, {"num_ranks": 2, "schedule": "gpipe"}]
    real = launch(jobs.moved, 2, kind, shapes, None, threads=1, quiet=True, deadline_s=60)
    for process in range(2):
        for shape, (sent, _) in zip(shapes, real[process], strict=True):
            assert rehearsed(kind, shape, process).sent_bytes == sent


REFUSED: dict[str, tuple[str, dict[str, Any], int]] = {
    "another number of layers": ("gpt", {"num_layers": 5, "num_ranks": 2}, 8),
    "fewer samples than micro-batches": ("gpt", {"num_ranks": 2}, 3),
    "heads that the width does not divide": ("gpt", {"num_ranks": 1, "tensor": 4}, 8),
    "too many tensors at a border": ("many", {"num_ranks": 2}, 8),
    "an output whose shape depends on numbers": ("positive", {"num_ranks": 2}, 8),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_would_fail_fails_in_the_rehearsal_of_every_rank_with_its_message(name: str) -> None:
    kind, shape, size = REFUSED[name]
    count = shape["num_ranks"] * shape.get("tensor", 1)
    with pytest.raises(PipefitError) as real:
        launch(jobs.step, count, kind, shape, size, threads=1, quiet=True, deadline_s=60)
    for process in range(count):
        with pytest.raises(PipefitError) as found:
            rehearsed(kind, shape, process, size)
        if kind == "positive":  # which shapes differ is not known without numbers, the rule is
            assert ONLY_SHAPES in str(real.value) and ONLY_SHAPES in str(found.value)
        else:
            assert str(found.value) == str(real.value)


def test_memory_is_that_of_the_allocator() -> None:
    """The rest: on the CPU ids are not copied to a device, and losses and norms come to the host."""
    real = launch(jobs.held, 2, "gpt", {"num_ranks": 2}, 8, threads=1, quiet=True, deadline_s=60)
    for process, (weights, states, peak) in enumerate(real):
        found = rehearsed("gpt", {"num_ranks": 2}, process, 8)
        assert (found.weight_bytes, found.optim_bytes) == (weights, states)
        assert found.peak_bytes == pytest.approx(peak, abs=1024)


def test_tied_weights_of_one_rank_are_counted_once() -> None:
    weights, states, peak = jobs.held("gpt", {"num_ranks": 1}, 8)
    found = rehearsed("gpt", {"num_ranks": 1}, 0, 8)
    assert (found.weight_bytes, found.optim_bytes) == (weights, states)
    assert found.peak_bytes == pytest.approx(peak, abs=1024)


def test_a_rehearsal_leaves_no_process_group_and_no_session() -> None:
    before = current()
    rehearsed("gpt", {"num_ranks": 2}, 1)
    with pytest.raises(PipefitError):
        rehearsed("gpt", {"num_ranks": 2}, 2)
    assert not dist.is_initialized()
    assert current() is before
