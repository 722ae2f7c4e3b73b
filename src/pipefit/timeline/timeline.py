"""Timeline: when each instruction of a program ran, simulated or measured; both are this one type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import COMPUTE_OPS, OP_SPEC, Lane, Op
from pipefit.ir.program import Program

__all__ = ["Event", "Timeline"]


class Event(NamedTuple):
    """One instruction's stay on its lane.

    Attributes:
        rank: who ran it.
        position: its place in the rank's list.
        repeat: which pass over the program (0 for the first).
        start_s: for a message: when it was posted; for compute: when everything it needs was there.
        end_s: for a message: when it had arrived.
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


@dataclass(frozen=True)
class Timeline:
    """The events of one or several passes over a program, and the memory of each rank over time.

    Attributes:
        program: what ran.
        events: by rank, then by repeat, then in the rank's order.
        memory: for each rank, (time_s, bytes) samples in order; () where it was not followed.
        source: "simulated" or "measured".
        num_repeats: passes over the program.
    """

    program: Program
    events: tuple[Event, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    source: str = "simulated"
    num_repeats: int = 1
    notes: dict[str, float] = field(default_factory=dict)

    def instruction(self, event: Event) -> Instruction:
        """The instruction of an event."""
        return self.program.ranks[event.rank][event.position]

    def lane(self, event: Event) -> Lane:
        """The lane of an event."""
        return OP_SPEC[self.instruction(event).op].lane

    def compute(self, rank: int | None = None) -> Iterator[tuple[Event, Instruction]]:
        """The forwards, replays and backwards, of one rank or of all."""
        for event in self.events:
            if rank is None or event.rank == rank:
                instruction = self.instruction(event)
                if instruction.op in COMPUTE_OPS:
                    yield event, instruction

    @property
    def start_s(self) -> float:
        """When the first compute instruction starts."""
        return min((event.start_s for event, _ in self.compute()), default=0.0)

    @property
    def makespan_s(self) -> float:
        """From the first instruction of the compute lane to the last, all repeats together."""
        ends = [event.end_s for event in self.events if self.lane(event) is Lane.COMPUTE]
        return max(ends, default=0.0) - self.start_s

    @property
    def period_s(self) -> float:
        """Seconds between steps in the steady state: the longest of any rank's time from one optimizer step to the next.

        Measured between the second half of the steps, so that the first fill does not count; with one step, the
        makespan.
        """
        longest = 0.0
        for rank in range(len(self.program.ranks)):
            steps = [e.end_s for e in self.events if e.rank == rank and self.instruction(e).op is Op.STEP]
            stages = max(len(self.program.header.stages_of(rank)), 1)
            ends = steps[stages - 1 :: stages]
            half = len(ends) // 2
            if len(ends) >= 2:
                first = ends[max(half - 1, 0)]
                longest = max(longest, (ends[-1] - first) / (len(ends) - 1 - max(half - 1, 0)))
        return longest or self.makespan_s

    def busy_s(self, rank: int) -> float:
        """Seconds a rank spends on forwards, replays and backwards."""
        return sum(event.duration_s for event, _ in self.compute(rank))

    @property
    def bubble_fraction(self) -> float:
        """The share of the makespan that ranks do not spend on forwards, replays and backwards, on average."""
        ranks = len(self.program.ranks)
        total = self.makespan_s * ranks
        return 1 - sum(self.busy_s(rank) for rank in range(ranks)) / total if total else 0.0
