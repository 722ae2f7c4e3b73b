"""The whole model in one safetensors file, for use without pipefit."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.checkpoint.commit import explained, make_folder
from pipefit.checkpoint.state import Trained, aliases_of, saved_forms, saved_stages, saved_tensors
from pipefit.checkpoint.tensor_files import payload, write_tensors
from pipefit.errors import PipefitError
from pipefit.runtime.collectives import agree, attempt, exchange
from pipefit.runtime.progress import SAVING
from pipefit.spec.files import sync_folder

Forms = Sequence[Mapping[str, Tensor]]
"""By stage, tensors of the shapes and types that are saved, by name."""


def export(pipeline: Trained, path: str | Path) -> Path:
    """Writes all weights and buffers under the user's names. Every rank must call it; rank 0 writes.

    A tied weight is saved once; its other names are noted as safetensors itself does: read the file with
    `safetensors.torch.load_model(model, path)`, or without ties with `model.load_state_dict(load_file(path))`.

    Args:
        pipeline: between two steps.
        path: of the file, such as "model.safetensors"; replaced as a whole when it exists.

    Raises:
        PipefitError: on every rank: the path is a directory, the disk is full, …
    """
    session = pipeline._session
    path = Path(path)
    with session.at(SAVING):
        forms, aliases = _forms(pipeline)
        values = _collected(pipeline, forms)
        metadata, first = {"format": "pt"} | aliases, session.rank == 0
        outcome = attempt(lambda: _write(path, forms, metadata, values) if first else None)
        # The processes wait for each other at each value: all are walked, even when the file cannot be written.
        rest = attempt(lambda: [None for _ in values] and None)
        agree(session, outcome if "error" in outcome else rest)
    return path


def _forms(pipeline: Trained) -> tuple[Forms, dict[str, str]]:
    """Shapes and types of all tensors by stage, and further names of tied weights, from all ranks."""
    mesh, ranks = pipeline.workers[0].mesh, pipeline.plan.placement.ranks
    held: dict[str, dict[str, tuple[str, list[int]]]] = {}
    aliases: dict[str, str] = {}
    for worker in pipeline.workers:
        stages = saved_stages(pipeline.plan, worker)
        aliases |= aliases_of(worker, stages)
        for stage in stages:
            forms = saved_forms(worker, stage, optimizer=False)
            held[str(stage)] = {n: (str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in forms.items()}
    tables = exchange(pipeline._session, {"held": held, "aliases": aliases})
    by_stage = []
    for stage, (first, *_) in enumerate(ranks):
        rows = tables[mesh.process_of(first) if pipeline._session.is_distributed else 0]["held"][str(stage)]
        meta = {n: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for n, (dtype, shape) in rows.items()}
        by_stage.append(meta)
    return by_stage, {name: saved for table in tables for name, saved in table["aliases"].items()}


def _collected(pipeline: Trained, forms: Forms) -> Iterator[Tensor]:
    """On rank 0 all tensors, on the host, in the order of the forms; on the others nothing, while they send theirs."""
    session, mesh = pipeline._session, pipeline.workers[0].mesh
    for stage, (first, *_) in enumerate(pipeline.plan.placement.ranks):
        owner = mesh.process_of(first) if session.is_distributed else 0
        holder = next((worker for worker in pipeline.workers if worker.rank == first), None)
        values = saved_tensors(holder, stage, optimizer=False) if holder else iter(())
        if holder is None and session.rank == 0:
            values = (_received(form, owner) for form in forms[stage].values())
        for value in values:
            if session.rank == 0:
                yield value
            elif session.rank == owner:
                dist.send(torch.frombuffer(bytearray(payload(value)) or bytearray(1), dtype=torch.uint8), 0)


def _received(form: Tensor, owner: int) -> Tensor:
    """A tensor of another rank; bytes travel, so it can be of any type."""
    size = math.prod(form.shape) * form.dtype.itemsize
    buffer = torch.empty(max(size, 1), dtype=torch.uint8)
    dist.recv(buffer, owner)
    return buffer[:size].view(form.dtype).reshape(form.shape)


def _write(path: Path, forms: Forms, metadata: Mapping[str, str], values: Iterator[Tensor]) -> None:
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}"
    whole = {name: form for of_stage in forms for name, form in of_stage.items()}
    try:
        if path.is_dir():
            raise PipefitError(f"{path}: expected a file to write, found a directory")
        make_folder(path.parent)
        write_tensors(temporary, whole, metadata, values)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as problem:
        raise explained(problem, path) from None
    finally:
        temporary.unlink(missing_ok=True)
