"""Waiting ranks: which one waits for which, read from their positions, and the page that shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pipefit.ir.graph import dependency_graph
from pipefit.ir.op import Op
from pipefit.ir.program import Program
from pipefit.runtime.compiled import compile_rank
from pipefit.runtime.progress import LOSS, MEETING, OUTSIDE, PLACES, Position


def waits_for(program: Program, rank: int, positions: Mapping[int, Position]) -> dict[int, str]:
    """The ranks that a rank may be waiting for at its position, each with what it should bring.

    A peer that has passed the instruction in question is not waited for. Empty: the rank is at work, or outside.
    """
    here = positions[rank]
    others = {r: p for r, p in positions.items() if r != rank}
    if here.index == LOSS:
        return {r: "its part of the loss" for r, p in others.items() if p.passes <= here.passes and p.index != LOSS}
    row, part = divmod(rank, program.header.tensor)
    instructions = program.ranks[row]
    if not 0 <= here.index < len(instructions):
        return {}
    graph = dependency_graph(program)
    start = graph.starts[row]
    found: dict[int, str] = {}

    def needs(number: int, what: str) -> None:
        peer, index = graph.place(number)
        peer = peer * program.header.tensor + part
        there = positions.get(peer)
        if peer != rank and (there is None or (there.passes, _index(there)) <= (here.passes, index)):
            found.setdefault(peer, what)

    for awaited in compile_rank(program, row).awaits[here.index]:
        number, instruction = start + awaited, instructions[awaited]
        if instruction.op is Op.RECV:
            needs(graph.partner[number], f"'{graph.instructions[graph.partner[number]]}'")
        else:
            for member in graph.collectives[graph.collective_of[number]]:
                needs(member, f"'{instruction}'")
    if instructions[here.index].op is Op.SEND and not found:
        # A send waits for an earlier one to the same peer, when too many are under way.
        found[instructions[here.index].peer * program.header.tensor + part] = "its receives"
    return found or _partners(program, rank, positions)


def _partners(program: Program, rank: int, positions: Mapping[int, Position]) -> dict[int, str]:
    """The processes of the same tensor-parallel rank that have not come as far: inside a layer all wait for all."""
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
    """An order of positions inside a pass: what follows the program comes last."""
    return position.index if position.index >= 0 else 1 << 60


def _state(position: Position) -> str:
    """The state letter of a rank's process: "T" stopped, "Z" or "" gone, else running."""
    try:
        return Path(f"/proc/{position.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _where(program: Program | None, rank: int, position: Position) -> str:
    if position.index in PLACES:
        return f"{PLACES[position.index]}, after pass {position.passes}"
    name = f"instruction {position.index}"
    if program is not None and position.index < len(own := program.ranks[rank // program.header.tensor]):
        name = f"'{own[position.index]}' ({name})"
    return f"at {name} of pass {position.passes}"


def _states(positions: Mapping[int, Position]) -> dict[int, str]:
    """The state letter of every known rank's process."""
    return {rank: _state(position) for rank, position in positions.items()}


def _culprit(
    program: Program, rank: int, positions: Mapping[int, Position], states: Mapping[int, str]
) -> tuple[int | None, list[str]]:
    """Follows who waits for whom from `rank` to one that waits for nobody; None: they wait in a circle."""
    lines: list[str] = []
    seen: list[int] = []
    current = rank
    while current not in seen:
        seen.append(current)
        if current not in positions or (current != rank and states[current] in ("T", "t", "Z", "")):
            return current, lines
        peers = waits_for(program, current, positions)
        if not peers:
            return current, lines
        # A rank that is stopped or gone explains more than one that also waits.
        bad = [peer for peer in peers if states.get(peer, "R") in ("T", "t", "Z", "")]
        peer = bad[0] if bad else min(peers)
        lines.append(f"rank {current} waits for {peers[peer]} of rank {peer}")
        current = peer
    return None, lines


def _verdict(
    program: Program | None,
    culprit: int | None,
    positions: Mapping[int, Position],
    states: Mapping[int, str],
    seconds: float,
    own: int,
) -> str:
    if culprit is None:
        return f"the ranks wait for each other in a circle (for {seconds:.0f} s)"
    if culprit not in positions:
        return f"rank {culprit} is to blame: where it is is not known on this machine"
    state, where = states[culprit], _where(program, culprit, positions[culprit])
    if state in ("T", "t") and culprit != own:
        return f"rank {culprit} is stopped (by SIGSTOP or a debugger), {where}"
    if state in ("Z", ""):
        return f"rank {culprit} has ended without a word, {where}"
    if positions[culprit].index == MEETING:
        return f"rank {culprit} does not meet the others: {where}"
    if positions[culprit].index == OUTSIDE:
        return f"rank {culprit} has been outside the program too long: {where}"
    return f"rank {culprit} does not go on, though it waits for no other rank: {where}"


def hang_report(
    rank: int,
    program: Program | None,
    positions: Mapping[int, Position],
    stood_s: float,
    deadline_s: float,
    num_ranks: int,
    stacks: Callable[[int], str] = lambda rank: "",
) -> str:
    """One page about a rank that hangs: the verdict, the chain that leads to it, and where every rank is.

    Args:
        rank: that found out.
        program: that it runs.
        positions: of all ranks that are known.
        stood_s: seconds it has stood at its instruction.
        deadline_s: seconds it may.
        num_ranks: of the run.
        stacks: gives the Python stack of a rank, "" if it cannot be had.
    """
    states = _states(positions)
    culprit, chain = (rank, []) if program is None else _culprit(program, rank, positions, states)
    lines = [
        _verdict(program, culprit, positions, states, stood_s, rank),
        f"seen by rank {rank}, which stood still for {stood_s:.1f} s, {_where(program, rank, positions[rank])} "
        f"(deadline {deadline_s:.1f} s; PIPEFIT_DEADLINE_S changes it, 0 turns it off)",
        *chain,
        "where the ranks are:",
    ]
    for other in range(num_ranks):
        if other in positions:
            mark = {"T": "stopped, ", "t": "stopped, ", "Z": "ended, ", "": "ended, "}.get(states[other], "")
            lines.append(f"  rank {other}: {mark}{_where(program, other, positions[other])}")
        else:
            lines.append(f"  rank {other}: not known on this machine")
    if culprit in positions and states[culprit] in ("R", "S", "D") and (stack := stacks(culprit)):
        lines += [f"what rank {culprit} was doing (innermost call first):", stack.rstrip()]
    return "\n".join(lines) + "\n"
