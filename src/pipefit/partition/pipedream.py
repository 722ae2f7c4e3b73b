"""PipeDream's partitioner (Harlap et al. 2018; Narayanan et al., SOSP 2019, section 3.1): stages and their replicas.

    A^k(i→j, m) = min over s, m' of max{ A^k(i→s, m−m'), 2a_s/B_k, T^k(s+1→j, m') },   T^k as in `conventions.py`,
    A^0(i→j, 1) = Σ T_l,   T_l the forward and backward time of layer l,

level by level from the inside: a stage of one level owns whole components of the level below, and A^{k−1} is its time
on one of them. So a two-level search cannot give "15-1" on 4 × 4 devices; the flat search over all 16 can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipefit.errors import PlanError, look_up
from pipefit.ir.instruction import Indices
from pipefit.partition.balance import TIE
from pipefit.partition.conventions import CONVENTIONS, Convention, Levels, data_parallel_s
from pipefit.partition.down_sets import find_states
from pipefit.partition.dynamic_program import Run, base_s, best_time, runs
from pipefit.partition.stage_costs import HELD, CutProblem, Memory
from pipefit.spec import Partition, Profile, StageSpec, Topology
from pipefit.spec.plan import Figures
from pipefit.units import format_bytes

# Hybrids must be predicted to be faster than plain data parallelism by more than this. For the released optimizer's
# convention it is smaller, because its result for VGG-16 on 2 × 8 devices is only 4.9 % faster and must be kept.
_MARGIN = {"paper": 0.05, "ring": 0.05, "pipedream-code": 0.04}


@dataclass(frozen=True)
class LevelStage:
    """One stage of one level, and the stages of one of its components (empty: it is a device).

    Attributes:
        layers: indices in the profile.
        replicas: components of the level below that run copies of it.
        stages: the stages of one such component.
    """

    layers: Indices
    replicas: int
    stages: LevelStages = ()


LevelStages = tuple[LevelStage, ...]
"""The stages of one component of a level."""


@dataclass(frozen=True)
class PipeDreamResult:
    """The partition that was chosen, and other times found. Times are seconds per mini-batch in the steady state.

    Attributes:
        partition: stages with their replicas; None when nothing fits (`why` names the reason).
        time_s: of that partition; infinite when nothing fits.
        shape: "data parallel", "flat" or "hierarchical": which search it comes from.
        levels: the same stages by levels, outermost first.
        in_flight: mini-batches in flight at each stage.
        memory_bytes: needed per device of each stage.
        convention: how communication was counted.
        search_s: best time found without a preference for data parallelism: the result of the released optimizer.
        flat_s: best time of the flat search; None when it was not made.
        hierarchical_s: best time of the search by levels; None when it was not made.
        straight_s: best pipeline without replicas.
        data_parallel_s: plain data parallelism over all devices, fitting or not; the better of the searches made.
        data_parallel_bytes: needed per device for that.
        data_parallel_fits: whether it fits.
        exact: every possible boundary of the graph was considered.
        why: the reason in words.
    """

    shape: str
    convention: str
    time_s: float
    search_s: float
    partition: Partition | None = None
    levels: LevelStages = ()
    in_flight: Indices = ()
    memory_bytes: Figures = ()
    flat_s: float | None = None
    hierarchical_s: float | None = None
    straight_s: float = math.inf
    data_parallel_s: float = math.inf
    data_parallel_bytes: float = 0.0
    data_parallel_fits: bool = False
    exact: bool = True
    why: str = ""

    @property
    def speedup_over_data_parallel(self) -> float:
        """The time of plain data parallelism over this one."""
        if self.time_s:
            return self.data_parallel_s / self.time_s
        return 1.0

    @property
    def configuration(self) -> str:
        """Replicas per stage as the papers write them: "15-1"."""
        if self.partition:
            return "-".join(str(stage.replicas) for stage in self.partition.stages)
        return "none"


def pipedream(
    profile: Profile,
    topology: Topology,
    *,
    cost: str = "ring",
    search: str | None = None,
    straight: bool = False,
    memory_bytes: float | None = None,
    weight_versions: bool = True,
    state_factor: float = 2.0,
    margin: float | None = None,
) -> PipeDreamResult:
    """Splits a model into replicated stages so that the time per mini-batch is minimal.

    Deterministic: equally fast partitions (to 1e-12) are ordered by number of stages, then lexicographically by
    (end, replicas) of one stage after the other, on each level.

    Args:
        profile: figures of one mini-batch.
        topology: levels with width and bandwidth; latency is not used.
        cost: convention of communication: "ring", "paper" or "pipedream-code".
        search: "flat" (all devices on one level, at the slowest bandwidth), "hierarchical" or "both"; None: both, but
            for "pipedream-code" hierarchical, as the released optimizer.
        straight: no replicas.
        memory_bytes: limit of a device; None: the smallest of the topology.
        weight_versions: each mini-batch in flight keeps the weights it used (weight stashing).
        state_factor: bytes of gradients and optimizer states per weight byte (2: gradient and momentum).
        margin: plain data parallelism is preferred when it is at most this fraction slower; None: 0.05, and 0.04 for
            "pipedream-code". 0: the fastest.

    Raises:
        PlanError: unknown convention or search, or a margin below 0.
    """
    rule = look_up(cost, CONVENTIONS, "unknown cost convention", PlanError)
    searches = _searches(search, rule, topology)
    if margin is not None and margin < 0:
        raise PlanError(f"margin: expected 0 or more, got {margin}")
    if memory_bytes is None:
        devices = map(topology.device_of, range(topology.num_devices))
        memory_bytes = min(device.memory_bytes for device in devices)
    memory = Memory(memory_bytes, 0.0, state_factor + 1.0)
    if weight_versions:
        memory = Memory(memory_bytes, 1.0, state_factor)
    levels = [(level.width, level.bandwidth_bytes_per_s) for level in topology.levels]
    states = find_states(profile, _affordable(levels, searches))
    slowest = min(bandwidth for _, bandwidth in levels)
    widths = {"flat": [(topology.num_devices, slowest)], "hierarchical": levels}
    problems = {}
    for name in searches:
        problems[name] = CutProblem(states, widths[name], rule, memory, straight)
    found_s = {name: _fastest(problem) for name, problem in problems.items()}
    shape = min(searches, key=found_s.__getitem__)
    problem = problems[shape]
    time_s = found_s[shape]
    # By levels a straight pipeline has the faster links inside, so the flat one need not be considered.
    straight_s = time_s
    if not straight:
        last = problems[searches[-1]]
        straight_s = _fastest(replace(last, straight=True, bases={}))
    single_s = _total(profile, "total_s") + profile.loss_s
    trained_bytes = _total(profile, "wgrad_bytes")
    whole_bytes = _data_parallel_bytes(problem)
    plain_s = [data_parallel_s(rule, single_s, trained_bytes, widths[name]) for name in searches]
    result = PipeDreamResult(
        shape,
        cost,
        time_s,
        search_s=time_s,
        flat_s=found_s.get("flat"),
        hierarchical_s=found_s.get("hierarchical"),
        straight_s=straight_s,
        data_parallel_s=min(plain_s),
        data_parallel_bytes=whole_bytes,
        data_parallel_fits=whole_bytes <= memory.limit_bytes,
        exact=states.complete,
    )
    if margin is None:
        margin = _MARGIN[cost]
    allowed_s = time_s * (1 + margin) * (1 + TIE)
    if not straight and result.data_parallel_fits and result.data_parallel_s <= allowed_s:
        return _data_parallel(result, problem, margin)
    if not math.isfinite(time_s):
        return replace(result, why=_why_nothing_fits(problem))
    stages = _divide(problem, len(problem.levels), 0, 0, len(states) - 1, time_s)
    return _with_stages(result, problem, stages, f"fastest of the {result.shape} search")


def _searches(search: str | None, rule: Convention, topology: Topology) -> list[str]:
    if search not in (None, "flat", "hierarchical", "both"):
        raise PlanError(f'search: expected "flat", "hierarchical" or "both", got {search!r}')
    has_levels = sum(level.width > 1 for level in topology.levels) > 1
    if search == "flat":
        return ["flat"]
    if search == "hierarchical" or not has_levels or (search is None and rule.released):
        return ["hierarchical"]
    return ["flat", "hierarchical"]


def _affordable(levels: Levels, searches: list[str]) -> int:
    """The number of states for a few seconds of search, which grows on inner levels as states³ · width²."""
    inner = [width for width, _ in levels[:-1]]
    widest = max(inner, default=1)
    if "hierarchical" not in searches or widest == 1:
        return 2000
    affordable = (1.5e10 / widest**2) ** (1 / 3)
    return max(int(affordable), 100)


def _fastest(problem: CutProblem) -> float:
    return best_time(problem, len(problem.levels), 0, 0, len(problem.states) - 1)


def _total(profile: Profile, field: str) -> float:
    return float(sum(getattr(layer, field) for layer in profile.layers))


def _divide(problem: CutProblem, level: int, beyond: int, start: int, end: int, time_s: float) -> LevelStages:
    """The stages of a level from one state to another, each with its stages of the level below."""

    def inside(run: Run) -> LevelStages:
        if level == 1:
            return ()
        base = base_s(problem, level - 1, run.beyond)
        inner_s = float(base[run.start, run.end])
        return _divide(problem, level - 1, run.beyond, run.start, run.end, inner_s)

    found = []
    for run in runs(problem, level, beyond, start, end, time_s):
        layers = problem.states.layers_between(run.start, run.end)
        found.append(LevelStage(layers, run.replicas, inside(run)))
    return tuple(found)


def _flatten(stages: LevelStages, copies: int = 1) -> list[StageSpec]:
    """Stages of devices: replicas multiplied over the levels. Layers without cost go to a level's first stage."""
    result = []
    for stage in stages:
        if stage.stages:
            result += _flatten(stage.stages, copies * stage.replicas)
        else:
            result.append(StageSpec(stage.layers, copies * stage.replicas))
    return result


