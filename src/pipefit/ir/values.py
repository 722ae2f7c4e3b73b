"""The values that each instruction needs, makes and consumes: the law that graph, liveness and runtime share.

`OP_SPEC` names them by kind and operands; here these names become values of a program.

A value belongs to one rank. It is named by kind, stage and index: the micro-batch for data, the version for weights,
the update for gradients of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import msgspec

from pipefit.ir.instruction import Indices, Instruction
from pipefit.ir.op import OP_SPEC, PIECE_OF, WHOLE_OF, Kind, Reduction
from pipefit.ir.program import Header, Program

INPUT = Kind.INPUT.value
ACT = Kind.ACT.value
GRAD = Kind.GRAD.value
SAVED = Kind.SAVED.value
HALF = Kind.HALF.value
WGRAD = Kind.WGRAD.value
WEIGHTS = Kind.WEIGHTS.value
NORM = Kind.NORM.value
OPTIM = Kind.OPTIM.value
SHARDS = Kind.SHARDS.value
SUMS = Kind.SUMS.value
COMMIT = Kind.COMMIT.value


class Value(msgspec.Struct, frozen=True, order=True, gc=False):
    """A value on a rank; `at` is its micro-batch, version or update; for the optimizer's states a version."""

    kind: str
    stage: int
    at: int

    def __str__(self) -> str:
        if self.stage >= 0:
            return f"{self.kind}[s{self.stage},{self.at}]"
        return f"{self.kind}[{self.at}]"


Values = tuple[Value, ...]
Rule = Callable[[Instruction, Program, int], Values]
"""The values of an instruction of a program on a rank."""


def tied_stages(header: Header, stage: int, rank: int) -> Indices:
    """The stages of a rank that belong to the tie group whose first stage is `stage`."""
    for tie in header.ties:
        if tie[0] == stage:
            return tuple(member for member in tie if rank in header.placement[member])
    return ()


def reduced_stages(header: Header, kind: str, stage: int, rank: int) -> Indices:
    """The stages of a rank whose gradients a reduction takes."""
    if stage < 0:
        return header.stages_of(rank)
    if kind == Reduction.TIED:
        return tied_stages(header, stage, rank)
    return (stage,)


def _terms(i: Instruction, program: Program, rank: int) -> Values:
    header = program.header
    if i.kind == Reduction.SHARDS:
        return (Value(SHARDS, i.stage, i.version),)
    stages = reduced_stages(header, i.kind, i.stage, rank)
    if i.kind in (Reduction.REPLICAS, Reduction.SCATTER):
        return (Value(WGRAD, i.stage, i.version),)
    if i.kind != Reduction.NORM or i.stage >= 0:
        return tuple(Value(_kept_gradients(header, stage), stage, i.version) for stage in stages)
    found = []
    for stage in stages:
        kind = _kept_gradients(header, stage)
        if header.is_spilled(stage):
            # Their gradients are on the device one stage after the other; each has left its part of the norm.
            kind = NORM
        if i.version < header.num_updates(stage):
            found.append(Value(kind, stage, i.version))
    return tuple(found)


def _result(i: Instruction, program: Program, rank: int) -> Values:
    if i.kind == Reduction.SHARDS:
        return (Value(WEIGHTS, i.stage, i.version + 1),)
    if i.kind == Reduction.NORM:
        return (Value(NORM, i.stage, i.version),)
    if i.kind == Reduction.SCATTER:
        return _summed(i, program, rank)
    return _terms(i, program, rank)


def _stepped(i: Instruction, program: Program, rank: int) -> Values:
    if program.header.is_sharded(i.stage):
        return (Value(SHARDS, i.stage, i.version),)
    return (Value(WEIGHTS, i.stage, i.version + 1),)


def _stepped_weights(i: Instruction, program: Program, rank: int) -> Values:
    """The weights that a step starts from; of shared ones every replica has its shard in any case."""
    if program.header.shares_weights(i.stage):
        return ()
    return (Value(WEIGHTS, i.stage, i.version),)


def _kept_gradients(header: Header, stage: int) -> str:
    """The kind of the gradients that a step takes: whole, or the shard that is kept when they are freed."""
    if header.shares_gradients(stage):
        return SUMS
    return WGRAD


def _summed(i: Instruction, program: Program, rank: int) -> Values:
    return (Value(_kept_gradients(program.header, i.stage), i.stage, i.version),)


def _shards_of_weights(i: Instruction, program: Program, rank: int) -> Values:
    """The shards of a version: those of the first are there from the start."""
    if i.version:
        return (Value(SHARDS, i.stage, i.version - 1),)
    return ()


def _states(i: Instruction, program: Program, rank: int) -> Values:
    """The optimizer's states, where they are moved; elsewhere they stay."""
    if program.header.is_optim_spilled(i.stage):
        return (Value(OPTIM, i.stage, i.version),)
    return ()


def _new_states(i: Instruction, program: Program, rank: int) -> Values:
    header = program.header
    if header.is_optim_spilled(i.stage) and not header.is_sharded(i.stage):
        return (Value(OPTIM, i.stage, i.version + 1),)
    return ()


