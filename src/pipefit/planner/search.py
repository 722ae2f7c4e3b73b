"""Search without a cap: bounds of all, estimates of the best of every family, simulations of the best few; reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from pipefit.errors import InfeasibleError
from pipefit.planner.candidate import Estimate, plan_of
from pipefit.planner.closed_forms import quick_bytes, quick_s
from pipefit.planner.cuts import least_bytes
from pipefit.planner.estimate import estimate, may_fit
from pipefit.planner.plan_figures import idle_share, sent_bytes
from pipefit.planner.simulated import simulate_best
from pipefit.planner.space import Config, Problem
from pipefit.spec import Candidate, Partition, StageSpec
from pipefit.units import format_bytes

# Families whose bound is further behind the best estimate than this are estimated only if the simulation is slower.
_HOPELESS = 1.3
# Candidates whose estimate is further behind the best simulated one are not simulated.
_CLOSE = 1.15
# Forwards that all simulations together may take.
_BUDGET = 40_000
# With at most so many devices more candidates of every family are estimated, also those whose bound is a little behind.
_SMALL = 64
_SLACK = 1.1


@dataclass
class Family:
    """Candidates that first compete with each other, with their bounds.

    Attributes:
        configs: all, the fastest first.
        able: those that may fit.
        frugal: the one that needs the least memory.
        feasible: those that fit, estimated.
        closest: where none fits, the one that lacks the least.
    """

    configs: list[tuple[float, Config]] = field(default_factory=list)
    able: list[tuple[float, Config]] = field(default_factory=list)
    frugal: Config | None = None
    feasible: list[Estimate] = field(default_factory=list)
    closest: Estimate | None = None

    def narrow(self, problem: Problem, limit: float) -> None:
        """Finds the members that may fit so much memory, and the one that needs the least."""
        if math.isinf(limit):
            # Where memory is unlimited a replay saves nothing.
            self.able = [item for item in self.configs if item[1].recompute == "none"] or self.configs
            self.frugal = self.able[0][1]
            return
        # If even the most frugal one does not fit, none does, and its figures are the reason. Of equal bounds that of
        # the smallest micro-batch is the closest.
        self.frugal = min((config for _, config in self.configs), key=partial(_frugality, problem))
        self.able = [item for item in self.configs if quick_bytes(problem, item[1]) <= limit]
        if not self.able:
            need = quick_bytes(problem, self.frugal)
            self.closest = Estimate(self.frugal, None, (need,), why=_lacks(need, limit))


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
        outcomes: all that fit, the fastest first.
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


def search(problem: Problem, listed: list[Config], keep: int | None = None) -> SearchResult:
    """The best of the listed candidates.

    Raises:
        InfeasibleError: none fits.
    """
    families: dict[str, Family] = {}
    for config in listed:
        families.setdefault(config.family, Family()).configs.append((quick_s(problem, config), config))
    for family in families.values():
        family.configs.sort()
        family.narrow(problem, _most_memory(problem))
    small = problem.topology.num_devices <= _SMALL
    behind, tries, slack = (_HOPELESS, 40, _SLACK) if small else (_CLOSE, 10, 1.0)
    waiting = sorted(families.values(), key=lambda each: each.able[:1] or each.configs[:1])
    best_s, done, rest = math.inf, list[Estimate](), list[Estimate]()
    # Where the best one takes longer than it was estimated, those far behind the estimate may be faster.
    while ahead := [family for family in waiting if family.able and family.able[0][0] < best_s]:
        for family in ahead:
            # Data parallelism is what others are compared with, so whether it fits must be known.
            if family.able[0][0] <= behind * best_s or family.configs[0][1].family == "data parallel":
                waiting.remove(family)
                _estimate_best(problem, family, best_s, keep or (3 if small else 2), tries, slack)
                best_s = min([best_s, *(estimated.period_s for estimated in family.feasible)])
        fitting = sorted((each for family in families.values() for each in family.feasible), key=_speed)
        done, rest = simulate_best(problem, fitting, _CLOSE, _BUDGET, least=2)
        best_s = min((each.period_s for each in done), default=best_s)
    if not done and not rest:
        raise InfeasibleError(_nothing_fits(problem, list(families.values())))
    outcomes = (*sorted(done, key=_speed), *rest)
    return SearchResult(outcomes, _candidates(problem, families, outcomes))


def some_fit(problem: Problem, listed: list[Config]) -> bool:
    """Returns whether any candidate fits, by those of each family that need the least memory."""
    frugal: dict[str, Config] = {}
    for config in sorted(listed, key=partial(_frugality, problem)):
        if quick_bytes(problem, config) <= _most_memory(problem):
            frugal.setdefault(config.family, config)
    return any(estimate(problem, config).fits for config in frugal.values())


def _frugality(problem: Problem, config: Config) -> tuple[float, int, Config]:
    return quick_bytes(problem, config, at_least=False), config.microbatch_size, config


def _speed(estimated: Estimate) -> tuple[float, Config]:
    return estimated.period_s, estimated.config


def _estimate_best(problem: Problem, family: Family, best_s: float, keep: int, tries: int, slack: float) -> None:
    """Estimates the members of a family, fastest first, until enough fit and the others' bounds are slower."""
    first, tried = None, 0
    assert family.frugal is not None
    for quick, config in family.able:
        own_s = min((estimated.period_s for estimated in family.feasible), default=math.inf)
        # Only a family that may win needs more than its fastest member.
        enough = len(family.feasible) >= (keep if own_s <= _CLOSE * best_s else 1)
        if quick > (slack if enough else _HOPELESS) * own_s or tried >= tries:
            break
        may = may_fit(problem, config)
        tried += may
        estimated = estimate(problem, config) if may else Estimate(config, None)
        if not estimated.fits and first is None:
            first = family.closest = estimate(problem, family.frugal)
            if not first.fits:
                return
        if estimated.fits and not any(_alike(estimated, other) for other in family.feasible):
            family.feasible.append(estimated)
        elif family.closest and estimated.partition and 1 < estimated.overflow < family.closest.overflow:
            family.closest = estimated
    if first and not family.feasible:
        family.feasible.append(first)
    family.feasible.sort(key=_speed)


