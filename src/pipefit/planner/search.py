"""Search without a cap: bound all, estimate the best of every family, simulate the best few; why the others lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from pipefit.errors import InfeasibleError
from pipefit.planner.bounds import quick_bytes, quick_s
from pipefit.planner.candidate import Estimate
from pipefit.planner.cuts import least_bytes
from pipefit.planner.estimate import estimate
from pipefit.planner.lane_limits import Limit
from pipefit.planner.simulated import Simulated, simulated, size_of
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
    """Candidates that first compete among themselves."""

    name: str
    configs: list[tuple[float, Config]] = field(default_factory=list)
    feasible: list[Estimate] = field(default_factory=list)
    closest: Estimate | None = None
    needs: tuple[float, Config] | None = None


@dataclass(frozen=True)
class Outcome:
    """A candidate that fits, estimated, and simulated where its estimate was among the best."""

    estimated: Estimate
    simulated: Simulated | None = None

    @property
    def time_s(self) -> float:
        """Seconds per update: simulated, else estimated."""
        return self.simulated.period_s if self.simulated else self.estimated.step_s

    @property
    def step_s(self) -> float:
        """Seconds of one update in isolation."""
        return self.simulated.step_s if self.simulated else self.estimated.step_s

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Of each rank of one pipeline, or of all."""
        return self.simulated.peak_bytes if self.simulated and self.simulated.peak_bytes else self.estimated.peak_bytes


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        winner: the fastest.
        outcomes: all that fit, best first.
        candidates: a line for every family.
        resident_s: where stages are spilled, seconds per update of devices that hold the whole model.
        limit: of the winner, where stages are spilled.
    """

    winner: Outcome
    outcomes: tuple[Outcome, ...]
    candidates: tuple[Candidate, ...]
    resident_s: float = 0.0
    limit: Limit | None = None


def search(problem: Problem, listed: list[Config], keep: int | None = None) -> SearchResult:
    """The best of the listed candidates.

    Raises:
        InfeasibleError: none fits.
    """
    families = _families(problem, listed)
    small = problem.topology.num_devices <= _SMALL
    keep = keep or (3 if small else 2)
    best_s = float("inf")
    for family in sorted(families, key=lambda item: (item.configs[0], item.name)):
        if family.configs[0][0] > _HOPELESS * best_s:
            continue
        _estimate_best(problem, family, keep, 40 if small else 32, _SLACK if small else 1.0)
        best_s = min([best_s, *(estimated.step_s for estimated in family.feasible)])
    fitting = sorted((each for family in families for each in family.feasible), key=lambda e: (e.step_s, e.config))
    if not fitting:
        raise InfeasibleError(_nothing_fits(problem, families))
    outcomes = _simulated(problem, fitting)
    return SearchResult(outcomes[0], outcomes, _candidates(problem, families, outcomes))


def _families(problem: Problem, listed: list[Config]) -> list[Family]:
    families: dict[str, Family] = {}
    for config in listed:
        family = families.setdefault(config.family, Family(config.family))
        family.configs.append((quick_s(problem, config), config))
    for family in families.values():
        family.configs.sort()
    return list(families.values())


def _estimate_best(problem: Problem, family: Family, keep: int, tries: int, slack: float) -> None:
    """Estimates the members of a family, fastest first, until enough fit and the others' bounds are slower."""
    limit = _most_memory(problem)
    if math.isinf(limit):
        # Nothing is saved by a replay where memory is no limit; the fastest is as good a first as any.
        able = [item for item in family.configs if item[1].recompute == "none"] or family.configs
        frugal = able[0][1]
    else:
        able = []
        for quick, config in family.configs:
            need = quick_bytes(problem, config)
            # Of equal bounds that of the smallest micro-batch is the closest.
            if family.needs is None or (need, config.microbatch_size) < (family.needs[0], _size(family.needs)):
                family.needs = need, config
            if need <= limit:
                able.append((quick, config))
        if not able:
            return
        # The most frugal one first: if even that does not fit, none does, and its figures are the reason.
        frugal = min(able, key=lambda item: (quick_bytes(problem, item[1]), item[1].microbatch_size, item))[1]
    first = estimate(problem, frugal)
    family.closest = first
    for tried, (quick, config) in enumerate(able):
        best_s = min((estimated.step_s for estimated in family.feasible), default=math.inf)
        if quick > (slack if len(family.feasible) >= keep else 1.3) * best_s:
            break
        if tried >= tries or not first.fits:
            break
        estimated = estimate(problem, config)
        if estimated.partition is None:
            continue
        if estimated.fits and all(
            estimated.partition != other.partition for other in family.feasible if _alike(estimated, other)
        ):
            family.feasible.append(estimated)
        elif not estimated.fits and estimated.overflow < family.closest.overflow:
            family.closest = estimated
    if first.fits and not family.feasible:
        family.feasible.append(first)
    family.feasible.sort(key=lambda estimated: (estimated.step_s, estimated.config))


def _most_memory(problem: Problem) -> float:
    return max(device.memory_bytes for device in problem.topology.devices or (problem.topology.device,))


def _size(needs: tuple[float, Config]) -> int:
    return needs[1].microbatch_size


def _alike(a: Estimate, b: Estimate) -> bool:
    """Whether two candidates differ in nothing but how they were cut."""
    return replace(a.config, partitioner="", recompute="") == replace(b.config, partitioner="", recompute="")


