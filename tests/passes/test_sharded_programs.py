"""Programs whose replicas step a part of the weights each: proven, priced, and refused when something is missing."""

from fractions import Fraction

import pytest

from pipefit.cost import CostModel, unit
from pipefit.ir import text
from pipefit.ir.instruction import Instruction
from pipefit.ir.liveness import working_lifetimes
from pipefit.ir.op import Op, Reduction
from pipefit.ir.program import Program
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.verify import verify

REPLICAS, SCATTER, SHARDS = Reduction.REPLICAS.value, Reduction.SCATTER.value, Reduction.SHARDS.value

SHAPES = {
    "data-parallel": Shape(2, 4, shard="optimizer"),
    "gpipe": Shape(2, 4, replicas=(2, 1), shard="optimizer", clip=True),
    "1f1b": Shape(2, 4, replicas=(2,), shard="optimizer", ties=((0, 1),), clip=True),
    "interleaved": Shape(2, 4, 2, replicas=(2,), shard="optimizer"),
    "pipedream": Shape(2, 1, num_steps=4, replicas=(2, 1), shard="optimizer"),
    "pipedream-vertical-sync": Shape(2, 1, num_steps=4, replicas=(2,), shard="optimizer"),
    "pipedream-2bw": Shape(2, 2, num_steps=4, replicas=(1, 2), shard="optimizer", clip=True),
}


def program(name: str) -> Program:
    return generate(name, SHAPES[name])


@pytest.mark.parametrize("name", SHAPES)
def test_they_are_proven_read_back_and_simulated(name: str) -> None:
    made = program(name)
    verify(made).raise_if_bad()
    assert text.parse(text.dump(made)) == made
    assert simulate(made, unit(made.header)).makespan_s > 0


def test_a_step_lies_between_the_sum_of_a_part_and_the_joining_of_parts() -> None:
    made = generate("data-parallel", Shape(2, 2, shard="optimizer"))
    assert [str(i) for i in made.ranks[1]] == [
        "load s0 m1",
        "fwd s0 m1 w0",
        "loss m1",
        "bwd s0 m1 w0",
        "reduce s0 w0 scatter",
        "step s0 w0",
        "drop s0 w0",
        "reduce s0 w0 shards",
    ]


def test_stages_on_one_rank_are_stepped_whole() -> None:
    made = program("gpipe")
    kinds = {(i.stage, i.kind) for _, _, i in made if i.op is Op.REDUCE and i.stage >= 0}
    assert kinds == {(0, SCATTER), (0, SHARDS)}


@pytest.mark.parametrize("name", SHAPES)
def test_whatever_is_taken_away_is_missed(name: str) -> None:
    made = program(name)
    for rank, instructions in enumerate(made.ranks):
        for index, i in enumerate(instructions):
            if i.op is Op.REDUCE and i.kind in (SCATTER, SHARDS):
                ranks = [list(other) for other in made.ranks]
                del ranks[rank][index]
                assert not verify(made.with_ranks(ranks)).ok, f"rank {rank} without {i}"


@pytest.mark.parametrize("name", SHAPES)
def test_weights_are_not_used_before_their_parts_are_together(name: str) -> None:
    made = program(name)
    ranks = [list(other) for other in made.ranks]
    for instructions in ranks:
        index = next((n for n, i in enumerate(instructions) if i.kind == SHARDS), None)
        if index is not None:
            step = next(n for n, i in enumerate(instructions) if i.op is Op.STEP)
            instructions.insert(step, instructions.pop(index))
    found = verify(made.with_ranks(ranks))
    assert not found.ok


def test_a_sum_over_replicas_is_no_sum_of_parts() -> None:
    made = program("data-parallel")
    wrong = [
        [Instruction(Op.REDUCE, 0, version=0, kind=REPLICAS) if i.kind == SCATTER else i for i in rank]
        for rank in made.ranks
    ]
    assert not verify(made.with_ranks(wrong)).ok


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_parts_and_joining_cost_together_what_a_sum_for_everyone_costs(copies: int) -> None:
    cost = CostModel((1,), (1,), (1,), weight_bytes=(1000,), bandwidth_bytes_per_s=10, latency_s=Fraction(1, 3))
    seconds = {
        kind: cost.reduce_s(Instruction(Op.REDUCE, 0, version=0, kind=kind), range(copies))
        for kind in (REPLICAS, SCATTER, SHARDS)
    }
    assert seconds[SCATTER] == seconds[SHARDS] > 0
    assert float(seconds[SCATTER] + seconds[SHARDS]) == pytest.approx(float(seconds[REPLICAS]))


def test_the_next_pass_begins_with_the_weights_put_together() -> None:
    made = generate("data-parallel", Shape(2, 2, shard="optimizer"))
    run = simulate(made, unit(made.header), repeats=3)
    join = max(n for n, i in enumerate(made.ranks[0]) if i.kind == SHARDS)
    ends = {event.repeat: event.end_s for event in run.events if event.rank == 0 and event.position == join}
    starts = {event.repeat: event.start_s for event in run.events if event.rank == 0 and event.position == 0}
    assert all(starts[lap + 1] >= ends[lap] for lap in range(2))


@pytest.mark.parametrize("slots", [1, 2])
def test_whole_gradients_are_freed_before_the_next_backward(slots: int) -> None:
    made = generate("breadth-first", Shape(1, 4, 3, replicas=(2,), shard="weights", shard_slots=slots))
    verify(made).raise_if_bad()
    for instructions in made.ranks:
        whole: set[int] = set()
        for i in instructions:
            if i.op is Op.FREE:
                whole.remove(i.stage)
            elif i.op is Op.BWD:
                whole.add(i.stage)
                assert whole == {i.stage}


def test_a_sum_is_in_memory_from_the_backward_that_begins_it_and_its_part_from_its_end_on() -> None:
    """The last lines of a rank; each value from the first instruction at which it is held to the last."""
    made = generate("1f1b", Shape(2, 4, replicas=(2, 2), shard="weights"))
    assert [str(i) for i in made.ranks[2][9:]] == [
        "bwd s0 m1 w0",
        "bwd s0 m3 w0",
        "drop s0 w0",
        "reduce s0 w0 scatter",
        "free s0 w0",
        "step s0 w0",
    ]
    found = {life.value.kind: (life.born, life.dies) for life in working_lifetimes(made, 2)}
    assert found["weights"] == (0, 11)
    assert found["wgrad"] == (9, 13)
    assert found["backward work"] == (9, 9)
    assert found["last work"] == (10, 10)
    assert found["early sum work"] == (11, 12)
    assert found["sum work"] == (12, 12)
    assert found["sums"] == (13, 14)
