"""Ranks as processes compute what one process computes, and to the bit what all ranks in one process compute."""

import dataclasses
from typing import Any

import pytest
import torch
from tests.pipelines import case_of, grouped
from tests.testing.equality_models import make

from pipefit.runtime.launch import launch
from pipefit.testing import Case, Outcome, check, compare, expected, make_pipeline, run, run_pipeline, tolerance_of
from pipefit.testing.equality import layer_counts

pytestmark = pytest.mark.dist


def task_of(
    name: str,
    schedule: str,
    num_ranks: int,
    m: int,
    sizes: tuple[int, ...],
    replicas: tuple[int, ...] = (),
    **more: Any,
) -> Case:
    model, example = make(name)
    chunks = 2 if schedule in ("interleaved", "breadth-first", "zb-v") else 1
    return case_of(
        model=model,
        batches=[example(size, step) for step, size in enumerate(sizes)],
        num_ranks=num_ranks,
        schedule=schedule,
        num_microbatches=m,
        counts=layer_counts(len(model), num_ranks, schedule, chunks, replicas),
        num_chunks=chunks,
        replicas=replicas,
        **more,
    )


THREE = (9, 9, 5)
ATTENTION = "attention, batch norm and dropout"
SIX = (5, 5, 5, 4, 5, 6)
TASKS = {
    "naive": task_of("dropout", "naive", 2, 3, THREE),
    "gpipe, tied": task_of("tied ends", "gpipe", 2, 4, THREE, clip_norm=0.05),
    "gpipe, recomputed batch norm": task_of("batch norm", "gpipe", 2, 3, THREE, recompute=True),
    "1f1b, skip": task_of("a skip over stages", "1f1b", 2, 4, THREE),
    "1f1b, integer mask": task_of("an integer mask beside activations", "1f1b", 2, 3, THREE, recompute=True),
    "1f1b, frozen beginning": task_of("a frozen beginning", "1f1b", 2, 4, THREE),
    "gpipe, frozen first half": task_of("a frozen first half", "gpipe", 2, 4, THREE),
    "1f1b, frozen first half": task_of("a frozen first half", "1f1b", 2, 8, (9, 9, 9), clip_norm=0.05),
    "1f1b, frozen first half, 3 ranks": task_of("a frozen first half", "1f1b", 3, 8, (9, 9, 9), recompute=True),
    "interleaved, frozen first half": task_of("a frozen first half", "interleaved", 2, 4, THREE),
    "zb-h1, frozen first half": task_of("a frozen first half", "zb-h1", 2, 4, THREE),
    "pipedream, frozen first half": task_of("a frozen first half", "pipedream", 2, 1, SIX),
    "pipedream, frozen first half, 3 ranks": task_of("a frozen first half", "pipedream", 3, 1, SIX),
    "2bw, frozen first half": task_of("a frozen first half", "pipedream-2bw", 2, 3, SIX, clip_norm=0.05),
    "1f1b, all but the end frozen": task_of("all but the end frozen", "1f1b", 2, 4, THREE, clip_norm=0.05),
    "1f1b, a weight that travels": task_of("a weight that travels", "1f1b", 2, 4, THREE),
    "interleaved": task_of("plain", "interleaved", 2, 3, THREE),
    "breadth-first, tied": task_of("tied neighbours", "breadth-first", 2, 3, THREE, recompute=True),
    "1f1b, layers replayed": task_of(ATTENTION, "1f1b", 2, 3, THREE, recompute="layer", clip_norm=0.05),
    "gpipe, layers replayed, tied": task_of("tied neighbours", "gpipe", 2, 3, THREE, recompute="layer"),
    "2bw, layers replayed": task_of(ATTENTION, "pipedream-2bw", 2, 3, SIX, recompute="layer"),
    "interleaved, attention replayed": task_of(ATTENTION, "interleaved", 2, 4, (9, 9, 6), recompute="selective"),
    "zb-h1, attention replayed": task_of(ATTENTION, "zb-h1", 2, 4, (9, 9, 9), recompute="selective"),
    "zb-h1, tied": task_of("tied ends", "zb-h1", 2, 4, THREE, clip_norm=0.05),
    "zb-h2 2-1": task_of("batch norm", "zb-h2", 3, 4, THREE, (2, 1)),
    "zb-v": task_of("convolutions", "zb-v", 2, 3, THREE),
    "data-parallel": task_of("batch norm", "data-parallel", 2, 3, THREE),
    "data-parallel 3-1": task_of("batch norm", "data-parallel", 2, 4, THREE, shares=(3, 1)),
    "1f1b 2-1": task_of("batch norm", "1f1b", 3, 3, THREE, (2, 1), clip_norm=0.05),
    "pipedream": task_of("convolutions", "pipedream", 3, 1, SIX),
    "pipedream 2-1": task_of("batch norm", "pipedream", 3, 1, SIX, (2, 1)),
    "vertical sync": task_of("convolutions", "pipedream-vertical-sync", 3, 1, SIX),
    "2bw, tied": task_of("tied ends", "pipedream-2bw", 3, 3, SIX, clip_norm=0.05),
}