def _with_stages(result: PipeDreamResult, problem: CutProblem, levels: LevelStages, why: str) -> PipeDreamResult:
    stages = _flatten(levels)
    in_flight = []
    needed = []
    for index, stage in enumerate(stages):
        behind = sum(after.replicas for after in stages[index:])
        count = math.ceil(behind / stage.replicas)
        in_flight.append(count)
        needed.append(_bytes_of(problem, count, stage.layers))
    return replace(
        result,
        partition=Partition(tuple(stages)),
        levels=levels,
        in_flight=tuple(in_flight),
        memory_bytes=tuple(needed),
        why=why,
    )


def _data_parallel(result: PipeDreamResult, problem: CutProblem, margin: float) -> PipeDreamResult:
    """Plain data parallelism, where the search is faster by at most the margin."""
    every = tuple(range(len(problem.states.profile)))
    levels: LevelStages = ()
    for width, _ in problem.levels:
        levels = (LevelStage(every, width, levels),)
    why = "plain data parallelism is fastest"
    ahead = 0.0
    if result.time_s:
        ahead = result.data_parallel_s / result.time_s - 1
    if ahead > TIE:
        why = f"plain data parallelism: the best hybrid would be {ahead:.1%} faster, within the margin of {margin:.0%}"
    plain = replace(result, time_s=result.data_parallel_s, shape="data parallel")
    return _with_stages(plain, problem, levels, why)


