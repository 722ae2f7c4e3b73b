"""The roofline of spilling: a lower bound of seconds per update over all orders of work and copies; the binding lane.

    limit = max(compute, bytes read / rate, bytes written / rate, steps on the host) + first fill

It is that of a step among others: weights that are still in their slots from the step before are not read. Where reads
and writes alternate on one channel, their seconds add up. The computing processor also computes checksums, where the
tier has them. Where stages step on the host their states do not move, and gradients are written in place of weights.
Sources: Nagrecha and Kumar, Hydra (VLDB 2022); Ren and others, ZeRO-Offload (USENIX ATC 2021) §4 for the host step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from pipefit.cost.model import CostModel
from pipefit.ir.op import COMPUTE_OPS, Op
from pipefit.ir.program import Program
from pipefit.ir.residency import kept_fetches
from pipefit.spec.topology import Tier


class Limit(NamedTuple):
    """Work and copies of one rank in a pass over its program, and the limit that they set.

    Attributes:
        lanes: seconds that each lane is busy.
        compute_s: seconds of forwards, replays, backwards and losses.
        read_bytes: fetched, by kind.
        written_bytes: evicted, by kind.
        fill_s: seconds until the first stage is loaded, before anything can start; 0 where it is still on the device.
    """

    lanes: dict[str, float]
    compute_s: float
    read_bytes: Mapping[str, float]
    written_bytes: Mapping[str, float]
    fill_s: float

    @property
    def limit_s(self) -> float:
        """The lower bound in seconds."""
        return max(self.lanes.values()) + self.fill_s

    @property
    def binds(self) -> str:
        """The lane that is busy the longest."""
        return max(self.lanes, key=self.lanes.__getitem__)


def limit_of(program: Program, rank: int, cost: CostModel, tier: Tier, times: float = 1) -> Limit:
    """The limit of a rank in a pass that follows another.

    Args:
        program: with the copies of a pass.
        rank: of the limit.
        cost: of its stages.
        tier: to which it spills, at the rank's share of the rates.
        times: factor of the micro-batches that are computed.
    """
    kept = kept_fetches(program, rank, later=True)
    read: defaultdict[str, float] = defaultdict(float)
    written: defaultdict[str, float] = defaultdict(float)
    compute = step = host = check = 0.0
    fill: float | None = None
    for index, i in enumerate(program.ranks[rank]):
        op = i.op
        if op is Op.FETCH:
            moved = index not in kept
            if fill is None:
                fill = cost.local_s(i, rank) * moved
            if moved:
                read[i.kind] += cost.size_bytes(i)
                check += cost.check_s(i)
        elif op is Op.EVICT:
            written[i.kind] += cost.size_bytes(i)
            check += cost.check_s(i)
        elif op is Op.HOST_STEP:
            host += cost.local_s(i, rank)
        elif op is Op.STEP:
            step += cost.duration_s(i, rank)
        elif op in COMPUTE_OPS or op is Op.LOSS:
            compute += cost.duration_s(i, rank)
    compute *= times
    read_s = sum(read.values()) / tier.read_bytes_per_s
    write_s = sum(written.values()) / tier.write_bytes_per_s
    lanes = {"compute": compute + step + check}
    if tier.one_channel and tier.name == "host":
        lanes["host ⇄ device"] = read_s + write_s
    elif tier.one_channel:
        lanes["disk"] = read_s + write_s
    elif tier.name == "host":
        lanes |= {"host → device": read_s, "device → host": write_s}
    else:
        lanes |= {"disk read": read_s, "disk write": write_s}
    if host:
        lanes["step on the host"] = host
    return Limit(lanes, compute, read, written, fill or 0.0)
