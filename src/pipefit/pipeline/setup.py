"""From a model and a user's wishes to a plan: how many stages, which layers, which ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from pipefit.errors import PlanError
from pipefit.partition import minmax
from pipefit.runtime.session import Session
from pipefit.schedules import find, placement_of
from pipefit.spec import Partition, Placement, Plan, Profile, StageSpec
from pipefit.stage.split import NamedLayer

__all__ = ["check_ranks", "default_device", "make_plan", "ranks_of", "stage_count", "wanted_ranks"]


def ranks_of(num_processes: int, tensor: int, data: int = 1) -> int:
    """How many ranks some processes make when `tensor` of them share each, in `data` copies of a pipeline.

    Raises:
        PlanError: they cannot be divided so.
    """
    if tensor < 1 or data < 1:
        raise PlanError(f"tensor and data: expected at least 1, got {tensor} and {data}")
    if num_processes % (tensor * data):
        widths = f"tensor={tensor}" + (f" × data={data}" if data > 1 else "")
        raise PlanError(
            f"{num_processes} processes cannot be a mesh of {widths} × a pipeline; start a multiple of {tensor * data}"
        )
    return num_processes // tensor


def wanted_ranks(
    session: Session,
    stages: int | Sequence[int] | str | None,
    chunks: int,
    replicas: Sequence[int],
    tensor: int,
    ranks: int | None = None,
) -> int:
    """The processes, t to a rank, when ranks are processes; else as many as the stages and replicas ask for.

    Args:
        session: the ranks of the run.
        stages: a number, layer counts, "auto", or None.
        chunks: stages per rank.
        replicas: copies of each stage, or one number for all.
        tensor: t.
        ranks: as they are asked for; None: they are not.

    Raises:
        PlanError: they do not go together.
    """
    if isinstance(stages, str) and stages != "auto":
        raise PlanError(f'stages: expected a number, a list of layer counts or "auto", got {stages!r}')
    if session.is_distributed:
        return ranks_of(session.num_ranks, tensor)
    if ranks is not None:
        return ranks
    count = len(stages) if isinstance(stages, list | tuple) else stages if isinstance(stages, int) else 2 * chunks
    if len(replicas) > 1:
        return sum(replicas)
    if count < 1 or count % chunks:
        raise PlanError(f"{count} stages cannot be dealt out as {chunks} chunks per rank")
    return count // chunks * (replicas[0] if replicas else 1)


def check_ranks(session: Session, plan: Plan) -> None:
    """Whether as many processes were started as a plan asks for.

    Raises:
        PlanError: they were not.
    """
    wanted = plan.num_processes
    if session.is_distributed and session.num_ranks != wanted:
        each = f" of {plan.tensor} processes" if plan.tensor > 1 else ""
        raise PlanError(
            f"the plan is for {plan.placement.num_ranks} ranks{each}, but {session.num_ranks} processes were started; "
            f"start {wanted}, or plan again"
        )


def stage_count(schedule: str, num_ranks: int, num_chunks: int, replicas: Sequence[int]) -> int:
    """How many stages a schedule makes of some ranks.

    Raises:
        PlanError: the replicas do not add up to the ranks.
    """
    if find(schedule).layout == "replicas":
        return 1
    return _depth(num_ranks, replicas) * num_chunks


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


def make_plan(
    layers: Sequence[NamedLayer],
    *,
    num_ranks: int,
    schedule: str,
    num_microbatches: int,
    num_chunks: int = 1,
    stages: Sequence[int] | None = None,
    replicas: Sequence[int] = (),
    recompute: bool = False,
    tensor: int = 1,
    sequence_parallel: bool = False,
    scatter_gather: bool = True,
    sharded_optimizer: bool = False,
    options: dict[str, int] | None = None,
    profile: Profile | None = None,
    model: str = "",
) -> Plan:
    """A plan by hand: consecutive layers, balanced by measured time when there is a profile, by count otherwise.

    Raises:
        PlanError: more stages than layers, or layer counts that do not fit.
    """
    count = stage_count(schedule, num_ranks, num_chunks, replicas)
    if stages is not None and len(stages) != count:
        raise PlanError(
            f"{schedule} on {num_ranks} ranks with {num_chunks} chunks has {count} stages, "
            f"got layer counts for {len(stages)}"
        )
    if count > len(layers):
        raise PlanError(
            f"{count} stages need at least {count} layers, the model has {len(layers)}; use fewer ranks or chunks, "
            "or split the model into more layers"
        )
    if stages is not None:
        partition = Partition.from_counts(stages, len(layers))
    else:
        partition = minmax(profile, count) if profile is not None else _even(len(layers), count)
    placement = placement_of(_depth(num_ranks, replicas), num_chunks, find(schedule).layout, tuple(replicas))
    copies = [len(ranks) for ranks in placement]
    alike = copies[0] if len(set(copies)) == 1 else 1
    specs = [
        StageSpec(stage.layers, count // alike, tensor, recompute)
        for stage, count in zip(partition.stages, copies, strict=True)
    ]
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
        sharded_optimizer=sharded_optimizer,
        model=model,
    )


def _even(num_layers: int, count: int) -> Partition:
    size, more = divmod(num_layers, count)
    return Partition.from_counts([size + (stage < more) for stage in range(count)])


def default_device() -> torch.device:
    """The process's GPU when there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")
