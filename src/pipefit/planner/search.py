"""Search without a cap: bounds of all, estimates of the best of every family, simulations of the best few; reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipefit.errors import InfeasibleError
from pipefit.planner.candidate import Estimate
from pipefit.planner.closed_forms import quick_bytes, quick_s
from pipefit.planner.cuts import least_bytes
from pipefit.planner.estimate import estimate
from pipefit.planner.simulated import simulate_best
from pipefit.planner.space import Config, Problem
from pipefit.spec import Candidate
from pipefit.units import format_bytes

# Families whose bound is further behind the best estimate than this are not estimated.
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
    """Candidates that first compete with each other, their bounds, and, where none fits, the closest."""

    configs: list[tuple[float, Config]] = field(default_factory=list)
    feasible: list[Estimate] = field(default_factory=list)
    closest: Estimate | None = None


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
    small = problem.topology.num_devices <= _SMALL
    best_s = math.inf
    for family in sorted(families.values(), key=lambda each: each.configs[0]):
        if family.configs[0][0] > _HOPELESS * best_s:
            continue
        _estimate_best(problem, family, keep or (3 if small else 2), 40 if small else 10, _SLACK if small else 1.0)
        best_s = min([best_s, *(estimated.period_s for estimated in family.feasible)])
    fitting = sorted((each for family in families.values() for each in family.feasible), key=_speed)
    if not fitting:
        raise InfeasibleError(_nothing_fits(problem, list(families.values())))
    done, rest = simulate_best(problem, fitting, _CLOSE, _BUDGET, least=2)
    outcomes = (*sorted(done, key=_speed), *rest)
    return SearchResult(outcomes, _candidates(problem, families, outcomes))


def _speed(estimated: Estimate) -> tuple[float, Config]:
    return estimated.period_s, estimated.config


def _estimate_best(problem: Problem, family: Family, keep: int, tries: int, slack: float) -> None:
    """Estimates the members of a family, fastest first, until enough fit and the others' bounds are slower."""
    limit = _most_memory(problem)
    if math.isinf(limit):
        # Where memory is unlimited a replay saves nothing, so the fastest candidate comes first.
        able = [item for item in family.configs if item[1].recompute == "none"] or family.configs
        frugal = able[0][1]
    else:
        # The most frugal one first: if even that does not fit, none does, and its figures are the reason. Of equal
        # bounds that of the smallest micro-batch is the closest.
        needs = [(quick_bytes(problem, item[1]), item[1].microbatch_size, item) for item in family.configs]
        need, _, (_, frugal) = min(needs)
        if need > limit:
            why = f"some rank needs at least {format_bytes(need)} of {format_bytes(limit)}"
            family.closest = Estimate(frugal, None, (need,), why=why)
            return
        able = [item for need, _, item in needs if need <= limit]
    first = family.closest = estimate(problem, frugal)
    for tried, (quick, config) in enumerate(able):
        best_s = min((estimated.period_s for estimated in family.feasible), default=math.inf)
        if quick > (slack if len(family.feasible) >= keep else 1.3) * best_s or tried >= tries or not first.fits:
            break
        estimated = estimate(problem, config)
        if estimated.fits and not any(_alike(estimated, other) for other in family.feasible):
            family.feasible.append(estimated)
        elif estimated.partition and not estimated.fits and estimated.overflow < family.closest.overflow:
            family.closest = estimated
    if first.fits and not family.feasible:
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
    lines = [_line(problem, best.config, best.period_s, max(best.peak_bytes), "")]
    # All simulated ones, then the best of every other family, then the families of which nothing fits.
    listed = {best.config.family}
    for each in outcomes[1:]:
        if each.size or each.config.family not in listed:
            listed.add(each.config.family)
            why = _slower(problem, each, best)
            lines.append(_line(problem, each.config, each.period_s, max(each.peak_bytes), why))
    for name in sorted(set(families) - listed):
        family = families[name]
        if family.closest is None:
            quick, config = family.configs[0]
            rate = problem.global_batch / quick
            why = f"at best {rate:.4g} samples/s, {quick / best.period_s - 1:.0%} slower than the winner"
            lines.append(_line(problem, config, quick, None, why))
        else:
            closest = family.closest
            lines.append(
                _line(problem, closest.config, None, max(closest.peak_bytes, default=None), _shortage(closest))
            )
    return tuple(lines)


def _line(problem: Problem, config: Config, time_s: float | None, peak: float | None, why: str) -> Candidate:
    rate = problem.global_batch / time_s if time_s else None
    return Candidate(config.summary, config.family, time_s, rate, peak, why)


def _slower(problem: Problem, outcome: Estimate, best: Estimate) -> str:
    """The reason why a candidate is slower, in words and numbers."""
    behind = outcome.period_s / best.period_s - 1
    said = "simulated" if outcome.size else "estimated"
    rate, top = problem.global_batch / outcome.period_s, problem.global_batch / best.period_s
    if abs(behind) < 5e-4:
        return f"as fast ({said} {rate:.4g} samples/s); the other comes first in the order of candidates"
    return f"{behind:.1%} slower: {said} {rate:.4g} samples/s against {top:.4g}"


def _shortage(closest: Estimate) -> str:
    """The reason why nothing of a family fits, by its closest member."""
    return f"depth {closest.config.depth}: {closest.why}"


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
    lines = [f"  {_shortage(each)} ({each.config.summary})" for each in closest]
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
