"""A second simulator, which shares nothing with the first but the laws of needs and costs: it lets a clock tick."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.waits import chain

from pipefit.cost import CostModel
from pipefit.errors import InvalidProgramError
from pipefit.ir.graph import dependency_graph
from pipefit.ir.op import OP_SPEC, Lane, Op
from pipefit.ir.values import MAKES, NEEDS
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.spec import Level, Topology
from pipefit.timeline import waited_for

pytestmark = pytest.mark.slow


class HangError(Exception):
    pass


class TieError(Exception):
    """Two messages want a link or port at the same moment: which goes first is nobody's law."""


def predecessors(program):
    """For each (rank, index): the indices before it on its rank that made what it needs."""
    found = {}
    for rank, instructions in enumerate(program.ranks):
        for index, i in enumerate(instructions):
            found[rank, index] = before = set()
            for value in NEEDS[i.op](i, program, rank):
                makers = [j for j in range(index) if value in MAKES[instructions[j].op](instructions[j], program, rank)]
                before.update(makers if value.kind == "wgrad" else makers[-1:])
    return found


def tick_by_tick(program, cost, repeats=1, contention=False):
    """Start and end of everything, by (rank, repeat, index); all costs must be whole numbers."""
    before = predecessors(program)
    graph = dependency_graph(program)
    awaited = {(rank, index) for (rank, _), indices in before.items() for index in indices}
    # A pass ends with the reductions that nothing in it awaits: the executor, too, waits for all that is left.
    closing = {graph.place(number) for group in graph.collectives for number in group} - awaited
    groups = [tuple(map(graph.place, pair)) for pair in {tuple(sorted(item)) for item in graph.partner.items()}]
    groups += [tuple(map(graph.place, group)) for group in graph.collectives]
    waiting = {(group, lap) for group in groups for lap in range(repeats)}
    start, end, posted, ready, link_free = {}, {}, {}, {}, {}
    at = [(0, 0)] * len(program.ranks)
    state = ["next"] * len(program.ranks)
    free = [0] * len(program.ranks)

    def known(rank, lap, index):
        return all(end.get((rank, lap, j), now + 1) <= now for j in before[rank, index])

    def advance(rank):
        lap, index = at[rank]
        if lap == repeats or free[rank] > now:
            return False
        if index == len(program.ranks[rank]):
            if any(end.get((r, lap, j), now + 1) > now for r, j in closing if r == rank):
                return False
            at[rank] = lap + 1, 0
            return True
        i, key = program.ranks[rank][index], (rank, lap, index)
        if state[rank] == "next" and OP_SPEC[i.op].lane is Lane.COMPUTE:
            if not known(rank, lap, index):
                return False
            start[key], end[key] = now, now + cost.duration_s(i, rank)
            free[rank], at[rank] = end[key], (lap, index + 1)
        elif state[rank] == "next":
            start[key], free[rank], state[rank] = now, now + cost.duration_s(i, rank), "issuing"
        elif state[rank] == "issuing":
            posted.setdefault(key, now)
            state[rank], at[rank] = "next", (lap, index + 1)
        return True

    def travel(group):
        rank, index = group[0]
        i = program.ranks[rank][index]
        if i.op is Op.REDUCE:
            members = sorted(rank for rank, _ in group)
            return set(cost.reduction_ports(i, members)), cost.reduce_s(i, members)
        sender, send = next((r, program.ranks[r][j]) for r, j in group if program.ranks[r][j].op is Op.SEND)
        link = {(sender, send.peer)} if contention else set()
        return link | set(cost.ports(sender, send.peer)), cost.message_s(send, sender)

    def deliver():
        for group, lap in waiting:
            if (group, lap) not in ready and all((r, lap, j) in posted and known(r, lap, j) for r, j in group):
                ready[group, lap] = now
        moved = False
        promised = set()
        for group, lap in sorted(waiting & ready.keys(), key=lambda item: ready[item]):
            lanes, seconds = travel(group)
            if lanes:
                # Those that came at this moment and have gone are rivals too.
                rivals = [g for g in ready if g != (group, lap) and ready[g] == ready[group, lap]]
                if any(travel(g[0])[0] & lanes for g in rivals):
                    raise TieError
                if lanes & promised or any(link_free.get(lane, 0) > now for lane in lanes):
                    promised |= lanes
                    continue
                link_free.update(dict.fromkeys(lanes, now + seconds))
            for rank, index in group:
                end[rank, lap, index] = now + seconds
            waiting.discard((group, lap))
            moved = True
        return moved

    now = 0
    while True:
        while any([advance(rank) for rank in range(len(at))] + [deliver()]):
            pass
        if all(lap == repeats for lap, _ in at) and not waiting:
            return start, end
        later = [time for time in [*free, *end.values(), *link_free.values()] if time > now]
        if not later:
            raise HangError
        now = min(later)


