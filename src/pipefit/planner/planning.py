"""`plan`: from a profile and a topology to the plan that trains fastest, with reasons."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from pipefit.errors import InfeasibleError, PlanError, nearest
from pipefit.planner.asked import ground_of, is_local, sizes_of, space_of
from pipefit.planner.gpt import is_gpt
from pipefit.planner.judge import judge, plan_of
from pipefit.planner.rehearse import rehearse
from pipefit.planner.search import Finding, Found, search
from pipefit.planner.space import Config, Ground, Space, configs
from pipefit.spec import Plan, Prediction, Profile, Topology

__all__ = ["METHODS", "plan"]

METHODS = ("auto", "pipedream", "gpipe", "2bw", "ptdp", "uniform")


def plan(
    profile: Profile,
    topology: Topology,
    *,
    method: str = "auto",
    global_batch: int | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    num_microbatches: int | None = None,
    schedules: Sequence[str] | None = None,
    depths: Sequence[int] | None = None,
    recompute: bool | None = None,
    cost: str = "ring",
    straight: bool = False,
    state_per_weight: float | None = None,
    executable: bool | None = None,
    tensors: Sequence[int] | None = None,
    sharded: bool | None = None,
) -> Plan:
    """The fastest plan that fits, its prediction, and why every other lost.

    >>> from pipefit.spec import Layer
    >>> layers = tuple(Layer(f"layer{i}", 1e-3, 1e-3, 1e-3, 1e3, 1e3, 1e6) for i in range(8))
    >>> found = plan(Profile("eight", 1, layers), Topology.local(2), global_batch=8)
    >>> found.placement.num_ranks, 60 < found.prediction.throughput < 1 / 0.024 * 2
    (2, True)

    Args:
        profile: seconds and bytes of the layers, at one or several micro-batch sizes.
        topology: links and devices. A plan uses all devices.
        method: "auto": all of depth, data width, tensor width (GPTs), chunks, micro-batch size, synchronous schedule,
            recompute, partition, replicas and sharded optimizer. "2bw", "ptdp", "gpipe" and "pipedream" plan what these
            papers plan; "uniform" gives every stage as many layers.
        global_batch: samples per weight update; None: a micro-batch per device, and at least 8 micro-batches. The
            mini-batch of "pipedream" is the profile's.
        microbatch_sizes: to choose from; None: those of the profile and, between the smallest and the largest of them,
            the powers of two; of a profile by arithmetic the powers of two up to 16.
        num_microbatches: per weight update, when they are given; then sizes follow from it.
        schedules: to choose from; None: those of the method.
        depths: to choose from; None: all.
        recompute: always or never; None: as is best.
        cost: convention of "pipedream".
        straight: no replicas, for "pipedream".
        state_per_weight: optimizer bytes per weight byte; None: 6 for 2-byte weights with Adam and a master copy (a
            profile by GPT arithmetic), else 2.
        executable: only what the runtime of this package runs for any model: no tensor parallelism, unless `tensors`
            says otherwise; None: on "local:N".
        tensors: tensor widths to choose from, which the model's layers must allow (`pipefit.parallel.widths_of`); None:
            powers of two for a GPT, as far as they go with `executable`.
        sharded: with the optimizer divided over the copies always or never, for "auto"; None: as is best.

    Raises:
        InfeasibleError: nothing fits; what is missing, and the cheapest change that would help.
        PlanError: a wish that has no meaning.
    """
    started = time.perf_counter()
    if method not in METHODS:
        raise PlanError(f"unknown method {method!r}; {nearest(method, METHODS)}")
    if method == "pipedream":
        from pipefit.planner.asynchronous import plan_pipedream

        made = plan_pipedream(profile, topology, cost=cost, straight=straight, state_per_weight=state_per_weight)
    else:
        ground = ground_of(profile, topology, global_batch, state_per_weight)
        sizes = sizes_of(ground, microbatch_sizes)
        space = space_of(
            ground,
            method,
            microbatch_sizes=sizes,
            num_microbatches=num_microbatches,
            schedules=schedules,
            depths=depths,
            recompute=recompute,
            executable=is_local(topology) if executable is None else executable,
            tensors=tensors,
            sharded=sharded,
        )
        made = _finish(ground, space, method, *_METHODS[method](ground, space))
    return msgspec.structs.replace(made, plan_seconds=time.perf_counter() - started)


# ------------------------------------------------------------------------------------------------------------- methods


def _auto(ground: Ground, space: Space) -> tuple[Found, list[Config]]:
    listed = _listed(ground, space)
    if ground.topology.num_devices <= 64 and space.depths is None:
        from pipefit.planner.asynchronous import replicated

        listed += replicated(ground, space)
    return search(ground, listed), listed


def _deepest(ground: Ground, space: Space) -> tuple[Found, list[Config]]:
    """As many stages as there are devices, or the largest divisor of that for which there are layers."""
    listed = _listed(ground, space)
    deepest = max(config.depth for config in listed)
    listed = [config for config in listed if config.depth == deepest]
    return search(ground, listed), listed


def _double_buffered(ground: Ground, space: Space) -> tuple[Found, list[Config]]:
    listed = _listed(ground, space)
    return search(ground, listed), listed


def _ptdp(ground: Ground, space: Space) -> tuple[Found, list[Config]]:
    """The rules of Megatron-LM (SC 2021), sections 3.2 to 3.4.

    Takeaway 1: tensor parallelism up to the devices of a server, pipelines across servers. Takeaway 2: as few devices
    per copy (t·p) as hold the model, data parallelism with the rest. Takeaway 3: the best micro-batch size is searched.
    Every stage has as many transformer blocks (section 2.2).
    """
    listed = [config for config in _listed(ground, space) if _is_even(ground.profile, config)]
    shapes = sorted({(c.tensor * c.depth, -c.tensor, c.depth) for c in listed})
    widest = max(space.tensors)
    # A pipeline only where the server's width is used up.
    allowed = [shape for shape in shapes if shape[2] == 1 or -shape[1] == widest]
    listed = [c for c in listed if (c.tensor * c.depth, -c.tensor, c.depth) in allowed]
    for shape in allowed:
        some = [c for c in listed if (c.tensor * c.depth, -c.tensor, c.depth) == shape]
        with suppress(InfeasibleError):
            return search(ground, some, keep=6), listed
    return search(ground, listed), listed


def _is_even(profile: Profile, config: Config) -> bool:
    """Whether the blocks of a GPT, all layers but embedding and head, can be divided evenly."""
    return not is_gpt(profile) or config.depth == 1 or (len(profile) - 2) % config.num_stages == 0


_METHODS: dict[str, Callable[[Ground, Space], tuple[Found, list[Config]]]] = {
    "auto": _auto,
    "2bw": _double_buffered,
    "ptdp": _ptdp,
    "gpipe": _deepest,
    "uniform": _deepest,
}


def _listed(ground: Ground, space: Space) -> list[Config]:
    listed = list(configs(ground, space))
    if not listed and space.depths is not None:
        most = min(ground.topology.num_devices, len(ground.profile))
        able = [k for k in range(1, most + 1) if ground.topology.num_devices % k == 0]
        if not set(able) & set(space.depths):
            raise PlanError(
                f"depths: got {', '.join(map(str, space.depths))}; a depth divides the {ground.topology.num_devices} "
                f"devices and is at most the {len(ground.profile)} layers: {', '.join(map(str, able))}"
            )
    if not listed:
        wanted = (
            f"{space.num_microbatches} micro-batches" if space.num_microbatches else f"sizes {space.microbatch_sizes}"
        )
        raise PlanError(
            f"no candidate: {ground.topology.num_devices} devices, {len(ground.profile)} layers, a batch of "
            f"{ground.global_batch} in micro-batches ({wanted}) and the schedules {', '.join(space.schedules)} do not "
            "go together; every copy of the pipeline needs as many micro-batches, so choose a batch that micro-batch "
            "size × copies divides"
        )
    return listed


def _finish(ground: Ground, space: Space, method: str, found: Found, listed: list[Config]) -> Plan:
    winner = found.winner
    assert winner.judged.partition is not None
    made = plan_of(ground, winner.judged.config, winner.judged.partition, method)
    step_s = winner.rehearsal.step_s if winner.rehearsal else winner.judged.step_s
    period_s = winner.time_s
    prediction = Prediction(
        step_s=step_s,
        period_s=period_s,
        minibatch_s=period_s,
        throughput=ground.global_batch / period_s if period_s else math.inf,
        peak_bytes=_peaks_of_all(made, winner),
        speedup_over_data_parallel=_over_data_parallel(ground, listed, found),
    )
    return msgspec.structs.replace(made, prediction=prediction, candidates=found.candidates)


def _peaks_of_all(made: Plan, winner: Finding) -> tuple[float, ...]:
    """The peak of every rank; copies hold what the first pipeline holds."""
    peaks = winner.judged.peak_bytes
    result = [0.0] * made.placement.num_ranks
    first = {ranks[0]: position for position, ranks in enumerate(made.placement.ranks[: len(peaks)])}
    for ranks in made.placement.ranks:
        for rank in ranks:
            result[rank] = peaks[first[ranks[0]]] if ranks[0] in first else result[rank]
    return tuple(result)


def _over_data_parallel(ground: Ground, listed: list[Config], found: Found) -> float | None:
    """Times faster than plain data parallelism, where that fits."""
    plain = [f for f in found.findings if f.judged.config.family == "data parallel"]
    if plain:
        return min(f.time_s for f in plain) / found.winner.time_s
    for config in sorted(config for config in listed if config.family == "data parallel"):
        judged = judge(ground, config)
        if judged.fits:
            told = rehearse(ground, judged)
            return (told.period_s if told else judged.step_s) / found.winner.time_s
    return None
