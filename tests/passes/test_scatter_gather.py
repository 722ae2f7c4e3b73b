"""Scatter/gather: messages in pieces of 1/t, gathered before use, over every schedule; and what is refused of it."""

import dataclasses
from typing import Any

import pytest

from pipefit.cost import CostModel, unit
from pipefit.draw.drawing import drawing_of
from pipefit.errors import PlanError, ScheduleError
from pipefit.ir import Op, Program, text
from pipefit.passes.scatter_gather import with_scatter_gather
from pipefit.schedules import Shape, generate, program_of
from pipefit.schedules.forward import forward_only
from pipefit.simulate import simulate
from pipefit.spec import Partition, Placement, Plan, SpillSpec, StageSpec
from pipefit.verify import verify

SHAPES = [
    ("1f1b", Shape(depth=3, num_microbatches=4, tensor=2, pieces=True)),
    ("gpipe", Shape(depth=2, num_microbatches=3, tensor=4, pieces=True, recompute=None)),
    ("1f1b", Shape(depth=2, num_microbatches=4, replicas=(2, 1), tensor=2, pieces=True, clip=True)),
    (
        "interleaved",
        Shape(depth=2, num_microbatches=4, num_chunks=2, replicas=(2,), tensor=2, pieces=True, ties=((0, 3),)),
    ),
    ("pipedream", Shape(depth=3, num_microbatches=1, num_steps=6, tensor=2, pieces=True)),
]


def plan_of(*tensors: int, **more: Any) -> Plan:
    stages = tuple(StageSpec((index,), tensor=tensor) for index, tensor in enumerate(tensors))
    placement = Placement(tuple((index,) for index in range(len(tensors))))
    return Plan(Partition(stages), placement, "1f1b", 4, **more)


def two_ranks(**more: object) -> Program:
    return generate("1f1b", Shape(depth=2, num_microbatches=1, **more))


def test_pieces_are_sent_and_gathered_just_before_their_use() -> None:
    first, second = ([str(i) for i in rank] for rank in two_ranks(tensor=2, pieces=True).ranks)
    assert first == [
        "load s0 m0", "recv s0 m0 grad-piece <1", "fwd s0 m0 w0", "send s0 m0 act-piece >1", "gather s0 m0 grad",
        "bwd s0 m0 w0", "step s0 w0", "drop s0 w0",
    ]  # fmt: skip
    assert second == [
        "recv s0 m0 act-piece <0", "gather s0 m0 act", "fwd s1 m0 w0", "load s1 m0", "loss m0", "bwd s1 m0 w0",
        "send s0 m0 grad-piece >0", "step s1 w0", "drop s1 w0",
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_every_message_becomes_a_piece_with_one_gather_and_the_program_is_proved(name: str, shape: Shape) -> None:
    program = generate(name, shape)
    plain = generate(name, Shape(**{f: getattr(shape, f) for f in shape.__struct_fields__} | {"pieces": False}))
    verify(program).raise_if_bad()
    count = {op: sum(i.op is op for _, _, i in program) for op in (Op.RECV, Op.GATHER)}
    assert count[Op.GATHER] == count[Op.RECV] == sum(i.op is Op.RECV for _, _, i in plain) > 0
    assert program.order == plain.order and program.digest != plain.digest
    assert text.parse(text.dump(program)) == program
    assert with_scatter_gather(Program(program.header, plain.ranks)) == program


def test_evaluation_moves_pieces_too() -> None:
    program = forward_only(two_ranks(tensor=2, pieces=True).header, 2)
    verify_ops = [i.op for _, _, i in program]
    assert verify_ops.count(Op.GATHER) == verify_ops.count(Op.SEND) == 2


def test_a_message_takes_one_tth_of_the_time_and_the_gather_moves_the_rest() -> None:
    def makespan(pieces: bool, bandwidth: float) -> float:
        program = two_ranks(tensor=4, pieces=pieces)
        cost = CostModel((1, 1), (1, 1), (0, 0), act_bytes=(8, 8), bandwidth_bytes_per_s=bandwidth, tensor=4)
        return simulate(program, cost).makespan_s

    # Two messages of 8 bytes at 1 byte/s; in pieces two of 2, and two gathers of 6 on the same link.
    assert makespan(False, 1) == 4 + 16
    assert makespan(True, 1) == 4 + 4 + 12


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda rank: [i for i in rank if i.op is not Op.GATHER], "needs act"),
        (lambda rank: [x for i in rank for x in ([i, i] if i.op is Op.GATHER else [i])], "already gathered"),
    ],
)
def test_a_missing_or_doubled_gather_is_found(change, word: str) -> None:
    program = two_ranks(tensor=2, pieces=True)
    report = verify(program.with_ranks([list(program.ranks[0]), change(list(program.ranks[1]))]))
    assert any(word in violation.message for violation in report.violations)


def test_pieces_need_several_processes() -> None:
    program = two_ranks(tensor=2, pieces=True)
    header = type(program.header)(
        **{f: getattr(program.header, f) for f in program.header.__struct_fields__} | {"tensor": 1, "pieces": False}
    )
    words = " ".join(v.message for v in verify(Program(header, program.ranks)).violations)
    assert "travels only between ranks of several" in words and "nothing to gather" in words
    with pytest.raises(ScheduleError, match="at least 2 where values travel in pieces"):
        two_ranks(tensor=1, pieces=True)


def test_a_plan_says_how_wide_its_ranks_are() -> None:
    assert program_of(plan_of(2, 2)).header.pieces and plan_of(2, 2).num_processes == 4
    assert not program_of(plan_of(2, 2, sequence_parallel=True)).header.pieces
    assert not program_of(plan_of(2, 2, scatter_gather=False)).header.pieces
    assert not program_of(plan_of(1, 1)).header.pieces
    with pytest.raises(PlanError, match="one width for all stages"):
        plan_of(2, 1)
    with pytest.raises(PlanError, match="at least 2"):
        plan_of(1, 1, sequence_parallel=True)
    with pytest.raises(PlanError, match="cannot be sharded by tensor parallelism too"):
        plan_of(2, 2, spill=SpillSpec("host", 2))


def test_a_cost_model_of_another_width_is_refused() -> None:
    program = two_ranks(tensor=2, pieces=True)
    cost = CostModel((1, 1), (1, 1), (0, 0), act_bytes=(8, 8), tensor=2)
    assert simulate(program, cost).makespan_s == 4
    with pytest.raises(PlanError, match="tensor"):
        simulate(program, dataclasses.replace(cost, tensor=1))


def test_pieces_are_drawn_under_unit_costs_as_whole_messages_are() -> None:
    wide, narrow = two_ranks(tensor=2, pieces=True), two_ranks()
    assert simulate(wide, unit(wide.header)).makespan_s == 6
    assert str(drawing_of(wide)) == str(drawing_of(narrow))
    cost = CostModel((1, 1), (1, 1), (0, 0), act_bytes=(8, 8), bandwidth_bytes_per_s=8, tensor=2)
    timeline = simulate(wide, cost)
    events = {str(timeline.instruction(event)): event for event in timeline.events}
    send, recv, gather = (
        events[f"{name} s0 m0 {kind}"]
        for name, kind in (("send", "act-piece >1"), ("recv", "act-piece <0"), ("gather", "act"))
    )
    assert recv.end_s - send.start_s == 0.5 and gather.end_s - recv.end_s == 0.5
