"""Plans that a user specifies: number of stages, their layers, their ranks."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.errors import PlanError
from pipefit.partition import minmax
from pipefit.partition.balance import divide, spans
from pipefit.schedules import find, placement_of
from pipefit.spec import Partition, Placement, Plan, Profile, StageSpec
from pipefit.spec.plan import Shard

_LEAST_SHARE = 100
"""A layer without cost counts as this part of the mean layer."""


def ranks_of(num_processes: int, tensor: int, data: int = 1) -> int:
    """Number of ranks of some processes when `tensor` of them share each, in `data` copies of a pipeline.

    Raises:
        PlanError: the processes are not a multiple of tensor · data.
    """
    if num_processes % (tensor * data):
        widths = f"tensor={tensor}" + (f" × data={data}" if data > 1 else "")
        raise PlanError(
            f"{num_processes} processes cannot be a mesh of {widths} × a pipeline; start a multiple of {tensor * data}"
        )
    return num_processes // tensor


def by_hand(
    num_layers: int,
    *,
    num_ranks: int,
    schedule: str,
    num_microbatches: int,
    num_chunks: int = 1,
    stages: Sequence[int] | None = None,
    replicas: Sequence[int] = (),
    recompute: str | bool = "none",
    tensor: int = 1,
    sequence_parallel: bool = False,
    scatter_gather: bool = True,
    shares: Sequence[int] = (),
    shard: Shard = "none",
    options: dict[str, int] | None = None,
    profile: Profile | None = None,
    costs: Sequence[float] | None = None,
    model: str = "",
) -> Plan:
    """A plan that a user specifies: consecutive layers, balanced by time, by costs, or else by number.

    >>> made = by_hand(8, num_ranks=2, schedule="1f1b", num_microbatches=4)
    >>> [stage.layers for stage in made.partition.stages], made.placement.ranks
    ([(0, 1, 2, 3), (4, 5, 6, 7)], ((0,), (1,)))

    Args:
        num_layers: of the model.
        num_ranks: of the program; each is `tensor` processes.
        schedule: its name.
        num_microbatches: per weight update.
        num_chunks: stages per rank.
        stages: layers of each stage; None: balanced.
        replicas: copies of each stage, or one number for all; (): one.
        recompute: what every stage replays, a kind of `pipefit.spec.plan.RECOMPUTE`.
        tensor: processes that share each rank by tensor parallelism.
        sequence_parallel: these also shard the sequence.
        scatter_gather: each of them sends its part of a message.
        shares: micro-batches of each copy of the pipeline per update; (): equally many.
        shard: what the copies of a stage share.
        options: further arguments of the schedule.
        profile: of the model; its times balance the stages.
        costs: of each layer, in any unit: they balance the stages where there is no profile.
        model: its name.

    Raises:
        PlanError: more stages than layers, or layer counts that do not fit.
    """
    layout = find(schedule).layout
    depth = _depth(num_ranks, replicas)
    count = depth * num_chunks
    if layout == "replicas":
        count = 1
    if stages is not None and len(stages) != count:
        raise PlanError(
            f"{schedule} on {num_ranks} ranks with {num_chunks} chunks has {count} stages, "
            f"got layer counts for {len(stages)}"
        )
    if count > num_layers:
        raise PlanError(
            f"{count} stages need at least {count} layers, the model has {num_layers}; use fewer ranks or chunks, "
            "or split the model into more layers"
        )
    partition = _cut(num_layers, count, stages, profile, costs)
    placement = placement_of(depth, num_chunks, layout, tuple(replicas))
    copies = [len(ranks) for ranks in placement]
    alike = 1
    if len(set(copies)) == 1:
        alike = copies[0]
    specs = []
    for stage, num_copies in zip(partition.stages, copies, strict=True):
        specs.append(StageSpec(stage.layers, num_copies // alike, tensor, recompute))
    return Plan(
        Partition(tuple(specs)),
        Placement(placement),
        schedule,
        num_microbatches,
        num_chunks=num_chunks,
        options=dict(options or {}),
        data=alike,
        sequence_parallel=sequence_parallel,
        scatter_gather=scatter_gather,
        shares=tuple(shares),
        shard=shard,
        model=model,
    )


def _cut(
    num_layers: int,
    num_stages: int,
    stages: Sequence[int] | None,
    profile: Profile | None,
    costs: Sequence[float] | None,
) -> Partition:
    """The layers of each stage: as given, else balanced by a profile, else by costs, else equally many."""
    if stages is not None:
        return Partition.from_counts(stages, num_layers)
    if profile is not None:
        return minmax(profile, num_stages)
    if costs is not None:
        return _balanced(costs, num_stages)
    return Partition.even(num_layers, num_stages)


def _balanced(costs: Sequence[float], num_stages: int) -> Partition:
    """The largest cost of a stage is as small as possible.

    >>> [len(stage.layers) for stage in _balanced([0, 1, 1, 1, 1, 0], 4).stages]
    [2, 1, 1, 2]
    """
    # Layers without cost are spread: each counts a little.
    least = (sum(costs) or 1.0) / (_LEAST_SHARE * len(costs))
    counts = divide([spans([cost + least for cost in costs])] * num_stages)
    assert counts is not None
    return Partition.from_counts(counts)


def _depth(num_ranks: int, replicas: Sequence[int]) -> int:
    if not replicas:
        return num_ranks
    if len(replicas) == 1:
        if num_ranks % replicas[0]:
            raise PlanError(f"{replicas[0]} replicas of every stage do not divide {num_ranks} ranks")
        return num_ranks // replicas[0]
    if sum(replicas) != num_ranks:
        raise PlanError(f"replicas {list(replicas)} need {sum(replicas)} ranks, there are {num_ranks}")
    return len(replicas)
