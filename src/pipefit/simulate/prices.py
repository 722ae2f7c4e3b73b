"""Prices: the seconds of every instruction of a program under one cost model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from msgspec.structs import replace

from pipefit.cost import CostModel
from pipefit.ir.graph import Graph
from pipefit.ir.instruction import Indices, Instruction
from pipefit.ir.op import COPY_OPS, MESSAGE_OPS, Op
from pipefit.ir.residency import copy_waits, kept_fetches
from pipefit.simulate.flat_program import Code, FlatProgram
from pipefit.spec.plan import COMING_AND_GOING

Key = tuple[object, ...]
Copies = dict[int, Indices]
"""Copies, with the instructions that each waits for."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of one program under one cost model, by instruction number; pairs are for the first pass and later ones.

    Attributes:
        hold: seconds that it holds its rank (its work, or its issuing).
        travel: seconds of a message, reduction or copy after this side has issued it; it has arrived when they have
            passed for all sides.
        lanes: resources that serve one instruction at a time: for copies, the lane of their rank; for messages
            under contention, their link; for transfers through shared ports, these.
        copies: each fetch and evict, with the evictions of the pass before that it must wait for.
        arrivals: seconds that a rank spends on arrived data before the instruction that waited for them begins.
        channels: of copies that alternate with those of another lane, the channel of both.
        closing: of each rank, the instructions that only the next pass waits for.
        between: seconds a rank spends before each pass.
    """

    hold: list[float]
    travel: tuple[list[float], list[float]]
    lanes: dict[int, tuple[Key, ...]]
    copies: Copies
    arrivals: tuple[dict[int, float], dict[int, float]]
    channels: dict[int, Key]
    closing: list[list[int]]
    between: float = 0


def prices_of(layout: FlatProgram, cost: CostModel, contention: bool = False, rendezvous: bool = True) -> Prices:
    """The prices of a program; for `contention` and `rendezvous` see `simulate`."""
    graph = layout.graph
    hold_of = [cost.duration_s(i, rank) for i, rank in layout.kinds]
    travel_of = [_travel_s(cost, i, rank, rendezvous) for i, rank in layout.kinds]
    lanes_of = [_lanes(cost, i, rank, contention) for i, rank in layout.kinds]
    channel_of = [_channel(cost, i, rank) for i, rank in layout.kinds]
    travel = [travel_of[index] for index in layout.costs]
    lanes = _by_number(layout, lanes_of)
    shares = graph.program.header.shard in COMING_AND_GOING
    for group in graph.collectives:
        first = graph.instructions[group[0]]
        members = sorted(graph.ranks[number] for number in group)
        seconds = cost.reduce_s(first, members)
        ports = cost.reduction_ports(first, members)
        for number in group:
            travel[number] = seconds
            lanes[number] = ports
            if shares and first.stage >= 0:
                # Those of one group are served in one order.
                lanes[number] += (("copies", *members),)
    kept = _kept(graph, later=False)
    kept_later = _kept(graph, later=True)
    between: float = 0
    closing = _closing(layout)
    spill = graph.program.header.spill
    if spill is not None and graph.program.header.num_ranks > 1:
        # Ranks of a pipeline wait between two passes for a commit of the tier, once everything is written.
        for tier in cost.tiers:
            if tier.name == spill.tier and tier.commit_s:
                between += tier.commit_s
                closing = _closing(layout, Op.EVICT)
    copies = {}
    if any(i.op in COPY_OPS for i, _ in layout.kinds):
        copies = _copies(graph, kept_later)
    return Prices(
        hold=[hold_of[index] for index in layout.costs],
        travel=(_without(travel, kept), _without(travel, kept_later)),
        lanes=lanes,
        copies=copies,
        arrivals=(_arrivals(layout, cost, kept), _arrivals(layout, cost, kept_later)),
        channels=_by_number(layout, channel_of),
        closing=closing,
        between=between,
    )


def _by_number(layout: FlatProgram, of_kind: list[T]) -> dict[int, T]:
    """Gives each instruction the fact about its kind of cost; empty facts are left out."""
    found: dict[int, T] = {}
    if not any(of_kind):
        return found
    for number, kind in enumerate(layout.costs):
        if of_kind[kind]:
            found[number] = of_kind[kind]
    return found


def _travel_s(cost: CostModel, i: Instruction, rank: int, rendezvous: bool) -> float:
    if i.op is Op.SEND:
        return cost.message_s(i, rank)
    if i.op is Op.RECV:
        if rendezvous:
            return cost.message_s(replace(i, op=Op.SEND, peer=rank), i.peer)
        return 0
    if i.op is Op.GATHER or i.op in COPY_OPS:
        return cost.local_s(i, rank)
    return 0


def _lanes(cost: CostModel, i: Instruction, rank: int, contention: bool) -> tuple[Key, ...]:
    if i.op in COPY_OPS:
        return ((rank, i.op, i.tier),)
    if i.op not in MESSAGE_OPS:
        return ()
    if i.op is Op.SEND:
        link = (rank, i.peer)
    else:
        link = (i.peer, rank)
    lanes = cost.ports(*link)
    if contention:
        lanes += (link,)
    return lanes


def _channel(cost: CostModel, i: Instruction, rank: int) -> Key:
    if i.op not in COPY_OPS or i.op is Op.HOST_STEP:
        return ()
    if cost.tier_of(i).one_channel:
        return (rank, i.tier)
    return ()


def _kept(graph: Graph, later: bool) -> frozenset[int]:
    """The fetches that move nothing, by number."""
    found = set()
    for rank, start in enumerate(graph.starts[:-1]):
        found |= {start + index for index in kept_fetches(graph.program, rank, later)}
    return frozenset(found)


def _without(travel: list[float], kept: frozenset[int]) -> list[float]:
    if kept:
        return [0 if number in kept else seconds for number, seconds in enumerate(travel)]
    return travel


def _arrivals(layout: FlatProgram, cost: CostModel, kept: frozenset[int]) -> dict[int, float]:
    """Seconds a rank spends on checksums of fetches, by the first instruction that waits for them."""
    found: dict[int, float] = {}
    if not any(tier.check_bytes_per_s for tier in cost.tiers):
        return found
    counted = set(kept)
    for number, code in enumerate(layout.codes):
        if code != Code.WAIT:
            continue
        for awaited in layout.waits[number]:
            came = layout.graph.instructions[awaited]
            if awaited not in counted and came.op is Op.FETCH:
                counted.add(awaited)
                found[number] = found.get(number, 0) + cost.check_s(came)
    return found


def _closing(layout: FlatProgram, *more: Op) -> list[list[int]]:
    """Of each rank, the instructions that the next pass waits for, but none in this pass.

    These are reductions whose end no instruction waits for, such as gathers of new weights; steps on the host, because
    their optimizers may be read between two passes; and the operations in `more`.
    """
    graph = layout.graph
    last = (Op.HOST_STEP, *more)
    always = [i.op in last for i, _ in layout.kinds]
    reductions = set(graph.collective_of)
    if reductions:
        reductions.difference_update(*layout.waits)
    result: list[list[int]] = [[] for _ in graph.starts[1:]]
    if not (reductions or any(always)):
        return result
    for number, kind in enumerate(layout.costs):
        if always[kind] or number in reductions:
            result[graph.ranks[number]].append(number)
    return result


def _copies(graph: Graph, kept: frozenset[int]) -> Copies:
    """Each copy; for a fetch, the evictions of the pass before that write its value and free its slot.

    Waits within a pass are in the graph. A fetch of a value that is still in its slot waits for nothing.
    """
    copies = [number for number, i in enumerate(graph.instructions) if i.op in COPY_OPS]
    needed: Copies = dict.fromkeys(copies, ())
    for rank, (start, end) in enumerate(pairwise(graph.starts)):
        for index, waits in copy_waits(graph.program, rank, later=True).items():
            number = start + index
            if graph.instructions[number].op is Op.FETCH and not graph.preds[number] and number not in kept:
                needed[number] = tuple(end + earlier for earlier in waits)
    return needed