def _simulated(problem: Problem, fitting: list[Estimate]) -> tuple[Outcome, ...]:
    """The best few simulated; those first, by simulated time, then the rest by estimate."""
    spent, best_s = 0, float("inf")
    done: list[Outcome] = []
    rest: list[Outcome] = []
    for estimated in fitting:
        size = size_of(estimated.config)
        worth = estimated.step_s <= _CLOSE * best_s and (spent + size <= _BUDGET or len(done) < 2)
        times = simulated(problem, estimated) if worth else None
        if times is None:
            rest.append(Outcome(estimated))
            continue
        spent += size
        done.append(Outcome(estimated, times))
        best_s = min(best_s, times.period_s)
    done.sort(key=lambda outcome: (outcome.time_s, outcome.estimated.config))
    return (*done, *rest)


def _candidates(problem: Problem, families: list[Family], outcomes: tuple[Outcome, ...]) -> tuple[Candidate, ...]:
    best = outcomes[0]
    lines = [_line(problem, best, "")]
    # Every simulated one, then the best of every other family, then the families of which nothing fits.
    listed = {best.estimated.config.family}
    for outcome in outcomes[1:]:
        config = outcome.estimated.config
        if outcome.simulated is None and config.family in listed:
            continue
        listed.add(config.family)
        lines.append(_line(problem, outcome, _slower(problem, outcome, best)))
    for family in sorted(families, key=lambda item: item.name):
        if family.name in listed:
            continue
        lines.append(_lost(problem, family, best))
    return tuple(lines)


def _line(problem: Problem, outcome: Outcome, why: str) -> Candidate:
    estimated = outcome.estimated
    time_s = outcome.time_s
    return Candidate(
        estimated.config.summary,
        estimated.config.family,
        time_s,
        problem.global_batch / time_s if time_s else None,
        max(estimated.peak_bytes),
        why,
    )


def _slower(problem: Problem, outcome: Outcome, best: Outcome) -> str:
    """In words and numbers."""
    behind = outcome.time_s / best.time_s - 1
    said = "simulated" if outcome.simulated else "estimated"
    rate, top = problem.global_batch / outcome.time_s, problem.global_batch / best.time_s
    if abs(behind) < 5e-4:
        return f"as fast ({said} {rate:.4g} samples/s); the other comes first in the order of candidates"
    return f"{behind:.1%} slower: {said} {rate:.4g} samples/s against {top:.4g}"


def _lost(problem: Problem, family: Family, best: Outcome) -> Candidate:
    quick, config = family.configs[0]
    if family.closest is None and family.needs is None:
        rate = problem.global_batch / quick
        why = f"at best {rate:.4g} samples/s, {quick / best.time_s - 1:.0%} slower than the winner"
        return Candidate(config.summary, family.name, quick, rate, None, why)
    return Candidate(*_shortage(problem, family))


def _shortage(problem: Problem, family: Family) -> tuple[str, str, None, None, float | None, str]:
    """Why nothing of a family fits, by the member that comes closest."""
    if family.closest is not None:
        estimated = family.closest
        peak = max(estimated.peak_bytes, default=None)
        return estimated.config.summary, family.name, None, None, peak, f"{_depth(estimated.config)}: {estimated.why}"
    assert family.needs is not None
    need, config = family.needs
    why = f"{_depth(config)}: some rank needs at least {format_bytes(need)} of {format_bytes(_most_memory(problem))}"
    return config.summary, family.name, None, None, need, why


def _depth(config: Config) -> str:
    return f"depth {config.depth}"


def _nothing_fits(problem: Problem, families: list[Family]) -> str:
    """The memory that is missing, and the least that would help."""
    least: tuple[float, str] | None = None
    # A lower bound ruled some families out. What they really need is counted now, as long as it might be the least.
    for family in sorted(families, key=lambda f: f.needs[0] if f.closest is None and f.needs else 0.0):
        if family.closest is None and family.needs and (least is None or family.needs[0] < least[0]):
            family.closest = estimate(problem, family.needs[1])
        if family.closest is None:
            continue
        need = _true_need(problem, family.closest)
        if need is not None and (least is None or need < least[0]):
            least = need, family.closest.config.summary
    lines = []
    for family in families:
        summary, _, _, _, _, why = _shortage(problem, family)
        lines.append(f"{why} ({summary})")
    text = f"{problem.profile.model} fits no plan on {problem.topology.num_devices} devices:\n  " + "\n  ".join(lines)
    if least is not None:
        # A little more: four digits are shown, and a plan with them should be found.
        text += f"\nthe cheapest change: devices with {format_bytes(least[0] * 1.0005)} of memory ({least[1]})"
    sizes = [config.microbatch_size for family in families for _, config in family.configs]
    if min(sizes) > 1:
        text += f"; or smaller micro-batches than {min(sizes)}, if the profile has their times"
    return text


def _true_need(problem: Problem, estimated: Estimate) -> float | None:
    """The memory with which a candidate fits; None where it has no meaning at all."""
    config, need = estimated.config, max(estimated.peak_bytes, default=math.inf)
    if config.chunks == 1 and config.partitioner in ("minmax", "links") and not config.replicas:
        need = min(need, least_bytes(problem, config))
    return need if math.isfinite(need) else None
