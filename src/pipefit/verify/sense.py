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


def set_aside(program: Program) -> tuple[Program, list[list[int]] | None, list[Finding]]:
    """The program without malformed instructions.

    Returns:
        The other instructions, with as many ranks as the header names; the former index of each (None: nothing was set
        aside); and the findings.
    """
    header = program.header
    findings = []
    for rank, instructions in enumerate(program.ranks):
        known: dict[tuple[object, ...], tuple[range, range]] = {}
        for index, i in enumerate(instructions):
            key = i.op, i.stage, i.kind, i.peer, i.tier, i.slot
            mbs, versions = known.get(key) or known.setdefault(key, _ranges(header, i, rank))
            if i.mb in mbs and i.version in versions:
                problem = None
            else:
                problem = next(_problems(header, i, rank), None)
            if problem:
                findings.append(Finding(problem[0], rank, index, problem[1]))
    bad = {(finding.rank, finding.position) for finding in findings}
    listed = len(program.ranks)
    named = header.num_ranks
    findings += [
        Finding("ownership", rank, -1, f"the program has no rank {rank}; its placement needs {named} ranks")
        for rank in range(listed, named)
    ]
    if not findings:
        return program, None, findings
    lists = [*program.ranks, *[()] * (named - listed)][:named]
    kept = [[n for n in range(len(own)) if (rank, n) not in bad] for rank, own in enumerate(lists)]
    return program.with_ranks([[lists[rank][n] for n in own] for rank, own in enumerate(kept)]), kept, findings


def _ranges(header: Header, i: Instruction, rank: int) -> tuple[range, range]:
    """Micro-batches and versions with which an instruction is well-formed, its other operands being as they are.

    Both are empty where it never is, and for copies, whose versions have several meanings.
    """
    fields = OP_SPEC[i.op].fields
    first = replace(i, mb=0 if "mb" in fields else i.mb, version=0 if "version" in fields else i.version)
    if "tier" in fields or any(_problems(header, first, rank)):
        return range(0), range(0)
    if "mb" in fields:
        mbs = range(header.total_microbatches)
    else:
        mbs = range(i.mb, i.mb + 1)
    if "version" not in fields:
        return mbs, range(i.version, i.version + 1)
    return mbs, range(_updates(header, i) + (i.op is not Op.REDUCE and i.op not in STEP_OPS))


def refuse_malformed(program: Program) -> None:
    """Refuses a program with malformed instructions, which can be neither run nor simulated.

    Raises:
        InvalidProgramError: with the first of them.
    """
    _, _, findings = set_aside(program)
    if findings:
        rule, rank, index, message = findings[0]
        if index >= 0:
            place = f"rank {rank}[{index}] {program.ranks[rank][index]}"
        else:
            place = f"rank {rank}"
        if len(findings) > 1:
            more = f", and {len(findings) - 1} more"
        else:
            more = ""
        raise InvalidProgramError(f"{rule}: {place}: {message}{more}; `pipefit verify` lists all")


