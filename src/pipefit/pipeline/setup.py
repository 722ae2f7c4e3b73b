"""Ranks and devices of a run: as many as its plan needs, where it computes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from pipefit.errors import PlanError
from pipefit.planner import ranks_of
from pipefit.runtime.session import Session
from pipefit.spec import Plan

__all__ = ["check_ranks", "default_device", "wanted_ranks"]


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


def default_device() -> torch.device:
    """The process's GPU when there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")
