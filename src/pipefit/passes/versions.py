"""Weights: the version that each instruction uses, the places of optimizer steps, and the drops of versions."""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter

from msgspec.structs import replace

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import BACKWARD_OPS, COMPUTE_OPS, Op
from pipefit.ir.program import Header, Program, WeightRule
from pipefit.ir.versions import required_versions
from pipefit.passes.places import inserted, last_backwards


def with_versions(program: Program) -> Program:
    """Sets the version operand of every forward, recompute and backward by the program's weight rule."""
    versions = required_versions(program.header, program.ranks)
    ranks = []
    for instructions in program.ranks:
        listed = list(instructions)
        for index, i in enumerate(instructions):
            if i.op in COMPUTE_OPS:
                listed[index] = replace(i, version=versions[i.stage, i.mb])
        ranks.append(listed)
    return program.with_ranks(ranks)


def with_steps(program: Program) -> Program:
    """Adds the optimizer steps.

    Under stashing the newest version is used at once, so each step follows the last backward of its update. Elsewhere
    a step waits until its version is first used or its stage's gradients start to accumulate for the next update, else
    until the end. So its reductions overlap with the work between, and on a rank with several stages the step of one
    never delays the backward of another. Spilled stages step while they are on the device (`with_spilling`); under
    clipping, which first needs the norm of all gradients, they step here.
    """
    header = program.header
    eager = header.weights is WeightRule.STASH
    ranks = []
    for instructions in program.ranks:
        due = {}
        for (stage, update), index in last_backwards(header, instructions).items():
            if not steps_at_once(header, stage):
                due[index] = step_of(header, stage, update)
        waiting: list[Instruction] = []
        listed = []
        for index, i in enumerate(instructions):
            first = [step for step in waiting if _must_precede(step, i, header)]
            for step in first:
                waiting.remove(step)
            listed += sorted(first, key=attrgetter("stage", "version"))
            listed.append(i)
            if index in due:
                if eager:
                    listed.append(due[index])
                else:
                    waiting.append(due[index])
        # At the end of a flush every stage steps: the update's index first, so that all finish one update together.
        listed += sorted(waiting, key=attrgetter("version", "stage"))
        ranks.append(listed)
    return program.with_ranks(ranks)


def _must_precede(step: Instruction, i: Instruction, header: Header) -> bool:
    """Returns whether an instruction uses the version that a step makes, or adds to later gradients."""
    if i.stage != step.stage or i.op not in COMPUTE_OPS:
        return False
    if i.version > step.version:
        return True
    return i.op in BACKWARD_OPS and header.update_of(i.stage, i.mb) > step.version


def steps_at_once(header: Header, stage: int) -> bool:
    """Returns whether a stage steps in the slot of the device in which its gradients are complete."""
    return header.is_spilled(stage) and not header.clip


def step_of(header: Header, stage: int, update: int) -> Instruction:
    """The step of a stage, on the device or on the host."""
    op = Op.STEP
    if header.steps_on_host(stage):
        op = Op.HOST_STEP
    return Instruction(op, stage, version=update)


def with_drops(program: Program) -> Program:
    """Drops each version of a stage's weights right after its last use; the newest stays.

    Versions of spilled stages are fetched and evicted with their slots (`with_spilling`), those that copies share are
    gathered and dropped (`with_sharing`).
    """
    ranks = []
    step = Op.STEP
    for instructions in program.ranks:
        last_use = {}
        newest: dict[int, int] = defaultdict(int)
        for index, i in enumerate(instructions):
            if i.op in COMPUTE_OPS or i.op is step:
                last_use[i.stage, i.version] = index
            if i.op is step:
                newest[i.stage] = max(newest[i.stage], i.version + 1)
        dead = defaultdict(list)
        for (stage, version), index in sorted(last_use.items()):
            if version < newest[stage] and program.header.is_resident(stage):
                drop = Instruction(Op.DROP, stage, version=version)
                dead[index + 1].append(drop)
        ranks.append(inserted(instructions, dead))
    return program.with_ranks(ranks)
