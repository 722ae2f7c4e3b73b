"""The planning methods: which space each searches, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pipefit.cost import usual_state
from pipefit.errors import InfeasibleError, PlanError
from pipefit.planner.asynchronous import replicated
from pipefit.planner.computed_profile import is_gpt
from pipefit.planner.search import SearchResult, search
from pipefit.planner.space import Config, Problem, Space, configs
from pipefit.schedules import find, names
from pipefit.spec import Profile, Topology
from pipefit.spec.profile import ARITHMETIC

METHODS = ("auto", "pipedream", "gpipe", "2bw", "ptdp", "uniform")

# For lectures; what every schedule is with a single stage; and those that split backwards, whose gain depends on what
# that costs (see `_schedules_of`) and on nothing that makes ranks wait for each other at a step.
_NOT_AUTOMATIC = ("naive", "data-parallel", "zb-h1", "zb-h2", "zb-v")


def problem_of(
    profile: Profile,
    topology: Topology,
    global_batch: int | None = None,
    state_per_weight: float | None = None,
) -> Problem:
    """The problem without a cap.

    Raises:
        PlanError: a batch below 1 or negative state.
    """
    if global_batch is None:
        global_batch = profile.microbatch_size * max(topology.num_devices, 8)
    if global_batch < 1:
        raise PlanError(f"global_batch: expected at least 1, got {global_batch}")
    if state_per_weight is None:
        state_per_weight = usual_state(profile)
    if not state_per_weight >= 0:
        raise PlanError(f"state_per_weight: expected 0 or more, got {state_per_weight}")
    return Problem(profile, topology, global_batch, state_per_weight)


def sizes_to_try(problem: Problem, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Micro-batch sizes to choose from: those given, or those whose times are known.

    Raises:
        PlanError: a size below 1.
    """
    profile = problem.profile
    if wanted is not None:
        if not wanted or min(wanted) < 1:
            raise PlanError(f"microbatch_sizes: expected sizes of at least 1, got {list(wanted)}")
        return tuple(sorted(set(wanted)))
    powers = [2**k for k in range(12)]
    if profile.source.startswith(ARITHMETIC):
        return tuple(size for size in powers if size <= 16)
    known = [profile.microbatch_size, *(other.microbatch_size for other in profile.others)]
    # Where times were not measured they are not known: small micro-batches are slower than the line says.
    between = [size for size in powers if min(known) <= size <= max(known)]
    return tuple(sorted({*known, *between}))


def space_of(
    problem: Problem,
    method: str,
    *,
    microbatch_sizes: tuple[int, ...],
    num_microbatches: int | None = None,
    schedules: Sequence[str] | None = None,
    depths: Sequence[int] | None = None,
    recompute: bool | None = None,
    tensors: Sequence[int] | None = None,
    sharded: bool | None = None,
) -> Space:
    """The choices of a method.

    Raises:
        PlanError: a count below 1, or an unknown or unsuitable schedule.
    """
    if num_microbatches is not None and num_microbatches < 1:
        raise PlanError(f"num_microbatches: expected at least 1, got {num_microbatches}")
    for depth in depths or ():
        if depth < 1:
            raise PlanError(f"depths: expected at least 1, got {depth}")
    chosen = tuple(schedules) if schedules else _schedules_of(method, problem.profile)
    for name in chosen:
        if method == "auto" and not find(name).is_synchronous:
            raise PlanError(f"{name} never flushes: --method auto plans synchronous schedules; use 2bw or pipedream")
        if find(name).spills:
            raise PlanError(f"{name} trains on one device from host memory or disk; this plans what fits in devices")
    replays = {None: ("none", "some", "all"), True: ("all",), False: ("none",)}[recompute]
    inner = problem.topology.levels[0].width
    # On processes of this machine plans are to run: widths are named there, as the model's layers allow them.
    free_widths = is_gpt(problem.profile) and not problem.topology.name.startswith("local:")
    widths = tuple(2**k for k in range(12) if 2**k <= 2 * inner) if free_widths else (1,)
    if tensors is not None:
        if not tensors or min(tensors) < 1:
            raise PlanError(f"tensors: expected widths of at least 1, got {list(tensors)}")
        widths = tuple(tensors)
    free = Space(
        chosen,
        tuple(depths) if depths else None,
        tensors=widths,
        microbatch_sizes=microbatch_sizes,
        recompute=replays,
        sharded=(False, True) if sharded is None else (sharded,),
        num_microbatches=num_microbatches,
        links=problem.topology.num_devices <= 64,
    )
    if method == "2bw":
        replays = tuple(mode for mode in replays if mode != "some") or replays
        return replace(free, tensors=(1,), chunks=(1,), sharded=(False,), recompute=replays)
    if method == "ptdp":
        always = ("all",) if recompute is None else replays
        inside = tuple(width for width in widths if width <= inner)
        return replace(free, tensors=inside, sharded=(False,), recompute=always)
    if method in ("gpipe", "uniform"):
        always = ("all",) if method == "gpipe" and recompute is None else replays
        return replace(
            free, tensors=(1,), chunks=(1,), sharded=(False,), recompute=always, partitioner=method, links=False
        )
    return free


