"""Search for a schedule by costs and memory: built-in ones, list schedules, and the neighbours of the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from pipefit.cost import CostModel, unit
from pipefit.errors import InfeasibleError, PipefitError, ScheduleError
from pipefit.ir.instruction import bwd, fwd
from pipefit.ir.liveness import device_peak_bytes, peak_inflight
from pipefit.ir.op import Kind, Op
from pipefit.ir.program import Header, Program, WeightRule
from pipefit.ir.values import Value
from pipefit.schedules import Schedule, Shape, find, names
from pipefit.schedules.written import written
from pipefit.simulate import simulate
from pipefit.synthesize.bound import bound_s
from pipefit.synthesize.order_problem import BACKWARD, INPUT, WEIGHT, Limit, Order, OrderProblem
from pipefit.synthesize.walk import EQUAL, Walk, with_whole_backwards
from pipefit.verify import verify
from pipefit.verify.memory_rules import for_each_rank

NAME = "synthesized"


@dataclass(frozen=True)
class Synthesis:
    """A schedule that was found.

    Attributes:
        schedule: a schedule for this one shape; it generates `program`.
        program: proved by the verifier.
        makespan_s: simulated.
        bound_s: a lower bound over all orders.
        built_in: seconds of each built-in schedule of this shape that respects the limit.
        num_candidates: number of orders examined.
        is_cut_short: whether the clock ended the search, so that another run may find something else.
    """

    schedule: Schedule
    program: Program
    makespan_s: float
    bound_s: float
    built_in: dict[str, float]
    num_candidates: int
    is_cut_short: bool

    @property
    def gap(self) -> float:
        """The distance from the bound, as a fraction of it; 0: nothing can be faster."""
        if self.bound_s:
            return max(self.makespan_s / self.bound_s - 1, 0.0)
        return 0.0

    @property
    def best_built_in(self) -> str | None:
        """The fastest built-in schedule; None: none respects the limit."""
        return min(self.built_in, key=self.built_in.__getitem__, default=None)


def header_of(num_ranks: int, num_microbatches: int, num_chunks: int = 1, layout: str = "loop") -> Header:
    """The header of the schedule to find; the cost model must be made for it.

    Raises:
        ScheduleError: a count below 1, or an unknown layout.
    """
    if layout not in ("loop", "wave"):
        raise ScheduleError(f"layout: expected loop or wave, got {layout!r}")
    return Shape(num_ranks, num_microbatches, num_chunks).header(NAME, layout, WeightRule.FLUSH)


def synthesize(
    header: Header,
    cost: CostModel | None = None,
    *,
    in_flight: float | Sequence[float] | None = None,
    capacity_bytes: float | Sequence[float] | None = None,
    split: bool = True,
    candidates: int = 20_000,
    seconds: float = 10.0,
    seed: int = 0,
) -> Synthesis:
    """Searches for the order of forwards and backwards with the least makespan.

    The search starts from the built-in schedules of the shape and from list schedules; in the best of them steps on
    critical paths are moved. It ends at the bound, after `candidates` orders, or after `seconds`; unless the time ends
    it, the same arguments give the same schedule. The result respects the limit, is proved by the verifier, and is no
    slower than any built-in schedule that respects the limit too.

    >>> found = synthesize(header_of(num_ranks=4, num_microbatches=8), in_flight=4)
    >>> found.makespan_s, found.bound_s, found.best_built_in
    (27, 27.0, 'zb-h1')

    Args:
        header: ranks, stages and micro-batches, as `header_of` makes it.
        cost: seconds and bytes; None: a forward takes 1 and so does each half of a backward. With a topology messages
            queue on its links.
        in_flight: micro-batches of a rank's layers whose activations it may hold, for each rank or for all.
        capacity_bytes: memory of each rank, likewise.
        split: whether backwards may come in halves.
        candidates: maximum number of orders to examine.
        seconds: maximum duration of the search.
        seed: the seed of the random moves.

    Raises:
        ScheduleError: a stage has several ranks, or a limit makes no sense.
        InfeasibleError: nothing respects the limit.
    """
    if candidates < 1 or not seconds > 0:
        raise PipefitError(f"expected at least one candidate and more than 0 seconds, got {candidates} and {seconds}")
    cost = cost or unit(header, 1, 2)
    counts = capacities = None
    if in_flight is not None:
        counts = for_each_rank("in_flight", in_flight, header.num_ranks, 1)
    if capacity_bytes is not None:
        capacities = for_each_rank("capacity_bytes", capacity_bytes, header.num_ranks, 0)
    limit = Limit(counts, capacities)
    one_by_one = _one_by_one(header)
    rivals = [program for program in _built_in(header) if split or not _has_halves(program)]
    static_bytes = _static_bytes([one_by_one, *rivals], cost)
    problem = OrderProblem.of(header, cost, limit, static_bytes, split)
    fitting = {program.header.schedule: program for program in rivals if limit.keeps(program, cost)}
    known = [problem.steps(program) for program in (*fitting.values(), one_by_one)]
    starts = known
    if split:
        starts = known + [_split(problem, order) for order in known]
    walk = Walk(problem, bound_s(problem), candidates, seconds)
    best = walk.run(starts, Random(seed))
    if split and best:
        best.insert(0, with_whole_backwards(problem, best[0]))
    found = []
    for order in (*best, *known):
        schedule = written(NAME, header, problem.instructions(order))
        program = schedule(_shape(header))
        if limit.keeps(program, cost):
            found.append((schedule, program))
    if not found:
        raise InfeasibleError(
            "no order respects the limit: each rank must be able to hold at least one micro-batch; allow more, or use "
            "more ranks"
        )
    took = [_makespan_s(program, cost) for _, program in found]
    limit_s = min(took) * (1 + EQUAL)
    # Of equally fast ones, the one with the least memory.
    equal = [place for place, seconds in enumerate(took) if seconds <= limit_s]
    held = [_held(program) for _, program in found]
    fastest = min(equal, key=held.__getitem__)
    schedule, program = found[fastest]
    verify(program).raise_if_bad()
    built_in = {name: _makespan_s(rival, cost) for name, rival in fitting.items()}
    return Synthesis(schedule, program, took[fastest], walk.bound, built_in, walk.looked_at, walk.is_cut_short)


def _has_halves(program: Program) -> bool:
    return any(i.op is Op.BWD_WEIGHT for _, _, i in program)


def _held(program: Program) -> float:
    return sum(peak_inflight(program, rank) for rank in range(len(program.ranks)))


def _shape(header: Header) -> Shape:
    return Shape(header.num_ranks, header.num_microbatches, header.num_stages // header.num_ranks)


def _makespan_s(program: Program, cost: CostModel) -> float:
    """The makespan as `pipefit simulate` gives it: links of a topology are shared, and sends wait for receives."""
    real = cost.topology is not None
    return simulate(program, cost, contention=real, rendezvous=real, memory=False).makespan_s


def _built_in(header: Header) -> Iterator[Program]:
    """The programs of the schedules that have this shape."""
    for name in names():
        made = find(name)
        if not made.is_synchronous or made.spills or made.layout not in ("loop", "wave"):
            continue
        try:
            program = made(_shape(header))
        except ScheduleError:
            continue
        if program.header.placement == header.placement:
            yield program


def _one_by_one(header: Header) -> Program:
    """One micro-batch at a time: the order that needs the least memory, in any shape."""
    ranks = []
    for rank in range(header.num_ranks):
        stages = header.stages_of(rank)
        order = []
        for mb in range(header.num_microbatches):
            order += [fwd(stage, mb) for stage in stages]
            order += [bwd(stage, mb) for stage in reversed(stages)]
        ranks.append(order)
    return written(NAME, header, ranks)(_shape(header))


def _static_bytes(programs: Sequence[Program], cost: CostModel) -> list[float]:
    """Bytes that ranks hold in addition to activations: the minimum over the given schedules."""

    def size(value: Value) -> float:
        if value.kind in (Kind.SAVED.value, Kind.HALF.value):
            return 0
        return cost.size_bytes(value)

    header = programs[0].header
    found = []
    for rank in range(header.num_ranks):
        states = cost.resident_bytes(header.stages_of(rank))
        found.append(min(device_peak_bytes(program, rank, size, states)[0] for program in programs))
    return found


def _split(problem: OrderProblem, order: Order) -> Order:
    """Splits the whole backwards of an order into halves: then gradients leave earlier."""
    count = problem.header.num_stages
    found = []
    for steps in order:
        halves = []
        for step in steps:
            kind, stage = divmod(step, count)
            if kind == BACKWARD:
                halves += [INPUT * count + stage, WEIGHT * count + stage]
            else:
                halves.append(step)
        found.append(halves)
    return found
