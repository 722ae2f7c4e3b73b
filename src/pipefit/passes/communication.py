"""Messages between ranks."""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from pipefit.ir.blocking import Blocking
from pipefit.ir.graph import Graph, graph_of_messages
from pipefit.ir.instruction import Instruction, Instructions, ValueKey
from pipefit.ir.op import COMPUTE_OPS, GRADIENT_OPS, Op
from pipefit.ir.program import Header, Program
from pipefit.ir.values import ACT, GRAD
from pipefit.passes.places import Added, computes_back, entering, inserted


def with_communication(program: Program, ahead: int = 1) -> Program:
    """Adds the sends and receives.

    A send follows the instruction that made its value. A receive is posted `ahead` compute instructions before the one
    that needs it, so the message travels while the rank computes, and the number of open buffers does not grow with the
    number of micro-batches. It is never posted after a receive whose message the same sender sends later, so each link
    is first-in-first-out and needs no tags. Where ranks would wait for each other because a send waits for its
    receive, the receive is posted as much earlier as necessary.
    """
    sends = []
    needed = []
    links = defaultdict(list)
    for rank, own in enumerate(program.ranks):
        after = _sends(program.header, rank, own)
        for send in after.values():
            links[rank, send.peer].append(send)
        sends.append(after)
        needed.append(_first_uses(own))
    posts: list[Added] = [defaultdict(list) for _ in program.ranks]
    for (source, target), messages in links.items():
        own = program.ranks[target]
        limit = len(own)
        for message in reversed(messages):
            value = (message.kind, message.stage, message.mb)
            use = needed[target].get(value, limit)
            limit = min(limit, computes_back(own, use, ahead))
            receive = replace(message, op=Op.RECV, peer=source)
            posts[target][limit].insert(0, receive)
    ranks = []
    for own, after, posted in zip(program.ranks, sends, posts, strict=True):
        for index, send in after.items():
            posted[index + 1].insert(0, send)
        ranks.append(inserted(own, posted))
    return _without_deadlock(program.with_ranks(ranks))


def _first_uses(instructions: Instructions) -> dict[ValueKey, int]:
    """For each value that enters a stage, the index of the first instruction that takes it."""
    found: dict[ValueKey, int] = {}
    for index, i in enumerate(instructions):
        if i.op in COMPUTE_OPS:
            found.setdefault(entering(i), index)
    return found


def _without_deadlock(program: Program) -> Program:
    """Posts receives earlier wherever the program would be stuck if every send waited for its receive.

    On each cycle of waiting one receive is posted where its rank is stuck. The sends of a link wait in order, so
    the order of its receives stays. A cycle without a send is the schedule's own mistake and stays as it is.
    """
    graph = _messages(program)
    run = Blocking(graph)
    while stuck := run.run():
        sends = []
        for cycle in run.cycles(stuck):
            waiting = [run.at[rank] for rank in cycle]
            sends += [number for number in waiting if graph.instructions[number].op is Op.SEND][:1]
        if not sends:
            break
        for send in sends:
            run.post(send)
    if not run.posted_early:
        return program
    early = defaultdict(list)
    for receive, number in run.posted_early.items():
        early[number].append(graph.instructions[receive])
    ranks: list[list[Instruction]] = [[] for _ in program.ranks]
    for number, rank in enumerate(graph.ranks):
        ranks[rank] += early.get(number, [])
        if number not in run.posted_early:
            ranks[rank].append(graph.instructions[number])
    return program.with_ranks(ranks)


def _messages(program: Program) -> Graph:
    """The dependency graph with only the edges from receives, to the first that needs each: all that ranks wait for."""
    graph = graph_of_messages(program)
    receive = Op.RECV
    for rank, instructions in enumerate(program.ranks):
        came = {}
        for number, i in enumerate(instructions, graph.starts[rank]):
            if i.op is receive:
                came[i.kind, i.stage, i.mb] = number
            elif i.op in COMPUTE_OPS and came:
                arrival = came.pop(entering(i), None)
                if arrival is not None:
                    graph.preds[number] = (arrival,)
    return graph


def _sends(header: Header, rank: int, instructions: Instructions) -> dict[int, Instruction]:
    """For the index of each instruction whose result another rank needs: the send that follows it."""
    result = {}
    forward = Op.FWD
    for index, i in enumerate(instructions):
        if i.op is forward and i.stage < header.last_stage:
            peer = header.rank_of(i.stage + 1, i.mb)
            send = Instruction(Op.SEND, i.stage, i.mb, kind=ACT, peer=peer)
        elif i.op in GRADIENT_OPS and i.stage > header.frozen:
            peer = header.rank_of(i.stage - 1, i.mb)
            send = Instruction(Op.SEND, i.stage - 1, i.mb, kind=GRAD, peer=peer)
        else:
            continue
        if peer != rank:
            result[index] = send
    return result
