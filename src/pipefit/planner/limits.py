"""The roofline of spilling: seconds per update that no order of work and copies can beat, and the lane that says so.

    limit = max(compute, bytes read / rate, bytes written / rate, steps on the host) + first fill

Where stages step on the host their states do not move, and gradients are written in place of weights. Sources: Nagrecha
and Kumar, Hydra (VLDB 2022); Ren and others, ZeRO-Offload (USENIX ATC 2021) §4 for the step on the host.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from pipefit.cost.model import CostModel
from pipefit.ir.op import COMPUTE_OPS, Op
from pipefit.ir.program import Program
from pipefit.ir.values import Value
from pipefit.spec.topology import Tier

__all__ = ["Limit", "Traffic", "limit_of", "traffic"]


@dataclass(frozen=True)
class Traffic:
    """What one rank computes and moves in a pass over its program.

    Attributes:
        compute_s: seconds of forwards, replays, backwards and losses.
        step_s: seconds of optimizer steps on the device.
        read_bytes: fetched, by kind.
        written_bytes: evicted, by kind.
        host_s: seconds of optimizer steps on the host.
        fill_s: seconds until the first stage is there.
    """

    compute_s: float
    step_s: float
    read_bytes: dict[str, float]
    written_bytes: dict[str, float]
    host_s: float
    fill_s: float


@dataclass(frozen=True)
class Limit:
    """The limit of a program.

    Attributes:
        lanes: seconds that each lane is busy.
        fill_s: seconds before anything can start.
    """

    lanes: dict[str, float]
    fill_s: float

    @property
    def limit_s(self) -> float:
        """Seconds that cannot be beaten."""
        return max(self.lanes.values()) + self.fill_s

    @property
    def binds(self) -> str:
        """The lane that is busy the longest."""
        return max(self.lanes, key=self.lanes.__getitem__)


def traffic(program: Program, rank: int, cost: CostModel) -> Traffic:
    """What a rank of a program computes and moves."""
    read: defaultdict[str, float] = defaultdict(float)
    written: defaultdict[str, float] = defaultdict(float)
    compute = step = host = fill = 0.0
    for i in program.ranks[rank]:
        if i.op is Op.FETCH:
            read[i.kind] += cost.size_bytes(Value(i.kind, i.stage, i.version))
            fill = fill or cost.local_s(i, rank)
        elif i.op is Op.EVICT:
            written[i.kind] += cost.size_bytes(Value(i.kind, i.stage, i.version))
        elif i.op is Op.HOST_STEP:
            host += cost.local_s(i, rank)
        elif i.op is Op.STEP:
            step += cost.duration_s(i, rank)
        elif i.op in COMPUTE_OPS or i.op is Op.LOSS:
            compute += cost.duration_s(i, rank)
    return Traffic(compute, step, dict(read), dict(written), host, fill)


def limit_of(moved: Traffic, tier: Tier) -> Limit:
    """The limit of a program that spills to a tier."""
    names = ("host → device", "device → host") if tier.name == "host" else ("disk read", "disk write")
    lanes = {
        "compute": moved.compute_s + moved.step_s,
        names[0]: sum(moved.read_bytes.values()) / tier.read_bytes_per_s,
        names[1]: sum(moved.written_bytes.values()) / tier.write_bytes_per_s,
    }
    if moved.host_s:
        lanes["step on the host"] = moved.host_s
    return Limit(lanes, moved.fill_s)
