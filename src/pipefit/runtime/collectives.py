"""Small collectives among the processes of a run: JSON data, rows of figures, sums of tables.

Every process of the run must make the same calls. In a run of one process they return their arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.errors import PipefitError, kind_of
from pipefit.parallel.alike import differences
from pipefit.parallel.waiting import collective, finish
from pipefit.runtime.session import Session
from pipefit.spec.files import JsonObject


def exchange(session: Session, data: Any) -> list[Any]:
    """Returns the JSON data of every process, by number."""
    if not session.is_distributed or session.is_rehearsal or session.is_outside:
        return [json.loads(json.dumps(data))] * session.num_ranks
    with session.progress.waiting():
        return exchange_in_group(data, session.group)


def exchange_in_group(data: Any, group: Any = None) -> list[Any]:
    """Returns the JSON data of every process of a process group, by number; None: the default group."""
    text = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    sizes[dist.get_rank(group)] = len(text)
    collective(dist.all_reduce, sizes, group=group)
    mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    mine[: len(text)] = text
    parts = [torch.empty_like(mine) for _ in sizes]
    collective(dist.all_gather, parts, mine, group=group)
    return [json.loads(bytes(part[:size].tolist())) for part, size in zip(parts, sizes.tolist(), strict=True)]


def sum_table(session: Session, table: Tensor) -> Tensor:
    """Returns the table (any shape, on the CPU) with the sum over all processes, which is written in place."""
    _together(session, dist.all_reduce, table)
    return table


def start_sum(session: Session, table: Tensor) -> Any:
    """Begins `sum_table`; returns the work to wait for, None in a run of one process."""
    if session.is_distributed:
        return dist.all_reduce(table, group=session.group, async_op=True)
    return None


def broadcast(session: Session, tensor: Tensor, source: int) -> Tensor:
    """Returns the tensor with the values of process `source`, written in place."""
    _together(session, dist.broadcast, tensor, source)
    return tensor


def send(session: Session, tensor: Tensor, target: int) -> None:
    """Sends the values of a tensor to another process, which waits for them."""
    if tensor.numel():
        with session.progress.waiting():
            finish(dist.isend(_bytes_of(tensor.contiguous()), target, group=session.group))


def receive(session: Session, tensor: Tensor, source: int) -> None:
    """Takes the values of a tensor from another process, in place."""
    if tensor.numel():
        buffer = tensor.contiguous()
        with session.progress.waiting():
            finish(dist.irecv(_bytes_of(buffer), source, group=session.group))
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.copy_(buffer)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def meet(session: Session) -> None:
    """Waits until every process is here."""
    _together(session, dist.barrier)


def _together(session: Session, call: Callable[..., Any], *args: Any) -> None:
    """Makes a collective call of torch among the processes of a run."""
    if session.is_distributed:
        with session.progress.waiting():
            collective(call, *args, group=session.group)


def attempt(function: Callable[[], Any]) -> JsonObject:
    """Returns the value of a function, or its error, as JSON data: {"value": …} or {"error": text, "kind": class}."""
    try:
        return {"value": function()}
    except Exception as problem:  # of any kind: the other ranks must get it before this one raises
        text = f"{type(problem).__name__}: {problem}"
        if isinstance(problem, PipefitError):
            text = str(problem)
        return {"error": text, "kind": type(problem).__name__}


def agree(session: Session, outcome: JsonObject, kind: type[PipefitError] = PipefitError) -> list[Any]:
    """Returns the values of all processes' attempts.

    Raises:
        PipefitError: of `kind`, on every process with the same message, when an attempt failed on any.
    """
    outcomes: Sequence[JsonObject] = exchange(session, outcome)
    errors = {rank: o["error"] for rank, o in enumerate(outcomes) if "error" in o}
    if errors:
        rank, first = next(iter(errors.items()))
        distinct = len(set(errors.values())) > 1 or len(errors) < len(outcomes)
        raise kind(f"rank {rank}: {first}" if distinct else first)
    return [o["value"] for o in outcomes]


def check_alike(session: Session, parts: Callable[[], JsonObject], kind: type[PipefitError], cure: str) -> None:
    """Compares parts of what all ranks must have alike.

    Args:
        session: of the run.
        parts: returns JSON data by name: small values, or checksums of others.
        kind: of the error.
        cure: the end of its message.

    Raises:
        PipefitError: of `kind`, on every rank with the same message: two ranks differ.
    """
    if not session.is_distributed:
        return
    own = parts()
    whole = hashlib.sha256(json.dumps(own).encode()).hexdigest()
    if len(set(exchange(session, whole))) > 1:
        raise kind(f"{differences(dict(enumerate(exchange(session, own))))}; {cure}")


def from_first(session: Session, function: Callable[[], Any]) -> Any:
    """Returns the JSON data of a function that only the first process calls.

    Raises:
        PipefitError: on every process the one that the function raised.
    """
    if not session.is_distributed or session.is_outside:
        return function()
    if session.rank == 0:
        outcome = attempt(function)
    else:
        outcome = None
    first = exchange(session, outcome)[0]
    if "error" in first:
        raise kind_of(first["kind"])(first["error"])
    return first["value"]