def outcomes(names: list[str]) -> list[Outcome]:
    """One rank's part of several tasks, in one process."""
    return [run_pipeline(TASKS[name]) for name in names]


def joined(num_ranks: int) -> dict[str, Outcome]:
    names = [name for name, task in TASKS.items() if task.num_ranks == num_ranks]
    parts = launch(outcomes, num_ranks, names, threads=1, quiet=True)
    return {name: Outcome.joined([part[index] for part in parts]) for index, name in enumerate(names)}


@pytest.fixture(scope="module")
def distributed() -> dict[str, Outcome]:
    return joined(2) | joined(3)


@pytest.mark.parametrize("name", TASKS)
def test_processes_compute_what_one_process_computes(name: str, distributed: dict[str, Outcome]) -> None:
    result = compare(distributed[name], expected(TASKS[name]), tolerance_of(torch.float64))
    assert result.equal, result


@pytest.mark.parametrize("name", TASKS)
def test_processes_and_the_local_transport_agree_to_the_bit(name: str, distributed: dict[str, Outcome]) -> None:
    task = TASKS[name]
    local, remote = run_pipeline(task), distributed[name]
    assert local.losses == remote.losses
    for mine, theirs in ((local.gradients, remote.gradients), (local.weights, remote.weights)):
        assert sorted(mine) == sorted(theirs) == list(range(task.num_ranks))
        for rank, table in mine.items():
            assert sorted(table) == sorted(theirs[rank])
            for key, value in table.items():
                assert torch.equal(value, theirs[rank][key]), f"rank {rank}: {key}"


def sent_bytes(name: str) -> list[float]:
    """Bytes that each process has sent in a step."""
    pipe = make_pipeline(TASKS[name])
    pipe.fit(TASKS[name].batches)
    return pipe.report(last=1).traffic.sent_bytes


def test_no_gradient_is_sent_to_a_frozen_stage() -> None:
    first, second = launch(sent_bytes, 2, "1f1b, frozen first half", threads=1, quiet=True)[0]
    assert first == 9 * 4 * 8 and second == 0, "activations of nine samples, four float64 each"


def test_a_check_over_processes_finds_them_equal_and_a_wrong_loss_unequal() -> None:
    model, example = make("plain")
    assert check(model, **grouped(example=example, num_ranks=2, transport="distributed")).equal
    task = TASKS["1f1b, frozen beginning"]
    doubled = run(dataclasses.replace(task, loss=double), "distributed")
    result = compare(doubled, expected(task), tolerance_of(torch.float64))
    assert not result.equal and result.first_difference == "3.0.weight", "the first that trains"


def double(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 2 * torch.nn.functional.cross_entropy(output, target)
