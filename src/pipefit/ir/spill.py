"""Spill: the stages that are kept on another tier, and the slots of a device for those that compute."""

from __future__ import annotations

import msgspec

from pipefit.errors import ScheduleError, check_figures
from pipefit.ir.instruction import Indices
from pipefit.ir.op import Kind

GRAIN_BYTES = 4096
"""Records and slots are rounded up to a multiple of this: direct I/O needs it."""

TIERS = ("host", "disk")
"""Tiers that can hold a stage while it is not on the device."""

SLOTTED = {Kind.WEIGHTS.value: "weights", Kind.WGRAD.value: "wgrad", Kind.OPTIM.value: "optim"}
"""The kinds of values in slots, and the names of these. Slot i of the gradients belongs to slot i of the weights."""

UNDER_WAY = 2
"""Activations that are written to a tier at a time: each leaves the device once it is written."""


class Spill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Spilling of a program: the stages that move, their tier, and the slots of each rank.

    The weights (and, where they are moved, the optimizer's states) of a spilled stage are on the tier and not on the
    device when a program starts, and again when it ends. A slot of a rank is as large as the largest spilled stage
    of that rank; each weights slot has a second slot for the gradients of the stage in it.

    Attributes:
        tier: "host" or "disk".
        weights_slots: the number of slots on each rank that has spilled stages.
        optim_slots: the number of slots there for the states of the optimizer; 0 when they are not moved.
        stages: the spilled stages, in increasing order; all others stay on their device.
        activations: whether the input of a spilled stage waits on the tier too, from its forward to its replay.
        on_host: the spilled stages that step on the host, in increasing order: their gradients are written back, and
            the optimizer's states never leave it. Only where the tier is the host.
        keeps: the spilled stages that keep the tensors saved by autograd on the device while their weights are away, in
            increasing order. The others replay a forward whose backward falls into another stay.
    """

    tier: str
    weights_slots: int
    optim_slots: int
    stages: Indices
    activations: bool = False
    on_host: Indices = ()
    keeps: Indices = ()

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise ScheduleError(f"spill: expected tier host or disk, got {self.tier!r}")
        check_figures(self, ScheduleError, "spill.", weights_slots=1, optim_slots=0)
        if not self.stages or any(a >= b for a, b in zip(self.stages, self.stages[1:], strict=False)):
            raise ScheduleError(f"spill: expected distinct stages in increasing order, got {self.stages}")
        if self.on_host and self.tier != "host":
            raise ScheduleError(
                f"spill: a step on the host needs weights, gradients and states in its memory, not on {self.tier}; "
                "spill to the host, or step on the device"
            )
        for verb, some in (("step on the host", self.on_host), ("keep what autograd saved", self.keeps)):
            if some != tuple(stage for stage in self.stages if stage in some):
                raise ScheduleError(
                    f"spill: expected spilled stages to {verb}, distinct and in increasing order, got {some} of "
                    f"{self.stages}"
                )

    @classmethod
    def of(
        cls, num_stages: int, slots: int = 2, optim_slots: int = 1, tier: str = "host", activations: bool = False
    ) -> Spill:
        """All stages of a model on a tier, with as many slots for weights and for the optimizer's states."""
        return cls(tier, slots, optim_slots, tuple(range(num_stages)), activations)

    def slots(self, kind: str) -> int:
        """Number of slots of a rank for a kind; 0 for a kind without slots."""
        if kind == Kind.OPTIM:
            return self.optim_slots
        if kind in SLOTTED:
            return self.weights_slots
        return 0
