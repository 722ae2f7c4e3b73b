"""Weights: the version that each instruction uses, the places of optimizer steps, and the drops of versions."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import BACKWARD_OPS, COMPUTE_OPS, Op
from pipefit.ir.program import Header, Program, WeightRule
from pipefit.ir.versions import required_versions
from pipefit.passes.places import inserted, last_backwards


def with_versions(program: Program) -> Program:
    """Sets the version operand of every forward, recompute and backward by the program's weight rule."""
    versions = required_versions(program.header, program.ranks)
    ranks = [
        [
            msgspec.structs.replace(i, version=versions[i.stage, i.mb]) if i.op in COMPUTE_OPS else i
            for i in instructions
        ]
        for instructions in program.ranks
    ]
    return program.with_ranks(ranks)


def with_steps(program: Program) -> Program:
    """Adds the optimizer steps.

    Under stashing the newest version is used at once, so each step follows the last backward of its update. Elsewhere
    a step waits until its version is first used or its stage's gradients start to accumulate for the next update, else
    until the end. So its reductions overlap with the work between, and on a rank with several stages the step of one
    never delays the backward of another. Spilled stages step while they are on the device (`with_spilling`); under
    clipping, which first needs the norm of all gradients, they step here.
    """
    eager = program.header.weights is WeightRule.STASH
    ranks = []
    for instructions in program.ranks:
        due = {index: key for key, index in last_backwards(program.header, instructions).items()}
        waiting: dict[tuple[int, int], Instruction] = {}
        listed = []
        for index, i in enumerate(instructions):
            if waiting:
                listed += [waiting.pop(key) for key in sorted(waiting) if _must_precede(key, i, program)]
            listed.append(i)
            if index in due and not steps_at_once(program.header, due[index][0]):
                step = step_of(program.header, *due[index])
                if eager:
                    listed.append(step)
                else:
                    waiting[due[index]] = step
        # At the end of a flush every stage steps: the update's index first, so that all finish one update together.
        listed += [waiting[key] for key in sorted(waiting, key=lambda key: (key[1], key[0]))]
        ranks.append(listed)
    return program.with_ranks(ranks)


def _must_precede(step: tuple[int, int], i: Instruction, program: Program) -> bool:
    """Returns whether an instruction uses the version made by a step of (stage, update), or adds to later gradients."""
    stage, update = step
    if i.stage != stage or i.op not in COMPUTE_OPS:
        return False
    return i.version > update or (i.op in BACKWARD_OPS and program.header.update_of(stage, i.mb) > update)


def steps_at_once(header: Header, stage: int) -> bool:
    """Returns whether a stage steps in the slot of the device in which its gradients are complete."""
    return header.is_spilled(stage) and not header.clip


def step_of(header: Header, stage: int, update: int) -> Instruction:
    """The step of a stage, on the device or on the host."""
    return Instruction(Op.HOST_STEP if header.steps_on_host(stage) else Op.STEP, stage, version=update)


def with_drops(program: Program) -> Program:
    """Drops each version of a stage's weights right after its last use; the newest stays.

    Versions of spilled stages are fetched and evicted with their slots (`with_spilling`).
    """
    ranks = []
    step = Op.STEP
    for instructions in program.ranks:
        last_use: dict[tuple[int, int], int] = {}
        newest: dict[int, int] = {}
        for index, i in enumerate(instructions):
            if i.op in COMPUTE_OPS or i.op is step:
                last_use[i.stage, i.version] = index
            if i.op is step:
                newest[i.stage] = max(newest.get(i.stage, 0), i.version + 1)
        dead: dict[int, list[Instruction]] = defaultdict(list)
        for (stage, version), index in sorted(last_use.items()):
            if version < newest.get(stage, 0) and not program.header.is_spilled(stage):
                dead[index + 1].append(Instruction(Op.DROP, stage, version=version))
        ranks.append(inserted(instructions, dead))
    return program.with_ranks(ranks)
