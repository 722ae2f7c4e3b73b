"""CostModel: seconds of instructions, messages and reductions, bytes of values; one law each, for every consumer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from pipefit.cost.rings import Ring, all_gather_s, all_reduce_s, even, over, ring_of
from pipefit.errors import PlanError
from pipefit.ir.instruction import Indices, Instruction
from pipefit.ir.liveness import Lifetime, lifetimes, working_lifetimes
from pipefit.ir.op import OP_SPEC, Kind, Lane, Op, Reduction
from pipefit.ir.values import Value
from pipefit.spec.plan import Figures
from pipefit.spec.topology import Tier, Topology

if TYPE_CHECKING:
    from pipefit.ir.program import Header, Program


@dataclass(frozen=True)
class CostModel:
    """Costs of a placed partition. Tuples run over stages; figures are for one micro-batch; () means 0 for all stages.

    Every law is exact arithmetic on its arguments, so integers and fractions stay exact.

    Attributes:
        forward_s: seconds of a forward.
        backward_input_s: seconds of the half of a backward that makes the gradient of the input.
        backward_weight_s: seconds of the other half; a full backward takes both.
        split_s: seconds that the second of two halves takes beyond its share of a whole backward.
        split_input_s: seconds that the first of two halves takes beyond its share.
        recompute_s: seconds of a replay; (): those of the forward.
        step_s: seconds of an optimizer step.
        host_step_s: seconds of an optimizer step on the host; (): those of the device.
        loss_s: seconds of the loss and its gradient.
        load_s: seconds of loading a slice of the batch.
        act_bytes: of a stage's output, as it travels to the next.
        grad_bytes: of the gradient of that output; (): those of the output.
        saved_bytes: kept from forward to backward.
        replay_bytes: made by a replay inside a backward, and freed with it.
        half_bytes: gradients kept from bwd_input to bwd_weight, in addition to `saved_bytes`; (): `grad_bytes`.
        weight_bytes: of the weights.
        wgrad_bytes: of the weights that train: of their gradients, and of each further version; (): `weight_bytes`.
        optim_bytes: of the optimizer's state, held from beginning to end.
        shard_bytes: of the part of shared weights that a rank keeps from beginning to end.
        sum_bytes: of its part of the summed gradients, from the first sum of an update to its step.
        gathered: stages whose whole weights come and go, because their copies share them.
        fixed_bytes: of other data of the stage that stays on its rank's device, such as buffers.
        input_bytes: of one micro-batch of inputs, at stage 0.
        target_bytes: of one micro-batch of targets, at the last stage (with a single stage, they are in the input).
        tied_bytes: of the shared weight of each tie group, by the group's first stage; where it has none, the weights
            of that whole stage.
        work_bytes: of a stage's instructions while they run, by the kinds of `pipefit.ir.op.Work`; empty: not known,
            and gradients of its weights count from the beginning of the first backward on.
        summed_per_byte: bytes of a gradient while it is summed, for each byte that it has before and after.
        overlapped: whether copies sum gradients of a stage during its last backward, and join weights during its next
            forward.
        topology: links between ranks; None: all alike, with the next two figures.
        bandwidth_bytes_per_s: of every link.
        latency_s: of every link.
        post_s: seconds that a rank spends on issuing a send, receive or reduction.
        copy_s_per_byte: further seconds per byte that a rank spends inside a send: Gloo copies on the caller's core.
        overhead_s: seconds that a rank spends on every instruction of the compute lane but `drop`, at any speed.
        speed: of each rank, relative to the device of the seconds above; (): all 1.
        copies: of a program of fewer copies than there are, the ranks of each stage; (): those of the program.
        tiers: rates of the copies to host and disk, by the tier's name.
        tensor: ranks that share each stage; a piece is 1/t of its value.
    """

    forward_s: Figures
    backward_input_s: Figures
    backward_weight_s: Figures
    split_s: Figures = ()
    split_input_s: Figures = ()
    recompute_s: Figures = ()
    step_s: Figures = ()
    host_step_s: Figures = ()
    loss_s: float = 0
    load_s: float = 0
    act_bytes: Figures = ()
    grad_bytes: Figures = ()
    saved_bytes: Figures = ()
    replay_bytes: Figures = ()
    half_bytes: Figures = ()
    weight_bytes: Figures = ()
    wgrad_bytes: Figures = ()
    optim_bytes: Figures = ()
    shard_bytes: Figures = ()
    sum_bytes: Figures = ()
    gathered: frozenset[int] = frozenset()
    fixed_bytes: Figures = ()
    input_bytes: float = 0
    target_bytes: float = 0
    tied_bytes: Mapping[int, float] = field(default_factory=dict)
    work_bytes: Mapping[str, Figures] = field(default_factory=dict)
    summed_per_byte: float = 1
    overlapped: bool = False
    topology: Topology | None = None
    bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0
    post_s: float = 0
    copy_s_per_byte: float = 0
    overhead_s: float = 0
    speed: Figures = ()
    copies: tuple[Indices, ...] = ()
    tiers: tuple[Tier, ...] = ()
    tensor: int = 1

    def __post_init__(self) -> None:
        num_stages = len(self.forward_s)
        if not num_stages:
            raise PlanError("cost: expected at least one stage, got none")
        for name in _PER_STAGE:
            like = _LIKE.get(name, name)
            figures = getattr(self, name) or getattr(self, like) or (0,) * num_stages
            given = tuple(figures)
            if len(given) != num_stages or min(given) < 0:
                raise PlanError(f"cost.{name}: expected {num_stages} figures ≥ 0, one per stage, got {given}")
            object.__setattr__(self, name, given)
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not value >= 0:
                raise PlanError(f"cost.{item.name}: expected 0 or more, got {value}")
        if self.speed and not min(self.speed) > 0:
            raise PlanError(f"cost.speed: expected more than 0 for every rank, got {self.speed}")

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_s)

    # ------------------------------------------------------------------------------------------------------- seconds

    def duration_s(self, instruction: Instruction, rank: int) -> float:
        """Seconds an instruction holds its rank: its work for the compute lane, its issuing for all others."""
        op = instruction.op
        if OP_SPEC[op].lane is Lane.COMPUTE:
            work = self._work_s(instruction)
            if self.speed and op is not Op.LOAD:
                work = work / self.speed[rank]
            if op in (Op.DROP, Op.FREE):
                return work
            return work + self.overhead_s
        if op is Op.BARRIER:
            return 0
        if op is Op.EVICT:
            return self.post_s + self.check_s(instruction)
        if op is Op.SEND and self.copy_s_per_byte:
            return self.post_s + self.copy_s_per_byte * self.size_bytes(instruction)
        return self.post_s

    def link(self, source: int, target: int) -> tuple[float, float]:
        """Bandwidth (bytes per second) and latency (seconds) from one rank to another."""
        if self.topology is None:
            return self.bandwidth_bytes_per_s, self.latency_s
        t = self.tensor
        end = target * t
        if source == target:
            # A rank's link to itself is that between its tensor-parallel processes.
            end += t - 1
        level = self.topology.level_between(source * t, end)
        return level.bandwidth_bytes_per_s, level.latency_s

    @property
    def has_ports(self) -> bool:
        """Returns whether some ranks share ports."""
        if self.topology is None:
            return False
        return any(level.one_port for level in self.topology.levels)

    @property
    def port_unit(self) -> int:
        """Ranks that share each port; of several levels with ports, the outermost counts."""
        if self.topology is None:
            return 1
        unit = 1
        found = 1
        for level in self.topology.levels:
            if level.one_port:
                found = unit
            unit *= level.width
        return max(found // self.tensor, 1)

    def ports(self, source: int, target: int) -> tuple[tuple[object, ...], ...]:
        """The ports of a message, out of one unit and into another; none where links share nothing."""
        if self.topology is None or source == target:
            return ()
        t = self.tensor
        return self.topology.ports(source * t, target * t)

    def reduction_ports(self, instruction: Instruction, members: Sequence[int]) -> tuple[tuple[object, ...], ...]:
        """The ports that a reduction keeps busy: those of the ring of its members. One without bytes needs none."""
        if not self._reduced_bytes(instruction):
            return ()
        found: dict[tuple[object, ...], None] = {}
        after = [*members[1:], *members[:1]]
        for source, target in zip(members, after, strict=True):
            found |= dict.fromkeys(self.ports(source, target))
        return tuple(found)

    def machine_of(self, rank: int) -> tuple[int, float]:
        """The machine of a rank, and the number of ranks that can compute there at once: cores / processes per rank."""
        if self.topology is None:
            return rank, math.inf
        span, cores = self.topology.machine
        return rank * self.tensor // span, cores / self.tensor

    def message_s(self, send: Instruction, rank: int) -> float:
        """Seconds of a message from the moment both sides have posted it to its arrival: latency + bytes / bandwidth.

        Args:
            send: the message, as its sender issues it.
            rank: the sender.
        """
        bandwidth, latency = self.link(rank, send.peer)
        return latency + over(self.size_bytes(send), bandwidth)

    def reduce_s(self, instruction: Instruction, members: Sequence[int]) -> float:
        """Seconds of a reduction or barrier from the moment its last member has issued it.

        An all-reduce, or for the kinds that shard a reduce-scatter or an all-gather: see `pipefit.cost.rings`. The
        norm and the barrier have no bytes.
        """
        if self.copies:
            members = self.copies[instruction.stage]
        if len(members) < 2:
            return 0
        if instruction.op is Op.UNSHARD or instruction.kind in _HALVES:
            law = all_gather_s
        else:
            law = all_reduce_s
        seconds = law(self._ring(members), self._reduced_bytes(instruction))
        stage = instruction.stage
        if self.overlapped and stage not in self.gathered:
            computed_s = self.forward_s[stage] + self.backward_input_s[stage] + self.backward_weight_s[stage]
            return max(seconds - computed_s, 0.0)
        return seconds

    def _ring(self, members: Sequence[int]) -> Ring:
        if self.topology is None:
            return even(len(members), self.bandwidth_bytes_per_s, self.latency_s)
        return ring_of(self.topology, [rank * self.tensor for rank in members])

    def local_s(self, instruction: Instruction, rank: int) -> float:
        """Seconds of an asynchronous instruction of one rank: fetch, evict (by the tier's rates), gather, host_step.

        Raises:
            PlanError: the tier is unknown.
        """
        if instruction.op is Op.GATHER:
            whole = Kind.GRAD.value
            if instruction.kind == Kind.ACT:
                whole = Kind.ACT.value
            size = self.size_bytes(Value(whole, instruction.stage, instruction.mb))
            bandwidth, latency = self.link(rank, rank)
            return all_gather_s(even(self.tensor, bandwidth, latency), size)
        if instruction.op is Op.HOST_STEP:
            return self.host_step_s[instruction.stage]
        tier = self.tier_of(instruction)
        rate = tier.write_bytes_per_s
        if instruction.op is Op.FETCH:
            rate = tier.read_bytes_per_s
        return tier.latency_s + over(self.size_bytes(instruction), rate)

    def check_s(self, copy: Instruction) -> float:
        """Seconds that a rank spends on the checksum of a copy: before an evict, and after a fetch."""
        for tier in self.tiers:
            if tier.name == copy.tier and tier.check_bytes_per_s:
                return self.size_bytes(copy) / tier.check_bytes_per_s
        return 0

    def tier_of(self, copy: Instruction) -> Tier:
        """The tier of a fetch or evict.

        Raises:
            PlanError: it is unknown.
        """
        for tier in self.tiers:
            if tier.name == copy.tier:
                return tier
        raise PlanError(f"cost.tiers: {copy} needs tier {copy.tier!r}; add it with its rates")

    # --------------------------------------------------------------------------------------------------------- bytes

    def size_bytes(self, value: Value | Instruction) -> float:
        """Bytes of a value, or of that of a message or copy: one law for liveness, memory over time and messages."""
        kind = value.kind
        if kind in _WITHOUT_BYTES:
            return 0
        if kind == Kind.INPUT and value.stage > 0:
            return self.target_bytes
        if kind == Kind.INPUT:
            return self.input_bytes
        if kind in self.work_bytes:
            return self.work_bytes[kind][value.stage]
        size: float = getattr(self, _SIZE[kind])[value.stage]
        if kind in _PIECES:
            return size / self.tensor
        return size

    def lifetimes(self, program: Program, rank: int) -> list[Lifetime]:
        """The values of a rank, with the work of its instructions where that is known."""
        if self.work_bytes:
            return working_lifetimes(program, rank)
        return lifetimes(program, rank)

    def held_bytes(self, value: Value) -> float:
        """Bytes of a value on a device where weights stay: of each version what trains; `frozen_bytes` is the rest."""
        if value.kind == Kind.WEIGHTS and value.stage not in self.gathered:
            return self.wgrad_bytes[value.stage]
        return self.size_bytes(value)

    def frozen_bytes(self, stage: int) -> float:
        """Bytes of a stage's weights that do not train, where they stay: all versions share them."""
        if stage in self.gathered:
            return 0
        return self.weight_bytes[stage] - self.wgrad_bytes[stage]

    def resident_bytes(self, stages: Sequence[int]) -> float:
        """Bytes that are always on a rank with these stages: the optimizer's state, and parts of what copies share."""
        return sum(self.optim_bytes[stage] + self.shard_bytes[stage] for stage in stages)

    def room_bytes(self, stages: Sequence[int]) -> float:
        """Bytes that a rank with these stages leaves free for the replays inside its backwards, one at a time."""
        return max((self.replay_bytes[stage] for stage in stages), default=0)

    def staying_bytes(self, header: Header, rank: int) -> float:
        """Bytes that are always on a rank: optimizer states that are not moved, `fixed_bytes`, and room for replays."""
        own = header.stages_of(rank)
        states = self.resident_bytes(list(filter(header.keeps_states, own)))
        fixed = sum(self.fixed_bytes[stage] for stage in own)
        return states + fixed + self.room_bytes(own)

    def _work_s(self, instruction: Instruction) -> float:
        """The sum of the operation's figures; those with one entry per stage are taken at the instruction's stage."""
        work: float = 0
        for name in OP_SPEC[instruction.op].seconds:
            figure = getattr(self, name)
            if isinstance(figure, tuple):
                figure = figure[instruction.stage]
            work += figure
        return work

    def _reduced_bytes(self, instruction: Instruction) -> float:
        if instruction.op is Op.BARRIER or instruction.kind == Reduction.NORM:
            return 0
        if instruction.op is Op.UNSHARD:
            return self.weight_bytes[instruction.stage]
        whole = self.wgrad_bytes[instruction.stage]
        if instruction.kind == Reduction.TIED:
            whole = self.tied_bytes.get(instruction.stage, whole)
        if instruction.kind == Reduction.SHARDS:
            return whole
        return whole * self.summed_per_byte


_PER_STAGE = [item.name for item in fields(CostModel) if item.type == "Figures" and item.name != "speed"]
_LIKE = {
    "recompute_s": "forward_s",
    "host_step_s": "step_s",
    "grad_bytes": "act_bytes",
    "half_bytes": "grad_bytes",
    "wgrad_bytes": "weight_bytes",
}
"""Figures that replace those that are not given."""
_HALVES = (Reduction.SCATTER.value, Reduction.SHARDS.value)

_SIZE = {
    Kind.ACT.value: "act_bytes",
    Kind.PIECE.value: "act_bytes",
    Kind.GRAD.value: "grad_bytes",
    Kind.GRAD_PIECE.value: "grad_bytes",
    Kind.SAVED.value: "saved_bytes",
    Kind.HALF.value: "half_bytes",
    Kind.WGRAD.value: "wgrad_bytes",
    Kind.WEIGHTS.value: "weight_bytes",
    Kind.OPTIM.value: "optim_bytes",
    Kind.SUMS.value: "sum_bytes",
}
_PIECES = (Kind.PIECE.value, Kind.GRAD_PIECE.value)
_WITHOUT_BYTES = (Kind.NORM.value, Kind.COMMIT.value, Kind.SHARDS.value)
"""Shards are parts of weights that are stored in the memory of the whole, or are always there."""
