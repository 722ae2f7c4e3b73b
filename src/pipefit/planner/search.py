"""Search without a cap, the best first: every candidate waits with a lower bound, until the least one is exact.

    candidate ── bound of any cut ──► cut, memory ── bound of the cut ──► simulated

The candidate with the least bound is looked at more closely, and waits again with a better bound. Where the least one
is simulated, no other can be faster. So the answer is the fastest of all candidates, of whatever list: fewer candidates
never give a faster plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from operator import itemgetter
from typing import NamedTuple

import msgspec

from pipefit.errors import InfeasibleError
from pipefit.planner.bounds import quick_bytes, quick_s
from pipefit.planner.candidate import LESS_SHARED, Estimate, plan_of
from pipefit.planner.estimate import bounded, estimate, need_bytes, of_cut_s
from pipefit.planner.plan_figures import idle_share, sent_bytes
from pipefit.planner.shared_copies import sharing_more
from pipefit.planner.simulated import simulated, size_of
from pipefit.planner.space import Config, Problem, Space
from pipefit.spec import Candidate, Partition, StageSpec
from pipefit.spec.plan import SHARDS, Shard
from pipefit.units import format_bytes

# Families whose best candidate is found for the table, the winner's included.
_SHOWN = 6
# Families that are further behind the winner are shown with their bounds.
_CLOSE = 1.15
# Forwards that the simulations for the table may take.
_BUDGET = 10_000
_PLAIN = "data parallel"

NOTHING, SIMULATION, MEMORY, CUT, TIMES = range(5)
"""The next missing figure of a candidate: of equal bounds the most exact one comes first."""


@dataclass
class Frontier:
    """Candidates with their lower bounds, and what is known of the families of which none fits.

    Attributes:
        problem: that they solve.
        waiting: a heap of bounds, what is missing (of equal bounds the most exact first), numbers, and candidates,
            at first without a cut.
        settled: families whose fastest candidate was found.
        unfit: of each family the candidate that lacks the least memory, of those that were looked at.
        spent: simulated forwards.
        space: whose copies share more where a candidate does not fit; None: they share what is listed.
        failed: candidates that do not fit.
    """

    problem: Problem
    waiting: list[tuple[float, int, int, Estimate]] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)
    unfit: dict[str, Estimate] = field(default_factory=dict)
    spent: int = 0
    space: Space | None = None
    failed: list[Config] = field(default_factory=list)
    _seen: dict[tuple[Config, Partition], Config] = field(default_factory=dict)
    _count: int = 0

    def add(self, bound_s: float, missing: int, candidate: Estimate) -> None:
        """Puts a candidate among those that wait, with the number of the step that comes next."""
        self._count += 1
        # Seconds without their last digits: sums in another order differ in these.
        rounded_s = float(f"{bound_s:.11g}")
        heappush(self.waiting, (rounded_s, missing, self._count, candidate))

    def offer(self, config: Config) -> None:
        """Takes a candidate with its bound, unless it cannot fit."""
        limit = _most_memory(self.problem)
        need = 0.0
        if math.isfinite(limit):
            need = quick_bytes(self.problem, config)
        if need <= limit:
            self.add(quick_s(self.problem, config), TIMES, Estimate(config, None))
        else:
            self.lacks(_too_large(config, need, limit))

    def next(self, limit_s: float = math.inf, most: float = math.inf) -> Estimate | None:
        """The fastest candidate of a family that is not settled yet.

        Args:
            limit_s: None is returned where all are slower.
            most: None is returned where more forwards than these would have to be simulated.
        """
        while self.waiting and self.waiting[0][0] <= limit_s:
            bound_s, missing, _, candidate = self.waiting[0]
            config = candidate.config
            if missing == SIMULATION and self.spent + size_of(config) > most:
                return None
            heappop(self.waiting)
            if config.family in self.settled:
                continue
            if missing == TIMES:
                self.add(max(bound_s, of_cut_s(self.problem, config)), CUT, candidate)
            elif missing == CUT:
                self._take(bounded(self.problem, config))
            elif missing == MEMORY:
                self._take(estimate(self.problem, config))
            elif missing == SIMULATION:
                self._simulate(candidate)
            else:
                self.settled.add(config.family)
                return candidate
        return None

    def nearly(self, most: float) -> Estimate | None:
        """The fastest of the candidates for whose simulations so many forwards suffice, or the first that fits."""
        found = self.next(most=most)
        if found is not None:
            return found
        done = [item for item in self.waiting if item[1] == NOTHING]
        if not done:
            return self.next()
        *_, fastest = min(done, key=itemgetter(0, 2))
        return fastest

    def bounds(self) -> dict[str, tuple[float, Estimate]]:
        """Of each family that is not settled the least bound, and the candidate that has it."""
        least: dict[str, tuple[float, Estimate]] = {}
        for bound_s, _, _, candidate in sorted(self.waiting, key=itemgetter(0, 1, 2)):
            family = candidate.config.family
            if family not in self.settled:
                least.setdefault(family, (bound_s, candidate))
        return least

    def _take(self, found: Estimate) -> None:
        """Puts a candidate with its cut among those that wait, unless it does not fit, or another one is the same."""
        if not found.fits or found.partition is None:
            self.lacks(found)
            return
        # Another partitioner, or replays where needed, may lead to the same stages.
        key = replace(found.config, partitioner="", recompute=""), found.partition
        same = self._seen.setdefault(key, found.config)
        if same != found.config:
            return
        missing = MEMORY
        if found.peak_bytes:
            missing = SIMULATION
        self.add(found.period_s, missing, found)

    def _simulate(self, estimated: Estimate) -> None:
        found = simulated(self.problem, estimated)
        if found is not None:
            self.spent += found.size
            self.add(found.period_s, NOTHING, found)

    def lacks(self, found: Estimate) -> None:
        """Notes a candidate that does not fit, and offers those whose copies share more."""
        self.failed.append(found.config)
        self.share(found.config)
        other = self.unfit.get(found.config.family)
        if other is None or _lacking(found) < _lacking(other):
            self.unfit[found.config.family] = found

    def share(self, config: Config) -> None:
        """Offers the candidates that follow one that does not fit."""
        if self.space is not None:
            for following in sharing_more(self.space, config, len(self.problem.profile)):
                self.offer(following)


def _lacking(found: Estimate) -> tuple[bool, float, float]:
    """Candidates with a cut first, then by the memory that they lack."""
    return found.partition is None, found.overflow, max(found.peak_bytes, default=math.inf)


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
        outcomes: of each family whose fastest candidate was found, that one; the fastest first.
        candidates: a line for every family.
        resident_s: where stages are spilled, seconds per update of devices that hold the whole model.
    """

    outcomes: tuple[Estimate, ...]
    candidates: tuple[Candidate, ...] = ()
    resident_s: float = 0.0

    @property
    def winner(self) -> Estimate:
        """The fastest."""
        return self.outcomes[0]


