"""Loading: any number of ranks loads the checkpoint of any other number, by the user's names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipefit.checkpoint.manifest import MANIFEST, Manifest, candidates, read_manifest
from pipefit.checkpoint.optim import Read, by_parameter, restore_optimizer, weight_of
from pipefit.checkpoint.sharded import OPTIM
from pipefit.checkpoint.state import tensors_of, weights_of
from pipefit.checkpoint.tensor_files import DTYPES
from pipefit.checkpoint.trained import Trained
from pipefit.errors import ModelError, PipefitError
from pipefit.parallel.mesh import Mesh
from pipefit.runtime.collectives import agree, attempt, exchange, from_first
from pipefit.runtime.progress import SAVING
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.spec.files import JsonObject

_log = logging.getLogger("pipefit.checkpoint")

Take = Callable[[], None]
"""Loads a part of a checkpoint that was compared with the model."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded.

    Attributes:
        path: its directory.
        step: weight updates it had done.
        extra: the caller's own data.
        skipped: damaged or unfinished checkpoints that are newer, each with the problem.
    """

    path: Path
    step: int
    extra: JsonObject = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def load(pipeline: Trained, directory: str | Path, *, weights_only: bool = False) -> Checkpoint:
    """Loads weights, optimizer states and the position of the training from a checkpoint. Every rank must call it.

    The run may have another number of ranks, other stages or another schedule than the one that saved. After this,
    training continues with the numbers it would have had without an interruption.

    Args:
        pipeline: of the same model.
        directory: of a run, whose newest valid checkpoint is taken, or of one checkpoint.
        weights_only: leave optimizers, learning rates and counters as they are; types of weights may differ.

    Raises:
        ModelError: the checkpoint is of another model or optimizer; nothing was changed.
        PipefitError: there is no valid checkpoint.
    """
    session = pipeline.session
    session.settle()
    with session.at(SAVING):
        path, manifest, skipped = _choose(session, Path(directory))
        try:
            take(pipeline, manifest, lambda: contents(path, manifest), weights_only)
        except PipefitError as problem:
            raise type(problem)(f"{path}: {problem}") from None
    return Checkpoint(path, manifest.step, manifest.extra, tuple(skipped))


def take(
    pipeline: Trained, manifest: Manifest, found: Callable[[], Mapping[str, Saved]], weights_only: bool = False
) -> None:
    """Loads saved tensors and the position of the training. Every rank must call it.

    Args:
        pipeline: of the same model.
        manifest: of the checkpoint.
        found: returns its tensors by name.
        weights_only: see `load`.

    Raises:
        ModelError: they are of another model or optimizer; nothing was changed.
    """
    pipeline.engine.check_weights()
    session = pipeline.session
    takers = []

    def prepare() -> None:
        takers.extend(_prepare(pipeline, found(), manifest, weights_only))

    def take_all() -> None:
        for one in takers:
            one()

    agree(session, attempt(prepare), ModelError)
    agree(session, attempt(take_all))
    if weights_only:
        return
    pipeline.state.resume(manifest.step, manifest.ordinal, manifest.loss_scale, manifest.position)
    if manifest.seed != pipeline.training.seed:
        _log.warning(
            "the checkpoint was trained with seed %d, this run has seed %d: dropout will differ",
            manifest.seed,
            pipeline.training.seed,
        )


# ---- choosing a checkpoint -----------------------------------------------------------------------------------------


def _choose(session: Session, place: Path) -> tuple[Path, Manifest, list[str]]:
    """The newest checkpoint that is whole, the same on every rank; skipped ones are logged."""
    found = from_first(session, lambda: [str(path) for path in _found(place)])
    skipped: list[str] = []
    for text in found:
        path = Path(text)
        problems = [o.get("error") for o in exchange(session, attempt(partial(_verify, session, path)))]
        problem = next((problem for problem in problems if problem), None)
        if problem is None:
            return path, read_manifest(path), skipped
        skipped.append(problem)
        if session.rank == 0 and len(found) > 1:
            _log.warning("skipped a checkpoint: %s", problem)
    raise PipefitError(f"{place}: no checkpoint in it is whole: " + "; ".join(skipped))


def _found(place: Path) -> list[Path]:
    if not place.exists():
        raise PipefitError(f"{place}: no such directory; expected one that `save` has made")
    if not place.is_dir():
        raise PipefitError(f"{place}: expected the directory of a run or of a checkpoint, found a file")
    if (place / MANIFEST).exists():
        found = [place]
    else:
        found = candidates(place)
    if not found:
        raise PipefitError(f"{place}: no checkpoint in it (looked for directories like step-000300)")
    return found


def _verify(session: Session, path: Path) -> None:
    """Every rank reads the manifest, and its share of the files to the last byte."""
    manifest = read_manifest(path)
    for entry in manifest.files[session.rank :: session.num_ranks]:
        entry.check(path)


# ---- loading its tensors -------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """A saved tensor: its shape and type, and the function that returns its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Read


