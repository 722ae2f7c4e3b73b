"""The clock: every rank issues its list in order; a message or collective happens when all its sides have issued it.

A rank is a generator that runs until it must wait. Where nothing is shared each time is the maximum of a few others, so
the order in which ranks are processed changes nothing. A shared resource (a link, a port, the cores of a machine)
serves the first request first, so ranks are then processed in the order of their clocks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

from pipefit.simulate.flat_program import Code, FlatProgram
from pipefit.simulate.prices import Key, Prices
from pipefit.simulate.sharing import Machine

_end = itemgetter(1)

UNKNOWN = -1
"""A time that is not known yet; no time is negative."""


@dataclass(slots=True)
class EventEngine:
    """Times of `repeats` passes; instruction n of pass k is entry k·size + n of `start`, `posted` and `end`.

    Attributes:
        layout: the program.
        prices: its seconds.
        repeats: passes.
        contention: whether messages have links or ports one at a time.
        cores: the machine of each rank, where ranks share cores; (): each has its own.
        blocked_on: the entry that each rank waits for.
    """

    layout: FlatProgram
    prices: Prices
    repeats: int
    contention: bool = False
    cores: Sequence[Machine] = ()
    start: list[float] = field(default_factory=list)
    posted: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    blocked_on: list[int] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    free: dict[Key, float] = field(default_factory=dict)
    taken: dict[Key, list[tuple[float, float]]] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)
    # (time, rank), or (time, number of ranks + entry) of a transfer that is ready then.
    agenda: list[tuple[float, int]] = field(default_factory=list)

    def run(self) -> None:
        """Runs until no rank can continue; the end of an instruction that hangs stays UNKNOWN."""
        graph = self.layout.graph
        num_ranks = len(graph.starts) - 1
        for times in (self.start, self.posted, self.end):
            times += [UNKNOWN] * (len(graph.instructions) * self.repeats)
        self.clock = [0] * num_ranks
        self.blocked_on = [UNKNOWN] * num_ranks
        ranks = [self._issue(rank) for rank in range(num_ranks)]
        if not (self.contention or self.cores):
            self.ready = list(reversed(range(num_ranks)))
            while self.ready:
                next(ranks[self.ready.pop()], None)
            return
        machines = list({id(machine): machine for machine in self.cores}.values())
        self.agenda = [(0, rank) for rank in range(num_ranks)]
        while self.agenda or any(machine.work for machine in machines):
            machine = min(machines, key=attrgetter("next_end"), default=None)
            if machine and (not self.agenda or machine.next_end <= self.agenda[0][0]):
                time, rank = machine.end()
            else:
                time, rank = heapq.heappop(self.agenda)
            if rank >= num_ranks:
                n = rank - num_ranks
                self._try(n, n % len(self.layout.codes), time)
                continue
            self.clock[rank] = max(self.clock[rank], time)
            next(ranks[rank], None)

    def _issue(self, rank: int) -> Iterator[None]:
        """Runs a rank; yields where it waits for an arrival, for ranks whose clocks are behind, or for a core."""
        layout = self.layout
        prices = self.prices
        codes = layout.codes
        waits = layout.waits
        partners = layout.partners
        ranks = layout.graph.ranks
        start = self.start
        posted = self.posted
        end = self.end
        clock = self.clock
        blocked_on = self.blocked_on
        wait = Code.WAIT.value
        message = Code.MESSAGE.value
        hold = prices.hold
        size = len(codes)
        shares = bool(self.cores)
        alone = not (self.contention or self.cores)
        first, stop = layout.graph.starts[rank : rank + 2]
        now: float = 0
        for base in range(0, size * self.repeats if first < stop else 0, size):
            travel = prices.travel[base > 0]
            arrivals = prices.arrivals[base > 0]
            for q in prices.closing[rank] if base else ():
                if end[base - size + q] < 0:
                    clock[rank] = now
                    blocked_on[rank] = base - size + q
                    yield
                now = max(now, end[base - size + q])
            if shares:
                now = yield from self._work(rank, now, prices.between)
            else:
                now += prices.between
            for i in range(first, stop):
                code = codes[i]
                n = base + i
                if code <= wait:
                    if code == wait:
                        for q in waits[i]:
                            if end[base + q] < 0:
                                clock[rank] = now
                                blocked_on[rank] = base + q
                                yield
                            if end[base + q] > now:
                                now = end[base + q]
                    if shares:
                        start[n] = now
                        now = yield from self._work(rank, now, hold[i] + arrivals.get(i, 0))
                    else:
                        if arrivals:
                            now += arrivals.get(i, 0)
                        start[n] = now
                        now += hold[i]
                    end[n] = now
                    continue
                start[n] = now
                if shares:
                    now = yield from self._work(rank, now, hold[i])
                else:
                    now += hold[i]
                if self.agenda and self.agenda[0][0] < now:
                    heapq.heappush(self.agenda, (now, rank))
                    yield
                posted[n] = now
                if code == message and alone:
                    # The result of `_try` where nothing is shared.
                    q = partners[i]
                    other = posted[base + q]
                    if other >= 0:
                        arrival = now + travel[i]
                        other += travel[q]
                        if arrival > other:
                            end[n] = end[base + q] = arrival
                        else:
                            end[n] = end[base + q] = other
                        if blocked_on[ranks[q]] == base + q:
                            self._wake(ranks[q], base + q)
                else:
                    self._try(n, i, now)

    def _work(self, rank: int, now: float, seconds: float) -> Generator[None, None, float]:
        """Works for some seconds on a core of the rank's machine, starting at `now`; returns the time of its end."""
        if now > self.clock[rank]:
            heapq.heappush(self.agenda, (now, rank))
            yield
        if seconds:
            self.cores[rank].begin(now, seconds, rank)
            yield
            now = self.clock[rank]
        return now

    def _wake(self, rank: int, n: int) -> None:
        """Continues a rank that waits for an instruction that has now ended."""
        self.blocked_on[rank] = UNKNOWN
        if self.contention or self.cores:
            heapq.heappush(self.agenda, (max(self.clock[rank], self.end[n]), rank))
        else:
            self.ready.append(rank)

    def _try(self, n: int, i: int, now: float) -> None:
        """Starts a message, collective or copy if all its sides have issued it and have the values they need.

        A message or collective requests its links and ports when it is ready, not when that time becomes known; the
        copies of a rank keep their order.
        """
        layout = self.layout
        prices = self.prices
        if self.end[n] >= 0:
            return
        base = n - i
        sides = layout.graph.sides(i)
        travels = prices.travel[base > 0]
        lanes = prices.lanes.get(i, ())
        travel = travels[i]
        if lanes:
            finish = max([self.free.get(lane, 0) for lane in lanes]) + travel
        else:
            finish = 0
        ready: float = 0
        for side in sides:
            begin = self.posted[base + side]
            if begin < 0:
                return
            for need in prices.copies.get(side, ()) if base else ():
                begin = max(begin, self.end[base - len(layout.codes) + need])
            for need in layout.waits[side]:
                if self.end[base + need] < 0:
                    return
                begin = max(begin, self.end[base + need])
            finish = max(finish, begin + travels[side])
            ready = max(ready, begin)
        if lanes and ready > now and i not in prices.copies:
            heapq.heappush(self.agenda, (ready, len(self.clock) + n))
            return
        first = finish - travel
        if i in prices.channels and travel:
            first, finish = self._through(prices.channels[i], first, travel)
        for lane in lanes:
            self.free[lane] = finish
        for side in sides:
            self.end[base + side] = finish
        if i in prices.copies:
            # A copy starts when its lane begins it, not when the rank issued it.
            self.start[n] = first
        for side in sides:
            if self.blocked_on[rank := layout.graph.ranks[side]] == base + side:
                self._wake(rank, base + side)
            for user in layout.users.get(side, ()):
                if self.posted[base + user] >= 0:
                    self._try(base + user, user, now)

    def _through(self, channel: Key, begin: float, seconds: float) -> tuple[float, float]:
        """Reserves a channel for a transfer; returns its begin and end.

        Transfers are reserved in the order in which they become known, and a later one may use a gap before an earlier
        one. So the channel is never idle while a transfer is ready.
        """
        taken = self.taken.setdefault(channel, [])
        pieces = []
        now = begin
        left = seconds
        for start, end in taken[bisect_right(taken, begin, key=_end) :]:
            piece = min(left, start - now)
            if piece > 0:
                pieces.append((now, now + piece))
                left -= piece
            if left <= 0:
                break
            now = end
        if left > 0:
            pieces.append((now, now + left))
        self.taken[channel] = sorted([*taken, *pieces])
        return pieces[0][0], pieces[-1][1]
