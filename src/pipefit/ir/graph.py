"""The dependency graph ("must come before"): for every instruction, those that make its values.

It is built once for each program. Instructions are numbered through all ranks. A value is made and needed on one rank,
so an edge joins two instructions of the same list, the maker first. Only messages (a send and its receive) and
collectives cross ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from pipefit.ir.instruction import Indices, Instruction
from pipefit.ir.op import OP_SPEC, WORK_OPS, Op, Reduction
from pipefit.ir.program import Header, Program
from pipefit.ir.residency import copy_waits
from pipefit.ir.values import CONSUMES, MAKES, NEEDS, SUMS, WEIGHTS, WGRAD, Value, tied_stages

FEW_SENDS = 4
"""Messages of one kind to a rank that are kept after they were sent, where nothing acknowledges their arrival."""


@dataclass(frozen=True, slots=True)
class Graph:
    """The dependencies of a program.

    Attributes:
        program: its source.
        starts: number of each rank's first instruction, and at the end the number of all instructions.
        instructions: the instructions of all ranks, one rank after the other.
        ranks: the rank of each.
        preds: the earlier instructions of each one's rank that made the values it needs (of several on the compute
            lane that add to one gradient, the newest); for a fetch, also those
            that wrote the value it reads and that free its slot; for a forward of a frozen stage, also the send that
            makes room for another.
        missing: needs that no earlier instruction of the rank has made (or that are used up): (instruction, value).
        partner: the receive of each send and the send of each receive.
        unmatched: sends and receives that have no partner.
        collectives: the instructions that take part in each collective, one per rank.
        collective_of: the index of each reduce's and barrier's collective.
    """

    program: Program
    starts: list[int]
    instructions: list[Instruction]
    ranks: list[int]
    preds: list[Indices]
    missing: list[tuple[int, Value]]
    partner: dict[int, int]
    unmatched: list[int]
    collectives: list[Indices]
    collective_of: dict[int, int]

    def place(self, number: int) -> tuple[int, int]:
        """The rank of an instruction and its index there."""
        rank = self.ranks[number]
        return rank, number - self.starts[rank]

    def sides(self, number: int) -> Indices:
        """All sides of a message or collective; anything else has one."""
        if number in self.partner:
            return number, self.partner[number]
        if number in self.collective_of:
            return self.collectives[self.collective_of[number]]
        return (number,)


def dependency_graph(program: Program) -> Graph:
    """The dependency graph of a program, valid or not: missing values and unmatched messages are listed, not raised.

    It is built once and kept with the program.
    """
    return program.once("graph", lambda: _linked(program))


def _linked(program: Program) -> Graph:
    graph = graph_of_messages(program)
    for rank in range(len(program.ranks)):
        _link_rank(program, rank, graph)
    return graph


def graph_of_messages(program: Program) -> Graph:
    """A graph without dependencies inside ranks: only what crosses ranks."""
    starts: list[int] = [0]
    flat: list[Instruction] = []
    rank_of = []
    for rank, instructions in enumerate(program.ranks):
        flat += instructions
        rank_of += [rank] * len(instructions)
        starts.append(len(flat))
    partner, unmatched = _match_messages(flat, rank_of)
    collectives = _collectives(program, flat, rank_of)
    members = {number: index for index, group in enumerate(collectives) for number in group}
    return Graph(program, starts, flat, rank_of, [()] * len(flat), [], partner, unmatched, collectives, members)


def _link_rank(program: Program, rank: int, graph: Graph) -> None:
    start = graph.starts[rank]
    waits = copy_waits(program, rank)
    header = program.header
    makers: dict[Value, Indices] = {}
    for stage in header.stages_of(rank):
        if header.is_resident(stage):
            makers[Value(WEIGHTS, stage, 0)] = ()
    # No gradient comes back to frozen stages, so nothing else keeps them from running far ahead of those that train.
    sent: dict[int, list[int]] = defaultdict(list)
    instructions = program.ranks[rank]
    frozen = header.frozen
    for number, instruction in enumerate(instructions, start):
        op = instruction.op
        found: Indices = ()
        if waits:
            found = tuple(start + earlier for earlier in waits.get(number - start, ()))
        if 0 <= instruction.stage < frozen:
            if op is Op.SEND:
                sent[instruction.peer].append(number)
            elif op is Op.FWD:
                target = header.rank_of(instruction.stage + 1, instruction.mb)
                found += tuple(sent[target][-1 - FEW_SENDS : -FEW_SENDS])
        for value in NEEDS[op](instruction, program, rank):
            maker = makers.get(value)
            if maker is None:
                graph.missing.append((number, value))
            else:
                found += maker
        graph.preds[number] = found
        for value in CONSUMES[op](instruction, program, rank):
            makers.pop(value, None)
        for value in MAKES[op](instruction, program, rank):
            # Gradients of weights are summed from many makers; any other value is the newest maker's. The compute lane
            # is in order, so its newest maker stands for all earlier ones, and a reduction for all it awaits.
            if value.kind == WGRAD and op in WORK_OPS and value in makers:
                awaited = [n for n in makers[value] if instructions[n - start].op not in WORK_OPS]
                makers[value] = (*awaited, number)
            elif value.kind == SUMS:
                makers[value] = (*makers.get(value, ()), number)
            else:
                makers[value] = (number,)


_Key = tuple[object, ...]


def _match_messages(flat: list[Instruction], rank_of: list[int]) -> tuple[dict[int, int], list[int]]:
    waiting = defaultdict(list)
    partner = {}
    unmatched = []
    send_op = Op.SEND
    receive_op = Op.RECV
    # The first send of a message that is sent twice is the last of its list.
    for number in reversed(range(len(flat))):
        i = flat[number]
        if i.op is send_op:
            waiting[rank_of[number], i.peer, i.kind, i.stage, i.mb].append(number)
    for number, i in enumerate(flat):
        if i.op is receive_op:
            sends = waiting.get((i.peer, rank_of[number], i.kind, i.stage, i.mb))
            if sends:
                send = sends.pop()
                partner[send] = number
                partner[number] = send
            else:
                unmatched.append(number)
    unmatched += [number for sends in waiting.values() for number in sends]
    return partner, sorted(unmatched)


def collective_members(header: Header, instruction: Instruction) -> Indices:
    """The ranks that must take part in a reduce or barrier, in increasing order.

    A tied weight is summed over every rank that holds a stage of its group, replicas included.
    """
    stage = instruction.stage
    everyone = tuple(range(header.num_ranks))
    if stage < 0:
        return everyone
    if instruction.kind == Reduction.TIED:
        return tuple(rank for rank in everyone if tied_stages(header, stage, rank))
    return tuple(sorted(header.placement[stage]))


def _collectives(program: Program, flat: list[Instruction], rank_of: list[int]) -> list[Indices]:
    """Groups the k-th occurrence of each collective on every rank."""
    seen: Counter[_Key] = Counter()
    groups = defaultdict(list)
    for number, i in enumerate(flat):
        if OP_SPEC[i.op].is_collective:
            what = (i.op, i.kind, i.stage, i.version)
            own = (rank_of[number], *what)
            groups[*what, seen[own]].append(number)
            seen[own] += 1
    return [tuple(group) for group in groups.values()]
