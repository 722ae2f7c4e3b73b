"""Messages between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pipefit.ir.blocking import Blocking
from pipefit.ir.graph import Graph, graph_of_messages
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import COMPUTE_OPS, GRADIENT_OPS, Op
from pipefit.ir.program import Header, Program
from pipefit.ir.values import ACT, GRAD
from pipefit.passes.places import computes_back, entering, inserted


def with_communication(program: Program, ahead: int = 1) -> Program:
    """Adds the sends and receives.

    A send follows the instruction that made its value. A receive is posted `ahead` compute instructions before the one
    that needs it, so the message travels while the rank computes, and the number of open buffers does not grow with the
    number of micro-batches. It is never posted after a receive whose message the same sender sends later, so each link
    is first-in-first-out and needs no tags. Where ranks would wait for each other because a send waits for its
    receive, the receive is posted as much earlier as necessary.
    """
    sends = [_sends(program.header, rank, instructions) for rank, instructions in enumerate(program.ranks)]
    links: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
    for rank, after in enumerate(sends):
        for send in after.values():
            links[rank, send.peer].append(send)
    computing = ([(n, i) for n, i in enumerate(own) if i.op in COMPUTE_OPS] for own in program.ranks)
    needed = [{entering(i): index for index, i in reversed(own)} for own in computing]
    posts: list[dict[int, list[Instruction]]] = [defaultdict(list) for _ in program.ranks]
    for (source, target), messages in links.items():
        limit = len(program.ranks[target])
        for message in reversed(messages):
            at = needed[target].get((message.kind, message.stage, message.mb), limit)
            limit = min(limit, computes_back(program.ranks[target], at, ahead))
            receive = Instruction(Op.RECV, message.stage, message.mb, kind=message.kind, peer=source)
            posts[target][limit].insert(0, receive)
    for own, posted in zip(sends, posts, strict=True):
        for index, send in own.items():
            posted[index + 1].insert(0, send)
    return _without_deadlock(program.with_ranks(list(map(inserted, program.ranks, posts))))


def _without_deadlock(program: Program) -> Program:
    """Posts receives earlier wherever the program would be stuck if every send waited for its receive.

    On each cycle of waiting one receive is posted where its rank is stuck. The sends of a link wait in order, so
    the order of its receives stays. A cycle without a send is the schedule's own mistake and stays as it is.
    """
    graph = _messages(program)
    run = Blocking(graph)
    while stuck := run.run():
        sends = [
            next((run.at[rank] for rank in cycle if graph.instructions[run.at[rank]].op is Op.SEND), None)
            for cycle in run.cycles(stuck)
        ]
        if not any(send is not None for send in sends):
            break
        for send in sends:
            if send is not None:
                run.post(send)
    if not run.posted_early:
        return program
    early: dict[int, list[Instruction]] = defaultdict(list)
    for receive, number in run.posted_early.items():
        early[number].append(graph.instructions[receive])
    ranks: list[list[Instruction]] = [[] for _ in program.ranks]
    for number, (rank, i) in enumerate(zip(graph.ranks, graph.instructions, strict=True)):
        if number in early:
            ranks[rank] += early[number]
        if number not in run.posted_early:
            ranks[rank].append(i)
    return program.with_ranks(ranks)


def _messages(program: Program) -> Graph:
    """The dependency graph with only the edges from receives, to the first that needs each: all that ranks wait for."""
    graph = graph_of_messages(program)
    receive = Op.RECV
    for rank, instructions in enumerate(program.ranks):
        came: dict[tuple[str, int, int], int] = {}
        for number, i in enumerate(instructions, graph.starts[rank]):
            if i.op is receive:
                came[i.kind, i.stage, i.mb] = number
            elif i.op in COMPUTE_OPS and (arrival := came.pop(entering(i), -1)) >= 0:
                graph.preds[number] = (arrival,)
    return graph


def _sends(header: Header, rank: int, instructions: Sequence[Instruction]) -> dict[int, Instruction]:
    """For the index of each instruction whose result another rank needs: the send that follows it."""
    result: dict[int, Instruction] = {}
    forward = Op.FWD
    for index, i in enumerate(instructions):
        if i.op is forward and i.stage < header.last_stage:
            user = i.stage + 1
            stage = i.stage
            kind = ACT
        elif i.op in GRADIENT_OPS and i.stage > header.frozen:
            user = i.stage - 1
            stage = i.stage - 1
            kind = GRAD
        else:
            continue
        if (peer := header.rank_of(user, i.mb)) != rank:
            result[index] = Instruction(Op.SEND, stage, i.mb, kind=kind, peer=peer)
    return result