def _problems(header: Header, i: Instruction, rank: int) -> Problems:
    fields = OP_SPEC[i.op].fields
    kinds = OP_SPEC[i.op].kinds
    if rank >= header.num_ranks:
        yield "ownership", f"there is no rank {rank}: the placement names {header.num_ranks} ranks"
    if kinds and i.kind not in kinds:
        if i.op is Op.REDUCE:
            rule = "collectives"
        else:
            if "tier" in fields:
                rule = "residency"
            else:
                rule = "messages"
        yield rule, f"expected one of {', '.join(kinds)}, got {i.kind or 'nothing'!r}"
    if "tier" in fields:
        yield from _tier(header, i)
    if i.op in MESSAGE_OPS or i.op is Op.GATHER:
        yield from _message(header, i, rank)
    is_norm = i.op is Op.REDUCE and i.kind == Reduction.NORM
    if is_norm and i.stage != -1:
        if not (0 <= i.stage < header.num_stages and header.clip and header.is_spilled(i.stage)):
            yield "collectives", "the norm is of all stages: it takes s*; only a spilled stage gives its part of it"
    elif "stage" in fields and not is_norm and not 0 <= i.stage < header.num_stages:
        yield "ownership", f"there is no stage {i.stage}: the placement has {header.num_stages} stages"
    if "mb" in fields and not 0 <= i.mb < header.total_microbatches:
        yield "ownership", f"there is no micro-batch {i.mb}: the program has {header.total_microbatches}"
    if i.op is Op.REDUCE and i.kind == Reduction.TIED and all(tie[0] != i.stage for tie in header.ties):
        yield "collectives", f"no group of tied stages starts with stage {i.stage}: the header has {header.ties}"
    if "tier" in fields:
        yield from _moved(header, i)
    if "version" in fields and ("tier" not in fields or i.kind in SLOTTED):
        yield from _version(header, i)
    if "slot" in fields:
        yield from _slot(header, i)
    if i.op in STEP_OPS and header.steps_on_host(i.stage) != (i.op is Op.HOST_STEP):
        if i.op is Op.HOST_STEP:
            expected = "its device: expected step"
        else:
            expected = "the host: expected host_step"
        yield "residency", f"the header says that stage {i.stage} steps on {expected}"


def _message(header: Header, i: Instruction, rank: int) -> Problems:
    if i.op is Op.GATHER and header.tensor == 1:
        yield "messages", "there is nothing to gather on a rank of one process: the header has tensor 1"
    if i.kind in WHOLE_OF and header.tensor == 1:
        yield "messages", f"{i.kind} travels only between ranks of several tensor-parallel processes: the header has 1"
    if i.peer == rank:
        yield "messages", "a rank cannot send to itself: what it made is already there"
    if i.op in MESSAGE_OPS and not 0 <= i.peer < header.num_ranks:
        yield "messages", f"there is no rank {i.peer}: the placement names {header.num_ranks} ranks"


def _version(header: Header, i: Instruction) -> Problems:
    """Checks that the version exists, or the update where its gradients are meant."""
    updates = _updates(header, i)
    if i.op is Op.REDUCE and not 0 <= i.version < updates:
        yield "collectives", f"there is no update {i.version}: there are {updates}"
    if (i.op in STEP_OPS or i.kind == Kind.WGRAD) and not 0 <= i.version < updates:
        yield "complete", f"there is no update {i.version}: stage {i.stage} makes {updates} updates"
    if not 0 <= i.version <= updates:
        yield "versions", f"there is no such version: stage {i.stage} has versions 0 to {updates}"


def _updates(header: Header, i: Instruction) -> int:
    """Number of updates that a stage makes, or for the norm of all gradients any stage."""
    stages = range(header.num_stages) if i.kind == Reduction.NORM else (i.stage,)
    return max(map(header.num_updates, stages))


def _tier(header: Header, i: Instruction) -> Problems:
    if header.spill is None:
        yield "residency", "the header spills nothing: every stage stays on its device"
    elif i.tier != header.spill.tier:
        if i.tier in TIERS:
            got = i.tier
        else:
            got = "no tier"
        yield "residency", f"the header spills to the {header.spill.tier}, got {got!r}"


def _moved(header: Header, i: Instruction) -> Problems:
    """Checks that the value can be moved; for activations `version` is the micro-batch."""
    if i.kind not in SLOTTED:
        if not 0 <= i.version < header.total_microbatches:
            yield "ownership", f"there is no micro-batch {i.version} of stage {i.stage}"
    elif not header.is_spilled(i.stage) or (i.kind == Kind.OPTIM and not header.is_optim_spilled(i.stage)):
        yield "residency", f"the {i.kind} of stage {i.stage} do not come and go: the header does not spill them"


def _slot(header: Header, i: Instruction) -> Problems:
    if header.spill:
        most = header.spill.slots(i.kind)
    else:
        most = 0
    if not (0 <= i.slot < most or (not most and i.slot == -1)):
        if most:
            expected = f"one of @0 to @{most - 1}"
        else:
            expected = "@*: it has no slot"
        yield "residency", f"expected slot {expected}, got {'@*' if i.slot < 0 else f'@{i.slot}'}"
