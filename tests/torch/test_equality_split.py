"""Backwards in two halves compute what whole ones do: programs written by hand, zero-bubble style."""

from collections.abc import Iterator

import pytest
from tests.torch.equality_models import MODELS, make

from pipefit.ir import Instruction, bwd_input, bwd_weight, fwd
from pipefit.ir.op import Op
from pipefit.schedules import Task, generate, schedule
from pipefit.schedules.registry import REGISTRY
from pipefit.schedules.shape import Shape
from pipefit.testing import check

#   F0 F1 F2 I0 .. F3 I1 W0 I2 W1 I3 W2 W3      rank 0 of 3: weight halves `late` input halves later
#   .. F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3      rank 1


def split_backwards(late: int):
    def order(task: Task) -> Iterator[list[Instruction]]:
        """1F1B, each backward's weight half postponed."""
        for rank in range(task.num_ranks):
            (stage,) = task.stages_of(rank)
            mbs = task.microbatches_of(stage, rank)
            warmup = min(task.num_ranks - 1 - rank, len(mbs))
            listed = [fwd(stage, mb) for mb in mbs[:warmup]]
            for done, mb in enumerate(mbs):
                if warmup + done < len(mbs):
                    listed.append(fwd(stage, mbs[warmup + done]))
                listed.append(bwd_input(stage, mb))
                if done >= late:
                    listed.append(bwd_weight(stage, mbs[done - late]))
            yield listed + [bwd_weight(stage, mb) for mb in mbs[max(len(mbs) - late, 0) :]]

    return order


@pytest.fixture(params=[0, 1, 99], ids=["at once", "one late", "all at the end"])
def split_schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"split-by-hand-{request.param}"
    schedule(name=name)(split_backwards(request.param))
    yield name
    del REGISTRY[name]


def test_a_split_program_has_halves_and_no_whole_backward(split_schedule: str) -> None:
    ops = [i.op for _, _, i in generate(split_schedule, Shape(3, 4))]
    assert ops.count(Op.BWD_INPUT) == ops.count(Op.BWD_WEIGHT) == 12 and Op.BWD not in ops


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", MODELS)
def test_split_backwards_are_exact(split_schedule: str, name: str, recompute: bool) -> None:
    model, example = make(name)
    result = check(
        model, example=example, num_ranks=3, schedule=split_schedule, recompute=recompute, num_microbatches=4, steps=2
    )
    assert result.equal, result
