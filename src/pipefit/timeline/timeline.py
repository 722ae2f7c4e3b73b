"""Timeline: start and end of each instruction of a program; one type for simulated and measured runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from operator import attrgetter

import msgspec

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import COMPUTE_OPS, OP_SPEC, STEP_OPS, WORK_OPS, Lane, Op
from pipefit.ir.program import Header, Program
from pipefit.spec.plan import Figures

_START = attrgetter("start_s")
_END = attrgetter("end_s")


class Event(msgspec.Struct, frozen=True, gc=False):
    """The time of one instruction on its lane.

    Attributes:
        rank: the rank that ran it.
        position: its index in the rank's list.
        repeat: the pass over the program (0 for the first).
        start_s: for a message or reduction, the time at which the rank began to issue it; for compute and copies, the
            time at which the rank or the copy's lane began it, with all needed values present.
        end_s: its end; for a message, reduction or copy, its arrival.
    """

    rank: int
    position: int
    repeat: int
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


def step_of(header: Header, i: Instruction) -> int:
    """The step to whose micro-batches or updates an instruction belongs; −1: none."""
    last = i.mb
    if i.op in STEP_OPS:
        last = min((i.version + 1) * header.updates[i.stage], header.total_microbatches) - 1
    return last // header.num_microbatches


@dataclass(frozen=True)
class Timeline:
    """The events of one or several passes over a program, and the memory of each rank over time.

    Attributes:
        program: the program that ran.
        events: all events by rank, then by repeat, then in the rank's order.
        memory: (time_s, bytes) samples of each rank in order; () where it was not recorded.
        source: "simulated" or "measured".
        num_repeats: passes over the program.
        notes: settings of the simulation that `waited_for` needs: "contention", "no_rendezvous".
        launches: when the host launched each computation, where a device computes it later; () on a CPU.
    """

    program: Program
    events: tuple[Event, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    source: str = "simulated"
    num_repeats: int = 1
    notes: dict[str, float] = field(default_factory=dict)
    launches: tuple[Event, ...] = ()

    def instruction(self, event: Event) -> Instruction:
        """The instruction of an event."""
        return self.program.ranks[event.rank][event.position]

    def lane(self, event: Event) -> Lane:
        """The lane of an event."""
        return OP_SPEC[self.instruction(event).op].lane

    def compute(self) -> Iterator[tuple[Event, Instruction]]:
        """The forwards, replays and backwards."""
        for event in self.events:
            instruction = self.instruction(event)
            if instruction.op in COMPUTE_OPS:
                yield event, instruction

    @cached_property
    def by_place(self) -> dict[tuple[int, int, int], Event]:
        """Events by (rank, repeat, position)."""
        return {(event.rank, event.repeat, event.position): event for event in self.events}

    # ------------------------------------------------------------------------------------------------------- figures

    @cached_property
    def _work(self) -> list[Event]:
        """The events of the compute lane."""
        ranks = self.program.ranks
        return [event for event in self.events if ranks[event.rank][event.position].op in WORK_OPS]

    @cached_property
    def _span(self) -> list[Event]:
        """The events that a step spans: its work, the fetches before it and the evictions after it."""
        if self.program.header.spill is None:
            return self._work
        return self._work + [event for event in self.events if self.lane(event) is Lane.COPY]

    @cached_property
    def start_s(self) -> float:
        """Start of the first instruction of the compute lane, or of the first copy of a program that spills."""
        return min(map(_START, self._span), default=0)

    @cached_property
    def end_s(self) -> float:
        """End of the last instruction of the compute lane, or of the last copy of a program that spills."""
        return max(map(_END, self._span), default=0)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first instruction of the compute lane to the end of the last, all repeats together."""
        return self.end_s - self.start_s

    @cached_property
    def step_ends_s(self) -> Figures:
        """End of each step: of the last work, on any rank, on its micro-batches and its updates.

        A step is `num_microbatches` micro-batches; steps of all repeats follow each other.
        """
        header = self.program.header
        ranks = self.program.ranks
        ends: list[float] = [self.start_s] * (header.num_steps * self.num_repeats)
        events = self._work
        if header.spill is not None:
            events = events + [event for event in self.events if self.instruction(event).op is Op.HOST_STEP]
        for event in events:
            step = step_of(header, ranks[event.rank][event.position])
            if step >= 0:
                step += event.repeat * header.num_steps
                ends[step] = max(ends[step], event.end_s)
        return tuple(ends)

    @cached_property
    def is_steady(self) -> bool:
        """Returns whether at least two steps end before the pipeline drains: only then is there a steady state."""
        return self._steady_steps() >= 2

    @cached_property
    def period_s(self) -> float:
        """Seconds between the ends of steps in the steady state.

        The average over the second half of the steps that are complete before any rank has run its last forward, so
        that neither the fill nor the drain counts; of whole rounds of replicas, whose steps end together. With fewer
        than two such steps: over all steps; with one step: the makespan.
        """
        ends = self.step_ends_s
        last = self._steady_steps() - 1
        if last < 1:
            last = len(ends) - 1
        if last < 1:
            return self.makespan_s
        first = last // 2
        updates = self.program.header.updates
        round_of = lcm(*updates) // self.program.header.num_microbatches
        rounds = max((last - first) // round_of, 1)
        if rounds * round_of <= last:
            first = last - rounds * round_of
        seconds = ends[last] - ends[first]
        return seconds / (last - first)

    def _steady_steps(self) -> int:
        last_forward = {}
        ranks = self.program.ranks
        frozen = self.program.header.frozen
        forward = Op.FWD
        for event in reversed(self._work):
            # Nothing holds frozen stages back: their last forward is no sign that the pipeline drains.
            if event.rank not in last_forward:
                i = ranks[event.rank][event.position]
                if i.op is forward and i.stage >= frozen:
                    last_forward[event.rank] = event.end_s
        drain = min(last_forward.values(), default=0)
        return sum(end <= drain for end in self.step_ends_s)

    @cached_property
    def _busy_s(self) -> Figures:
        busy: list[float] = [0] * len(self.program.ranks)
        for event, _ in self.compute():
            busy[event.rank] += event.end_s - event.start_s
        return tuple(busy)

    def busy_s(self, rank: int) -> float:
        """Seconds a rank spends on forwards, replays and backwards."""
        return self._busy_s[rank]

    def utilisation(self, rank: int) -> float:
        """The share of the makespan that a rank spends on forwards, replays and backwards."""
        if self.makespan_s:
            return self._busy_s[rank] / self.makespan_s
        return 0.0

    @property
    def bubble_fraction(self) -> float:
        """The share of the makespan that ranks do not spend on forwards, replays and backwards, on average."""
        total = self.makespan_s * len(self._busy_s)
        if total:
            return 1 - sum(self._busy_s) / total
        return 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time as a multiple of the busy time: the bubble of the lectures."""
        busy = sum(self._busy_s)
        if busy:
            return (self.makespan_s * len(self._busy_s) - busy) / busy
        return 0.0

    def peak_bytes(self, rank: int) -> float:
        """Maximum of bytes that a rank holds at any time; 0 where memory was not recorded."""
        if self.memory:
            return max((size for _, size in self.memory[rank]), default=0)
        return 0
