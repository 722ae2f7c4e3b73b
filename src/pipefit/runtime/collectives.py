"""Ranks tell each other plain JSON data, so that all of them reach the same verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipefit import errors
from pipefit.errors import PipefitError
from pipefit.runtime.session import Session

__all__ = ["agree", "attempt", "exchange", "from_first"]


def exchange(session: Session, data: Any) -> list[Any]:
    """The JSON data of every process, by rank. All must call it."""
    if not session.is_distributed:
        return [json.loads(json.dumps(data))]
    text = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
    sizes = torch.zeros(session.num_ranks, dtype=torch.int64)
    sizes[session.rank] = len(text)
    dist.all_reduce(sizes)
    mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    mine[: len(text)] = text
    parts = [torch.empty_like(mine) for _ in range(session.num_ranks)]
    dist.all_gather(parts, mine)
    sizes_by_rank: list[int] = sizes.tolist()
    return [json.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes_by_rank, strict=True)]


def attempt(function: Callable[[], Any]) -> dict[str, Any]:
    """What a function gives, or what went wrong, as JSON data: {"value": …} or {"error": text}."""
    try:
        return {"value": function()}
    except PipefitError as problem:
        return {"error": str(problem)}
    except Exception as problem:  # whatever it is, the other ranks must hear of it before this one raises
        return {"error": f"{type(problem).__name__}: {problem}"}


def agree(session: Session, outcome: dict[str, Any], kind: type[PipefitError] = PipefitError) -> list[Any]:
    """The values of all ranks' attempts.

    Raises:
        PipefitError: of `kind`, on every rank with the same words, when an attempt failed on any.
    """
    outcomes: Sequence[dict[str, Any]] = exchange(session, outcome)
    errors = {rank: o["error"] for rank, o in enumerate(outcomes) if "error" in o}
    if errors:
        rank, first = next(iter(errors.items()))
        distinct = len(set(errors.values())) > 1 or len(errors) < len(outcomes)
        raise kind(f"rank {rank}: {first}" if distinct else first)
    return [o["value"] for o in outcomes]


def from_first(session: Session, function: Callable[[], Any]) -> Any:
    """The JSON data that a function gives on the first rank, which alone calls it.

    Raises:
        PipefitError: on every rank the one that the function raised.
    """
    if not session.is_distributed:
        return function()
    outcome: dict[str, Any] = {}
    if session.rank == 0:
        try:
            outcome = {"value": function()}
        except Exception as problem:  # the other ranks wait for this one's word
            known = isinstance(problem, PipefitError)
            outcome = {"error": str(problem) if known else repr(problem), "kind": type(problem).__name__}
    first = exchange(session, outcome)[0]
    if "error" in first:
        raise getattr(errors, first["kind"], PipefitError)(first["error"])
    return first["value"]
