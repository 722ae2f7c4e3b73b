"""Program and costs in, Timeline out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, repeat

from pipefit.cost import CostModel
from pipefit.errors import InvalidProgramError, PlanError
from pipefit.ir.blocking import Blocking
from pipefit.ir.collector import collector_paused
from pipefit.ir.graph import Graph, collective_members
from pipefit.ir.op import WORK_OPS, Op
from pipefit.ir.program import Program
from pipefit.simulate.event_engine import EventEngine
from pipefit.simulate.flat_program import FlatProgram, flat_program
from pipefit.simulate.occupancy import memory_over_time
from pipefit.simulate.prices import prices_of
from pipefit.simulate.sharing import Machine
from pipefit.spec.plan import COMING_AND_GOING
from pipefit.timeline.timeline import Event, Timeline, step_of


def simulate(
    program: Program,
    cost: CostModel,
    *,
    repeats: int = 1,
    contention: bool = False,
    rendezvous: bool = True,
    memory: bool = True,
    steps_only: bool = False,
) -> Timeline:
    """Times of each instruction's start and end.

    Every rank issues its list in order. An instruction of the compute lane starts when the rank is free and the values
    it needs have arrived. Any other is issued and completes asynchronously: a message starts when both sides have
    posted it, a reduction when all members have, a copy when its lane is free; where reads and writes of a tier
    alternate, each uses the gaps of the other. Weights that are still in their slots from the pass before are not read.
    Where a machine of the topology has fewer cores than processes, those that work at the same time share them evenly.

    >>> from pipefit.cost import unit
    >>> from pipefit.schedules import Shape, generate
    >>> program = generate("1f1b", Shape(depth=4, num_microbatches=8))
    >>> simulate(program, unit(program.header)).makespan_s
    33

    Args:
        program: to simulate.
        cost: seconds and bytes.
        repeats: passes over the program, one after the other on each rank, without a barrier between them.
        contention: messages on the same link (from one rank to another) travel one at a time, in the order in which
            both their sides have posted them. Messages and reductions through a shared port (`Level.one_port`) do so in
            any case: a message occupies the sender's port out and the receiver's port in, a reduction those of all its
            members.
        rendezvous: False: a message starts when it is sent, even if its receive is not posted yet, as the closed forms
            of the papers assume.
        memory: whether to record the memory of each rank.
        steps_only: no memory, and only the events at which a step or the forwards of a rank begin or end (all of a
            program that spills): enough for makespan, ends of steps and period, but not for busy times.

    Raises:
        InvalidProgramError: an instruction waits for something that never happens; the message names both.
        PlanError: the cost model is for another number of stages or ranks.
    """
    if cost.num_stages != program.header.num_stages:
        raise PlanError(f"cost is for {cost.num_stages} stages, the program has {program.header.num_stages}")
    if cost.speed and len(cost.speed) < len(program.ranks):
        raise PlanError(f"cost.speed has {len(cost.speed)} ranks, the program {len(program.ranks)}")
    if program.header.pieces and cost.tensor != program.header.tensor:
        raise PlanError(f"cost.tensor: the program's pieces are 1/{program.header.tensor}, got {cost.tensor}")
    if repeats < 1:
        raise PlanError(f"repeats: expected at least 1, got {repeats}")
    if (contention or cost.has_ports) and not rendezvous:
        raise PlanError(
            "messages that share links or ports travel in the order in which both sides have posted them, so "
            "contention needs rendezvous"
        )
    options = {"contention": contention, "no_rendezvous": not rendezvous}
    notes = {name: 1.0 for name, value in options.items() if value}
    if cost.has_ports:
        notes["port_unit"] = float(cost.port_unit)
    with collector_paused():
        engine = _run(program, cost, repeats, contention, rendezvous)
        timeline = Timeline(program, _events(engine, steps_only), num_repeats=repeats, notes=notes)
        if memory and not steps_only:
            timeline = replace(timeline, memory=memory_over_time(timeline, cost))
        return timeline


def _run(program: Program, cost: CostModel, repeats: int, contention: bool, rendezvous: bool) -> EventEngine:
    layout = flat_program(program)
    _check(layout)
    # Ranks share cores only where a machine has more ranks than cores.
    places = [cost.machine_of(rank) for rank in range(len(program.ranks))]
    crowds = Counter(places)
    machines = {place: Machine(place[1]) for place in crowds}
    shares = any(num > cores for (_, cores), num in crowds.items())
    if shares:
        cores = [machines[place] for place in places]
    else:
        cores = []
    prices = prices_of(layout, cost, contention, rendezvous)
    waits = contention or cost.has_ports or program.header.shard in COMING_AND_GOING
    engine = EventEngine(layout, prices, repeats, waits, cores)
    engine.run()
    if min(engine.end, default=0) < 0:
        raise InvalidProgramError(_hang(layout.graph))
    return engine


def _check(layout: FlatProgram) -> None:
    graph = layout.graph

    def name(number: int) -> str:
        rank, index = graph.place(number)
        return f"rank {rank}, instruction {index} ({graph.instructions[number]})"

    if graph.missing:
        number, value = graph.missing[0]
        raise InvalidProgramError(f"{name(number)} needs {value}, which nothing before it makes on that rank")
    if graph.unmatched:
        number = graph.unmatched[0]
        if graph.instructions[number].op is Op.SEND:
            side = "receive"
        else:
            side = "send"
        raise InvalidProgramError(f"{name(number)} has no matching {side}: it would wait for ever")
    for group in graph.collectives:
        expected = collective_members(graph.program.header, graph.instructions[group[0]])
        present = {graph.ranks[number] for number in group}
        absent = sorted(set(expected) - present)
        if absent:
            raise InvalidProgramError(f"{name(group[0])} is a collective that ranks {absent} never join")


def _events(engine: EventEngine, steps_only: bool) -> tuple[Event, ...]:
    graph = engine.layout.graph
    starts = graph.starts
    program = graph.program
    picks = steps_only and program.header.spill is None
    size = starts[-1]
    events: list[Event] = []
    for rank, (first, last) in enumerate(pairwise(starts)):
        shown = _milestones(program, rank) if picks else range(last - first)
        for lap in range(engine.repeats):
            entries = [lap * size + first + index for index in shown]
            times = [map(column.__getitem__, entries) for column in (engine.start, engine.end)]
            events += map(Event, repeat(rank), shown, repeat(lap), *times)
    return tuple(events)


def _milestones(program: Program, rank: int) -> list[int]:
    """The first work of a rank, its last of each step, and its last forward of a stage that trains."""
    header = program.header
    instructions = program.ranks[rank]
    last: dict[int | Op, int] = {}
    for index, i in zip(reversed(range(len(instructions))), reversed(instructions), strict=True):
        if i.op in WORK_OPS:
            last.setdefault(step_of(header, i), index)
        if i.op is Op.FWD and i.stage >= header.frozen:
            last.setdefault(Op.FWD, index)
        if len(last) == header.num_steps + 2:  # every step, no step, and a forward
            break
    for index, i in enumerate(instructions):
        if i.op in WORK_OPS:
            return sorted({index, *last.values()})
    return [0]


def _hang(graph: Graph) -> str:
    """The instruction at which each rank waits, and the one it waits for."""
    run = Blocking(graph)
    lines = ["the program hangs:"]
    for this in run.run().values():
        rank, index = graph.place(this)
        awaited = run.waits_for(this)
        here = this
        for side in graph.sides(awaited):
            if graph.ranks[side] == rank:
                here = side
        peer, there = graph.place(awaited)
        line = f"  rank {rank} is at instruction {index} ({graph.instructions[this]})"
        if here != this:
            line += f" and waits for {graph.instructions[here]}"
        lines.append(
            f"{line}, which rank {peer} has not reached (its instruction {there}: {graph.instructions[awaited]})"
        )
    return "\n".join(lines)
