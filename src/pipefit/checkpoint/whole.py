"""The whole model in one safetensors file, for those who go on without pipefit."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.checkpoint.commit import explained, make_folder
from pipefit.checkpoint.state import Trained, tensors_of
from pipefit.checkpoint.tensors import header, payload
from pipefit.errors import PipefitError
from pipefit.runtime.collectives import agree, attempt, exchange
from pipefit.spec.files import sync_folder

__all__ = ["export"]


def export(pipeline: Trained, path: str | Path) -> Path:
    """Writes all weights and buffers under the user's names. Every rank must call it; rank 0 writes.

    A tied weight is saved once, its other names are noted as safetensors itself does: read the file with
    `safetensors.torch.load_model(model, path)`, or without ties with `model.load_state_dict(load_file(path))`.

    Args:
        pipeline: between two steps.
        path: of the file, such as "model.safetensors"; replaced as a whole when it exists.

    Raises:
        PipefitError: on every rank: the path is a directory, the disk is full, …
    """
    session = pipeline._session
    path = Path(path)
    with session.busy():
        held: list[dict[str, Tensor]] = []
        aliases: dict[str, str] = {}
        for worker in pipeline.workers:
            tensors, known = tensors_of(pipeline, worker, optimizer=False)
            held.append(tensors)
            aliases.update(known)
        mine = {
            "held": {
                name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for own in held for name, t in own.items()
            },
            "aliases": aliases,
        }
        tables = exchange(session, mine)
        order = {name: i for i, name in enumerate(_model_names(pipeline))}
        parts = sorted(
            ((name, rank, *what) for rank, table in enumerate(tables) for name, what in table["held"].items()),
            key=lambda part: order.get(part[0], len(order)),
        )
        metadata = {"format": "pt"} | {k: v for table in tables for k, v in table["aliases"].items()}
        outcome = _write(pipeline, path, parts, metadata, held)
        agree(session, outcome)
    return path


def _model_names(pipeline: Trained) -> Iterator[str]:
    for layer in pipeline.layers:
        yield from layer.module.state_dict(prefix=f"{layer.prefix}.")


def _write(
    pipeline: Trained, path: Path, parts: list[tuple[Any, ...]], metadata: dict[str, str], held: list[dict[str, Tensor]]
) -> dict[str, Any]:
    """Rank 0 takes tensor after tensor from its owner and writes it; an error does not stop the others' sends."""
    session = pipeline._session
    shapes = {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, _, dtype, shape in parts}
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}"
    file: Any = None
    outcome: dict[str, Any] = {"value": None}

    def run(what: Any) -> None:
        nonlocal outcome
        if session.rank == 0 and "error" not in outcome:
            outcome = attempt(lambda: _guarded(what, path))

    def begin() -> None:
        nonlocal file
        if path.is_dir():
            raise PipefitError(f"{path}: expected a file to write, found a directory")
        make_folder(path.parent)
        file = temporary.open("xb")
        file.write(header(shapes, metadata))

    def finish() -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()
        temporary.replace(path)
        sync_folder(path.parent)

    run(begin)
    for name, owner, *_ in parts:
        mine = next((own.get(name) for own in held if name in own), None)
        tensor = _collected(session, owner, mine, shapes[name])
        if tensor is not None:
            run(lambda t=tensor: file.write(payload(t)))
    run(finish)
    if "error" in outcome and file is not None:
        file.close()
        temporary.unlink(missing_ok=True)
    return outcome


def _guarded(what: Any, path: Path) -> None:
    try:
        what()
    except OSError as problem:
        raise explained(problem, path) from None


def _collected(session: Any, owner: int, mine: Tensor | None, shaped: Tensor) -> Tensor | None:
    """A tensor at rank 0, on the host; bytes travel, so every type can."""
    if not session.is_distributed or owner == session.rank == 0:
        return mine
    size = math.prod(shaped.shape) * shaped.dtype.itemsize
    if session.rank == owner and mine is not None:
        dist.send(torch.frombuffer(bytearray(payload(mine)) or bytearray(1), dtype=torch.uint8), 0)
    elif session.rank == 0:
        buffer = torch.empty(max(size, 1), dtype=torch.uint8)
        dist.recv(buffer, owner)
        return buffer[:size].view(shaped.dtype).reshape(shaped.shape)
    return None