def _flushes_over_ranks(name: str) -> bool:
    return find(name).is_synchronous and not find(name).spills


def _schedules_of(method: str, profile: Profile) -> tuple[str, ...]:
    if method == "auto":
        found = tuple(name for name in names() if name not in _NOT_AUTOMATIC and _flushes_over_ranks(name))
        is_measured = all(layer.split_s is not None for layer in profile.layers)
        return (*found, "zb-h1") if is_measured else found
    return {
        "2bw": ("pipedream-2bw",), "ptdp": ("1f1b", "interleaved"), "gpipe": ("gpipe",), "uniform": ("1f1b",)
    }[method]  # fmt: skip


def search_by(method: str, problem: Problem, space: Space) -> tuple[SearchResult, list[Config]]:
    """The result of a method, and all candidates that it listed.

    Raises:
        InfeasibleError: nothing fits.
        PlanError: there is no candidate.
    """
    listed = _listed(problem, space)
    if method == "ptdp":
        return _ptdp(problem, space, listed)
    if method == "auto" and problem.topology.num_devices <= 64 and space.depths is None:
        listed += replicated(problem, space)
    if method in ("gpipe", "uniform"):
        # As many stages as there are devices, or the largest divisor of that for which there are layers.
        deepest = max(config.depth for config in listed)
        listed = [config for config in listed if config.depth == deepest]
    return search(problem, listed), listed


def _ptdp(problem: Problem, space: Space, listed: list[Config]) -> tuple[SearchResult, list[Config]]:
    """The rules of Megatron-LM (SC 2021), sections 3.2 to 3.4.

    Takeaway 1: tensor parallelism up to the devices of a server, pipelines across servers. Takeaway 2: as few devices
    per copy (t·p) as hold the model, data parallelism with the rest. Takeaway 3: the best micro-batch size is searched.
    Every stage has as many transformer blocks (section 2.2).
    """
    listed = [config for config in listed if _is_even(problem.profile, config)]
    shapes = sorted({(c.tensor * c.depth, -c.tensor, c.depth) for c in listed})
    widest = max(space.tensors)
    # A pipeline only where the server's width is used up.
    allowed = [shape for shape in shapes if shape[2] == 1 or -shape[1] == widest]
    listed = [c for c in listed if (c.tensor * c.depth, -c.tensor, c.depth) in allowed]
    for shape in allowed:
        some = [c for c in listed if (c.tensor * c.depth, -c.tensor, c.depth) == shape]
        with suppress(InfeasibleError):
            return search(problem, some, keep=6), listed
    return search(problem, listed), listed


def _is_even(profile: Profile, config: Config) -> bool:
    """Whether the blocks of a GPT, all layers but embedding and head, can be split evenly."""
    return not is_gpt(profile) or config.depth == 1 or (len(profile) - 2) % config.num_stages == 0


def _listed(problem: Problem, space: Space) -> list[Config]:
    listed = list(configs(problem, space))
    if not listed and space.depths is not None:
        most = min(problem.topology.num_devices, len(problem.profile))
        able = [k for k in range(1, most + 1) if problem.topology.num_devices % k == 0]
        if not set(able) & set(space.depths):
            raise PlanError(
                f"depths: got {', '.join(map(str, space.depths))}; a depth divides the {problem.topology.num_devices} "
                f"devices and is at most the {len(problem.profile)} layers: {', '.join(map(str, able))}"
            )
    if not listed:
        wanted = (
            f"{space.num_microbatches} micro-batches" if space.num_microbatches else f"sizes {space.microbatch_sizes}"
        )
        raise PlanError(
            f"no candidate: {problem.topology.num_devices} devices, {len(problem.profile)} layers, a batch of "
            f"{problem.global_batch} in micro-batches ({wanted}) and the schedules {', '.join(space.schedules)} do not "
            "go together; every copy of the pipeline needs as many micro-batches, so choose a batch that micro-batch "
            "size × copies divides"
        )
    return listed
