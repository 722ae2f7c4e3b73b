"""The problem of ordering: seconds, memory and messages of each stage, as plain lists.

Micro-batches are alike, so an order is given by steps: a rank's list of (kind, stage), the k-th occurrence of
which is micro-batch k. A step is one number, kind · num_stages + stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import sub

from pipefit.cost.model import CostModel
from pipefit.ir.instruction import Groups, Indices, Instruction
from pipefit.ir.liveness import device_peak_bytes, peak_inflight
from pipefit.ir.op import Kind, Op
from pipefit.ir.program import Header, Program
from pipefit.ir.values import Value
from pipefit.spec.plan import Figures

FORWARD, INPUT, WEIGHT, BACKWARD = range(4)
"""The kinds of steps; the first three are in the order in which a micro-batch takes them."""

_OPS = (Op.FWD, Op.BWD_INPUT, Op.BWD_WEIGHT, Op.BWD)

Order = list[list[int]]
"""The steps of each rank."""

_SLACK = 1e-9  # tolerance for sums of fractions


@dataclass(frozen=True)
class Limit:
    """The memory limit of each rank; None: no limit.

    Attributes:
        in_flight: micro-batches of the rank's layers whose activations are held.
        capacity_bytes: the most bytes of all values held.
    """

    in_flight: Figures | None = None
    capacity_bytes: Figures | None = None

    def keeps(self, program: Program, cost: CostModel) -> bool:
        """Returns whether a program respects the limit, by the liveness of its values."""
        header = program.header
        for rank, most in enumerate(self.in_flight or ()):
            if peak_inflight(program, rank) > most + _SLACK:
                return False
        for rank, most in enumerate(self.capacity_bytes or ()):
            states = cost.resident_bytes(header.stages_of(rank))
            if device_peak_bytes(program, rank, cost.size_bytes, states)[0] > most:
                return False
        return True


@dataclass(frozen=True)
class OrderProblem:
    """Ranks and their stages, and the time and memory of each step.

    Attributes:
        header: placement and micro-batches.
        seconds: the duration of each step.
        feeds: the step that feeds each step, and the seconds of the transfer; −1: only earlier steps of its
            stage. The feeding step is a forward or, for whole and split backwards alike, a first half.
        closing_s: seconds of each rank after its last step: the optimizer's.
        takes: memory that a forward adds to its rank, by stage: bytes, or 1 where micro-batches are counted.
        halves: memory that the first half of a backward adds until the second; 0 where backwards stay whole.
        room: the memory of each rank, in these units.
        split: whether backwards may come in halves.
    """

    header: Header
    seconds: Figures
    feeds: tuple[tuple[int, float], ...]
    closing_s: Figures
    takes: Figures
    halves: Figures
    room: Figures
    split: bool

    @classmethod
    def of(
        cls, header: Header, cost: CostModel, limit: Limit, static_bytes: Sequence[float], split: bool
    ) -> OrderProblem:
        """The problem of a placement under a cost model.

        Args:
            header: placement and micro-batches.
            cost: seconds and bytes.
            limit: the limit of memory.
            static_bytes: the bytes of each rank in addition to activations.
            split: whether backwards may come in halves.
        """
        count = header.num_stages
        stages = range(count)
        home = [ranks[0] for ranks in header.placement]

        def duration_s(op: Op, stage: int) -> float:
            return cost.duration_s(Instruction(op, stage, 0, 0), home[stage])

        seconds = [duration_s(op, stage) for op in _OPS for stage in stages]
        last = header.last_stage
        more_s = {0: duration_s(Op.LOAD, 0)}
        more_s[last] = duration_s(Op.LOAD, last) + duration_s(Op.LOSS, last)
        for stage, end_s in more_s.items():
            seconds[stage] += end_s

        def travel_s(kind: Kind, stage: int, source: int, target: int) -> float:
            message = Instruction(Op.SEND, stage, 0, kind=kind.value, peer=target)
            if source != target:
                return cost.message_s(message, source)
            return 0

        forwards = [(-1, 0.0)]
        backwards = []
        for stage, (here, there) in enumerate(pairwise(home)):
            forwards.append((stage, travel_s(Kind.ACT, stage, here, there)))
            backwards.append((count + stage + 1, travel_s(Kind.GRAD, stage, there, here)))
        backwards.append((count - 1, 0.0))
        weights = [(-1, 0.0)] * count
        held = [header.stages_of(rank) for rank in range(header.num_ranks)]
        closing_s = [sum(duration_s(Op.STEP, stage) for stage in own) for own in held]
        takes = [1.0] * count
        halves = [0.0] * count
        if limit.capacity_bytes:
            takes = [cost.size_bytes(Value(Kind.SAVED.value, stage, 0)) for stage in stages]
            if split:
                halves = [cost.size_bytes(Value(Kind.HALF.value, stage, 0)) for stage in stages]
            room = list(map(sub, limit.capacity_bytes, static_bytes))
        else:
            most = limit.in_flight or (float(header.num_microbatches),) * len(held)
            room = [count * len(own) + _SLACK for count, own in zip(most, held, strict=True)]
        return cls(
            header,
            tuple(seconds),
            (*forwards, *backwards, *weights, *backwards),
            tuple(closing_s),
            tuple(takes),
            tuple(halves),
            tuple(room),
            split,
        )

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one update."""
        return self.header.num_microbatches

    @cached_property
    def stages(self) -> Groups:
        """The stages of each rank."""
        header = self.header
        return tuple(map(header.stages_of, range(header.num_ranks)))

    @cached_property
    def home(self) -> Indices:
        """The rank of each stage."""
        return tuple(ranks[0] for ranks in self.header.placement)

    def size_of(self, stage: int) -> float:
        """Memory of one micro-batch of a stage, at most."""
        return self.takes[stage] + self.halves[stage]

    def keeps(self, rank: int, order: Sequence[int]) -> bool:
        """Returns whether every micro-batch of a rank takes its steps in order, within the memory limit."""
        count = self.header.num_stages
        held = 0.0
        room = self.room[rank]
        done = [0] * (4 * count)
        for step in order:
            kind, stage = divmod(step, count)
            if kind == FORWARD:
                held += self.takes[stage]
            elif kind == INPUT:
                held += self.halves[stage]
            done[step] += 1
            forwards, inputs, weights, wholes = done[stage::count]
            if held > room or inputs + wholes > forwards or weights > inputs:
                return False
            if kind == WEIGHT:
                held -= self.size_of(stage)
            elif kind == BACKWARD:
                held -= self.takes[stage]
        return True

    def instructions(self, order: Order) -> list[list[Instruction]]:
        """The order as instructions."""
        count = self.header.num_stages
        result = []
        for steps in order:
            begun = [0] * (2 * count)
            # First halves whose second is still to come: the oldest takes the next.
            open_halves: list[list[int]] = [[] for _ in range(count)]
            listed = []
            for step in steps:
                kind, stage = divmod(step, count)
                if kind == WEIGHT:
                    mb = open_halves[stage].pop(0)
                else:
                    place = stage
                    if kind != FORWARD:
                        place += count
                    mb = begun[place]
                    begun[place] += 1
                if kind == INPUT:
                    open_halves[stage].append(mb)
                listed.append(Instruction(_OPS[kind], stage, mb))
            result.append(listed)
        return result

    def steps(self, program: Program) -> Order:
        """The order of a program; its micro-batches are assumed to be in order."""
        count = self.header.num_stages
        kinds = {op: kind * count for kind, op in enumerate(_OPS)}
        return [[kinds[i.op] + i.stage for i in instructions if i.op in kinds] for instructions in program.ranks]
