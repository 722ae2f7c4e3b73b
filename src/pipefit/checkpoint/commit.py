"""Saving: every rank writes its own file into a new directory, which gets its name only when all is on the disk.

    temporary directory ─► rank files, each forced to disk ─► all ranks report ─► any error: no commit
                        ─► manifest, forced to disk ─► rename ─► parent forced to disk ─► older checkpoints to the trash

A run killed at any point leaves either no new checkpoint or a whole one, and never changes earlier ones. The training
waits for all of this, or only for a copy of its tensors, from which a thread does the same.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch.distributed as dist
from torch import Tensor

from pipefit.checkpoint.manifest import MANIFEST, Manifest, candidates, step_name
from pipefit.checkpoint.optim import optimization_of
from pipefit.checkpoint.sharded import Sharing, whole_states
from pipefit.checkpoint.state import aliases_of, saved_forms, saved_names, saved_stages, saved_tensors
from pipefit.checkpoint.tensor_files import header, write_tensors
from pipefit.checkpoint.trained import Trained
from pipefit.errors import PipefitError
from pipefit.runtime.collectives import agree, attempt, from_first
from pipefit.runtime.meeting import TIMEOUT
from pipefit.runtime.progress import MEETING, SAVING
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.spec.files import JsonObject, encode, sync_folder
from pipefit.spec.sealed import seal, write_file
from pipefit.stage.training import Tensors

_TEMPORARY = ".tmp-"
_TRASH = ".trash-"
_METADATA = {"format": "pt"}
_log = logging.getLogger("pipefit.checkpoint")


class Part(NamedTuple):
    """The part of a checkpoint that one rank writes, or has copied.

    Attributes:
        name: of its file; "": another process of the rank writes it.
        forms: tensors of the saved shapes and types, by name.
        values: in their order, each valid until the next; all must be walked.
        facts: for the manifest.
    """

    name: str
    forms: Tensors
    values: Iterable[Tensor]
    facts: JsonObject


class _Order(NamedTuple):
    """The checkpoint that is to be written.

    Attributes:
        path: its directory.
        facts: on rank 0, those of its manifest that no part has.
        keep, spared: see `save`.
    """

    path: Path
    facts: JsonObject
    keep: int | None
    spared: Container[str]


def save(
    pipeline: Trained,
    directory: str | Path,
    *,
    extra: JsonObject | None = None,
    keep: int | None = None,
    spared: Container[str] = (),
    wait: bool = True,
) -> Path:
    """Saves a run: weights, optimizer states and the position of the training. Every rank must call it.

    Args:
        pipeline: between two steps.
        directory: of the run, on a file system that all ranks see; the checkpoint is `step-000300` inside it.
        extra: JSON data of the caller, returned by `load`. That of rank 0 counts.
        keep: number of the newest checkpoints that stay; None: all.
        spared: names of checkpoints that stay in any case, on rank 0.
        wait: for the files; else only for a copy in the host's memory, from which a thread writes them. Where that
            fails there is a warning and no checkpoint. Spilled stages are written at once: a copy may not fit.

    Returns:
        The directory of the new checkpoint.

    Raises:
        PipefitError: on every rank, and nothing is committed: the disk is full, the path is a file, …
    """
    session = pipeline.session
    place = Path(directory)
    record = pipeline.loop.callbacks.last
    session.settle()
    with session.at(SAVING):
        pipeline.verify_replicas()
    facts: JsonObject = {}
    parts: list[Part] = []
    is_copied = not wait and pipeline.program.header.spill is None

    def prepared(sharing: Sharing) -> str:
        parts.extend(map(_copied, parts_of(pipeline, sharing) if is_copied else ()))
        if session.rank:
            return ""
        facts.update(_facts(pipeline, extra, keep))
        return _free_name(place, pipeline.state.num_updates)

    def tell(outcome: JsonObject) -> None:
        if "error" not in outcome:
            pipeline.loop.callbacks.follow("checkpoint", record, path=path)

    with session.at(SAVING), whole_states(pipeline) as sharing:
        path = place / agree(session, attempt(partial(prepared, sharing)))[0]
        order = _Order(path, facts, keep, spared)
        if is_copied:
            work = partial(_attempted, _beside(session), order, parts)
            session.background.start(work, tell, must_end=not session.is_distributed)
            return path
        if wait:
            write = _written
        else:
            write = _attempted
        outcome = write(session, order, parts_of(pipeline, sharing))
    tell(outcome)
    return path


def _beside(session: Session) -> Session:
    """The session of the thread: with a process group of its own, and a position that others do not see."""
    if session.is_distributed and session.background.group is None:
        with session.at(MEETING):
            session.background.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return replace(session, group=session.background.group, progress=session.background.progress)


def _facts(pipeline: Trained, extra: JsonObject | None, keep: int | None) -> JsonObject:
    """The facts of the manifest that no part has, as they are now."""
    if keep is not None and keep < 1:
        raise PipefitError(f"keep: expected at least 1 checkpoint, got {keep}")
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as problem:
        raise PipefitError(f"extra: expected JSON data (numbers, text, lists, dicts): {problem}") from None
    return facts_of(pipeline, extra or {})


def _free_name(place: Path, step: int) -> str:
    """The name of a new checkpoint; a second one of a step replaces nothing."""
    taken = 0
    with explaining(place):
        while (place / step_name(step, taken)).exists():
            taken += 1
    return step_name(step, taken)


def _attempted(session: Session, order: _Order, parts: Iterable[Part]) -> JsonObject:
    """Writes a checkpoint, or says why there is none."""
    outcome = attempt(lambda: _written(session, order, parts))
    if "error" in outcome and session.rank == 0:
        _log.warning("%s is not saved, training goes on: %s", order.path, outcome["error"])
    return outcome


def _written(session: Session, order: _Order, parts: Iterable[Part]) -> JsonObject:
    """Writes and commits a checkpoint. Every rank must call it."""
    first = session.rank == 0
    temporary = order.path.parent / from_first(session, lambda: _begin(order))
    try:
        reports = agree(session, attempt(lambda: write_parts(session, parts, temporary)))
        from_first(session, lambda: _commit(order, temporary, reports))
    except PipefitError:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if first and order.keep is not None:
        _retain(order)
    return {}


def _begin(order: _Order) -> str:
    """Makes the temporary directory and removes those of killed runs."""
    place = order.path.parent
    name = _new_name(_TEMPORARY, order.path)
    with explaining(place):
        make_folder(place)
        for path in place.iterdir():
            if path.name.startswith((_TEMPORARY, _TRASH)):
                shutil.rmtree(path, ignore_errors=True)
        (place / name).mkdir()
    return name


def _new_name(prefix: str, path: Path) -> str:
    """The name of a folder that nobody has."""
    return f"{prefix}{path.name}-{uuid.uuid4().hex[:8]}"


def make_folder(place: Path) -> None:
    """Makes a directory and its parents durably."""
    if not place.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        sync_folder(place.parent)


def parts_of(pipeline: Trained, sharing: Sharing, among: Container[int] | None = None) -> Iterator[Part]:
    """The parts of this process's ranks, one after the other.

    Args:
        pipeline: inside `whole_states`.
        sharing: what replicas share, from there.
        among: the first replica of a stage among these ranks writes it; None: among all.
    """
    for worker in pipeline.workers:
        stages = saved_stages(pipeline.plan, worker, among)
        forms: Tensors = {}
        for stage in stages:
            forms |= saved_forms(worker, stage)
        values = _values(pipeline, worker, stages, sharing, set(forms))
        if not worker.mesh.is_first:
            yield Part("", forms, values, {})
            continue
        facts = {"aliases": aliases_of(worker, stages), "optimization": optimization_of(worker, stages)}
        yield Part(f"rank-{worker.rank}.safetensors", forms, values, msgspec.to_builtins(facts))


def _values(
    pipeline: Trained, worker: Worker, stages: Sequence[int], sharing: Sharing, left: set[str]
) -> Iterator[Tensor]:
    """The saved tensors of a rank's own stages; of the others it sends its parts when their turn comes.

    Args:
        pipeline: whose state is saved.
        worker: the rank.
        stages: those that the rank saves.
        sharing: among the copies of a stage.
        left: names of the tensors that have not come yet. A weight that several stages have under one name comes once;
            states that a spilled stage has only since it was fetched for this are not saved.
    """
    for stage in worker.stages:
        if stage in stages:
            for name, value in saved_tensors(worker, stage, sharing):
                if name in left:
                    left.remove(name)
                    yield value
        elif pipeline.session.is_distributed:
            sharing.send(stage, saved_names(worker, stage))
            sharing.send_states(stage)


def _copied(part: Part) -> Part:
    """A part whose values are copies in the host's memory."""
    try:
        header(part.forms, _METADATA)  # refuses at once what the file cannot hold
        values = [value.detach().to("cpu", copy=True) for value in part.values if part.name]
    finally:
        walk(part)
    return part._replace(forms=dict(zip(part.forms, values, strict=False)), values=values)


