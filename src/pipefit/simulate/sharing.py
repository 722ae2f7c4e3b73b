"""Cores that ranks share: processes that run at the same time on a machine share its cores evenly.

Ranks that compute, or issue messages, take a core; one that waits takes none. While n processes of a machine with c
cores run, each runs at the rate min(1, c/n): processor sharing, the limit of short time slices. Rates change with every
begin and end, so events are processed in the order of time.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Machine:
    """Cores, and the work of ranks on them.

    Attributes:
        cores: for ranks; of ranks that are t processes each, 1/t of the machine's.
        done: seconds of work, on a whole core, of a process that has run since the beginning.
        now: the time for which `done` holds.
        work: running work as (the `done` at which it ends, rank), the first to end first.
    """

    cores: float
    done: float = 0
    now: float = 0
    work: list[tuple[float, int]] = field(default_factory=list)

    def begin(self, now: float, seconds: float, rank: int) -> None:
        """Begins work of a rank that takes `seconds` on a whole core."""
        self._advance(now)
        heapq.heappush(self.work, (self.done + seconds, rank))

    @property
    def next_end(self) -> float:
        """The time at which the first running work ends, if no other begins."""
        if not self.work:
            return math.inf
        left = self.work[0][0] - self.done
        num = len(self.work)
        if num > self.cores:
            left = left * num / self.cores
        return self.now + left

    def end(self) -> tuple[float, int]:
        """Ends the first running work; returns its time and rank."""
        time = self.next_end
        self.now = time
        self.done = self.work[0][0]
        return time, heapq.heappop(self.work)[1]

    def _advance(self, now: float) -> None:
        num = len(self.work)
        if num:
            passed = now - self.now
            if num <= self.cores:
                self.done += passed
            else:
                self.done += passed * self.cores / num
        self.now = now
