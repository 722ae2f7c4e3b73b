"""Rules `messages` and `fifo`: the messages between ranks."""

from __future__ import annotations

from pipefit.ir.instruction import Instruction, ValueKey
from pipefit.ir.op import MESSAGE_OPS, WHOLE_OF, Op
from pipefit.ir.program import Header
from pipefit.ir.values import ACT, GRAD
from pipefit.verify.subject import Finding, Findings, Subject

Link = tuple[int, int]
"""The ranks that send and receive a value."""


def messages(s: Subject) -> Findings:
    """Each value that another rank needs is sent once, whole or in pieces, from its maker to its user."""
    links = _owed(s.header)
    crossed: dict[ValueKey, int] = {}
    unmatched = set(s.graph.unmatched)
    for _, _, number in s.each(*MESSAGE_OPS):
        i = s.graph.instructions[number]
        whole = WHOLE_OF.get(i.kind, i.kind)
        key = whole, i.stage, i.mb
        rank = s.graph.ranks[number]
        problem = _wrong_link(i, rank, links.get(key))
        if problem:
            yield s.at("messages", number, problem)
        elif number in unmatched:
            if i.op is Op.SEND:
                other = "receive"
            else:
                other = "send"
            yield s.at("messages", number, f"rank {i.peer} has no {other} for it")
        elif i.op is Op.SEND:
            if key in crossed:
                first = s.where(crossed[key])
                yield s.at("messages", number, f"is already sent: {first}")
            crossed.setdefault(key, number)
    yield from _gathers(s)
    for key, (source, target) in links.items():
        if key not in crossed:
            kind, stage, mb = key
            message = f"{kind} s{stage} m{mb} must go from rank {source} to rank {target}"
            yield Finding("messages", source, -1, message)


def _gathers(s: Subject) -> Findings:
    """A value that came in pieces is gathered once; the rule of dependencies checks that its pieces are there."""
    seen: dict[ValueKey, int] = {}
    for stage, mb, number in s.each(Op.GATHER):
        kind = s.graph.instructions[number].kind
        first = seen.setdefault((kind, stage, mb), number)
        if first != number:
            yield s.at("messages", number, f"is already gathered: {s.where(first)}")


def _owed(header: Header) -> dict[ValueKey, Link]:
    """The values that must be sent, with source and target rank."""
    result = {}
    for stage in range(header.last_stage):
        for mb in range(header.total_microbatches):
            source = header.rank_of(stage, mb)
            target = header.rank_of(stage + 1, mb)
            if source != target:
                result[ACT, stage, mb] = source, target
                if stage >= header.frozen:
                    result[GRAD, stage, mb] = target, source
    return result


def _wrong_link(i: Instruction, rank: int, link: Link | None) -> str:
    if link is None:
        return f"no other rank needs {i.kind} s{i.stage} m{i.mb}"
    source, target = link
    if i.op is Op.SEND:
        mine = (rank, i.peer)
    else:
        mine = (i.peer, rank)
    if link == mine:
        return ""
    return f"{i.kind} s{i.stage} m{i.mb} goes from rank {source} to rank {target}"


def fifo(s: Subject) -> Findings:
    """On each link, receives in the order of their sends."""
    newest: dict[Link, int] = {}
    receive = Op.RECV
    for number, i in enumerate(s.graph.instructions):
        if i.op is receive and number in s.graph.partner:
            send = s.graph.partner[number]
            link = i.peer, s.graph.ranks[number]
            before = newest.get(link, -1)
            if send < before:
                first = s.where(send)
                second = s.where(before)
                yield s.at("fifo", number, f"posted after the receive of a later send: {first} comes before {second}")
            newest[link] = max(before, send)
