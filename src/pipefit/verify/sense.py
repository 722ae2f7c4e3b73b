"""Malformed instructions: stages, micro-batches, versions, ranks and kinds that do not exist.

They are reported and set aside, so that every other rule may rely on its operands.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from pipefit.errors import InvalidProgramError
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import MESSAGE_OPS, OP_SPEC, STEP_OPS, WHOLE_OF, Kind, Op, Reduction
from pipefit.ir.program import Header, Program
from pipefit.ir.spill import SLOTTED, TIERS
from pipefit.verify.subject import Finding

Problems = Iterator[tuple[str, str]]
"""Violated rules with messages: only the first is reported, so later ones may assume that earlier ones hold."""


def set_aside(program: Program) -> tuple[Program, list[list[int]], list[Finding]]:
    """The program without malformed instructions.

    Returns:
        The other instructions, with as many ranks as the header names; the former index of each; and the findings.
    """
    header = program.header
    findings = []
    kept: list[list[int]] = [[] for _ in range(header.num_ranks)]
    for rank, instructions in enumerate(program.ranks):
        known = {}
        for index, i in enumerate(instructions):
            key = i.op, i.stage, i.kind, i.peer, i.tier, i.slot
            if key not in known:
                known[key] = _ranges(header, i, rank)
            mbs, versions = known[key]
            problem = None
            if i.mb not in mbs or i.version not in versions:
                problem = next(_problems(header, i, rank), None)
            if problem:
                rule, message = problem
                findings.append(Finding(rule, rank, index, message))
            elif rank < header.num_ranks:
                kept[rank].append(index)
    for rank in range(len(program.ranks), header.num_ranks):
        message = f"the program has no rank {rank}; its placement needs {header.num_ranks} ranks"
        findings.append(Finding("ownership", rank, -1, message))
    if not findings:
        return program, kept, findings
    ranks: list[list[Instruction]] = [[] for _ in kept]
    for rank, own in enumerate(kept):
        ranks[rank] = [program.ranks[rank][index] for index in own]
    return program.with_ranks(ranks), kept, findings


def _ranges(header: Header, i: Instruction, rank: int) -> tuple[range, range]:
    """Micro-batches and versions with which an instruction is well-formed, its other operands being as they are.

    Both are empty where it never is, and for copies, whose versions have several meanings.
    """
    fields = OP_SPEC[i.op].fields
    mbs = range(i.mb, i.mb + 1)
    versions = range(i.version, i.version + 1)
    first = i
    if "mb" in fields:
        mbs = range(header.total_microbatches)
        first = replace(first, mb=0)
    if "version" in fields:
        first = replace(first, version=0)
    if "tier" in fields or any(_problems(header, first, rank)):
        return range(0), range(0)
    if "version" in fields:
        # A step or reduction is of an update; other instructions also use the version after the last one.
        is_of_update = i.op in (Op.REDUCE, Op.FREE, *STEP_OPS)
        versions = range(_updates(header, i) + (not is_of_update))
    return mbs, versions


def refuse_malformed(program: Program) -> None:
    """Refuses a program with malformed instructions, which can be neither run nor simulated.

    Raises:
        InvalidProgramError: with the first of them.
    """
    _, _, findings = set_aside(program)
    if findings:
        rule, rank, index, message = findings[0]
        place = f"rank {rank}"
        if index >= 0:
            place += f"[{index}] {program.ranks[rank][index]}"
        if len(findings) > 1:
            message += f", and {len(findings) - 1} more"
        raise InvalidProgramError(f"{rule}: {place}: {message}; `pipefit verify` lists all")


def _problems(header: Header, i: Instruction, rank: int) -> Problems:
    fields = OP_SPEC[i.op].fields
    kinds = OP_SPEC[i.op].kinds
    if rank >= header.num_ranks:
        yield "ownership", f"there is no rank {rank}: the placement names {header.num_ranks} ranks"
    if kinds and i.kind not in kinds:
        got = i.kind or "nothing"
        yield _rule_of_kinds(i), f"expected one of {', '.join(kinds)}, got {got!r}"
    if "tier" in fields:
        yield from _tier(header, i)
    if i.op in MESSAGE_OPS or i.op is Op.GATHER:
        yield from _message(header, i, rank)
    has_stage = 0 <= i.stage < header.num_stages
    is_reduce = i.op is Op.REDUCE
    if is_reduce and i.kind == Reduction.NORM:
        gives_part = has_stage and header.clip and header.is_spilled(i.stage)
        if i.stage != -1 and not gives_part:
            yield "collectives", "the norm is of all stages: it takes s*; only a spilled stage gives its part of it"
    elif "stage" in fields and not has_stage:
        yield "ownership", f"there is no stage {i.stage}: the placement has {header.num_stages} stages"
    if "mb" in fields and not 0 <= i.mb < header.total_microbatches:
        yield "ownership", f"there is no micro-batch {i.mb}: the program has {header.total_microbatches}"
    firsts = [tie[0] for tie in header.ties]
    if is_reduce and i.kind == Reduction.TIED and i.stage not in firsts:
        yield "collectives", f"no group of tied stages starts with stage {i.stage}: the header has {header.ties}"
    if "tier" in fields:
        yield from _moved(header, i)
    is_parked = "tier" in fields and i.kind not in SLOTTED
    if "version" in fields and not is_parked:
        yield from _version(header, i)
    if "slot" in fields:
        yield from _slot(header, i)
    if i.op in STEP_OPS:
        yield from _place_of_step(header, i)
    if i.op in (Op.UNSHARD, Op.FREE) and has_stage and not header.shares_gradients(i.stage):
        yield "sharing", f"the header says that the copies of stage {i.stage} share nothing that is gathered or freed"


def _rule_of_kinds(i: Instruction) -> str:
    if i.op is Op.REDUCE:
        return "collectives"
    if "tier" in OP_SPEC[i.op].fields:
        return "residency"
    return "messages"


def _place_of_step(header: Header, i: Instruction) -> Problems:
    on_host = header.steps_on_host(i.stage)
    if on_host and i.op is Op.STEP:
        yield "residency", f"the header says that stage {i.stage} steps on the host: expected host_step"
    if i.op is Op.HOST_STEP and not on_host:
        yield "residency", f"the header says that stage {i.stage} steps on its device: expected step"


def _message(header: Header, i: Instruction, rank: int) -> Problems:
    if i.op is Op.GATHER and header.tensor == 1:
        yield "messages", "there is nothing to gather on a rank of one process: the header has tensor 1"
    if i.kind in WHOLE_OF and header.tensor == 1:
        yield "messages", f"{i.kind} travels only between ranks of several tensor-parallel processes: the header has 1"
    if i.peer == rank:
        yield "messages", "a rank cannot send to itself: what it made is already there"
    exists = 0 <= i.peer < header.num_ranks
    if i.op in MESSAGE_OPS and not exists:
        yield "messages", f"there is no rank {i.peer}: the placement names {header.num_ranks} ranks"


def _version(header: Header, i: Instruction) -> Problems:
    """Checks that the version exists, or the update where its gradients are meant."""
    updates = _updates(header, i)
    is_update = 0 <= i.version < updates
    if i.op is Op.REDUCE and not is_update:
        yield "collectives", f"there is no update {i.version}: there are {updates}"
    if not is_update and (i.op in (Op.FREE, *STEP_OPS) or i.kind == Kind.WGRAD):
        yield "complete", f"there is no update {i.version}: stage {i.stage} makes {updates} updates"
    if not is_update and i.version != updates:
        yield "versions", f"there is no such version: stage {i.stage} has versions 0 to {updates}"


def _updates(header: Header, i: Instruction) -> int:
    """Number of updates that a stage makes, or for the norm of all gradients any stage."""
    if i.kind == Reduction.NORM:
        return max(map(header.num_updates, range(header.num_stages)))
    return header.num_updates(i.stage)


def _tier(header: Header, i: Instruction) -> Problems:
    if header.spill is None:
        yield "residency", "the header spills nothing: every stage stays on its device"
    elif i.tier != header.spill.tier:
        got = "no tier"
        if i.tier in TIERS:
            got = i.tier
        yield "residency", f"the header spills to the {header.spill.tier}, got {got!r}"


def _moved(header: Header, i: Instruction) -> Problems:
    """Checks that the value can be moved; for activations `version` is the micro-batch."""
    if i.kind not in SLOTTED:
        if not 0 <= i.version < header.total_microbatches:
            yield "ownership", f"there is no micro-batch {i.version} of stage {i.stage}"
        return
    moves = header.is_spilled(i.stage)
    if i.kind == Kind.OPTIM:
        moves = header.is_optim_spilled(i.stage)
    if not moves:
        yield "residency", f"the {i.kind} of stage {i.stage} do not come and go: the header does not spill them"


def _slot(header: Header, i: Instruction) -> Problems:
    most = 0
    if header.spill:
        most = header.spill.slots(i.kind)
    if most:
        possible = range(most)
        expected = f"one of @0 to @{most - 1}"
    else:
        possible = range(-1, 0)
        expected = "@*: it has no slot"
    if i.slot not in possible:
        got = "@*"
        if i.slot >= 0:
            got = f"@{i.slot}"
        yield "residency", f"expected slot {expected}, got {got}"
