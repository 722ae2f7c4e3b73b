"""Waiting ranks: the rank that each one waits for, from their positions, and the page that shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pipefit.ir.graph import dependency_graph
from pipefit.ir.op import Op
from pipefit.ir.program import Program
from pipefit.runtime.compiled import compile_rank
from pipefit.runtime.progress import (
    CALLS,
    JOINING,
    LEAVING,
    LOSS,
    MEASURING,
    MEETING,
    OUTSIDE,
    PLACES,
    SAVING,
    Position,
)

_SLOW_TIMES = 10
"""A save, a load or a measurement may take so many deadlines without a sign of life."""


def waits_for(program: Program | None, rank: int, positions: Mapping[int, Position]) -> dict[int, str]:
    """The ranks that a rank may be waiting for at its position, each with the missing message or part.

    A peer that has passed the instruction is waited for only if nobody else is: what it sent may not have arrived.
    Empty: the rank is computing, or in the user's code.
    """
    here = positions[rank]
    others = {r: p for r, p in positions.items() if r != rank}
    if here.index < 0 and (here.waits or here.index == MEETING):
        there = {r for r, p in others.items() if p.index < 0 and (p.waits or p.index == here.index == MEETING)}
        return dict.fromkeys(others.keys() - there, "its part of what all do together")
    if here.index == LOSS:
        return {r: "its part of the loss" for r, p in others.items() if p.passes <= here.passes and p.index != LOSS}
    if program is None:
        return {}
    row, part = divmod(rank, program.header.tensor)
    instructions = program.ranks[row]
    if here.index >= len(instructions):
        awaits = compile_rank(program, row).awaited_at_end
    elif 0 <= here.index:
        awaits = compile_rank(program, row).awaits[here.index]
    else:
        return {}
    graph = dependency_graph(program)
    start = graph.starts[row]
    found: dict[int, str] = {}
    sent: dict[int, str] = {}

    def needs(number: int, what: str) -> None:
        peer, index = graph.place(number)
        peer = peer * program.header.tensor + part
        there = positions.get(peer)
        if peer != rank and (there is None or (there.passes, _index(there)) <= (here.passes, index)):
            found.setdefault(peer, what)
        elif peer != rank and here.waits:
            sent.setdefault(peer, f"{what}, which it has passed,")

    for awaited in awaits:
        number, instruction = start + awaited, instructions[awaited]
        if instruction.op is Op.RECV:
            needs(graph.partner[number], f"'{graph.instructions[graph.partner[number]]}'")
        elif number in graph.collective_of:  # else it is a copy, for which no other rank is needed
            for member in graph.collectives[graph.collective_of[number]]:
                needs(member, f"'{instruction}'")
    if here.index < len(instructions):
        if instructions[here.index].op is Op.SEND and not found:
            # A send waits for an earlier one to the same peer, when too many are open.
            found[instructions[here.index].peer * program.header.tensor + part] = "its receives"
        found = found or _partners(program, rank, positions)
    return found or sent


def _partners(program: Program, rank: int, positions: Mapping[int, Position]) -> dict[int, str]:
    """The processes of the same tensor-parallel rank that are behind: inside a layer all wait for all."""
    here, tensor = positions[rank], program.header.tensor
    first = rank - rank % tensor
    return {
        other: f"its part of '{program.ranks[rank // tensor][here.index]}'"
        for other in range(first, first + tensor)
        if other != rank
        and (there := positions.get(other))
        and (there.passes, _index(there)) < (here.passes, here.index)
    }


def _index(position: Position) -> int:
    """An order of positions inside a pass: places after the program come last."""
    if position.index >= 0:
        return position.index
    return 1 << 60


_STATES = {"T": "stopped", "t": "stopped", "Z": "ended"}
"""Meaning of the kernel's state of a process; in any other state it runs or waits."""


def state_of(pid: int) -> str:
    """The state of a process: "stopped", "ended" or "there"."""
    try:
        return _STATES.get(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0], "there")
    except OSError:
        return "ended"