whole = st.integers(0, 6)
NAMES = ["naive", "data-parallel", "gpipe", "1f1b", "interleaved", "breadth-first", "pipedream", "pipedream-2bw"]


@st.composite
def programs(draw):
    name = draw(st.sampled_from(NAMES))
    p = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 2)) if name in ("interleaved", "breadth-first") else 1
    replicas = draw(st.sampled_from([(), (), (2,) * p])) if name != "data-parallel" and chunks == 1 and p < 4 else ()
    tieable = p > 1 and name not in ("data-parallel", "pipedream")
    shape = Shape(
        p,
        draw(st.integers(4, 6)),
        num_chunks=chunks,
        num_steps=draw(st.integers(1, 2)),
        replicas=replicas,
        recompute=draw(st.sampled_from([(), None])),
        clip=draw(st.booleans()),
        ties=((0, p * chunks - 1),) if tieable and draw(st.booleans()) else (),
        ahead=draw(st.integers(0, 3)),
    )
    return generate(name, shape)


@st.composite
def shaken(draw):
    """A program with some neighbours swapped: often still valid, sometimes hanging."""
    program = draw(programs())
    ranks = [list(instructions) for instructions in program.ranks]
    for _ in range(draw(st.integers(0, 4))):
        rank = draw(st.integers(0, len(ranks) - 1))
        i = draw(st.integers(0, len(ranks[rank]) - 2))
        ranks[rank][i], ranks[rank][i + 1] = ranks[rank][i + 1], ranks[rank][i]
    program = program.with_ranks(ranks)
    assume(not dependency_graph(program).missing)
    return program


@st.composite
def costs(draw, header, least_latency=0):
    def each(numbers=whole):
        return tuple(draw(numbers) for _ in range(header.num_stages))

    return CostModel(
        each(), each(), each(), step_s=each(), loss_s=draw(whole), load_s=draw(whole), act_bytes=each(),
        weight_bytes=tuple(4 * 3 * size for size in each()), bandwidth_bytes_per_s=Fraction(1, 2),
        latency_s=draw(st.integers(least_latency, 6)), post_s=draw(whole), copy_s_per_byte=draw(st.integers(0, 2)),
        overhead_s=draw(st.integers(0, 1)),
        speed=tuple(Fraction(1, draw(st.integers(1, 3))) for _ in range(header.num_ranks)),
    )  # fmt: skip


def agree(program, cost, repeats=1, **options):
    try:
        start, end = tick_by_tick(program, cost, repeats, options.get("contention", False))
    except HangError:
        start = None
    try:
        timeline = simulate(program, cost, repeats=repeats, **options)
    except InvalidProgramError as problem:
        assert str(problem).startswith("the program hangs")
        assert start is None
        return
    assert start is not None
    for event in timeline.events:
        key = event.rank, event.repeat, event.position
        assert (event.start_s, event.end_s) == (start[key], end[key]), (key, timeline.instruction(event))


