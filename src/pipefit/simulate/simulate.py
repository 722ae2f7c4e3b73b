"""Program and costs in, Timeline out."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, repeat

from pipefit.cost import CostModel
from pipefit.errors import InvalidProgramError, PlanError
from pipefit.ir.graph import Graph, collective_members
from pipefit.ir.op import Kind, Op
from pipefit.ir.program import Program
from pipefit.ir.residency import kept_fetches
from pipefit.simulate.event_engine import EventEngine, Key, Prices
from pipefit.simulate.flat_program import Code, FlatProgram, flat_program
from pipefit.simulate.occupancy import memory_over_time
from pipefit.simulate.sharing import Machine, SharingEngine
from pipefit.timeline import Event, Timeline


def simulate(
    program: Program,
    cost: CostModel,
    *,
    repeats: int = 1,
    contention: bool = False,
    rendezvous: bool = True,
    memory: bool = True,
) -> Timeline:
    """Times of each instruction's start and end.

    Every rank issues its list in order. An instruction of the compute lane starts when the rank is free and what it
    needs has arrived. Any other is issued and completes asynchronously: a message starts when both sides have posted
    it, a reduction when all members have, a copy when its lane is free; where reads and writes of a tier alternate,
    they move in each other's gaps. Weights that lie in their slots since the pass before are not read. Where a machine
    of the topology has fewer cores than processes, those that work at the same time share them evenly.

    >>> from pipefit.cost import unit
    >>> from pipefit.schedules import Shape, generate
    >>> program = generate("1f1b", Shape(depth=4, num_microbatches=8))
    >>> simulate(program, unit(program.header)).makespan_s
    33

    Args:
        program: what to run.
        cost: seconds and bytes.
        repeats: passes over the program, one after the other on each rank, without a barrier between them.
        contention: messages on the same link (from one rank to another) travel one at a time, in the order in which
            both their sides have posted them. So does, with or without it, whatever goes through the same port of a
            level of the topology that has one (`Level.one_port`): a message occupies the sender's port out and the
            receiver's port in, a reduction those of all its members.
        rendezvous: False: a message starts when it is sent, whether or not its receive is posted yet, so that how far
            ahead receives are posted changes nothing: the closed forms of the papers assume this.
        memory: whether to follow the memory of each rank.

    Raises:
        InvalidProgramError: something waits for what never comes; the message names both.
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
            "where messages take turns on links or ports, their order is that in which both sides have posted them, so "
            "it needs rendezvous"
        )
    options = {"contention": contention, "no_rendezvous": not rendezvous}
    notes = {name: 1.0 for name, value in options.items() if value}
    if cost.has_ports:
        notes["port_unit"] = float(cost.port_unit)
    with collector_paused():
        engine = _run(program, cost, repeats, contention, rendezvous)
        samples = memory_over_time(program, cost, engine) if memory else ()
        return Timeline(program, _events(engine), samples, num_repeats=repeats, notes=notes)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses Python's search for cycles.

    It would walk over all the small tuples made here, again and again, and find none; without it this takes half the
    time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run(program: Program, cost: CostModel, repeats: int, contention: bool, rendezvous: bool) -> EventEngine:
    layout = flat_program(program)
    _check(layout)
    prices = _prices(layout, cost, contention, rendezvous)
    engine = _engine(layout, prices, repeats, contention or cost.has_ports, cost)
    engine.run()
    if min(engine.end, default=0) < 0:
        raise InvalidProgramError(_hang(engine))
    return engine


def _engine(layout: FlatProgram, prices: Prices, repeats: int, contention: bool, cost: CostModel) -> EventEngine:
    """The clock, or that of ranks that share cores where a machine has more of them than it has cores."""
    places = [cost.machine_of(rank) for rank in range(len(layout.graph.program.ranks))]
    cores = dict(places)
    crowds = Counter(machine for machine, _ in places)
    if all(crowds[machine] <= num for machine, num in cores.items()):
        return EventEngine(layout, prices, repeats, contention)
    numbers = {machine: number for number, machine in enumerate(cores)}
    machines = [Machine(num) for num in cores.values()]
    of = [numbers[machine] for machine, _ in places]
    return SharingEngine(layout, prices, repeats, contention, machines=machines, machine_of=of)


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
        side = "receive" if graph.instructions[number].op is Op.SEND else "send"
        raise InvalidProgramError(f"{name(number)} has no matching {side}: it would wait for ever")
    for group in graph.collectives:
        expected = collective_members(graph.program.header, graph.instructions[group[0]])
        absent = sorted(set(expected) - {graph.ranks[number] for number in group})
        if absent:
            raise InvalidProgramError(f"{name(group[0])} is a collective that ranks {absent} never join")