Contents = dict[str, Saved]
"""Saved tensors by their names."""


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def contents(path: Path, manifest: Manifest) -> Contents:
    """All tensors in the files of a checkpoint, by name; only headers are read."""
    result: Contents = {}
    for entry in manifest.files:
        try:
            with safe_open(path / entry.name, framework="pt") as file:
                for name in file.keys():
                    part = file.get_slice(name)
                    read = partial(_read, path / entry.name, name)
                    result[name] = Saved(tuple(part.get_shape()), DTYPES[part.get_dtype()], read)
        except (SafetensorError, OSError) as problem:
            raise PipefitError(f"{path / entry.name}: {problem}") from None
    return result


def _prepare(pipeline: Trained, saved: Mapping[str, Saved], manifest: Manifest, weights_only: bool) -> list[Take]:
    """Compares the checkpoint with the model; returns the functions that load it. Until they run nothing is changed."""
    weights = {name: saved[name] for name in saved if not name.startswith(OPTIM)}
    for alias, owner in manifest.aliases.items():
        if owner in weights:
            weights[alias] = weights[owner]
    _compare(pipeline, weights, weights_only)
    readers = readers_of(pipeline.engine.mesh, {**saved, **weights})
    states_of = by_parameter(readers)
    takers: list[Take] = []
    for worker in pipeline.workers:
        for stage in worker.stages:
            restore = None
            if not weights_only and stage in worker.optimizers:
                restore = restore_optimizer(worker, stage, manifest.optimization, states_of)
            takers.append(partial(_take, worker, stage, readers, restore))
    return takers


def readers_of(mesh: Mesh, saved: Mapping[str, Saved]) -> dict[str, Read]:
    """Reads this process's parts of saved tensors: of weights, and of states that have the shapes of their weights."""
    found = {}
    for name, entry in saved.items():
        weight = weight_of(name)
        found[name] = entry.read
        if weight in saved and entry.shape == saved[weight].shape:
            found[name] = partial(_read_part, mesh, weight, entry.read)
    return found


def _read_part(mesh: Mesh, weight: str, read: Read) -> Tensor:
    return mesh.part(weight, read())


@torch.no_grad()
def _take(worker: Worker, stage: int, readers: Mapping[str, Read], restore: Take | None) -> None:
    """Loads the saved tensors of a stage, which is on the device meanwhile."""
    with worker.presence(stage, optim=True, change=True):
        with worker.stores[stage].overwritten():
            for name, _, tensor in weights_of(worker, stage):
                tensor.copy_(readers[name]())
        if restore is not None:
            restore()


def _compare(pipeline: Trained, weights: Contents, weights_only: bool) -> None:
    """Compares names, shapes and types of the whole model, also of tensors on other ranks."""
    wanted = tensors_of(pipeline.layers)
    whole_shape = pipeline.engine.mesh.whole_shape
    if missing := [name for name in wanted if name not in weights]:
        raise ModelError(_other_model("the model has", missing, "that the checkpoint lacks", weights))
    if unknown := [name for name in weights if name not in wanted]:
        raise ModelError(_other_model("the checkpoint has", unknown, "that the model lacks", wanted))
    for name, value in wanted.items():
        found = weights[name]
        shape = whole_shape(name, value.shape)
        if tuple(shape) != found.shape:
            raise ModelError(
                f"{name}: the model's shape is {list(shape)}, the checkpoint's {list(found.shape)}; "
                "it is of another model"
            )
        if value.dtype != found.dtype and not weights_only:
            raise ModelError(
                f"{name}: the model has {value.dtype}, the checkpoint {found.dtype}; make the model of that type, or "
                "convert only the weights: load(…, weights_only=True)"
            )


def _other_model(who: str, names: list[str], whom: str, others: dict[str, Any]) -> str:
    more = ""
    if len(names) > 3:
        more = f" and {len(names) - 3} more"
    example = next(iter(others), "nothing")
    return (
        f"{who} {', '.join(names[:3])}{more} {whom} (which begins with {example}); is it the same model, "
        "with its layers under the same names?"
    )
