"""The planning methods: the space that each searches, and the order of the search."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import cast

from pipefit.cost import usual_state
from pipefit.errors import InfeasibleError, PlanError
from pipefit.ir.instruction import Indices
from pipefit.planner.asynchronous import replicated
from pipefit.planner.computed_profile import num_blocks
from pipefit.planner.plan_options import ANY, PlanOptions
from pipefit.planner.search import SearchResult, search, some_fit
from pipefit.planner.space import Config, Problem, Space, configs
from pipefit.planner.transformer import transformer_of
from pipefit.schedules import find, names
from pipefit.spec import Profile, Topology
from pipefit.spec.options import AUTO
from pipefit.spec.plan import SHARDS, Shard, recompute_kind

# For teaching; the schedule that all others are with a single stage; and those with split backwards, whose gain depends
# on the cost of the split (see `_schedules_of`) and on the absence of waits of all ranks at a step.
_NOT_AUTOMATIC = ("naive", "data-parallel", "zb-h1", "zb-h2", "zb-v")


def problem_of(
    profile: Profile,
    topology: Topology,
    global_batch: int | None = None,
    state_per_weight: float | None = None,
) -> Problem:
    """The problem without a cap."""
    if global_batch is None:
        global_batch = profile.microbatch_size * max(topology.num_devices, 8)
    if state_per_weight is None:
        state_per_weight = usual_state(profile)
    return Problem(profile, topology.for_elements(profile.element_bytes), global_batch, state_per_weight)


def space_of(problem: Problem, options: PlanOptions) -> Space:
    """The choices of a method.

    Raises:
        PlanError: a count below 1, or an unknown or unsuitable schedule.
    """
    method = options.method
    for name in ("microbatch_sizes", "depths", "tensors", "chunks"):
        given = getattr(options, name)
        if given is not None and (not given or min(given) < 1):
            raise PlanError(f"{name}: expected at least 1, got {', '.join(map(str, given)) or 'none'}")
    if options.schedules:
        chosen = tuple(options.schedules)
    else:
        chosen = _schedules_of(method, problem.profile)
    for name in chosen:
        if method == "auto" and not find(name).is_synchronous:
            raise PlanError(f"{name} never flushes: --method auto plans synchronous schedules; use 2bw or pipedream")
        if find(name).spills:
            raise PlanError(f"{name} trains on one device from host memory or disk; without a cap nothing is spilled")
    replays = _replays(problem.profile, method, options.recompute)
    inner = problem.topology.levels[0].width
    widths = tuple(options.tensors or _widths(problem, 2 * inner))
    if method == "ptdp":
        widths = tuple(width for width in widths if width <= inner)
    elif method != "auto":
        widths = (1,)
    shards: tuple[Shard, ...] = ("none",)
    next_shard: dict[Shard, Shard] = {}
    if method == "auto" and options.shard in (AUTO, ANY):
        shards = ("none", "optimizer")
        next_shard = dict(pairwise(SHARDS[1:]))
    elif method == "auto":
        shards = (cast(Shard, options.shard),)
    partitioner = "minmax"
    if method in ("gpipe", "uniform"):
        partitioner = method
    return Space(
        chosen,
        tuple(options.depths or ()) or None,
        widths,
        _sizes(problem.profile, options.microbatch_sizes),
        replays,
        shards,
        partitioner,
        options.num_microbatches,
        links=problem.topology.num_devices <= 64 and partitioner == "minmax",
        chunks=tuple(options.chunks or (2, 3, 4)),
        next_shard=next_shard,
        shares_last=options.shard == AUTO,
        more_chunks=options.chunks is None,
    )


_REPLAYS = {"2bw": ("none", "stage"), "ptdp": ("layer",), "gpipe": ("stage",)}
"""Kinds of recomputation that the papers of the methods use."""


def _replays(profile: Profile, method: str, wanted: object) -> tuple[str, ...]:
    """Kinds of recomputation to choose from: those that the method uses and the profile has figures for.

    Raises:
        PlanError: it has none for the kind that is wanted.
    """
    if wanted != AUTO:
        kind = recompute_kind(wanted)
        if not profile.can_replay(kind):
            what = "of layers that are replayed"
            if kind == "selective":
                what = "of attention"
            raise PlanError(
                f"recompute {kind}: profile {profile.model} has no figures {what}; measure it with `pipefit profile`, "
                "or give recompute stage"
            )
        return (kind,)
    usual = _REPLAYS.get(method, ("none", "some", "selective", "layer", "stage"))
    return tuple(kind for kind in usual if profile.can_replay(kind)) or ("stage",)


def _widths(problem: Problem, most: int) -> Indices:
    """Tensor widths to choose from; on processes of this machine, where plans must run, only widths given by name."""
    if not num_blocks(problem.profile) or problem.topology.name.startswith("local:"):
        return (1,)
    if problem.profile.counted is not None:
        return tuple(width for width in problem.profile.counted.widths if width <= most)
    if problem.profile.computed_for is not None:
        return tuple(filter(transformer_of(problem.profile.model).splits, powers_of_two(most)))
    return powers_of_two(most)


def powers_of_two(most: int) -> Indices:
    """1, 2, 4 … up to `most`."""
    return tuple(2**k for k in range(most.bit_length()))


def _sizes(profile: Profile, wanted: Sequence[int] | None) -> Indices:
    """Micro-batch sizes to choose from: those given, or those whose times are known."""
    if wanted is not None:
        return tuple(sorted(set(wanted)))
    if profile.computed_for is not None:
        return powers_of_two(16)
    known = {profile.microbatch_size, *(other.microbatch_size for other in profile.others)}
    # Times that were not measured are not extrapolated: small micro-batches are slower than a proportional time.
    between = {size for size in powers_of_two(max(known)) if size >= min(known)}
    return tuple(sorted(known | between))


def _schedules_of(method: str, profile: Profile) -> tuple[str, ...]:
    if method == "auto":
        found = []
        for name in names():
            schedule = find(name)
            if name not in _NOT_AUTOMATIC and schedule.is_synchronous and not schedule.spills:
                found.append(name)
        if all(layer.split_s is not None for layer in profile.layers):
            found.append("zb-h1")
        return tuple(found)
    return {
        "2bw": ("pipedream-2bw",), "ptdp": ("1f1b", "interleaved"), "gpipe": ("gpipe",), "uniform": ("1f1b",)
    }[method]  # fmt: skip


def search_by(method: str, problem: Problem, space: Space) -> SearchResult:
    """The result of a method.

    Raises:
        InfeasibleError: nothing fits.
        PlanError: there is no candidate.
    """
    listed = _listed(method, problem, space)
    if method == "ptdp":
        return _ptdp(problem, space, listed)
    if space.shares_last:
        with suppress(InfeasibleError):
            return search(problem, replace(space, next_shard={}), listed)
    return search(problem, space, listed)


def fits_by(method: str, problem: Problem, space: Space) -> bool:
    """Returns whether some candidate of a method fits: faster than a search for the best.

    Raises:
        PlanError: there is no candidate.
    """
    return some_fit(problem, space, _listed(method, problem, space))


def _listed(method: str, problem: Problem, space: Space) -> list[Config]:
    listed = list(configs(problem, space))
    if not listed:
        raise PlanError(_no_candidate(problem, space))
    if method == "auto" and problem.topology.num_devices <= 64 and space.depths is None:
        listed += replicated(problem, space)
    if method in ("gpipe", "uniform"):
        # As many stages as there are devices, or the largest divisor of that for which there are layers.
        deepest = max(config.depth for config in listed)
        listed = [config for config in listed if config.depth == deepest]
    return listed


def _ptdp(problem: Problem, space: Space, listed: list[Config]) -> SearchResult:
    """The rules of Megatron-LM (SC 2021), sections 3.2 to 3.4.

    Takeaway 1: tensor parallelism up to the devices of a server, pipelines across servers. Takeaway 2: as few devices
    per copy (t·p) as hold the model, data parallelism with the rest. Takeaway 3: the best micro-batch size is searched.
    All stages have equally many transformer blocks (section 2.2).
    """

    def shape(config: Config) -> tuple[int, int]:
        return config.tensor * config.depth, config.depth

    # A pipeline only where the server's width is used up.
    widest = max(space.tensors)
    listed = [each for each in listed if each.depth == 1 or each.tensor == widest]
    listed = [each for each in listed if _is_even(problem.profile, each)]
    for smallest in sorted(set(map(shape, listed))):
        with suppress(InfeasibleError):
            return search(problem, space, [each for each in listed if shape(each) == smallest])
    return search(problem, space, listed)


def _is_even(profile: Profile, config: Config) -> bool:
    """Returns whether the blocks of a transformer can be split evenly; of other models any layers can."""
    return config.depth == 1 or num_blocks(profile) % config.num_stages == 0


def _no_candidate(problem: Problem, space: Space) -> str:
    num_devices = problem.topology.num_devices
    num_layers = len(problem.profile)
    deepest = min(num_devices, num_layers)
    able = [depth for depth in range(1, deepest + 1) if num_devices % depth == 0]
    if space.depths is not None and not set(able) & set(space.depths):
        return (
            f"depths: got {', '.join(map(str, space.depths))}; a depth divides the {num_devices} devices and is at "
            f"most the {num_layers} layers: {', '.join(map(str, able))}"
        )
    wanted = f"sizes {space.microbatch_sizes}"
    if space.num_microbatches:
        wanted = f"{space.num_microbatches} micro-batches"
    return (
        f"no candidate: {num_devices} devices, {num_layers} layers, a batch of {problem.global_batch} in micro-batches "
        f"({wanted}) and the schedules {', '.join(space.schedules)} do not go together; every copy of the pipeline "
        "needs as many micro-batches, so choose a batch that micro-batch size × copies divides"
    )
