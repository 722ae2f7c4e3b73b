"""The clock where processes share cores: what runs at once on a machine divides its cores evenly.

Ranks that compute, or issue messages, take a core; one that waits takes none. While n processes of a machine with c
cores run, each goes at the rate min(1, c/n): processor sharing, which is what slices of time come to. Rates change with
every beginning and end, so everything happens in the order of time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipefit.simulate.event_engine import UNKNOWN, EventEngine
from pipefit.simulate.flat_program import Code


@dataclass(slots=True)
class Machine:
    """Cores, and the work of ranks on them.

    Attributes:
        cores: for ranks; of ranks that are t processes each, 1/t of the machine's.
        done: seconds of work, each on a whole core, of a process that has run since the beginning.
        now: the time for which `done` holds.
        work: what runs, (the `done` at which it ends, rank), first to end first.
    """

    cores: float
    done: float = 0
    now: float = 0
    work: list[tuple[float, int]] = field(default_factory=list)

    def begin(self, now: float, seconds: float, rank: int) -> None:
        """A rank begins work that takes so long on a whole core."""
        self._advance(now)
        heapq.heappush(self.work, (self.done + seconds, rank))

    @property
    def next_end(self) -> float:
        """The time at which the first running work ends, if nothing else begins."""
        if not self.work:
            return math.inf
        left = self.work[0][0] - self.done
        num = len(self.work)
        return self.now + (left if num <= self.cores else left * num / self.cores)

    def end(self) -> tuple[float, int]:
        """The first ends: when, and whose it is."""
        time = self.next_end
        self.now, self.done = time, self.work[0][0]
        return time, heapq.heappop(self.work)[1]

    def _advance(self, now: float) -> None:
        num = len(self.work)
        if num:
            passed = now - self.now
            self.done += passed if num <= self.cores else passed * self.cores / num
        self.now = now


@dataclass(slots=True)
class SharingEngine(EventEngine):
    """The same clock for ranks that share cores.

    Attributes:
        machines: with their cores.
        machine_of: of each rank, the index of its machine.
        enters: whether a rank is about to begin a pass.
        works: whether it has begun its current instruction.
    """

    machines: Sequence[Machine] = ()
    machine_of: Sequence[int] = ()
    enters: list[bool] = field(default_factory=list)
    works: list[bool] = field(default_factory=list)

    def run(self) -> None:
        """Runs until no rank can go on; the end of an instruction that hangs stays UNKNOWN."""
        graph = self.layout.graph
        size, num_ranks = len(graph.instructions), len(graph.starts) - 1
        for times in (self.start, self.posted, self.end):
            times += [UNKNOWN] * (size * self.repeats)
        # The agenda wakes ranks in the order of time, as it does under contention.
        self.contention = True
        self.clock, self.at = [0] * num_ranks, list(graph.starts[:-1])
        self.blocked_on = [UNKNOWN] * num_ranks
        self.enters, self.works = [True] * num_ranks, [False] * num_ranks
        self.agenda = [(0, rank) for rank in range(num_ranks) if graph.starts[rank] < graph.starts[rank + 1]]
        while True:
            machine = min(self.machines, key=lambda one: one.next_end)
            awake = self.agenda[0][0] if self.agenda else math.inf
            if machine.next_end <= awake:
                if math.isinf(machine.next_end):
                    return
                time, rank = machine.end()
            else:
                time, rank = heapq.heappop(self.agenda)
            self.clock[rank] = max(self.clock[rank], time)
            while self.at[rank] < size * self.repeats and self._goes_on(rank):
                pass

    def _goes_on(self, rank: int) -> bool:
        """The next thing that a free rank does; False where it works or waits now."""
        if self.enters[rank]:
            return self._enter(rank)
        return self._end(rank) if self.works[rank] else self._begin(rank)

    def _enter(self, rank: int) -> bool:
        """Before a pass: waits for what the one before left open, then gets ready."""
        size, prices = len(self.layout.codes), self.prices
        base = self.at[rank] // size * size
        if base and not self.works[rank] and not self._has(rank, [base - size + q for q in prices.closing[rank]]):
            return False
        if prices.between and not self.works[rank]:
            self.works[rank] = True
            return self._busy(rank, prices.between)
        self.enters[rank] = self.works[rank] = False
        return True

    def _begin(self, rank: int) -> bool:
        n = self.at[rank]
        i = n % len(self.layout.codes)
        if self.layout.codes[i] == Code.WAIT and not self._has(rank, [n - i + q for q in self.layout.waits[i]]):
            return False
        self.start[n] = self.clock[rank]
        self.works[rank] = True
        return self._busy(rank, self.prices.hold[i] + self.prices.arrivals[n != i].get(i, 0))

    def _end(self, rank: int) -> bool:
        n = self.at[rank]
        size = len(self.layout.codes)
        i = n % size
        if self.layout.codes[i] <= Code.WAIT:
            self.end[n] = self.clock[rank]
        else:
            if self.posted[n] < 0:
                self.posted[n] = self.clock[rank]
                self._try(n, i)
        self.works[rank] = False
        self.at[rank] = n + 1
        if i + 1 == self.layout.graph.starts[rank + 1]:
            self.at[rank], self.enters[rank] = n - i + size + self.layout.graph.starts[rank], True
        return True

    def _busy(self, rank: int, seconds: float) -> bool:
        """Work for a core; whether it is done already."""
        if seconds:
            self.machines[self.machine_of[rank]].begin(self.clock[rank], seconds, rank)
        return not seconds

    def _has(self, rank: int, awaited: Sequence[int]) -> bool:
        """Whether all that a rank needs is there by now; where not, it is woken when more of it is."""
        for n in awaited:
            if self.end[n] < 0:
                self.blocked_on[rank] = n
                return False
        latest = max((self.end[n] for n in awaited), default=0)
        if latest > self.clock[rank]:
            heapq.heappush(self.agenda, (latest, rank))
            return False
        return True
