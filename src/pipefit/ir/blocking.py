"""Blocking execution: the strictest way to run a program, used to prove that it has no deadlock.

A send waits until its receive is posted; a reduce or barrier until all members have issued it; any other instruction
until the values it needs have arrived. A program that ends under these rules also ends under every weaker rule and in
every interleaving: an instruction waits only for earlier events, so the order in which ranks run does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipefit.ir.graph import Graph
from pipefit.ir.instruction import Indices
from pipefit.ir.op import Op


def _awaited(graph: Graph) -> list[Indices]:
    """For each instruction, the sends of the messages that it needs; for a send, its receive."""
    receive_op = Op.RECV
    came = {n: send for n, send in graph.partner.items() if graph.instructions[n].op is receive_op}
    awaited = [tuple([came[n] for n in preds if n in came]) for preds in graph.preds]
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
        self._awake = list(range(len(self.at)))

    def run(self) -> dict[int, int]:
        """Runs until all ranks are done or stuck; returns the number of the instruction where each rank got stuck.

        Called again after `post`, it returns only ranks that were awake since.
        """
        graph = self._graph
        done = self._done
        asleep = self._asleep
        awaited = self._awaited
        awake = self._awake
        collective_of = graph.collective_of
        ran = set()
        while awake:
            rank = awake.pop()
            ran.add(rank)
            number = self.at[rank]
            end = graph.starts[rank + 1]
            while number < end:
                # The send that must happen, or the receive that must be posted, before the instruction can run.
                blocker = -1
                for other in awaited[number]:
                    if not done[other]:
                        blocker = other
                        break
                if blocker < 0 and number in collective_of and not self._arrive(number):
                    blocker = number
                if blocker >= 0:
                    asleep.setdefault(blocker, []).append(rank)
                    break
                done[number] = 1
                if number in asleep:
                    awake += asleep.pop(number)
                number += 1
            self.at[rank] = number
        return {rank: self.at[rank] for rank in sorted(ran) if self._is_stuck(rank)}

    def _is_stuck(self, rank: int) -> bool:
        return self.at[rank] < self._graph.starts[rank + 1]

    def _arrive(self, number: int) -> bool:
        """Issues a collective; returns whether all its members have issued it."""
        graph = self._graph
        done = self._done
        index = graph.collective_of[number]
        if not done[number]:
            done[number] = 1
            self._absent[index] -= 1
            if not self._absent[index]:
                for member in graph.collectives[index]:
                    self._awake += self._asleep.pop(member, ())
        return not self._absent[index]

    def waits_for(self, number: int) -> int:
        """The instruction of another rank that a stuck instruction waits for, else −1."""
        others = self._awaited[number]
        if number in self._graph.collective_of:
            others += self._graph.sides(number)
        return next((other for other in others if not self._done[other]), -1)

    def cycles(self, among: Iterable[int]) -> list[list[int]]:
        """The cycles of stuck ranks that wait for each other and to which some ranks lead, each once."""
        found = []
        seen = set()
        for rank in among:
            path = []
            while rank >= 0 and rank not in seen and self._is_stuck(rank):
                seen.add(rank)
                path.append(rank)
                blocker = self.waits_for(self.at[rank])
                rank = -1
                if blocker >= 0:
                    rank = self._graph.ranks[blocker]
            if rank in path:
                cycle = path[path.index(rank) :]
                first = cycle.index(min(cycle))
                found.append(cycle[first:] + cycle[:first])
        return found

    def post(self, send: int) -> None:
        """Posts the receive of a stuck send where its rank is stuck."""
        receive = self._graph.partner[send]
        self._done[receive] = 1
        self.posted_early[receive] = self.at[self._graph.ranks[receive]]
        self._awake += self._asleep.pop(receive, ())
