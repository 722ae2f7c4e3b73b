"""The shape of a spilled program: which stages are moved, which step on the host, and which keep their activations."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipefit.errors import PlanError
from pipefit.ir.spill import Spill
from pipefit.planner import NOT_FROM_DISK
from pipefit.schedules.shape import Shape
from pipefit.spec.options import KEEP, STEP_ON, Spilled


def spilled_shape(shape: Shape, spill: Spilled | None) -> Shape:
    """The shape of a spilled program, from that of the same one without spilling; a plan's own spilling wins."""
    if spill is None or shape.spill is not None or spill.cap_bytes is not None:
        return shape
    num_stages = shape.depth * shape.num_chunks
    return msgspec.structs.replace(shape, spill=spill_of(spill, num_stages, shape.ties), prefetch=spill.prefetch)


def spill_of(spill: Spilled, num_stages: int, ties: Sequence[Sequence[int]] = ()) -> Spill:
    """The spilling of a program.

    Args:
        spill: as the user asks for it.
        num_stages: of the model.
        ties: groups of stages that share a weight, which stays on the device: so they step there.

    Raises:
        PlanError: a step on the host, and the stages are on disk.
    """
    tied = {stage for tie in ties for stage in tie}
    free = [stage for stage in range(num_stages) if stage not in tied]
    on_host = _chosen("step_on", spill.step_on, STEP_ON, "host", free)
    kept = _chosen("keep", spill.keep, KEEP, "all", range(num_stages))
    on_disk = spill.folder is not None
    if on_host and on_disk:
        raise PlanError(NOT_FROM_DISK)
    optim_slots = spill.optim_slots if len(on_host) < num_stages else 0
    made = Spill.of(num_stages, spill.slots, optim_slots, "disk" if on_disk else "host", spill.activations)
    return msgspec.structs.replace(made, on_host=on_host, keeps=kept)


def _chosen(name: str, choice: object, words: Sequence[str], every: str, stages: Sequence[int]) -> tuple[int, ...]:
    """The stages of a choice: a word, of which `every` stands for all of them, or their numbers."""
    if isinstance(choice, str) and choice in words:
        return tuple(stages) if choice == every else ()
    if isinstance(choice, Sequence) and not isinstance(choice, str) and set(choice) <= set(stages):
        return tuple(sorted(set(choice)))
    shared = " (those that share no weight with another)" if name == "step_on" else ""
    numbers = ", ".join(map(str, stages)) or "none"
    raise PlanError(f"{name}: expected {', '.join(words)}, or some of the stages {numbers}{shared}, got {choice!r}")
