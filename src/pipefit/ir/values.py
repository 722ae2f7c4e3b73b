"""What each instruction needs, makes and uses up: the law that dependency graph, liveness and runtime share.

A value lives on one rank. It is named by kind, stage and index: the micro-batch for data, the version for weights,
the update for gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Kind, Op
from pipefit.ir.program import Header, Program

__all__ = ["Value", "consumes", "makes", "needs", "tied_stages"]

INPUT, ACT, GRAD, SAVED, HALF = Kind.INPUT.value, Kind.ACT.value, Kind.GRAD.value, Kind.SAVED.value, Kind.HALF.value
WGRAD, WEIGHTS, NORM, OPTIM = Kind.WGRAD.value, Kind.WEIGHTS.value, Kind.NORM.value, Kind.OPTIM.value
SHARDS = Kind.SHARDS.value
_WHOLE = {Kind.PIECE.value: ACT, Kind.GRAD_PIECE.value: GRAD}
_PIECE = {ACT: Kind.PIECE.value, GRAD: Kind.GRAD_PIECE.value}


class Value(NamedTuple):
    """A value on a rank; `at` is its micro-batch, version or update; for the optimizer's states a version."""

    kind: str
    stage: int
    at: int

    def __str__(self) -> str:
        return f"{self.kind}[s{self.stage},{self.at}]" if self.stage >= 0 else f"{self.kind}[{self.at}]"


Rule = Callable[[Instruction, Program, int], tuple[Value, ...]]