def _prices(layout: FlatProgram, cost: CostModel, contention: bool, rendezvous: bool) -> Prices:
    graph = layout.graph
    hold_of = [cost.duration_s(i, rank) for i, rank in layout.kinds]
    travel_of: list[float] = [_travel_s(cost, layout, i.op, index) for index, (i, _) in enumerate(layout.kinds)]
    travel = [travel_of[index] for index in layout.costs]
    lanes: dict[int, tuple[Key, ...]] = {}
    channels: dict[int, Key] = {}
    groups: dict[int, tuple[int, ...]] = {}
    for group in graph.collectives:
        first = graph.instructions[group[0]]
        members = sorted(graph.ranks[number] for number in group)
        seconds, ports = cost.reduce_s(first, members), cost.reduction_ports(first, members)
        for number in group:
            if ports:
                lanes[number] = ports
            groups[number] = group
            travel[number] = seconds
    for number, i in enumerate(graph.instructions):
        if i.op is Op.RECV:
            travel[number] = travel[layout.partners[number]] if rendezvous else 0
            held = _message_lanes(cost, i.peer, graph.ranks[number], contention)
            if held:
                lanes[number] = lanes[layout.partners[number]] = held
        elif i.op is Op.FETCH or i.op is Op.EVICT or i.op is Op.HOST_STEP:
            lanes[number] = ((graph.ranks[number], i.op, i.tier),)
            if i.op is not Op.HOST_STEP and cost.tier_of(i).one_channel:
                channels[number] = graph.ranks[number], i.tier
    hold = [hold_of[index] for index in layout.costs]
    commit_s = _commit_s(graph, cost)
    kept, later = _kept(graph, later=False), _kept(graph, later=True)
    for number in kept:
        travel[number] = 0
    return Prices(
        hold,
        travel,
        lanes,
        groups,
        _copies(graph) | dict.fromkeys(later, ()),
        later,
        (_arrivals(layout, cost, kept), _arrivals(layout, cost, later)),
        channels,
        _closing(layout, commit_s > 0),
        cost.pass_s + commit_s,
    )


def _kept(graph: Graph, later: bool) -> frozenset[int]:
    """The fetches that move nothing, by number."""
    ranks = enumerate(graph.starts[:-1])
    return frozenset(start + index for rank, start in ranks for index in kept_fetches(graph.program, rank, later))


def _arrivals(layout: FlatProgram, cost: CostModel, kept: frozenset[int]) -> dict[int, float]:
    """Seconds a rank spends on what has come, by the first that waits for it: on messages, and checksums of fetches."""
    graph = layout.graph
    checks = graph.program.header.spill is not None and any(tier.check_bytes_per_s for tier in cost.tiers)
    if not (checks or cost.arrival_s):
        return {}
    found: dict[int, float] = {}
    counted = set(kept)
    for number, code in enumerate(layout.codes):
        for awaited in layout.waits[number] if code == Code.WAIT else ():
            came = graph.instructions[awaited]
            if awaited in counted or came.op not in (Op.RECV, Op.FETCH):
                continue
            counted.add(awaited)
            seconds = cost.arrival_s if came.op is Op.RECV else cost.check_s(came)
            found[number] = found.get(number, 0) + seconds
    return found


def _message_lanes(cost: CostModel, source: int, target: int, contention: bool) -> tuple[Key, ...]:
    """The links and ports that a message occupies while it travels."""
    ports = cost.ports(source, target)
    return (*ports, (source, target)) if contention else ports


def _commit_s(graph: Graph, cost: CostModel) -> float:
    """Seconds that ranks wait between two passes for a commit of the tier; a single rank does not."""
    header = graph.program.header
    if header.spill is None or header.num_ranks == 1:
        return 0
    # A whole 0, so that exact costs stay exact.
    return next((tier.commit_s for tier in cost.tiers if tier.name == header.spill.tier and tier.commit_s), 0)


