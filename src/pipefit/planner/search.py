"""The search: rank all, look closer at the best of every family, simulate the best few, and say why the others lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from pipefit.errors import InfeasibleError
from pipefit.planner.bounds import quick_bytes, quick_s
from pipefit.planner.cut import least_bytes
from pipefit.planner.judge import Judged, judge
from pipefit.planner.rehearse import Rehearsal, rehearse, size_of
from pipefit.planner.space import Config, Ground
from pipefit.spec import Candidate
from pipefit.units import format_bytes

__all__ = ["Finding", "Found", "search"]

# Families whose optimistic time is further behind than this are not looked at closely.
_HOPELESS = 1.3
# Candidates whose estimate is further behind the best simulated one are not simulated.
_CLOSE = 1.15
# Forwards that all rehearsals together may simulate.
_BUDGET = 40_000
# With at most so many devices more candidates of every family are looked at, and those whose bound is a little behind.
_SMALL = 64
_SLACK = 1.1


@dataclass
class Family:
    """Candidates that first compete among themselves."""

    name: str
    configs: list[tuple[float, Config]] = field(default_factory=list)
    feasible: list[Judged] = field(default_factory=list)
    closest: Judged | None = None
    needs: tuple[float, Config] | None = None


@dataclass(frozen=True)
class Finding:
    """A candidate that fits, with the simulator's word where it was asked."""

    judged: Judged
    rehearsal: Rehearsal | None = None

    @property
    def time_s(self) -> float:
        """Seconds per update: simulated, else estimated."""
        return self.rehearsal.period_s if self.rehearsal else self.judged.step_s


@dataclass(frozen=True)
class Found:
    """The winner, all that fit (best first), and a line for every family."""

    winner: Finding
    findings: tuple[Finding, ...]
    candidates: tuple[Candidate, ...]


def search(ground: Ground, listed: list[Config], keep: int | None = None) -> Found:
    """The best of the listed candidates.

    Raises:
        InfeasibleError: none fits.
    """
    families = _families(ground, listed)
    small = ground.topology.num_devices <= _SMALL
    keep = keep or (3 if small else 2)
    best_s = float("inf")
    for family in sorted(families, key=lambda item: (item.configs[0], item.name)):
        if family.configs[0][0] > _HOPELESS * best_s:
            continue
        _look(ground, family, keep, 40 if small else 32, _SLACK if small else 1.0)
        best_s = min([best_s, *(judged.step_s for judged in family.feasible)])
    fitting = sorted((judged for family in families for judged in family.feasible), key=lambda j: (j.step_s, j.config))
    if not fitting:
        raise InfeasibleError(_nothing_fits(ground, families))
    findings = _rehearsed(ground, fitting)
    return Found(findings[0], findings, _candidates(ground, families, findings))


def _families(ground: Ground, listed: list[Config]) -> list[Family]:
    families: dict[str, Family] = {}
    for config in listed:
        family = families.setdefault(config.family, Family(config.family))
        family.configs.append((quick_s(ground, config), config))
    for family in families.values():
        family.configs.sort()
    return list(families.values())


def _look(ground: Ground, family: Family, keep: int, tries: int, slack: float) -> None:
    """Judges the members of a family, fastest first, until enough of them fit and the others' bounds are behind."""
    limit = _most_memory(ground)
    if math.isinf(limit):
        # Nothing is saved by a replay where memory is no limit; the fastest is as good a first as any.
        able = [item for item in family.configs if item[1].recompute == "none"] or family.configs
        frugal = able[0][1]
    else:
        able = []
        for quick, config in family.configs:
            need = quick_bytes(ground, config)
            # Of equal bounds that of the smallest micro-batch is nearest to the truth.
            if family.needs is None or (need, config.microbatch_size) < (family.needs[0], _size(family.needs)):
                family.needs = need, config
            if need <= limit:
                able.append((quick, config))
        if not able:
            return
        # The most frugal one first: if even that does not fit, none does, and its figures are the reason.
        frugal = min(able, key=lambda item: (quick_bytes(ground, item[1]), item[1].microbatch_size, item))[1]
    first = judge(ground, frugal)
    family.closest = first
    for tried, (quick, config) in enumerate(able):
        best_s = min((judged.step_s for judged in family.feasible), default=math.inf)
        if quick > (slack if len(family.feasible) >= keep else 1.3) * best_s:
            break
        if tried >= tries or not first.fits:
            break
        judged = judge(ground, config)
        if judged.partition is None:
            continue
        if judged.fits and all(
            judged.partition != other.partition for other in family.feasible if _alike(judged, other)
        ):
            family.feasible.append(judged)
        elif not judged.fits and judged.overflow < family.closest.overflow:
            family.closest = judged
    if first.fits and not family.feasible:
        family.feasible.append(first)
    family.feasible.sort(key=lambda judged: (judged.step_s, judged.config))


def _most_memory(ground: Ground) -> float:
    return max(device.memory_bytes for device in ground.topology.devices or (ground.topology.device,))


def _size(needs: tuple[float, Config]) -> int:
    return needs[1].microbatch_size


def _alike(a: Judged, b: Judged) -> bool:
    """Whether two candidates differ in nothing but how they were cut."""
    return replace(a.config, partitioner="", recompute="") == replace(b.config, partitioner="", recompute="")


