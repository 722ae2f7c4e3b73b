"""Saving: every rank writes its own file into a new directory, which gets its name only when all is on the disk.

    temporary directory ─► rank files, each forced to disk ─► all ranks report ─► any error: no commit
                        ─► manifest, forced to disk ─► rename ─► parent forced to disk ─► older checkpoints to the trash

A run killed at any point leaves either no new checkpoint or a whole one, and never changes earlier ones.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from pipefit.checkpoint.manifest import MANIFEST, Manifest, Optimization, candidates, step_name
from pipefit.checkpoint.optim import optimization_of
from pipefit.checkpoint.sharded_optimizer import whole_states
from pipefit.checkpoint.state import aliases_of, saved_forms, saved_stages, saved_tensors
from pipefit.checkpoint.tensor_files import write_tensors
from pipefit.checkpoint.trained import Trained
from pipefit.errors import PipefitError
from pipefit.runtime.collectives import agree, attempt
from pipefit.runtime.progress import SAVING
from pipefit.spec.files import encode, sync_folder
from pipefit.spec.sealed import FileEntry, seal, write_file

_TEMPORARY, _TRASH = ".tmp-", ".trash-"
_log = logging.getLogger("pipefit.checkpoint")


def save(
    pipeline: Trained, directory: str | Path, *, extra: dict[str, Any] | None = None, keep: int | None = None
) -> Path:
    """Saves a run: weights, optimizer states and the position of the training. Every rank must call it.

    Args:
        pipeline: between two steps.
        directory: of the run, on a file system that all ranks see; the checkpoint is `step-000300` inside it.
        extra: JSON data of the caller, returned by `load`. That of rank 0 counts.
        keep: number of the newest checkpoints that stay; None: all.

    Returns:
        The directory of the new checkpoint.

    Raises:
        PipefitError: on every rank, and nothing is committed: the disk is full, the path is a file, …
    """
    session = pipeline._session
    place = Path(directory)
    first = session.rank == 0
    with session.at(SAVING):
        made = attempt(lambda: _begin(place, pipeline.num_updates, extra, keep) if first else "")
        temporary = place / agree(session, made)[0]
        try:
            with whole_states(pipeline):
                reports = agree(session, attempt(lambda: write_ranks(pipeline, temporary)))
            done = attempt(lambda: _commit(pipeline, temporary, reports, extra or {}) if first else "")
            path = place / agree(session, done)[0]
        except PipefitError:
            if first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if first and keep is not None:
            _retain(place, path, keep)
    return path


def _begin(place: Path, step: int, extra: dict[str, Any] | None, keep: int | None) -> str:
    """Makes the temporary directory and removes those of killed runs."""
    if keep is not None and keep < 1:
        raise PipefitError(f"keep: expected at least 1 checkpoint, got {keep}")
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as problem:
        raise PipefitError(f"extra: expected JSON data (numbers, text, lists, dicts): {problem}") from None
    try:
        make_folder(place)
        for path in place.iterdir():
            if path.name.startswith((_TEMPORARY, _TRASH)):
                shutil.rmtree(path, ignore_errors=True)
        name = f"{_TEMPORARY}{step_name(step)}-{uuid.uuid4().hex[:8]}"
        (place / name).mkdir()
    except OSError as problem:
        raise explained(problem, place) from None
    return name


def make_folder(place: Path) -> None:
    """Makes a directory and its parents durably."""
    if not place.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        sync_folder(place.parent)


def write_ranks(pipeline: Trained, temporary: Path, among: Container[int] | None = None) -> dict[str, Any]:
    """Writes the files of this process's ranks; returns the facts about them for the manifest.

    Args:
        pipeline: inside `whole_states`.
        temporary: the folder.
        among: the first replica of a stage among these ranks writes it; None: among all.
    """
    files: list[FileEntry] = []
    optimization: list[Optimization] = []
    aliases: dict[str, str] = {}
    for worker in pipeline.workers:
        stages = saved_stages(pipeline.plan, worker, among)
        forms = {name: form for stage in stages for name, form in saved_forms(worker, stage).items()}
        values = _alive(pipeline, (value for stage in stages for value in saved_tensors(worker, stage)))
        path = temporary / f"rank-{worker.rank}.safetensors"
        try:
            if worker.mesh.is_first:
                files.append(write_tensors(path, forms, {"format": "pt"}, values))
                aliases |= aliases_of(worker, stages)
                optimization += optimization_of(worker, stages)
        except OSError as problem:
            raise explained(problem, path, sum(form.nbytes for form in forms.values())) from None
        finally:
            # The processes of a rank wait for each other at each value: all are walked, even when the disk is full.
            for _ in values:
                pass
    return msgspec.to_builtins({"files": files, "aliases": aliases, "optimization": optimization})


def _alive(pipeline: Trained, values: Iterator[Tensor]) -> Iterator[Tensor]:
    """The values; each is a sign of life for ranks that wait."""
    for value in values:
        pipeline._session.progress.again()
        yield value


def manifest_of(pipeline: Trained, reports: Sequence[dict[str, Any]], extra: dict[str, Any]) -> Manifest:
    """The manifest of a training, between two steps, with the facts about the files."""
    data = {
        "step": pipeline.num_updates,
        "ordinal": pipeline.loop.next_ordinal,
        "world": pipeline.plan.placement.num_ranks,
        "seed": pipeline._training.seed,
        "schedule": pipeline.plan.schedule,
        "plan": hashlib.sha256(msgspec.json.encode(encode("plan", pipeline.plan))).hexdigest()[:16],
        "files": [entry for report in reports for entry in report["files"]],
        "aliases": {name: saved for report in reports for name, saved in report["aliases"].items()},
        "optimization": [record for report in reports for record in report["optimization"]],
        "extra": extra,
        "loss_scale": scale.state() if (scale := pipeline.workers[0].scale) else None,
        "position": pipeline.position.state(),
    }
    return msgspec.convert(data, Manifest)


def _commit(pipeline: Trained, temporary: Path, reports: list[dict[str, Any]], extra: dict[str, Any]) -> str:
    """On rank 0: writes the manifest and renames the directory; returns the checkpoint's name."""
    place = temporary.parent
    manifest = seal(encode("checkpoint", manifest_of(pipeline, reports, extra)), indent=1)
    try:
        write_file(temporary / MANIFEST, [manifest.encode()])
        sync_folder(temporary)
        taken = 0
        while (path := place / step_name(pipeline.num_updates, taken)).exists():
            taken += 1
        temporary.rename(path)
        sync_folder(place)
    except OSError as problem:
        raise explained(problem, place) from None
    return path.name


def _retain(place: Path, newest: Path, keep: int) -> None:
    """Removes the oldest checkpoints: by a rename first, so that none is ever incomplete."""
    others = [path for path in candidates(place) if path != newest]
    for path in others[keep - 1 :]:
        trash = place / f"{_TRASH}{path.name}-{uuid.uuid4().hex[:8]}"
        try:
            path.rename(trash)
            shutil.rmtree(trash)
        except OSError as problem:
            _log.warning("an old checkpoint could not be removed: %s", problem)


def explained(problem: OSError, path: Path, num_bytes: int | None = None) -> PipefitError:
    """A failure of the file system in words."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = f"; this file needs {num_bytes} bytes" if num_bytes else ""
        with contextlib.suppress(OSError):
            needed += f", {shutil.disk_usage(path.parent).free} bytes are free"
        return PipefitError(
            f"{path}: the disk is full{needed}; nothing was saved, nothing is lost: earlier checkpoints are unchanged"
        )
    if problem.errno in (errno.EEXIST, errno.ENOTDIR):
        return PipefitError(f"{path}: expected a directory for checkpoints, found a file in its place")
    return PipefitError(f"{path}: cannot be written: {problem.strerror or problem}")
