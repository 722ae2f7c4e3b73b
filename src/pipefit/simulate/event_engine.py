"""The clock: every rank issues its list in order; a message or collective happens when all its sides have issued it.

Without contention each time is the latest of a few others, so the order in which ranks are looked at changes nothing,
and a rank runs on until it must wait. With contention links are handed out first come, first served, so ranks are
looked at in the order of their clocks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from pipefit.simulate.flat_program import FlatProgram

Key = tuple[object, ...]

_end = itemgetter(1)

UNKNOWN: Final = -1
"""Stands for a time that is not known yet; no time is negative."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of one program under one cost model, by instruction number.

    Attributes:
        hold: how long it holds its rank (its work, or its issuing).
        travel: how long a message, reduction or copy takes after this side has issued it; it is there when that has
            passed for all sides.
        lanes: resources that one instruction has at a time: for copies, the lane of their rank; for messages
            under contention, their link; for what goes through shared ports, these.
        groups: the members of the collective it belongs to.
        copies: each fetch and evict, with the evictions of the pass before that it must wait for.
        kept: the fetches whose value is still in its slot, in a pass that follows another.
        arrivals: seconds that a rank spends on arrived data before the instruction that waited for them begins; in the
            first pass and in later ones.
        channels: of copies that alternate with those of another lane, the channel of both.
        closing: of each rank, the instructions that only the next pass waits for.
        between: seconds a rank spends before each pass.
    """

    hold: list[float]
    travel: list[float]
    lanes: dict[int, tuple[Key, ...]]
    groups: dict[int, tuple[int, ...]]
    copies: dict[int, tuple[int, ...]]
    kept: frozenset[int]
    arrivals: tuple[dict[int, float], dict[int, float]]
    channels: dict[int, Key]
    closing: list[list[int]]
    between: float = 0


@dataclass(slots=True)
class EventEngine:
    """Times of `repeats` passes; instruction n of pass k is entry k·size + n of `start`, `posted` and `end`."""

    layout: FlatProgram
    prices: Prices
    repeats: int
    contention: bool
    start: list[float] = field(default_factory=list)
    posted: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    blocked_on: list[int] = field(default_factory=list)
    issuing: list[bool] = field(default_factory=list)
    free: dict[Key, float] = field(default_factory=dict)
    taken: dict[Key, list[tuple[float, float]]] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)
    agenda: list[tuple[float, int]] = field(default_factory=list)

    def run(self) -> None:
        """Runs until no rank can go on; the end of an instruction that hangs stays UNKNOWN."""
        graph = self.layout.graph
        size, num_ranks = len(graph.instructions), len(graph.starts) - 1
        for times in (self.start, self.posted, self.end):
            times += [UNKNOWN] * (size * self.repeats)
        self.clock = [self.prices.between] * num_ranks
        self.at = list(graph.starts[:-1])
        self.blocked_on = [UNKNOWN] * num_ranks
        self.issuing = [False] * num_ranks
        if self.contention:
            self.agenda = [(0, rank) for rank in range(num_ranks)]
            while self.agenda:
                self._advance(heapq.heappop(self.agenda)[1])
        else:
            self.ready = list(reversed(range(num_ranks)))
            while self.ready:
                self._advance(self.ready.pop())

    def _advance(self, rank: int) -> None:
        """Runs one rank until it must wait: for a message, or (under contention) for ranks whose clocks are behind."""
        layout, prices = self.layout, self.prices
        codes, waits, partners = layout.codes, layout.waits, layout.partners
        hold, travel = prices.hold, prices.travel
        start, posted, end = self.start, self.posted, self.end
        size, ranks, first, stop = (
            len(codes),
            layout.graph.ranks,
            layout.graph.starts[rank],
            layout.graph.starts[rank + 1],
        )
        blocked_on, ready = self.blocked_on, self.ready
        now = self.clock[rank]
        begin, i = divmod(self.at[rank], size)
        blocked_on[rank] = UNKNOWN
        plain = not self.contention
        for lap in range(begin, self.repeats):
            base = lap * size
            arrivals = prices.arrivals[lap > 0]
            if lap and i == first:
                for q in prices.closing[rank]:
                    arrival = end[base - size + q]
                    if arrival < 0:
                        blocked_on[rank], self.clock[rank], self.at[rank] = base - size + q, now, base + first
                        return
                    now = max(now, arrival + prices.between)
            while i < stop:
                code = codes[i]
                n = base + i
                if code <= 1:
                    if code == 1:
                        for q in waits[i]:
                            arrival = end[base + q]
                            if arrival < 0:
                                blocked_on[rank], self.clock[rank], self.at[rank] = base + q, now, n
                                return
                            if arrival > now:
                                now = arrival
                        if arrivals:
                            now += arrivals.get(i, 0)
                    start[n] = now
                    now += hold[i]
                    end[n] = now
                elif plain and code == 2:
                    start[n] = now
                    now += hold[i]
                    posted[n] = now
                    q = partners[i]
                    other = posted[base + q]
                    if other >= 0:
                        arrival, other = now + travel[i], other + travel[q]
                        if other > arrival:
                            arrival = other
                        end[n] = end[base + q] = arrival
                        peer = ranks[q]
                        if blocked_on[peer] == base + q:
                            blocked_on[peer] = UNKNOWN
                            ready.append(peer)
                else:
                    self.clock[rank], self.at[rank] = now, n
                    if not self._issue(rank, n, i):
                        return
                    now = self.clock[rank]
                i += 1
            i = first
            now += prices.between
            self.clock[rank], self.at[rank] = now, base + size + first

    def _issue(self, rank: int, n: int, i: int) -> bool:
        """Issues a message, reduction or copy; False when the rank must come back to it later."""
        if not self.issuing[rank]:
            self.start[n] = self.clock[rank]
            self.clock[rank] += self.prices.hold[i]
            self.issuing[rank] = True
            if self.contention and self.agenda and self.agenda[0][0] < self.clock[rank]:
                heapq.heappush(self.agenda, (self.clock[rank], rank))
                return False
        if self.posted[n] < 0:
            self.posted[n] = self.clock[rank]
            self._try(n, i)
        self.issuing[rank] = False
        return True

    def _try(self, n: int, i: int) -> None:
        """Lets a message, collective or copy happen if all its sides have issued it and hold what they need."""
        layout, prices = self.layout, self.prices
        base, q = n - i, layout.partners[i]
        sides = (i, q) if q >= 0 else prices.groups.get(i, (i,))
        if self.end[n] >= 0:
            return
        lanes = prices.lanes.get(i, ())
        kept = base > 0 and i in prices.kept
        travel = 0 if kept else prices.travel[i]
        finish = max([self.free.get(lane, 0) for lane in lanes]) + travel if lanes else 0
        for side in sides:
            begin = self.posted[base + side]
            if begin < 0:
                return
            if base and side in prices.copies:
                begin = max((begin, *(self.end[base - len(layout.codes) + need] for need in prices.copies[side])))
            for need in layout.waits[side]:
                if self.end[base + need] < 0:
                    return
                begin = max(begin, self.end[base + need])
            finish = max(finish, begin + (0 if kept else prices.travel[side]))
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
            self._arrived(base, side)

    def _through(self, channel: Key, begin: float, seconds: float) -> tuple[float, float]:
        """Moves something through a channel while nobody else does; when that begins and ends.

        Who comes to be known first goes first, and another moves in the gaps: so the channel is never idle while there
        is something to move, whatever the order in which that becomes known.
        """
        taken = self.taken.setdefault(channel, [])
        pieces: list[tuple[float, float]] = []
        now, left = begin, seconds
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

    def _arrived(self, base: int, side: int) -> None:
        """Wakes the rank that waits for it, and whatever else needs it."""
        rank = self.layout.graph.ranks[side]
        if self.blocked_on[rank] == base + side:
            self.blocked_on[rank] = UNKNOWN
            if self.contention:
                heapq.heappush(self.agenda, (max(self.clock[rank], self.end[base + side]), rank))
            else:
                self.ready.append(rank)
        for user in self.layout.users.get(side, ()):
            if self.posted[base + user] >= 0:
                self._try(base + user, user)
