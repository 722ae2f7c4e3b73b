"""From what is asked of a plan to what it is chosen from: the ground that candidates are judged on, and their space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipefit.cost import usual_state
from pipefit.errors import PlanError
from pipefit.planner.gpt import is_gpt
from pipefit.planner.space import Ground, Space
from pipefit.schedules import find, names
from pipefit.spec import Profile, Topology
from pipefit.spec.profile import ARITHMETIC

__all__ = ["ground_of", "is_local", "sizes_of", "space_of"]

# For lectures; what every schedule is with a single stage; and those that split backwards, whose gain depends on what
# that costs (see `_schedules_of`) and on nothing that makes ranks wait for each other at a step.
_NOT_AUTOMATIC = ("naive", "data-parallel", "zb-h1", "zb-h2", "zb-v")


def ground_of(
    profile: Profile,
    topology: Topology,
    global_batch: int | None = None,
    state_per_weight: float | None = None,
) -> Ground:
    """What candidates are judged on.

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
    return Ground(profile, topology, global_batch, state_per_weight)


def is_local(topology: Topology) -> bool:
    """Whether plans for it are to run with this package, on processes of one machine."""
    return topology.name.startswith("local:")


def sizes_of(ground: Ground, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Micro-batch sizes to choose from: those wanted, or those whose times are known.

    Raises:
        PlanError: a size below 1.
    """
    profile = ground.profile
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
    ground: Ground,
    method: str,
    *,
    microbatch_sizes: tuple[int, ...],
    num_microbatches: int | None = None,
    schedules: Sequence[str] | None = None,
    depths: Sequence[int] | None = None,
    recompute: bool | None = None,
    executable: bool = False,
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
    chosen = tuple(schedules) if schedules else _schedules_of(method, ground.profile)
    for name in chosen:
        if method == "auto" and not find(name).is_synchronous:
            raise PlanError(f"{name} never flushes: --method auto plans synchronous schedules; use 2bw or pipedream")
        if find(name).spills:
            raise PlanError(f"{name} trains on one device from host memory or disk; this plans what fits in devices")
    replays = {None: ("none", "some", "all"), True: ("all",), False: ("none",)}[recompute]
    inner = ground.topology.levels[0].width
    widths = tuple(2**k for k in range(12) if 2**k <= 2 * inner) if is_gpt(ground.profile) and not executable else (1,)
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
        links=ground.topology.num_devices <= 64,
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
