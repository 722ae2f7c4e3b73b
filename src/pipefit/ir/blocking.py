"""Blocking execution: the strictest way to run a program, used to prove that it has no deadlock.

A send waits until its receive is posted; a reduce or barrier until all members have issued it; any other instruction
until the values it needs have arrived. A program that ends under these rules also ends under every weaker rule and in
every interleaving: an instruction waits only for earlier events, so the order in which ranks run does not matter.
"""

from __future__ import annotations

from pipefit.ir.graph import Graph
from pipefit.ir.op import Op


def _awaited(graph: Graph) -> list[tuple[int, ...]]:
    """For each instruction, the sends of the messages that it needs; for a send, its receive."""
    came = {n: send for n, send in graph.partner.items() if graph.instructions[n].op is Op.RECV}
    awaited = [tuple(came[n] for n in preds if n in came) if preds else () for preds in graph.preds]
    for receive, send in came.items():
        awaited[send] += (receive,)
    return awaited


class Blocking:
    """A run without times. Messages without a partner, missing members and values never made are ignored.

    Attributes:
        at: the number of each rank's next instruction.
        posted_early: receives that `post` moved forward, and the number of the instruction before which each must be.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.at = list(graph.starts[:-1])
        self.posted_early: dict[int, int] = {}
        self._done = bytearray(len(graph.instructions))
        self._awaited = _awaited(graph)
        self._absent = [len(group) for group in graph.collectives]
        self._asleep: dict[int, list[int]] = {}

    def run(self) -> dict[int, int]:
        """Runs until all ranks are done or stuck; returns the number of each stuck rank's instruction."""
        starts = self._graph.starts
        self._advance([rank for rank, number in enumerate(self.at) if number < starts[rank + 1]])
        return {rank: number for rank, number in enumerate(self.at) if number < starts[rank + 1]}

    def _advance(self, awake: list[int]) -> None:
        graph, done, asleep, awaited = self._graph, self._done, self._asleep, self._awaited
        asleep.clear()
        while awake:
            rank = awake.pop()
            number, end = self.at[rank], graph.starts[rank + 1]
            while number < end:
                blocker = self._blocker(number) if awaited[number] else -1
                if blocker < 0 and number in graph.collective_of and not self._arrive(number, awake):
                    blocker = number
                if blocker >= 0:
                    asleep.setdefault(blocker, []).append(rank)
                    break
                done[number] = 1
                if number in asleep:
                    awake += asleep.pop(number)
                number += 1
            self.at[rank] = number

    def _blocker(self, number: int) -> int:
        """The send that must happen or the receive that must be posted before an instruction can run, else −1."""
        for other in self._awaited[number]:
            if not self._done[other]:
                return other
        return -1

    def _arrive(self, number: int, awake: list[int]) -> bool:
        """Issues a collective; returns whether all its members have issued it."""
        graph, done = self._graph, self._done
        index = graph.collective_of[number]
        if not done[number]:
            done[number] = 1
            self._absent[index] -= 1
            if not self._absent[index]:
                for member in graph.collectives[index]:
                    awake += self._asleep.pop(member, ())
        return not self._absent[index]

    def waits_for(self, number: int) -> int:
        """The instruction of another rank that a stuck instruction waits for, else −1."""
        blocker = self._blocker(number)
        if blocker < 0 and number in self._graph.collective_of:
            blocker = next((other for other in self._graph.sides(number) if not self._done[other]), -1)
        return blocker

    def cycles(self, stuck: dict[int, int]) -> list[list[int]]:
        """The cycles of stuck ranks that wait for each other, each once, starting at its first rank."""
        found: list[list[int]] = []
        seen: set[int] = set()
        for start in sorted(stuck):
            path: list[int] = []
            rank = start
            while rank in stuck and rank not in seen:
                seen.add(rank)
                path.append(rank)
                blocker = self.waits_for(stuck[rank])
                rank = self._graph.ranks[blocker] if blocker >= 0 else -1
            if rank in path:
                found.append(path[path.index(rank) :])
        return found

    def post(self, send: int) -> None:
        """Posts the receive of a stuck send where its rank is stuck."""
        receive = self._graph.partner[send]
        self._done[receive] = 1
        self.posted_early[receive] = self.at[self._graph.ranks[receive]]
