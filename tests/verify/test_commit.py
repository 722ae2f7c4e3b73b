"""The commit point of a step: a program that repairs itself has one, and none that lacks it is proved."""

import msgspec
import pytest
from tests.oracle import outcome

from pipefit.errors import ScheduleError
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.ir.program import Program
from pipefit.ir.text import dump, parse
from pipefit.schedules import Shape, generate
from pipefit.verify import verify

SHAPES = {
    "1f1b": Shape(2, 4, replicas=(2,), commit=True),
    "gpipe": Shape(2, 4, replicas=(2, 1), clip=True, commit=True),
    "interleaved": Shape(2, 4, num_chunks=2, replicas=(2,), ties=((0, 3),), clip=True, commit=True),
    "zb-h1": Shape(3, 6, replicas=(2,), clip=True, commit=True),
    "zb-v": Shape(2, 4, num_chunks=2, replicas=(2,), commit=True),
    "breadth-first": Shape(2, 4, num_chunks=2, replicas=(2,), frozen=1, commit=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_rank_meets_the_others_once_between_its_gradients_and_its_steps(name: str):
    program = generate(name, SHAPES[name])
    assert verify(program).ok
    assert parse(dump(program)) == program
    for own in program.ranks:
        ops = [i.op for i in own]
        place = ops.index(Op.BARRIER)
        assert ops.count(Op.BARRIER) == 1
        assert not {Op.BWD, Op.BWD_WEIGHT, Op.REDUCE}.intersection(ops[place:])
        assert not {Op.STEP, Op.DROP}.intersection(ops[:place])


def moved(program: Program, rank: int, index: int) -> Program:
    """The program with a rank's barrier at another place."""
    own = [i for i in program.ranks[rank] if i.op is not Op.BARRIER]
    own.insert(index, Instruction(Op.BARRIER))
    return program.with_ranks([own if other == rank else ranks for other, ranks in enumerate(program.ranks)])


@pytest.mark.parametrize("name", SHAPES)
def test_a_barrier_at_any_other_place_is_refused(name: str):
    program = generate(name, SHAPES[name])
    for rank, own in enumerate(program.ranks):
        ops = [i.op for i in own if i.op is not Op.BARRIER]
        gradients = [n for n, op in enumerate(ops) if op in (Op.BWD, Op.BWD_WEIGHT, Op.REDUCE)]
        steps = [n for n, op in enumerate(ops) if op is Op.STEP]
        for index in range(len(ops) + 1):
            is_right = index > max(gradients, default=-1) and index <= min(steps, default=len(ops))
            assert verify(moved(program, rank, index)).ok is is_right, (rank, index)


def test_a_step_that_may_run_before_the_barrier_is_named():
    program = generate("1f1b", SHAPES["1f1b"])
    own = [i for i in program.ranks[1] if i.op is not Op.BARRIER]
    report = str(verify(program.with_ranks([program.ranks[0], [*own, Instruction(Op.BARRIER)], *program.ranks[2:]])))
    assert "may run before the barrier that commits the step" in report
    without = [[i for i in ranks if i.op is not Op.BARRIER] for ranks in program.ranks]
    assert "may run before the barrier" in str(verify(program.with_ranks(without)))
    twice = [[*ranks, Instruction(Op.BARRIER)] for ranks in program.ranks]
    assert "the step is already committed" in str(verify(program.with_ranks(twice)))


def test_what_a_program_computes_stays():
    for name, shape in SHAPES.items():
        plain = msgspec.structs.replace(shape, commit=False)
        assert outcome(generate(name, shape)) == outcome(generate(name, plain))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("pipedream", Shape(2, 1, num_steps=2, commit=True)),
        ("1f1b", Shape(2, 2, num_steps=2, commit=True)),
        ("1f1b", Shape(2, 2, replicas=(2,), shard="optimizer", commit=True)),
        ("spilled", Shape(2, 2, commit=True)),
    ],
)
def test_it_is_refused_where_a_step_needs_others(name: str, shape: Shape):
    with pytest.raises(ScheduleError, match="commit"):
        generate(name, shape)