def _in_slots(i: Instruction, program: Program, rank: int) -> Values:
    """The values that a spilled stage's step replaces in its slots: old weights, old states and gradients."""
    if not program.header.is_spilled(i.stage):
        return ()
    weights = Value(WEIGHTS, i.stage, i.version)
    gradients = Value(WGRAD, i.stage, i.version)
    return (weights, gradients, *_states(i, program, rank))


def _of_microbatch(kind: str) -> Rule:
    """The value of a kind for the stage and micro-batch of an instruction."""
    return lambda i, program, rank: (Value(kind, i.stage, i.mb),)


def _of_last_stage(kind: str) -> Rule:
    """The value of a kind for the last stage and the micro-batch of an instruction."""
    return lambda i, program, rank: (Value(kind, program.header.last_stage, i.mb),)


def _of_version(kind: str) -> Rule:
    """The value of a kind for the stage and version, or update, of an instruction."""
    return lambda i, program, rank: (Value(kind, i.stage, i.version),)


def _stage_input(i: Instruction, program: Program, rank: int) -> Values:
    if i.stage > 0:
        return (Value(ACT, i.stage - 1, i.mb),)
    return (Value(INPUT, 0, i.mb),)


def _input_gradient(i: Instruction, program: Program, rank: int) -> Values:
    if i.stage > program.header.frozen:
        return (Value(GRAD, i.stage - 1, i.mb),)
    return ()


def _saved(i: Instruction, program: Program, rank: int) -> Values:
    if i.stage < program.header.frozen or (i.stage, i.mb) in program.recomputed:
        return ()
    return (Value(SAVED, i.stage, i.mb),)


def _weight_gradient(i: Instruction, program: Program, rank: int) -> Values:
    return (Value(WGRAD, i.stage, program.header.update_of(i.stage, i.mb)),)


def _norm(i: Instruction, program: Program, rank: int) -> Values:
    if program.header.clip:
        return (Value(NORM, -1, i.version),)
    return ()


def _whole_gradients(i: Instruction, program: Program, rank: int) -> Values:
    """All that a rank must have when the ranks meet to commit a step: its steps then need no message."""
    header = program.header
    if not header.commit:
        return ()
    trained = (stage for stage in header.stages_of(rank) if stage >= header.frozen)
    found = [Value(WGRAD, stage, 0) for stage in trained]
    if header.clip:
        found.append(Value(NORM, -1, 0))
    return tuple(found)


def _commit(i: Instruction, program: Program, rank: int) -> Values:
    if program.header.commit:
        return (Value(COMMIT, -1, 0),)
    return ()


_VALUES: dict[str, Rule] = {
    "input[s,m]": _of_microbatch(INPUT),
    "input[last,m]": _of_last_stage(INPUT),
    "act[s-1,m]": _stage_input,
    "act[s,m]": _of_microbatch(ACT),
    "act[last,m]": _of_last_stage(ACT),
    "grad[s-1,m]": _input_gradient,
    "grad[s,m]": _of_microbatch(GRAD),
    "grad[last,m]": _of_last_stage(GRAD),
    "saved[s,m]": _of_microbatch(SAVED),
    "saved[s,m] unless replayed": _saved,
    "half[s,m]": _of_microbatch(HALF),
    "weights[s,w]": _of_version(WEIGHTS),
    "stepped weights[s,w]": _stepped_weights,
    "shards of weights[s,w]": _shards_of_weights,
    "stepped[s,w+1]": _stepped,
    "wgrad[s,w]": _of_version(WGRAD),
    "summed[s,w]": _summed,
    "wgrad[s,u]": _weight_gradient,
    "optim[s,w]": _states,
    "optim[s,w+1]": _new_states,
    "in slots[s,w]": _in_slots,
    "norm[w]": _norm,
    "whole gradients": _whole_gradients,
    "commit": _commit,
    "terms[s,w]": _terms,
    "result[s,w]": _result,
    "kind[s,m]": lambda i, program, rank: (Value(i.kind, i.stage, i.mb),),
    "kind[s,w]": lambda i, program, rank: (Value(i.kind, i.stage, i.version),),
    "whole kind[s,m]": lambda i, program, rank: (Value(WHOLE_OF.get(i.kind, i.kind), i.stage, i.mb),),
    "piece of kind[s,m]": lambda i, program, rank: (Value(PIECE_OF[i.kind], i.stage, i.mb),),
}


def _nothing(i: Instruction, program: Program, rank: int) -> Values:
    return ()


def _both(first: Rule, second: Rule) -> Rule:
    return lambda i, program, rank: first(i, program, rank) + second(i, program, rank)


def _rule(names: tuple[str, ...]) -> Rule:
    """The values of several names."""
    if names:
        return reduce(_both, [_VALUES[name] for name in names])
    return _nothing


NEEDS = {op: _rule(spec.needs) for op, spec in OP_SPEC.items()}
"""For each operation the values that must be on the rank before it can run."""

MAKES = {op: _rule(spec.makes) for op, spec in OP_SPEC.items()}
"""For each operation the values that are on the rank once it is done."""

CONSUMES = {op: _rule(spec.consumes) for op, spec in OP_SPEC.items()}
"""For each operation the values that are gone from the rank once it is done."""