def needs(instruction: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    """The values that must be on the rank before the instruction can run."""
    rule = _NEEDS.get(instruction.op)
    return rule(instruction, program, rank) if rule else ()


def makes(instruction: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    """The values that are on the rank once the instruction is done."""
    rule = _MAKES.get(instruction.op)
    return rule(instruction, program, rank) if rule else ()


def consumes(instruction: Instruction, program: Program) -> tuple[Value, ...]:
    """The values that are gone from the rank once the instruction is done.

    The step of a spilled stage works in its slot: what it starts from is gone, and so are its gradients.
    """
    op, stage, mb = instruction.op, instruction.stage, instruction.mb
    if op is Op.BWD:
        return Value(SAVED, stage, mb), Value(GRAD, stage, mb)
    if op is Op.BWD_WEIGHT:
        return Value(SAVED, stage, mb), Value(HALF, stage, mb)
    if op is Op.BWD_INPUT:
        return (Value(GRAD, stage, mb),)
    if op is Op.DROP:
        return (Value(WEIGHTS, stage, instruction.version),)
    if op is Op.EVICT:
        return (Value(instruction.kind, stage, instruction.version),)
    if op is Op.STEP and program.header.is_spilled(stage):
        own = Value(WEIGHTS, stage, instruction.version), Value(WGRAD, stage, instruction.version)
        return (*own, *_states(instruction, program, 0))
    return ()


def tied_stages(header: Header, stage: int, rank: int) -> tuple[int, ...]:
    """The stages of a rank that belong to the tie group whose first stage is `stage`."""
    for tie in header.ties:
        if tie[0] == stage:
            return tuple(member for member in tie if rank in header.placement[member])
    return ()


def _stage_input(i: Instruction) -> Value:
    return Value(ACT, i.stage - 1, i.mb) if i.stage > 0 else Value(INPUT, 0, i.mb)


def _forward_needs(i: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    return _stage_input(i), Value(WEIGHTS, i.stage, i.version)


def _forward_makes(i: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    act = Value(ACT, i.stage, i.mb)
    return (act,) if (i.stage, i.mb) in program.recomputed else (act, Value(SAVED, i.stage, i.mb))


def _loss_needs(i: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    last = program.header.last_stage
    return Value(ACT, last, i.mb), Value(INPUT, last, i.mb)


def _backward_needs(i: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    return Value(SAVED, i.stage, i.mb), Value(GRAD, i.stage, i.mb), Value(WEIGHTS, i.stage, i.version)


def _weight_half_needs(i: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    return Value(SAVED, i.stage, i.mb), Value(HALF, i.stage, i.mb), Value(WEIGHTS, i.stage, i.version)


def _input_gradient(i: Instruction) -> tuple[Value, ...]:
    return (Value(GRAD, i.stage - 1, i.mb),) if i.stage > 0 else ()


def _weight_gradient(i: Instruction, program: Program) -> Value:
    return Value(WGRAD, i.stage, program.header.update_of(i.stage, i.mb))


def _reduce_needs(i: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    header = program.header
    if i.kind == SHARDS:
        return (Value(SHARDS, i.stage, i.version),)
    if i.kind == Kind.NORM and i.stage < 0:
        stages = tuple(s for s in header.stages_of(rank) if i.version < header.num_updates(s))
        # The gradients of a spilled stage have come by one after the other, and left their part of the norm.
        return tuple(Value(NORM if header.is_spilled(stage) else WGRAD, stage, i.version) for stage in stages)
    stages = tied_stages(header, i.stage, rank) if i.kind == Kind.TIED else (i.stage,)
    return tuple(Value(WGRAD, stage, i.version) for stage in stages)


def _reduce_makes(i: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    if i.kind == SHARDS:
        return (Value(WEIGHTS, i.stage, i.version + 1),)
    return (Value(NORM, i.stage, i.version),) if i.kind == Kind.NORM else _reduce_needs(i, program, rank)


def _step_needs(i: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    own = Value(WEIGHTS, i.stage, i.version), Value(WGRAD, i.stage, i.version)
    norm = (Value(NORM, -1, i.version),) if program.header.clip else ()
    return (*own, *_states(i, program, 0), *norm)


def _host_step_needs(i: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    """What it works on lies on the tier, and is no value of the rank's device: see `ir.residency`."""
    return (Value(NORM, -1, i.version),) if program.header.clip else ()


def _step_makes(i: Instruction, program: Program, rank: int) -> tuple[Value, ...]:
    if program.header.is_sharded(i.stage):
        return (Value(SHARDS, i.stage, i.version),)
    return (Value(WEIGHTS, i.stage, i.version + 1), *_states(i, program, 1))


def _states(i: Instruction, program: Program, later: int) -> tuple[Value, ...]:
    """The optimizer's states that a step starts from or makes, where they are moved; elsewhere they just stay."""
    moved = program.header.is_optim_spilled(i.stage)
    return (Value(OPTIM, i.stage, i.version + later),) if moved else ()


_NEEDS: dict[Op, Rule] = {
    Op.FWD: _forward_needs,
    Op.RECOMPUTE: _forward_needs,
    Op.LOSS: _loss_needs,
    Op.BWD: _backward_needs,
    Op.BWD_INPUT: _backward_needs,
    Op.BWD_WEIGHT: _weight_half_needs,
    Op.SEND: lambda i, program, rank: (Value(_WHOLE.get(i.kind, i.kind), i.stage, i.mb),),
    Op.GATHER: lambda i, program, rank: (Value(_PIECE[i.kind], i.stage, i.mb),),
    Op.REDUCE: _reduce_needs,
    Op.STEP: _step_needs,
    Op.HOST_STEP: _host_step_needs,
    Op.DROP: lambda i, program, rank: (Value(WEIGHTS, i.stage, i.version),),
    Op.EVICT: lambda i, program, rank: (Value(i.kind, i.stage, i.version),),
}

_MAKES: dict[Op, Rule] = {
    Op.LOAD: lambda i, program, rank: (Value(INPUT, i.stage, i.mb),),
    Op.FWD: _forward_makes,
    Op.RECOMPUTE: lambda i, program, rank: (Value(SAVED, i.stage, i.mb),),
    Op.LOSS: lambda i, program, rank: (Value(GRAD, program.header.last_stage, i.mb),),
    Op.BWD: lambda i, program, rank: (*_input_gradient(i), _weight_gradient(i, program)),
    Op.BWD_INPUT: lambda i, program, rank: (*_input_gradient(i), Value(HALF, i.stage, i.mb)),
    Op.BWD_WEIGHT: lambda i, program, rank: (_weight_gradient(i, program),),
    Op.RECV: lambda i, program, rank: (Value(i.kind, i.stage, i.mb),),
    Op.GATHER: lambda i, program, rank: (Value(i.kind, i.stage, i.mb),),
    Op.REDUCE: _reduce_makes,
    Op.STEP: _step_makes,
    Op.FETCH: lambda i, program, rank: (Value(i.kind, i.stage, i.version),),
}
