"""Backwards in two halves compute what whole ones do: zero-bubble schedules, and programs written by hand."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pipelines import grouped
from tests.testing.equality_models import MODELS, make

from pipefit.cost import CostModel
from pipefit.ir import Instruction, bwd_input, bwd_weight, fwd, text
from pipefit.ir.op import Op
from pipefit.schedules import Task, generate, schedule
from pipefit.schedules.registry import REGISTRY
from pipefit.schedules.shape import Shape
from pipefit.synthesize import header_of, synthesize
from pipefit.testing import check

CHUNKS = {"zb-h1": 1, "zb-h2": 1, "zb-v": 2}


def assert_equal(model_name: str, name: str, num_ranks: int, m: int, **options: Any) -> None:
    model, example = make(model_name)
    sizes = {"num_ranks": num_ranks, "num_microbatches": m, "num_chunks": CHUNKS.get(name, 1)}
    result = check(model, **grouped(example=example, schedule=name, **sizes, **{"steps": 3, **options}))
    assert result.equal, result


SHAPES = itertools.cycle([(3, 4), (4, 3), (2, 5), (4, 2), (3, 1)])
CASES = [(*case, *next(SHAPES), index % 2 == 0) for index, case in enumerate(itertools.product(CHUNKS, MODELS))]


@pytest.mark.parametrize(
    ("name", "model", "num_ranks", "m", "recompute"),
    CASES,
    ids=[f"{s}-{model}-p{p}m{m}{'-recomputed' * r}".replace(" ", "_") for s, model, p, m, r in CASES],
)
def test_zero_bubble_schedules_are_exact_for_every_kind_of_model(
    name: str, model: str, num_ranks: int, m: int, recompute: bool
) -> None:
    assert_equal(model, name, num_ranks, m, recompute=recompute)


@pytest.mark.parametrize(("num_ranks", "m"), [(1, 1), (1, 3), (2, 2), (3, 7), (4, 8)])
@pytest.mark.parametrize("name", CHUNKS)
def test_zero_bubble_schedules_are_exact_for_any_ranks_and_microbatches(name: str, num_ranks: int, m: int) -> None:
    assert_equal("plain", name, num_ranks, m)


@pytest.mark.parametrize("name", CHUNKS)
def test_zero_bubble_schedules_are_exact_under_clipping_and_with_a_ragged_last_batch(name: str) -> None:
    assert_equal("tied ends", name, 3, 4, clip_norm=0.05)
    assert_equal("dropout", name, 3, 4, batch_size=[9, 9, 5])


@pytest.mark.parametrize(
    ("name", "replicas", "num_ranks", "m"),
    [
        ("zb-h1", (2,), 4, 5),
        ("zb-h1", (1, 2, 1), 4, 3),
        ("zb-h2", (2, 1), 3, 4),
        ("zb-v", (2,), 4, 5),
        ("zb-v", (2,), 4, 3),
    ],
)
@pytest.mark.parametrize("model", ["plain", "batch norm", "tied neighbours"])
def test_replicas_of_zero_bubble_stages_are_exact(
    model: str, name: str, replicas: tuple[int, ...], num_ranks: int, m: int
) -> None:
    assert_equal(model, name, num_ranks, m, replicas=replicas)


@pytest.fixture
def all_at_the_end() -> Iterator[str]:
    def order(task: Task) -> Iterator[list[Instruction]]:
        """GPipe, and after it all weight halves, the last micro-batch first."""
        for rank in range(task.num_ranks):
            (stage,) = task.stages_of(rank)
            mbs = task.microbatches_of(stage, rank)
            yield [op(stage, mb) for op in (fwd, bwd_input) for mb in mbs] + [bwd_weight(stage, mb) for mb in mbs[::-1]]

    schedule(name="split-by-hand")(order)
    yield "split-by-hand"
    del REGISTRY["split-by-hand"]


def test_a_split_program_has_halves_and_no_whole_backward(all_at_the_end: str) -> None:
    for name in (all_at_the_end, "zb-h1"):
        ops = [i.op for _, _, i in generate(name, Shape(3, 4))]
        assert ops.count(Op.BWD_INPUT) == ops.count(Op.BWD_WEIGHT) == 12 and Op.BWD not in ops


@pytest.mark.parametrize("model", MODELS)
def test_weight_halves_in_another_order_are_exact(all_at_the_end: str, model: str) -> None:
    assert_equal(model, all_at_the_end, 3, 4, steps=2)


@pytest.mark.parametrize(("model", "copies"), [("dropout", 1), ("batch norm", 2)])
def test_an_order_that_was_found_by_search_trains_as_one_process_does(model: str, copies: int, tmp_path: Path) -> None:
    times = (1, 2, 1, 1)
    cost = CostModel(times, times, times, latency_s=0.5)
    found = synthesize(header_of(2, 3, 2, "wave"), cost, in_flight=1.5, candidates=300, seconds=60)
    path = str(text.save(found.program, tmp_path / "found.pipe"))
    layers, example = make(model)
    sizes = {"num_ranks": 2 * copies, "num_microbatches": 3 * copies, "num_chunks": 2, "replicas": (copies,)}
    result = check(layers, **grouped(example=example, schedule=path, steps=2, **sizes))
    assert result.equal, result