def _rehearsed(ground: Ground, fitting: list[Judged]) -> tuple[Finding, ...]:
    """The best few simulated; those first, by simulated time, then the rest by estimate."""
    spent, best_s = 0, float("inf")
    done: list[Finding] = []
    rest: list[Finding] = []
    for judged in fitting:
        size = size_of(judged.config)
        worth = judged.step_s <= _CLOSE * best_s and (spent + size <= _BUDGET or len(done) < 2)
        told = rehearse(ground, judged) if worth else None
        if told is None:
            rest.append(Finding(judged))
            continue
        spent += size
        done.append(Finding(judged, told))
        best_s = min(best_s, told.period_s)
    done.sort(key=lambda finding: (finding.time_s, finding.judged.config))
    return (*done, *rest)


def _candidates(ground: Ground, families: list[Family], findings: tuple[Finding, ...]) -> tuple[Candidate, ...]:
    best = findings[0]
    lines = [_line(ground, best, "")]
    shown = {best.judged.config}
    # Every simulated one, then the best of every other family, then the families of which nothing fits.
    told = {best.judged.config.family}
    for finding in findings[1:]:
        config = finding.judged.config
        if finding.rehearsal is None and config.family in told:
            continue
        told.add(config.family)
        shown.add(config)
        lines.append(_line(ground, finding, _slower(ground, finding, best)))
    for family in sorted(families, key=lambda item: item.name):
        if family.name in told:
            continue
        lines.append(_lost(ground, family, best))
    return tuple(lines)


def _line(ground: Ground, finding: Finding, why: str) -> Candidate:
    judged = finding.judged
    time_s = finding.time_s
    return Candidate(
        judged.config.summary,
        judged.config.family,
        time_s,
        ground.global_batch / time_s if time_s else None,
        max(judged.peak_bytes),
        why,
    )


def _slower(ground: Ground, finding: Finding, best: Finding) -> str:
    """In words and numbers."""
    behind = finding.time_s / best.time_s - 1
    said = "simulated" if finding.rehearsal else "estimated"
    rate, top = ground.global_batch / finding.time_s, ground.global_batch / best.time_s
    if abs(behind) < 5e-4:
        return f"as fast ({said} {rate:.4g} samples/s); the other comes first in the order of candidates"
    return f"{behind:.1%} slower: {said} {rate:.4g} samples/s against {top:.4g}"


def _lost(ground: Ground, family: Family, best: Finding) -> Candidate:
    quick, config = family.configs[0]
    if family.closest is None and family.needs is None:
        rate = ground.global_batch / quick
        why = f"at best {rate:.4g} samples/s, {quick / best.time_s - 1:.0%} slower than the winner"
        return Candidate(config.summary, family.name, quick, rate, None, why)
    return Candidate(*_shortage(ground, family))


def _shortage(ground: Ground, family: Family) -> tuple[str, str, None, None, float | None, str]:
    """Why nothing of a family fits, by the member that comes closest."""
    if family.closest is not None:
        judged = family.closest
        peak = max(judged.peak_bytes, default=None)
        return judged.config.summary, family.name, None, None, peak, f"{_depth(judged.config)}: {judged.why}"
    assert family.needs is not None
    need, config = family.needs
    why = f"{_depth(config)}: some rank needs at least {format_bytes(need)} of {format_bytes(_most_memory(ground))}"
    return config.summary, family.name, None, None, need, why


def _depth(config: Config) -> str:
    return f"depth {config.depth}"


def _nothing_fits(ground: Ground, families: list[Family]) -> str:
    """What is missing, and the least that would help."""
    least: tuple[float, str] | None = None
    # A lower bound ruled some families out. What they really need is asked now, as long as it might be the least.
    for family in sorted(families, key=lambda f: f.needs[0] if f.closest is None and f.needs else 0.0):
        if family.closest is None and family.needs and (least is None or family.needs[0] < least[0]):
            family.closest = judge(ground, family.needs[1])
        if family.closest is None:
            continue
        need = _true_need(ground, family.closest)
        if need is not None and (least is None or need < least[0]):
            least = need, family.closest.config.summary
    lines = []
    for family in families:
        summary, _, _, _, _, why = _shortage(ground, family)
        lines.append(f"{why} ({summary})")
    text = f"{ground.profile.model} fits no plan on {ground.topology.num_devices} devices:\n  " + "\n  ".join(lines)
    if least is not None:
        # A little more: four digits are shown, and who asks again with them should find a plan.
        text += f"\nthe cheapest change: devices with {format_bytes(least[0] * 1.0005)} of memory ({least[1]})"
    sizes = [config.microbatch_size for family in families for _, config in family.configs]
    if min(sizes) > 1:
        text += f"; or smaller micro-batches than {min(sizes)}, if the profile has their times"
    return text


def _true_need(ground: Ground, judged: Judged) -> float | None:
    """The memory with which a candidate fits; None where it has no meaning at all."""
    config, need = judged.config, max(judged.peak_bytes, default=math.inf)
    if config.chunks == 1 and config.partitioner in ("minmax", "links") and not config.replicas:
        need = min(need, least_bytes(ground, config))
    return need if math.isfinite(need) else None