def _most_memory(problem: Problem) -> float:
    return max(device.memory_bytes for device in problem.topology.devices or (problem.topology.device,))


def _alike(a: Estimate, b: Estimate) -> bool:
    """Returns whether two candidates have the same cut and differ only in the partitioner that found it."""
    configs = [replace(each.config, partitioner="", recompute="") for each in (a, b)]
    return configs[0] == configs[1] and a.partition == b.partition


# ----------------------------------------------------------------------------------------------------- why others lost


def _candidates(problem: Problem, families: dict[str, Family], outcomes: tuple[Estimate, ...]) -> tuple[Candidate, ...]:
    best = outcomes[0]
    lines = [compared(problem, best, best)]
    # All simulated ones, then the best of every other family, then the families of which nothing fits.
    listed = {best.config.family}
    for each in outcomes[1:]:
        if each.size or each.config.family not in listed:
            listed.add(each.config.family)
            lines.append(compared(problem, each, best))
    for name in sorted(set(families) - listed):
        family = families[name]
        if family.closest is None:
            quick, config = family.able[0]
            rate, slower = problem.global_batch / quick, 1 - best.period_s / quick
            why = f"{slower:.0%} slower: at best {rate:.4g} samples/s"
            lines.append(Candidate(config.summary, name, quick, rate, None, why, "at best", slower))
        else:
            lines.append(_unfit(problem, family.closest))
    if "data parallel" not in families:
        lines += _too_large_for_one(problem, best.config.microbatch_size)
    return tuple(lines)


