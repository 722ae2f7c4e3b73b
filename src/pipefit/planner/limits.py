"""The roofline of spilling: seconds per update that no order of work and copies can beat, and the lane that says so.

    limit = max(compute, bytes read / rate, bytes written / rate, 30·N_host / host memory rate) + first fill

N parameters of four bytes that step on the host; an Adam step there reads and writes about 30 bytes of each. Sources:
Nagrecha and Kumar, Hydra (VLDB 2022); Ren and others, ZeRO-Offload (USENIX ATC 2021) §4 for the step on the host.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from pipefit.cost.model import CostModel
from pipefit.ir.op import COMPUTE_OPS, Op
from pipefit.ir.program import Program
from pipefit.ir.values import OPTIM, WEIGHTS, WGRAD, Value
from pipefit.spec.topology import Tier

__all__ = ["Limit", "Traffic", "limits", "traffic"]

_HOST_STEP_BYTES = 30.0
_ELEMENT_BYTES = 4.0
_SHARES = 20


@dataclass(frozen=True)
class Traffic:
    """What one rank computes and moves in a pass over its program.

    Attributes:
        compute_s: seconds of forwards, replays, backwards and losses.
        step_s: seconds of optimizer steps on the device.
        read_bytes: fetched, by kind.
        written_bytes: evicted, by kind.
        weight_bytes: of all stages that are spilled.
        fill_s: seconds until the first stage is there.
    """

    compute_s: float
    step_s: float
    read_bytes: dict[str, float]
    written_bytes: dict[str, float]
    weight_bytes: float
    fill_s: float


@dataclass(frozen=True)
class Limit:
    """The limit for one place of the optimizer.

    Attributes:
        optimizer: "resident" (states stay on the device), "device" (states come and go), "host", or "split".
        lanes: seconds that each lane is busy.
        fill_s: seconds before anything can start.
        host_share: of the weights, those that step on the host.
        runs: whether the runtime of this package steps there.
    """

    optimizer: str
    lanes: dict[str, float]
    fill_s: float
    host_share: float = 0.0
    runs: bool = True

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
    compute = step = fill = 0.0
    for i in program.ranks[rank]:
        if i.op is Op.FETCH:
            read[i.kind] += cost.size_bytes(Value(i.kind, i.stage, i.version))
            fill = fill or cost.local_s(i, rank)
        elif i.op is Op.EVICT:
            written[i.kind] += cost.size_bytes(Value(i.kind, i.stage, i.version))
        elif i.op is Op.STEP:
            step += cost.duration_s(i, rank)
        elif i.op in COMPUTE_OPS or i.op is Op.LOSS:
            compute += cost.duration_s(i, rank)
    spilled = filter(program.header.is_spilled, program.header.stages_of(rank))
    weights = sum(cost.size_bytes(Value(WEIGHTS, stage, 0)) for stage in spilled)
    return Traffic(compute, step, dict(read), dict(written), weights, fill)


def limits(moved: Traffic, tier: Tier, host_bytes_per_s: float = 0.0) -> tuple[Limit, ...]:
    """The limit where the program steps, and what it would be on the host or split between the two.

    Args:
        moved: of a program that steps on the device.
        tier: that it spills to.
        host_bytes_per_s: rate of the host's memory under a fused step; 0: not known, and a step there not considered.
            From a disk the states would have to be read all the same, so there it makes no sense.
    """
    here = Limit("device" if OPTIM in moved.read_bytes else "resident", _lanes(moved, tier, 0.0, 0.0), moved.fill_s)
    if tier.name != "host" or not host_bytes_per_s:
        return (here,)
    shares = [share / _SHARES for share in range(1, _SHARES + 1)]
    others = [
        Limit("host" if x == 1 else "split", _lanes(moved, tier, x, host_bytes_per_s), moved.fill_s, x, runs=False)
        for x in shares
    ]
    split = min(others[:-1], key=lambda limit: limit.limit_s)
    return here, others[-1], split


def _lanes(moved: Traffic, tier: Tier, share: float, host_bytes_per_s: float) -> dict[str, float]:
    """Seconds of each lane when a share of the weights steps on the host: its gradients go down, no states move."""
    states, down = moved.read_bytes.get(OPTIM, 0.0), moved.written_bytes
    read = sum(moved.read_bytes.values()) - share * states
    kept = (1 - share) * (down.get(WEIGHTS, 0.0) + down.get(OPTIM, 0.0))
    written = kept + max(down.get(WGRAD, 0.0), share * moved.weight_bytes)
    names = ("host → device", "device → host") if tier.name == "host" else ("disk read", "disk write")
    lanes = {
        "compute": moved.compute_s + (1 - share) * moved.step_s,
        names[0]: read / tier.read_bytes_per_s,
        names[1]: written / tier.write_bytes_per_s,
    }
    if share:
        lanes["step on the host"] = _HOST_STEP_BYTES * share * moved.weight_bytes / _ELEMENT_BYTES / host_bytes_per_s
    return lanes