@pytest.mark.long
@given(shaken(), st.data(), st.integers(1, 2))
def test_a_ticking_clock_gives_the_same_times(program, data, repeats):
    agree(program, data.draw(costs(program.header)), repeats)


def test_a_pass_waits_for_the_last_reductions_of_the_one_before_even_where_no_instruction_does():
    # The reduction of tied weights comes after the step, so that nothing awaits it.
    program = generate("naive", Shape(2, 4, ties=((0, 1),)))
    ranks = [list(instructions) for instructions in program.ranks]
    (tied,) = (i for i in ranks[0] if i.op is Op.REDUCE)
    ranks[0] = [i for i in ranks[0] if i.op is not Op.REDUCE] + [tied]
    late = program.with_ranks(ranks)
    cost = CostModel((1, 1), (1, 1), (1, 1), step_s=(1, 1), weight_bytes=(8, 8), bandwidth_bytes_per_s=1)
    agree(late, cost, repeats=2)
    timeline = simulate(late, cost, repeats=2)
    reduced = max(
        event.end_s for event in timeline.events if (event.repeat, timeline.instruction(event).op) == (0, Op.REDUCE)
    )
    assert min(event.start_s for event in timeline.events if event.rank == 0 and event.repeat == 1) >= reduced


@given(programs(), st.data())
def test_a_ticking_clock_gives_the_same_times_under_contention(program, data):
    try:
        agree(program, data.draw(costs(program.header, least_latency=1)), contention=True)
    except TieError:
        assume(False)


def with_ports(cost, header):
    """The same links, with one port each way for every rank."""
    level = Level("", header.num_ranks, cost.bandwidth_bytes_per_s, cost.latency_s, one_port=True)
    return replace(cost, topology=Topology((level,)))


@given(programs(), st.data())
@settings(suppress_health_check=[HealthCheck.filter_too_much])
def test_a_ticking_clock_gives_the_same_times_where_links_share_ports(program, data):
    try:
        # Of messages at one moment, one of which takes no time, either may be first.
        agree(program, with_ports(data.draw(costs(program.header, least_latency=1)), program.header))
    except TieError:
        assume(False)


def test_a_reduction_and_a_message_that_want_a_port_at_one_moment_are_a_tie():
    program = generate("pipedream-2bw", Shape(2, 4, num_steps=2, replicas=(2, 2), clip=True))
    cost = CostModel((0, 0), (0, 0), (0, 0), weight_bytes=(12, 0), bandwidth_bytes_per_s=Fraction(1, 2), latency_s=1)
    with pytest.raises(TieError):
        agree(program, with_ports(cost, program.header))


def test_a_reduction_that_waits_for_another_takes_its_port_when_it_is_ready_not_when_that_is_known():
    program = generate("pipedream-2bw", Shape(2, 4, num_steps=2, replicas=(2, 2), clip=True, ties=((0, 1),)))
    cost = CostModel(
        (0, 0), (0, 0), (0, 0), weight_bytes=(12, 0), bandwidth_bytes_per_s=Fraction(1, 2), latency_s=1, overhead_s=1
    )
    agree(program, with_ports(cost, program.header))


@given(shaken(), st.data())
def test_the_critical_path_is_without_gaps_and_as_long_as_the_makespan(program, data):
    cost = data.draw(costs(program.header))
    options = data.draw(st.sampled_from([{}, {"contention": True}]))
    if data.draw(st.booleans()):
        cost = with_ports(cost, program.header)
    try:
        timeline = simulate(program, cost, **options)
    except InvalidProgramError:
        assume(False)
    path = chain(timeline)
    assert path[-1].end_s == timeline.end_s
    assert waited_for(timeline, path[0]).reason == "start"
    covered = path[0].end_s
    for event in path[1:]:
        # Next to the links of the path there are only the posts, during which the rank is busy too.
        assert event.start_s - covered <= 6 * (cost.post_s + cost.copy_s_per_byte * 6)
        covered = max(covered, event.end_s)
