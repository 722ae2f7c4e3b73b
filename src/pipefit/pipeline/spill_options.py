"""How a pipeline spills, as its user says it: the cap, where stages live, and what is done with them there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from pipefit.errors import PlanError
from pipefit.ir.spill import Spill
from pipefit.pipeline.resumed import committed_step
from pipefit.planner.spilling import NOT_FROM_DISK, STEP_ON
from pipefit.profiling import measure_tier
from pipefit.runtime.session import current
from pipefit.schedules.shape import Shape
from pipefit.spec.topology import Tier
from pipefit.spill.rank import SpillPlace
from pipefit.units import parse_quantity

__all__ = ["Spilled", "in_bytes", "spilled_shape"]

KEEP = ("auto", "all", "none")
"""Which stages may be told to keep their activations."""


@dataclass(frozen=True)
class Spilled:
    """How a pipeline spills: `Pipeline(…, spill=Spilled("1.5 GiB", disk="/scratch"))`.

    Attributes:
        device_memory: most that training may take on the device, bytes or text like "1.5 GiB"; None: the stages are
            cut as the pipeline's other arguments say, all of them spilled.
        host_memory: most that the host tiers of a machine's ranks may take; None: no limit.
        disk: folder of the disk tier, for what `host_memory` leaves, or all; None: stages live in the host's memory.
        slots: stages whose weights and gradients are on the device at once: one computes, the others load.
        optim_slots: the same for the optimizer's states; 0: these stay on the device.
        step_on: where stages step: "device" (the optimizer's states come to it, or stay there), "host" (in the memory
            of the host tier, where the states stay), the stages that step on the host, or "auto": what is faster by
            the plan for the cap; without one, the device.
        keep: stages that keep on the device what a forward saved for its backward, while their weights are away,
            instead of replaying it: "all", "none", these, or "auto": as many as the plan for the cap has room for;
            without one, none. What a layer computes from its weights it must save through autograd, as torch's do.
        activations: whether what enters a stage waits on the tier too, from its forward to its replay: room for more
            micro-batches, and more to move. Under a cap this is also done where nothing fits without.
        prefetch: stages ahead that the next is loaded; None: as soon as a slot is free; 0: when it is needed.
        resume: go on from the last step that a run which was cut off has committed in `disk`, instead of beginning
            anew. Model, plan and training must be the same; weights, optimizers, schedules and random numbers stand
            where they stood, and `Pipeline.num_updates` says where that is. A number: from that step or one before.
        commit_every: steps from one commit on `disk` to the next, which is where a run that is cut off goes on from;
            None: 1 where all records lie there, else 10; 0: nothing is committed.
        about: JSON data on what else must be the same to go on from there, each by the name that a message calls it.
        place: in place of `disk` and `host_memory`, for runs that share slots and lanes.
    """

    device_memory: float | str | None = None
    host_memory: float | str | None = None
    disk: str | Path | None = None
    slots: int = 2
    optim_slots: int = 1
    step_on: str | Sequence[int] = "auto"
    keep: str | Sequence[int] = "auto"
    activations: bool = False
    prefetch: int | None = None
    resume: bool | int = False
    commit_every: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    place: SpillPlace | None = None

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("optim_slots", 0), ("prefetch", 0), ("commit_every", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise PlanError(f"{name}: expected a whole number of at least {least}, got {value!r}")
        for name in ("device_memory", "host_memory"):
            size = in_bytes(getattr(self, name), name)
            if size is not None and not size > 0:
                raise PlanError(f"{name}: expected more than 0 bytes, got {getattr(self, name)!r}")

    @property
    def cap_bytes(self) -> float | None:
        """The cap on the device's memory."""
        return in_bytes(self.device_memory, "device_memory")

    @property
    def where(self) -> SpillPlace:
        """The tier's place."""
        if self.place is not None:
            return self.place
        host = in_bytes(self.host_memory, "host_memory")
        folder = None if self.disk is None else Path(self.disk)
        return SpillPlace(
            folder,
            None if host is None else int(host),
            about=self.about,
            resume=self.resume,
            commits=self.commit_every != 0,
        )

    @property
    def committed(self) -> int | None:
        """The step that `resume` would go on from, of this process's rank; None: there is none."""
        folder = self.where.folder
        return None if folder is None else committed_step(folder, current().rank)

    def measured(self, device: torch.device) -> Tier:
        """The tier with its rates, measured now; a commit that is not made at each step is not counted."""
        folder, host = self.where.folder, in_bytes(self.host_memory, "host_memory")
        tier = measure_tier(folder, device, capacity_bytes=host if folder is None else None)
        often = self.commit_every == 1 or (self.commit_every is None and host is None)
        return tier if often else msgspec.structs.replace(tier, commit_s=0.0)

    def of(self, num_stages: int, ties: Sequence[Sequence[int]] = ()) -> Spill:
        """As the programs know it.

        Args:
            num_stages: of the model.
            ties: groups of stages that share a weight, which stays on the device: so they step there.

        Raises:
            PlanError: a step on the host, and the stages are on disk.
        """
        tied = {stage for tie in ties for stage in tie}
        free = [stage for stage in range(num_stages) if stage not in tied]
        stepped = _stages("step_on", self.step_on, STEP_ON, "host", free)
        kept = _stages("keep", self.keep, KEEP, "all", range(num_stages))
        on_disk = self.where.folder is not None
        if stepped and on_disk:
            raise PlanError(NOT_FROM_DISK)
        optim_slots = self.optim_slots if len(stepped) < num_stages else 0
        spill = Spill.of(num_stages, self.slots, optim_slots, "disk" if on_disk else "host", self.activations)
        return msgspec.structs.replace(spill, on_host=stepped, keeps=kept)


def _stages(name: str, told: object, words: Sequence[str], every: str, which: Sequence[int]) -> tuple[int, ...]:
    """The stages that are meant by a word, of which `every` means all that can be meant, or by their numbers."""
    if isinstance(told, str) and told in words:
        return tuple(which) if told == every else ()
    if isinstance(told, Sequence) and not isinstance(told, str) and set(told) <= set(which):
        return tuple(sorted(set(told)))
    shared = " (those that share no weight with another)" if name == "step_on" else ""
    numbers = ", ".join(map(str, which)) or "none"
    raise PlanError(f"{name}: expected {', '.join(words)}, or some of the stages {numbers}{shared}, got {told!r}")


def in_bytes(value: float | str | None, name: str) -> float | None:
    """Bytes of a number, or of text like "1.5 GiB"; None stays None."""
    return None if value is None else parse_quantity(value, "bytes", name)


def spilled_shape(shape: Shape, spill: Spilled | None) -> Shape:
    """The shape of a spilled program, from that of the same one without spilling; a plan's own wins."""
    if spill is None or shape.spill is not None or spill.cap_bytes is not None:
        return shape
    num_stages = shape.depth * shape.num_chunks
    return msgspec.structs.replace(shape, spill=spill.of(num_stages, shape.ties), prefetch=spill.prefetch)