def search(problem: Problem, space: Space, listed: list[Config]) -> SearchResult:
    """The fastest of the listed candidates, and of those whose copies share more where these do not fit.

    Raises:
        InfeasibleError: none fits.
    """
    # Data parallelism is what others are compared with, so whether it fits, and its time, must be known.
    plain = Frontier(problem)
    frontier = Frontier(problem, space=space)
    for config in listed:
        if config.family == _PLAIN:
            plain.offer(config)
        else:
            frontier.offer(config)
    best = plain.next()
    for config in plain.failed:
        frontier.share(config)
    if best is not None:
        frontier.add(best.period_s, NOTHING, best)
    winner = frontier.next()
    if winner is None:
        closest = [*frontier.unfit.values(), *plain.unfit.values()]
        raise InfeasibleError(_nothing_fits(problem, space, listed, closest))
    outcomes = [winner]
    most = frontier.spent + _BUDGET
    limit_s = _CLOSE * winner.period_s
    while len(outcomes) < _SHOWN:
        found = frontier.next(limit_s, most)
        if found is None:
            break
        outcomes.append(found)
    if best is not None and best not in outcomes:
        outcomes.append(best)
        frontier.settled.add(_PLAIN)
    frontier.unfit |= plain.unfit
    return SearchResult(tuple(outcomes), tuple(_candidates(frontier, listed, outcomes)))


def _with_sharing(problem: Problem, space: Space, listed: list[Config]) -> list[Config]:
    """The listed candidates, and all whose copies share more."""
    found = list(listed)
    for config in found:
        found += sharing_more(space, config, len(problem.profile))
    return found


def some_fit(problem: Problem, space: Space, listed: list[Config]) -> bool:
    """Returns whether any candidate fits."""
    limit = _most_memory(problem)
    frugal = sorted(_with_sharing(problem, space, listed), key=partial(quick_bytes, problem))
    return any(quick_bytes(problem, config) <= limit and estimate(problem, config).fits for config in frugal)


def _most_memory(problem: Problem) -> float:
    devices = problem.topology.devices or (problem.topology.device,)
    return max(device.memory_bytes for device in devices)


# ----------------------------------------------------------------------------------------------------- why others lost