def walk(part: Part) -> None:
    """Goes through the values of a part that are left: processes wait for each other at each of them."""
    for _ in part.values:
        pass


def _alive(session: Session, value: Tensor) -> Tensor:
    """Returns a value, which is a sign of life for ranks that wait."""
    session.progress.again()
    return value


def write_parts(session: Session, parts: Iterable[Part], temporary: Path) -> JsonObject:
    """Writes the files of parts into a folder; returns the facts about them for the manifest."""
    report: JsonObject = {"files": [], "aliases": {}, "optimization": []}
    for part in parts:
        path = temporary / part.name
        values = map(partial(_alive, session), part.values)
        try:
            if part.name:
                size = sum(form.nbytes for form in part.forms.values())
                with explaining(path, size):
                    entry = write_tensors(path, part.forms, _METADATA, values)
                report["files"].append(msgspec.to_builtins(entry))
                report["aliases"] |= part.facts["aliases"]
                report["optimization"] += part.facts["optimization"]
        finally:
            # Also when the disk is full.
            walk(part)
    return report


def facts_of(pipeline: Trained, extra: JsonObject) -> JsonObject:
    """The facts for the manifest of a training, between two steps, that no part has."""
    plan = pipeline.plan
    digest = hashlib.sha256(msgspec.json.encode(encode("plan", plan))).hexdigest()
    facts = {
        "step": pipeline.state.num_updates,
        "world": plan.placement.num_ranks,
        "seed": pipeline.training.seed,
        "schedule": plan.schedule,
        "plan": digest[:16],
        "extra": extra,
    }
    return facts | pipeline.state.saved()