def _data_parallel_bytes(problem: CutProblem) -> float:
    every = range(len(problem.states.profile))
    return _bytes_of(problem, 1, every)


def _bytes_of(problem: CutProblem, in_flight: int, layers: Sequence[int]) -> float:
    """Bytes of a stage of some layers with this many mini-batches in flight."""
    chosen = [problem.states.profile.layers[layer] for layer in layers]
    held = [sum(getattr(layer, name) for layer in chosen) for name in HELD]
    return float(problem.memory.needed_bytes(in_flight, *held))


def _why_nothing_fits(problem: CutProblem) -> str:
    """The bytes that the largest layer needs, and the bytes of a device."""
    memory = problem.memory
    layers = problem.states.profile.layers
    if not memory.is_limited:
        return "no partition uses every device: there are fewer layers than stages would be needed"
    needed = [_bytes_of(problem, 1, [layer]) for layer in range(len(layers))]
    most = max(needed)
    largest = needed.index(most)
    every = format_bytes(_data_parallel_bytes(problem))
    return (
        f"nothing fits: layer {largest} ({layers[largest].name}) needs {format_bytes(most)} with one "
        f"mini-batch in flight, all layers {every}, and a device has "
        f"{format_bytes(memory.limit_bytes)}; use a smaller micro-batch, more devices or more memory"
    )