def where(program: Program | None, rank: int, position: Position) -> str:
    """A rank's position in words."""
    if position.call:
        return f"in {CALLS[position.call]}, which all ranks must call, after pass {position.passes}"
    if position.index in PLACES:
        return f"{PLACES[position.index]}, after pass {position.passes}"
    if program is None:
        return f"at instruction {position.index} of pass {position.passes}"
    own = program.ranks[rank // program.header.tensor]
    if position.index >= len(own):
        return f"at the end of pass {position.passes}"
    return f"at '{own[position.index]}' (instruction {position.index}, pass {position.passes})"


def _culprit(
    program: Program | None, rank: int, positions: Mapping[int, Position], states: Mapping[int, str]
) -> tuple[int | None, list[str]]:
    """The end of the waits. A rank that is stopped or has ended is the cause, wherever they lead."""
    end, lines = _last_waited_for(program, rank, positions, states)
    gone = [other for other, state in sorted(states.items()) if state != "there"]
    return (end if end in gone or not gone else gone[0]), lines


def cause_of(
    rank: int, program: Program | None, positions: Mapping[int, Position], num_ranks: int
) -> tuple[int | None, list[str]]:
    """Follows the waits from `rank` to a rank that waits for no other; None: they wait for each other in a cycle.

    A rank that nobody has seen is the cause, where this one could wait for it.
    """
    culprit, lines = _culprit(program, rank, positions, states_of(rank, positions))
    missing = [other for other in range(num_ranks) if other not in positions]
    if missing and culprit == rank and (positions[rank].waits or positions[rank].index in (JOINING, MEETING, LOSS)):
        culprit = missing[0]
    return culprit, lines


def _last_waited_for(
    program: Program | None, rank: int, positions: Mapping[int, Position], states: Mapping[int, str]
) -> tuple[int | None, list[str]]:
    lines: list[str] = []
    seen = []
    current = rank
    while current not in seen:
        seen.append(current)
        if current not in positions or (current != rank and states[current] != "there"):
            return current, lines
        # The other ranks may be in another program, whose instructions are not known here.
        is_known = positions[current].index < 0 or positions[current].program == positions[rank].program
        if is_known:
            peers = waits_for(program, current, positions)
        else:
            peers = {}
        if not peers:
            return current, lines
        # A rank that is stopped or has ended explains more than one that also waits.
        peer = min(peers, key=lambda peer: (states.get(peer, "there") == "there", peer))
        lines.append(f"rank {current} waits for {peers[peer]} of rank {peer}")
        current = peer
    return None, lines


def patience(
    rank: int, program: Program | None, positions: Mapping[int, Position], deadline_s: float, now_s: float
) -> float:
    """Seconds for which a rank may stay where it is, from the position of the rank that causes it.

    Slow work of another outside the programs is no hang while it shows signs of life, and none at all while a rank
    waits to leave. A rank that is stopped or has ended gets no more than the deadline.

    Args:
        rank: that waits.
        program: that it runs.
        positions: the positions of all ranks that are known.
        deadline_s: the limit of an instruction.
        now_s: monotonic seconds of this machine.
    """
    states = states_of(rank, positions)
    culprit, _ = _culprit(program, rank, positions, states)
    if culprit is None or culprit not in positions or states[culprit] != "there":
        return deadline_s
    if positions[rank].index == LEAVING:
        return float("inf")
    if (cause := positions[culprit]).index in (SAVING, MEASURING) and not cause.waits:
        if now_s - cause.since_s > _SLOW_TIMES * deadline_s:
            return deadline_s
        return float("inf")
    return deadline_s


def states_of(rank: int, positions: Mapping[int, Position]) -> dict[int, str]:
    """The states of the ranks' processes; `rank` is running, even if it was stopped for a while."""
    return {other: "there" if other == rank else state_of(position.pid) for other, position in positions.items()}


def _verdict(culprit: int, place: str, position: Position, state: str) -> str:
    if state == "stopped":
        return f"rank {culprit} is stopped (by SIGSTOP or a debugger), {place}"
    if state == "ended":
        return f"rank {culprit} has ended without an error message, {place}"
    if position.index in (MEETING, JOINING):
        return f"rank {culprit} does not join the others: {place}"
    if position.index == OUTSIDE:
        return f"rank {culprit} has been outside the program too long: {place}"
    return f"rank {culprit} does not continue, though it waits for no other rank: {place}"


def hang_report(
    rank: int,
    program: Program | None,
    positions: Mapping[int, Position],
    stood_s: float,
    deadline_s: float,
    num_ranks: int,
    stacks: Callable[[int], str] = lambda rank: "",
) -> str:
    """One page about a rank that hangs: the cause, the chain of waits that leads to it, and all positions.

    Args:
        rank: that detected the hang.
        program: that it runs.
        positions: the positions of all ranks that are known.
        stood_s: seconds that it has been at its instruction.
        deadline_s: limit of these seconds.
        num_ranks: the number of ranks of the run.
        stacks: from a rank to its Python stack, "" if it is not available.
    """
    states = states_of(rank, positions)
    places = {other: where(program, other, position) for other, position in positions.items()}
    culprit, chain = cause_of(rank, program, positions, num_ranks)
    if culprit is None:
        verdict = f"the ranks wait for each other in a cycle (for {stood_s:.0f} s)"
    elif culprit not in positions:
        verdict = f"rank {culprit} is the cause: its position is not known on this machine"
    else:
        verdict = _verdict(culprit, places[culprit], positions[culprit], states[culprit])
    lines = [
        verdict,
        f"detected by rank {rank}, which has waited for {stood_s:.1f} s, {places[rank]} "
        f"(deadline {deadline_s:.1f} s; PIPEFIT_DEADLINE_S changes it, 0 turns it off)",
        *chain,
        "positions of the ranks:",
    ]
    for other in range(num_ranks):
        if states.get(other, "there") != "there":
            mark = f"{states[other]}, "
        else:
            mark = ""
        if other in positions and positions[other].device >= 0:
            mark += "its GPU is "
        lines.append(f"  rank {other}: {mark}{places.get(other, 'not known on this machine')}")
    if culprit is not None and states.get(culprit) == "there" and (stack := stacks(culprit)):
        lines += [f"stack of rank {culprit} (innermost call first):", stack.rstrip()]
    return "\n".join(lines) + "\n"