def _too_large_for_one(problem: Problem, size: int) -> list[Candidate]:
    """Data parallelism where it was no candidate, if it does not fit: for whatever batch."""
    count = problem.topology.num_devices
    config = Config("data-parallel", count, 1, 1, 1, size, count, "all", sharded=count > 1)
    need, limit = quick_bytes(problem, config), _most_memory(problem)
    found = Estimate(config, None, (need,), why=_lacks(need, limit)) if need > limit else estimate(problem, config)
    return [] if found.fits else [_unfit(problem, found)]


def _lacks(need: float, limit: float) -> str:
    return f"some rank needs at least {format_bytes(need)} of {format_bytes(limit)}"


def compared(problem: Problem, each: Estimate, best: Estimate) -> Candidate:
    """A candidate next to the winner: the share of the winner's throughput that it lacks, in words and numbers."""
    rate, top = problem.global_batch / each.period_s, problem.global_batch / best.period_s
    slower = 1 - rate / top
    basis = "simulated" if each.size else "estimated"
    why = f"{slower:.1%} slower: {basis} {rate:.4g} samples/s against {top:.4g}"
    if abs(slower) < 5e-4:
        why = f"as fast ({basis} {rate:.4g} samples/s); the other comes first in the order of candidates"
    assert each.partition is not None
    plan = plan_of(problem, each.config, each.partition)
    return Candidate(
        each.config.summary,
        each.config.family,
        each.period_s,
        rate,
        max(each.peak_bytes),
        "" if each is best else why,
        basis,
        slower,
        idle_share(plan, problem.profile, problem.topology, each.period_s),
        sent_bytes(plan, problem.profile, problem.topology),
    )


def _unfit(problem: Problem, closest: Estimate) -> Candidate:
    config, sent = closest.config, None
    if config.depth == 1:
        whole = Partition((StageSpec(tuple(range(len(problem.profile)))),))
        sent = sent_bytes(plan_of(problem, config, whole), problem.profile, problem.topology)
    peak = max(closest.peak_bytes, default=None)
    return Candidate(config.summary, config.family, None, None, peak, closest.why, sent_bytes=sent)


def _nothing_fits(problem: Problem, families: list[Family]) -> str:
    """The missing memory, and the least memory that would help."""
    least, cheapest = math.inf, ""
    closest = [family.closest for family in families if family.closest is not None]
    for index, each in sorted(enumerate(closest), key=lambda item: _bound(item[1])):
        if _bound(each) >= least:
            continue
        if _bound(each):
            # It was ruled out by a lower bound. Its real need might be the least.
            closest[index] = estimate(problem, each.config)
        need = _true_need(problem, closest[index])
        if need < least:
            least, cheapest = need, closest[index].config.summary
    lines = [f"  {each.config.summary}: {each.why}" for each in closest]
    text = "\n".join([f"{problem.profile.model} fits no plan on {problem.topology.num_devices} devices:", *lines])
    if cheapest:
        # A little more: four digits are shown, and a plan with them should be found.
        text += f"\nthe cheapest change: devices with {format_bytes(least * 1.0005)} of memory ({cheapest})"
    smallest = min(config.microbatch_size for family in families for _, config in family.configs)
    if smallest > 1:
        text += f"; or smaller micro-batches than {smallest}, if the profile has their times"
    return text


def _bound(estimated: Estimate) -> float:
    """The lower bound of a candidate's bytes, where only that is known; else 0."""
    return 0.0 if estimated.partition else max(estimated.peak_bytes, default=0.0)


def _true_need(problem: Problem, estimated: Estimate) -> float:
    """The memory with which a candidate fits; infinite where it is not possible at all."""
    config, need = estimated.config, max(estimated.peak_bytes, default=math.inf)
    if config.chunks == 1 and config.partitioner in ("minmax", "links") and not config.replicas:
        need = min(need, least_bytes(problem, config))
    return need