def _closing(layout: FlatProgram, commits: bool) -> list[list[int]]:
    """Of each rank, the instructions that the next pass waits for and nothing in this one.

    Those are reductions whose end no instruction waits for, such as those that put weights together; steps on the host,
    whose optimizers may be read between two passes; and where steps are committed, all evictions.
    """
    awaited = {number for needed in layout.waits for number in needed}
    result: list[list[int]] = [[] for _ in layout.graph.starts[1:]]
    for group in layout.graph.collectives:
        for number in group:
            if number not in awaited:
                result[layout.graph.ranks[number]].append(number)
    for number, i in enumerate(layout.graph.instructions):
        if i.op is Op.HOST_STEP or (commits and i.op is Op.EVICT):
            result[layout.graph.ranks[number]].append(number)
    return result


def _copies(graph: Graph) -> dict[int, tuple[int, ...]]:
    """Each copy; for a fetch, the evictions of the pass before that it needs: of its value, and of its slot's content.

    Only evictions of the pass before are here: the rest is in the graph.
    """
    last: dict[tuple[object, ...], int] = {}
    written: dict[int, list[tuple[object, ...]]] = {}
    found: dict[int, tuple[int, ...]] = {}
    slots: dict[tuple[object, ...], int] = {}
    for number, i in enumerate(graph.instructions):
        rank = graph.ranks[number]
        if i.op is Op.FETCH:
            slots[rank, i.kind, i.stage] = i.slot
            written[number] = [] if graph.preds[number] else [(rank, i.kind, i.stage), (rank, i.kind, i.slot, "slot")]
        elif i.op is Op.EVICT:
            found[number] = ()
            last[rank, i.kind, i.stage] = last[rank, i.kind, slots.get((rank, i.kind, i.stage), -1), "slot"] = number
        elif i.op is Op.HOST_STEP:
            found[number] = ()
            last[rank, Kind.WEIGHTS.value, i.stage] = number
    return found | {number: tuple({last[key] for key in keys if key in last}) for number, keys in written.items()}


def _travel_s(cost: CostModel, layout: FlatProgram, op: Op, index: int) -> float:
    i, rank = layout.kinds[index]
    if op is Op.SEND:
        return cost.message_s(i, rank)
    return cost.local_s(i, rank) if op in (Op.GATHER, Op.FETCH, Op.EVICT, Op.HOST_STEP) else 0


def _events(engine: EventEngine) -> tuple[Event, ...]:
    starts = engine.layout.graph.starts
    size = starts[-1]
    events: list[Event] = []
    for rank, (first, last) in enumerate(pairwise(starts)):
        for lap in range(engine.repeats):
            a, b = lap * size + first, lap * size + last
            rows = zip(repeat(rank), range(b - a), repeat(lap), engine.start[a:b], engine.end[a:b], strict=False)
            events += map(Event._make, rows)
    return tuple(events)


def _hang(engine: EventEngine) -> str:
    """The instruction at which each rank waits, and what it waits for."""
    graph = engine.layout.graph
    size = len(graph.instructions)
    lines = []
    for rank, waiting in enumerate(engine.blocked_on):
        if waiting < 0:
            continue
        this, awaited = engine.at[rank] % size, waiting % size
        line = f"rank {rank} stands at instruction {graph.place(this)[1]} ({graph.instructions[this]})"
        if awaited != this:
            line += f" and waits for {graph.instructions[awaited]}"
        lines.append(f"{line}, {_awaited_sides(engine, waiting)}")
    if not lines:
        stuck = next(n for n, end in enumerate(engine.end) if end < 0) % size
        lines = [f"{graph.instructions[stuck]} on rank {graph.ranks[stuck]} needs its own result"]
    return "the program hangs:\n  " + "\n  ".join(lines)


def _awaited_sides(engine: EventEngine, n: int) -> str:
    graph = engine.layout.graph
    i = n % len(graph.instructions)
    partner = engine.layout.partners[i]
    sides = (i, partner) if partner >= 0 else engine.prices.groups.get(i, (i,))
    names = []
    for side in sides:
        rank, index = graph.place(side)
        if engine.posted[n - i + side] < 0:
            names.append(f"which rank {rank} has not reached (its instruction {index}: {graph.instructions[side]})")
        elif side != i:
            names.append(f"which rank {rank} has issued")
    return "; ".join(names) or "which waits for another message"