def manifest_of(facts: JsonObject, reports: Sequence[JsonObject]) -> Manifest:
    """The manifest with `facts_of` the training and the facts about the files."""
    whole: JsonObject = {"files": [], "aliases": {}, "optimization": []}
    for report in reports:
        whole["files"] += report["files"]
        whole["aliases"] |= report["aliases"]
        whole["optimization"] += report["optimization"]
    return msgspec.convert(facts | whole, Manifest)


def _commit(order: _Order, temporary: Path, reports: list[JsonObject]) -> None:
    """On rank 0: writes the manifest and renames the directory."""
    manifest = seal(encode("checkpoint", manifest_of(order.facts, reports)), indent=1)
    with explaining(order.path.parent):
        write_file(temporary / MANIFEST, [manifest.encode()])
        sync_folder(temporary)
        temporary.rename(order.path)
        sync_folder(order.path.parent)


def _retain(order: _Order) -> None:
    """Removes the oldest checkpoints: by a rename first, so that none is ever incomplete."""
    assert order.keep is not None
    place = order.path.parent
    others = [path for path in candidates(place) if path != order.path and path.name not in order.spared]
    for path in others[order.keep - 1 :]:
        trash = place / _new_name(_TRASH, path)
        try:
            path.rename(trash)
            shutil.rmtree(trash)
        except OSError as problem:
            _log.warning("an old checkpoint could not be removed: %s", problem)


@contextlib.contextmanager
def explaining(path: Path, num_bytes: int = 0) -> Iterator[None]:
    """The context of writing a file or folder, of that many bytes if they are known.

    Raises:
        PipefitError: the file system has failed; in words.
    """
    try:
        yield
    except OSError as problem:
        raise _explained(problem, path, num_bytes) from None


def _explained(problem: OSError, path: Path, num_bytes: int) -> PipefitError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        if num_bytes:
            needed = f"; this file needs {num_bytes} bytes"
        else:
            needed = ""
        with contextlib.suppress(OSError):
            needed += f", {shutil.disk_usage(path.parent).free} bytes are free"
        return PipefitError(
            f"{path}: the disk is full{needed}; nothing was saved, nothing is lost: earlier checkpoints are unchanged"
        )
    if problem.errno in (errno.EEXIST, errno.ENOTDIR):
        return PipefitError(f"{path}: expected a directory for checkpoints, found a file in its place")
    return PipefitError(f"{path}: cannot be written: {problem.strerror or problem}")