def _candidates(frontier: Frontier, listed: Iterable[Config], outcomes: list[Estimate]) -> Iterator[Candidate]:
    """The fastest of each family that was settled; then the bounds of the others, and the families that do not fit."""
    problem = frontier.problem
    best = outcomes[0]
    for each in outcomes:
        yield compared(problem, each, best)
        if each is best:
            yield from _sharing_less(problem, best.config)
    waiting = frontier.bounds()
    for bound_s, candidate in waiting.values():
        config = candidate.config
        rate = problem.global_batch / bound_s
        slower = 1 - best.period_s / bound_s
        why = f"{slower:.0%} slower: at best {rate:.4g} samples/s"
        yield Candidate(config.summary, config.family, bound_s, rate, None, why, "at best", slower)
    for name in sorted(frontier.unfit.keys() - frontier.settled - waiting.keys()):
        yield _unfit(problem, frontier.unfit[name])
    if all(config.family != _PLAIN for config in listed):
        yield from _too_large_for_one(problem, best.config.microbatch_size)


def _sharing_less(problem: Problem, config: Config) -> Iterator[Candidate]:
    """A plan whose copies share gradients or weights, if they shared less: the memory that it lacks."""
    if not config.shares_gradients:
        return
    less = replace(config, shard=SHARDS[SHARDS.index(config.shard) - 1])
    found = estimate(problem, less)
    if not found.fits:
        unfit = _unfit(problem, found)
        yield msgspec.structs.replace(unfit, family=unfit.family + LESS_SHARED)


def _too_large_for_one(problem: Problem, size: int) -> list[Candidate]:
    """Data parallelism where it was no candidate, if it does not fit: for whatever batch."""
    count = problem.topology.num_devices
    shard: Shard = "none"
    if count > 1:
        shard = "optimizer"
    config = Config("data-parallel", count, 1, 1, 1, size, count, "all", shard)
    need = quick_bytes(problem, config)
    limit = _most_memory(problem)
    found = _too_large(config, need, limit)
    if need <= limit:
        found = estimate(problem, config)
    if found.fits:
        return []
    return [_unfit(problem, found)]


def _too_large(config: Config, need: float, limit: float) -> Estimate:
    why = f"some rank needs at least {format_bytes(need)} of {format_bytes(limit)}"
    return Estimate(config, None, (need,), why=why)


def compared(problem: Problem, each: Estimate, best: Estimate) -> Candidate:
    """A candidate next to the winner: the share of the winner's throughput that it lacks, in words and numbers."""
    rate = problem.global_batch / each.period_s
    top = problem.global_batch / best.period_s
    slower = 1 - rate / top
    basis = "estimated"
    if each.size:
        basis = "simulated"
    why = f"{slower:.1%} slower: {basis} {rate:.4g} samples/s against {top:.4g}"
    if abs(slower) < 5e-4:
        why = f"as fast ({basis} {rate:.4g} samples/s); the other comes first in the order of candidates"
    if each is best:
        why = ""
    assert each.partition is not None
    plan = plan_of(problem, each.config, each.partition)
    return Candidate(
        each.config.summary,
        each.config.family,
        each.period_s,
        rate,
        max(each.peak_bytes),
        why,
        basis,
        slower,
        idle_share(plan, problem.profile, problem.topology, each.period_s),
        sent_bytes(plan, problem.profile, problem.topology),
    )


def _unfit(problem: Problem, closest: Estimate) -> Candidate:
    config = closest.config
    sent = None
    if config.num_stages == 1:
        whole = Partition((StageSpec(tuple(range(len(problem.profile)))),))
        sent = sent_bytes(plan_of(problem, config, whole), problem.profile, problem.topology)
    peak = max(closest.peak_bytes, default=None)
    return Candidate(config.summary, config.family, None, None, peak, closest.why, sent_bytes=sent)


def _nothing_fits(problem: Problem, space: Space, listed: list[Config], closest: list[Estimate]) -> str:
    """The missing memory, and the least memory that would help."""
    text = f"{problem.profile.model} fits no plan on {problem.topology.num_devices} devices:"
    for each in closest:
        text += f"\n  {each.config.summary}: {each.why}"
    least, config = _cheapest(problem, _with_sharing(problem, space, listed))
    if config is not None:
        # A little more: four digits are shown, and a plan with them should be found.
        text += f"\nthe cheapest change: devices with {format_bytes(least * 1.0005)} of memory ({config.summary})"
    smallest = min(config.microbatch_size for config in listed)
    if smallest > 1:
        text += f"; or smaller micro-batches than {smallest}, if the profile has their times"
    return text


def _cheapest(problem: Problem, listed: list[Config]) -> tuple[float, Config | None]:
    """The least memory in which a candidate fits, and that candidate; the best first, as in the search by seconds."""
    # The replicas of a stage depend on the memory, so what they need with more of it is not known.
    free = [config for config in listed if not config.layers]
    least = math.inf
    cheapest = None
    for bound, config in sorted((quick_bytes(problem, config), config) for config in free):
        if bound >= least:
            break
        need = need_bytes(problem, config)
        if need < least:
            least = need
            cheapest = config
    return least, cheapest
