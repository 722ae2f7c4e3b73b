"""Malformed instructions: stages, micro-batches, versions, ranks and kinds that do not exist.

They are reported and set aside, so that every other rule may rely on its operands.
"""

from __future__ import annotations

from collections.abc import Callable

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import OP_SPEC, WHOLE_OF, Kind, Op, Reduction
from pipefit.ir.program import Header, Program
from pipefit.ir.spill import SLOTTED, TIERS, Spill
from pipefit.verify.subject import Finding

Check = Callable[[Header, Instruction, int], tuple[str, str] | None]


def set_aside(program: Program) -> tuple[Program, list[list[int]] | None, list[Finding]]:
    """The program without malformed instructions.

    Returns:
        The rest, as many ranks as the header names; for each of its instructions the index it had (None: nothing was
        set aside); and what was found.
    """
    header = program.header
    findings: list[Finding] = []
    kept: list[list[int]] = []
    for rank, instructions in enumerate(program.ranks):
        sound: list[int] = []
        for index, i in enumerate(instructions):
            problem = _problem(header, i, rank)
            if problem is None:
                sound.append(index)
            else:
                findings.append(Finding(problem[0], rank, index, problem[1]))
        kept.append(sound)
    missing = header.num_ranks - len(kept)
    findings += [
        Finding("ownership", rank, -1, f"the program has no rank {rank}; its placement needs {header.num_ranks} ranks")
        for rank in range(len(program.ranks), header.num_ranks)
    ]
    if not findings:
        return program, None, findings
    kept = [*kept[: header.num_ranks], *([] for _ in range(missing))]
    ranks = [[program.ranks[rank][index] for index in indices] for rank, indices in enumerate(kept)]
    return program.with_ranks(ranks), kept, findings


def _problem(header: Header, i: Instruction, rank: int) -> tuple[str, str] | None:
    if rank >= header.num_ranks:
        return "ownership", f"there is no rank {rank}: the placement names {header.num_ranks} ranks"
    kinds = OP_SPEC[i.op].kinds
    if kinds and i.kind not in kinds:
        return _RULE_OF_KIND[i.op], f"expected one of {', '.join(kinds)}, got {i.kind or 'nothing'!r}"
    return next(filter(None, (check(header, i, rank) for check in _CHECKS[i.op])), None)


_RULE_OF_KIND = {
    Op.SEND: "messages",
    Op.RECV: "messages",
    Op.GATHER: "messages",
    Op.REDUCE: "collectives",
    Op.FETCH: "residency",
    Op.EVICT: "residency",
}


def _stage(header: Header, i: Instruction, rank: int) -> tuple[str, str] | None:
    if 0 <= i.stage < header.num_stages:
        return None
    return "ownership", f"there is no stage {i.stage}: the placement has {header.num_stages} stages"


def _microbatch(header: Header, i: Instruction, rank: int) -> tuple[str, str] | None:
    if 0 <= i.mb < header.total_microbatches:
        return None
    return "ownership", f"there is no micro-batch {i.mb}: the program has {header.total_microbatches}"


def _version(header: Header, i: Instruction, rank: int) -> tuple[str, str] | None:
    if 0 <= i.version <= header.num_updates(i.stage):
        return None
    return "versions", f"there is no such version: stage {i.stage} has versions 0 to {header.num_updates(i.stage)}"


def _step(header: Header, i: Instruction, rank: int) -> tuple[str, str] | None:
    if 0 <= i.version < header.num_updates(i.stage):
        return None
    return "complete", f"there is no update {i.version}: stage {i.stage} makes {header.num_updates(i.stage)} updates"


def _device(header: Header, i: Instruction, rank: int) -> tuple[str, str] | None:
    """Whether a stage steps where the header says."""
    on_host = header.steps_on_host(i.stage)
    if on_host == (i.op is Op.HOST_STEP):
        return None
    expected = "the host: expected host_step" if on_host else "its device: expected step"
    return "residency", f"the header says that stage {i.stage} steps on {expected}"


