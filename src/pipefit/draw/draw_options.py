"""The options of a drawing: for `pipefit draw` and `pipefit.draw`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipefit.cost.unit_costs import UnitCosts
from pipefit.spec.arguments import Amount, Number
from pipefit.spec.options import Checked, setting
from pipefit.spec.plan import Shard


@dataclass(frozen=True)
class DrawOptions(UnitCosts, Checked):
    """The options of a drawing, except its shape: unit costs, copies, replays, and spilling where `slots` are given.

    In Python `recompute` may also be the stages that replay.
    """

    num_steps: Number | None = setting(None, "Weight updates to draw.", "--steps")
    replicas: Sequence[int] = setting((), "Copies of each stage, such as 2,1.", typed="numbers")
    shard: Shard = setting("none", "What the copies of each stage share: each includes those before it.")
    stage_work: Sequence[float] = setting(
        (), "Cost of each stage in --forward and --backward, such as 2,1.", typed="figures"
    )
    recompute: bool | Sequence[int] = setting(False, "Replay each forward before its backward.", typed=bool)
    slots: Number | None = setting(
        None,
        "Spill all stages, with so many slots on each rank; default: 2 for `spilled`, no spilling for others.",
    )
    optim_slots: Amount = setting(1, "Slots for optimizer states; 0: these stay.")
    tier: Literal["host", "disk"] = setting("host", "Tier of spilled stages.")
    prefetch: Amount | None = setting(
        None, "Fetch a stage so many visits ahead; 0: when it is needed. Default: as soon as a slot is free."
    )
    activations: bool = setting(False, "Inputs of spilled stages wait on the tier too, until their replay.")
    step_on: Literal["device", "host"] = setting("device", "Place of the step of stages on the host.")
    keep: bool = setting(False, "Spilled stages keep their activations on the device, and replay nothing.")
