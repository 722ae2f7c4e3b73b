"""What is to be planned under a cap on the devices' memory, all of it known: one noun for cuts, choices and plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipefit.cost import FREE, CostModel, ModelBytes, of_plan
from pipefit.ir.liveness import tier_peak_bytes
from pipefit.ir.program import Program
from pipefit.ir.spill import Spill
from pipefit.schedules import Shape, generate, placement_of
from pipefit.spec import Partition, Placement, Plan, Profile, SpillSpec, Topology
from pipefit.spec.topology import Tier

__all__ = ["Task"]

_SHARES = (0.25, 0.5, 0.75)
"""Of the stages, that step on the host where the others step on the device."""


@dataclass(frozen=True)
class Task:
    """What is to be planned: the arguments of `plan_spilling`, all known.

    Attributes:
        tier: at the rates that each rank has of it.
        topology: with the tiers of a machine.
        schedule: by which the ranks take turns; "spilled" for one of them.
        num_chunks: stages on each rank; 0: as many as are best.
        copies: of the pipeline, which have the micro-batches in turn and add up their gradients.
        keep: whether stages that there is room for keep what a forward saved for its backward.
        sizes: what layers take to the byte; None: what the profile says, and `state` times as much.
    """

    profile: Profile
    topology: Topology
    tier: Tier
    device_bytes: float
    host_bytes: float
    num_microbatches: int
    state: float
    clip: bool
    ties: tuple[tuple[int, ...], ...]
    activations: bool
    step_on: str
    num_ranks: int = 1
    schedule: str = "spilled"
    num_chunks: int = 0
    copies: int = 1
    keep: bool = True
    sizes: ModelBytes | None = None

    @property
    def depth(self) -> int:
        """Ranks of each pipeline."""
        return self.num_ranks // self.copies

    def cost_of(self, partition: Partition) -> CostModel:
        """What the stages of a cut cost, wherever they step."""
        num_chunks = len(partition.stages) // self.depth
        placement = Placement(placement_of(self.depth, num_chunks, "loop", (self.copies,)))
        spill = SpillSpec(self.tier.name, self.device_bytes, activations=self.activations)
        plan = Plan(
            partition,
            placement,
            self.schedule,
            self.num_microbatches,
            self.profile.microbatch_size,
            num_chunks,
            data=self.copies,
            spill=spill,
        )
        return of_plan(self.profile, plan, self.topology, state_per_weight=self.state, runtime=FREE, sizes=self.sizes)

    def program_of(self, partition: Partition, spill: Spill, num_microbatches: int) -> Program:
        """What would run."""
        return generate(self.schedule, self.shape_of(partition, spill, num_microbatches))

    def shape_of(self, partition: Partition, spill: Spill, num_microbatches: int) -> Shape:
        """The shape of that; in a pipeline, too, what is spilled replays its forwards, but for stages that keep."""
        replayed = tuple(stage for stage in range(len(partition.stages)) if stage not in spill.keeps)
        return Shape(
            self.depth,
            num_microbatches,
            len(partition.stages) // self.depth,
            replicas=(self.copies,),
            clip=self.clip,
            ties=self.ties_of(partition),
            recompute=() if self.schedule == "spilled" else replayed,
            spill=spill,
            options=self.options,
        )

    @property
    def options(self) -> dict[str, int]:
        """Of the schedule: a pipeline that visits a stage for all micro-batches at once need not replay the last."""
        return {"turn": 1} if self.schedule == "breadth-first" else {}

    @property
    def moves_once(self) -> bool:
        """Whether what is moved does not depend on the number of micro-batches."""
        return not self.activations and self.schedule in ("spilled", "breadth-first")

    def has_room(self, program: Program, cost: CostModel) -> bool:
        """Whether the tier of every machine holds what the ranks there keep on it."""
        held = [tier_peak_bytes(program, rank, cost.size_bytes)[0] for rank in range(self.num_ranks)]
        share = self.topology.tier_shares(self.num_ranks)
        return all(sum(held[first : first + share]) <= self.host_bytes for first in range(0, self.num_ranks, share))

    def on_host(self, partition: Partition, optim_slots: int) -> Iterator[tuple[int, ...]]:
        """The stages that may step on the host, together; of a split the last, which step first.

        Their steps have the longest until their weights are needed again.
        """
        tied = {stage for tie in self.ties_of(partition) for stage in tie}
        free = tuple(stage for stage in range(len(partition.stages)) if stage not in tied)
        if self.step_on != "host" or not free:
            yield ()
        knows = self.tier.step_bytes_per_s > 0 and self.step_on == "auto"
        if self.tier.name != "host" or not free or not (knows or self.step_on == "host"):
            return
        num_stages = len(partition.stages)
        if len(free) < num_stages or not optim_slots:
            yield free
        if self.step_on == "auto":
            for share in _SHARES:
                count = round(share * len(free))
                if 0 < count < len(free):
                    yield free[-count:]

    def ties_of(self, partition: Partition) -> tuple[tuple[int, ...], ...]:
        """The stages that share a weight because layers of them do."""
        owner = {layer: index for index, stage in enumerate(partition.stages) for layer in stage.layers}
        groups = {tuple(sorted({owner[layer] for layer in tie})) for tie in self.ties}
        return tuple(sorted(group for group in groups if len(group) > 1))