def _message(header: Header, i: Instruction, rank: int) -> tuple[str, str] | None:
    if i.kind in WHOLE_OF and header.tensor == 1:
        return "messages", f"{i.kind} travels only between ranks of several tensor-parallel processes: the header has 1"
    if i.peer == rank:
        return "messages", "a rank cannot send to itself: what it made is already there"
    if not 0 <= i.peer < header.num_ranks:
        return "messages", f"there is no rank {i.peer}: the placement names {header.num_ranks} ranks"
    return None


def _gather(header: Header, i: Instruction, rank: int) -> tuple[str, str] | None:
    if header.tensor > 1:
        return None
    return "messages", "there is nothing to gather on a rank of one process: the header has tensor 1"


def _reduce(header: Header, i: Instruction, rank: int) -> tuple[str, str] | None:
    if i.kind == Reduction.NORM:
        updates = max(header.num_updates(stage) for stage in range(header.num_stages))
        if i.stage != -1 and not (0 <= i.stage < header.num_stages and header.clip and header.is_spilled(i.stage)):
            return "collectives", "the norm is of all stages: it takes s*; only a spilled stage gives its part of it"
    else:
        problem = _stage(header, i, rank)
        if problem:
            return problem
        if i.kind == Reduction.TIED and all(tie[:1] != (i.stage,) for tie in header.ties):
            return "collectives", f"no group of tied stages starts with stage {i.stage}: the header has {header.ties}"
        updates = header.num_updates(i.stage)
    return None if 0 <= i.version < updates else ("collectives", f"there is no update {i.version}: there are {updates}")


def _tiered(header: Header, i: Instruction, rank: int) -> tuple[str, str] | None:
    spill = header.spill
    if spill is None:
        return "residency", "the header spills nothing: every stage stays on its device"
    if i.tier != spill.tier:
        return "residency", f"the header spills to the {spill.tier}, got {i.tier if i.tier in TIERS else 'no tier'!r}"
    return _stage(header, i, rank) or _moved(header, i) or _slot(spill, i)


def _moved(header: Header, i: Instruction) -> tuple[str, str] | None:
    """Whether there is such a version, update or micro-batch of a stage that is moved at all."""
    if i.kind not in SLOTTED:
        there = 0 <= i.version < header.total_microbatches
        return None if there else ("ownership", f"there is no micro-batch {i.version} of stage {i.stage}")
    if not header.is_spilled(i.stage) or (i.kind == Kind.OPTIM and not header.is_optim_spilled(i.stage)):
        return "residency", f"the {i.kind} of stage {i.stage} do not come and go: the header does not spill them"
    if i.kind == Kind.WGRAD:
        return _step(header, i, 0)
    return _version(header, i, 0)


def _slot(spill: Spill, i: Instruction) -> tuple[str, str] | None:
    most = spill.slots(i.kind)
    if i.op is Op.EVICT or (0 <= i.slot < most) or (not most and i.slot == -1):
        return None
    expected = f"one of @0 to @{most - 1}" if most else "@*: it lies in no slot"
    return "residency", f"expected slot {expected}, got {'@*' if i.slot < 0 else f'@{i.slot}'}"


_OF_MICROBATCH = (_stage, _microbatch)
_CHECKS: dict[Op, tuple[Check, ...]] = {
    Op.LOAD: _OF_MICROBATCH,
    Op.LOSS: (_microbatch,),
    **dict.fromkeys((Op.FWD, Op.RECOMPUTE, Op.BWD, Op.BWD_INPUT, Op.BWD_WEIGHT), (*_OF_MICROBATCH, _version)),
    Op.SEND: (_message, *_OF_MICROBATCH),
    Op.RECV: (_message, *_OF_MICROBATCH),
    Op.GATHER: (_gather, *_OF_MICROBATCH),
    Op.REDUCE: (_reduce,),
    Op.STEP: (_stage, _step, _device),
    Op.HOST_STEP: (_stage, _step, _device),
    Op.DROP: (_stage, _version),
    Op.FETCH: (_tiered,),
    Op.EVICT: (_tiered,),
    Op.BARRIER: (),
}
