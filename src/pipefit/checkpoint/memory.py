"""Copies of a training in the memory of its machines, which outlive the processes: after a fault no step is lost.

    /dev/shm/…/step-000012/rank-0.safetensors    one of the machine's ranks that have a stage writes it
                           rank-0.json           sealed, written last: the step, and the file with its checksum

A step counts when the machines that are left hold all of its stages: of a stage with copies, one is enough (the
observation of ReCycle, arXiv 2405.14009). What a machine lacks, others send. No rank goes on before all have written,
so they are at most one step apart; one more step is kept for a copy that is damaged.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from pipefit.checkpoint.commit import Part, facts_of, manifest_of, parts_of, walk, write_parts
from pipefit.checkpoint.manifest import FORM, Manifest, candidates, step_name, step_of
from pipefit.checkpoint.optim import optimization_of, read_of, weight_of
from pipefit.checkpoint.restore import Contents, Saved, contents, take
from pipefit.checkpoint.sharded import whole_states
from pipefit.checkpoint.state import tensors_of, weights_of
from pipefit.checkpoint.trained import Trained
from pipefit.errors import PipefitError
from pipefit.runtime.collectives import broadcast, exchange
from pipefit.runtime.outliving import processes_here
from pipefit.runtime.progress import SAVING
from pipefit.spec.files import JsonObject, decode, encode
from pipefit.spec.sealed import read_sealed, write_sealed
from pipefit.stage.record_layout import name_of

EVERY = "PIPEFIT_MEMORY_EVERY"
_KEPT = 3
_log = logging.getLogger("pipefit.checkpoint")


class Memory:
    """The copies of a training in the memory of this machine.

    Args:
        pipeline: that is trained, by a synchronous schedule.
        folder: in the machine's memory, private.
        every: steps between copies.
    """

    def __init__(self, pipeline: Trained, folder: Path, every: int) -> None:
        self._pipeline = pipeline
        self._folder = folder
        self.every = every
        mesh = pipeline.engine.mesh
        processes = processes_here(pipeline.session)
        self._is_first = pipeline.session.rank == processes[0]
        # Sharded optimizers are whole on the first replica alone.
        is_alike = pipeline.session.is_distributed and pipeline.plan.shard == "none"
        self._among = {mesh.rank_of(process) for process in processes} if is_alike else None
        self._failed = False
        self._is_newest = True
        self._seen: list[Any] | None = self._marks()

    def keep(self) -> None:
        """Copies the training after a step, if it is due. Every rank must call it."""
        step = self._pipeline.state.num_updates
        if step % self.every:
            return
        # No rank goes on before all have their copies: a step that a callback has seen is not lost.
        self._pipeline.session.together(lambda: self._keep(step))
        self._is_newest = True
        self._seen = self._marks()
        if self._is_first:
            for old in candidates(self._folder)[_KEPT:]:
                shutil.rmtree(old, ignore_errors=True)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """The context of a step that ends with a copy, and changes weights and states before."""
        self._is_newest = self.is_newest()
        self._seen = None
        try:
            yield
        except PipefitError:
            self._is_newest = False
            raise

    def is_newest(self) -> bool:
        """Returns whether weights and states are as in the newest copy, or were at the beginning of the step that runs.

        A callback or a load may have changed them. What torch does not count, changes through `.data`, is not noticed.
        """
        return self._is_newest and self._seen in (None, self._marks())

    def _marks(self) -> list[Any]:
        """Where copies share weights: the numbers of optimizers, and the place and number of changes of each tensor."""
        found: list[Any] = []
        if self._pipeline.plan.shard == "none":
            return found
        for worker in self._pipeline.workers:
            found += optimization_of(worker, worker.stages)
            states = [value for optimizer in worker.optimizers.values() for value in optimizer.state.values()]
            tensors = [state for own in states for state in own.values() if isinstance(state, Tensor)]
            for index, stage in worker.stages.items():
                tensors += [*worker.stores[index].kept(), *(buffer for _, buffer in stage.saved_buffers())]
                # Their memory comes and goes.
                found += [parameter._version for _, parameter in stage.named_parameters()]
            found += [(tensor.data_ptr(), tensor._version) for tensor in tensors]
        return found

    def _keep(self, step: int) -> None:
        with self._pipeline.session.at(SAVING), whole_states(self._pipeline) as sharing:
            parts = list(parts_of(self._pipeline, sharing, self._among))
            try:
                if not self._failed:
                    self._write(parts, self._folder / step_name(step))
            except (OSError, PipefitError) as problem:
                self._failed = True
                _log.warning("the training is no longer copied in memory: %s", problem)
            for part in parts:
                walk(part)

    def _write(self, parts: Sequence[Part], place: Path) -> None:
        place.mkdir(mode=0o700, exist_ok=True)
        for part in parts:
            if part.name:
                (place / part.name).unlink(missing_ok=True)  # where a rank was lost before all had their copies
        report = write_parts(self._pipeline.session, parts, place)
        if report["files"]:
            data = encode("checkpoint", manifest_of(facts_of(self._pipeline, {}), [report]))
            first = Path(report["files"][0]["name"])
            write_sealed(place / first.with_suffix(".json"), data, durable=False)


def memory_of(pipeline: Trained, folder: Path | None, is_synchronous: bool, before: int) -> Memory | None:
    """The copies of a training; None: it makes none.

    By default every step of a training with replicas is copied. PIPEFIT_MEMORY_EVERY=N sets the number of steps between
    copies, 0 turns them off.

    Args:
        pipeline: that is trained.
        folder: in the machine's memory; None: there is none.
        is_synchronous: whether its schedule is.
        before: steps between its copies so far; 0: there are none.

    Raises:
        PipefitError: the variable is not a whole number.
    """
    text = os.environ.get(EVERY, "").strip()
    if text and not text.isdecimal():
        raise PipefitError(f"{EVERY}: expected a number of steps, 0 for no copies in memory, got {text!r}")
    if text:
        every = int(text)
    else:
        every = before or int(any(len(ranks) > 1 for ranks in pipeline.plan.placement.ranks))
    spills = any(worker.spilling for worker in pipeline.workers)
    if folder and every and is_synchronous and not spills:
        return Memory(pipeline, folder, every)
    return None


# ---- resuming ------------------------------------------------------------------------------------------------------


class Here(NamedTuple):
    """A step in this machine's memory.

    Attributes:
        manifests: of its ranks.
        saved: tensors by name.
    """

    manifests: list[Manifest]
    saved: Contents


def recall(pipeline: Trained, folder: Path, least: int, most: float = math.inf) -> int | None:
    """Resumes from the newest step in the memory of the machines; removes what is newer. Every rank must call it.

    Args:
        pipeline: of the same model, with any plan.
        folder: of this machine.
        least: number of steps; fewer are of no use.
        most: number of steps; more are of no use.

    Returns:
        The step; None: none is whole.
    """
    session = pipeline.session
    first = processes_here(session)[0]
    with session.at(SAVING):
        here = steps_in(folder, least, most)
        names = {}
        if session.rank == first:
            names = {step: _names(found) for step, found in here.items()}
        held_at: dict[int, dict[int, set[str]]] = {}
        for process, own in enumerate(exchange(session, names)):
            for step, held in own.items():
                held_at.setdefault(int(step), {})[process] = set(held)  # JSON has text as keys
        wanted = tensors_of(pipeline.layers).keys()
        whole = [step for step, held in held_at.items() if wanted <= set[str]().union(*held.values())]
        chosen = max(whole, default=None)
        if session.rank == first:
            forget_newer(folder, chosen)
        firsts = sorted(set(exchange(session, first)))
        if chosen is not None:
            found = {other: held_at[chosen].get(other, set()) for other in firsts}
            _take(pipeline, here.get(chosen, Here([], {})), found)
    return chosen


def forget_newer(folder: Path, step: int | None) -> None:
    """Removes the copies of later steps from a machine's memory; None: all copies."""
    for place in candidates(folder):
        if step is None or step_of(place) > step:
            shutil.rmtree(place, ignore_errors=True)


def steps_in(folder: Path, least: float = 0, most: float = math.inf) -> dict[int, Here]:
    """Some of the steps in a machine's memory, with the undamaged copies of its ranks."""
    found: dict[int, Here] = {}
    for place in candidates(folder):
        if not least <= step_of(place) <= most:
            continue
        for path in sorted(place.glob("rank-*.json")):
            try:
                manifest = decode("checkpoint", read_sealed(path, FORM), Manifest, PipefitError, str(path))
                for entry in manifest.files:
                    entry.check(place)
                saved = contents(place, manifest)
            except (PipefitError, OSError) as problem:
                _log.warning("skipped a copy in memory: %s", problem)
                continue
            here = found.setdefault(manifest.step, Here([], {}))
            here.manifests.append(manifest)
            here.saved.update(saved)
    return found


def _names(here: Here) -> list[str]:
    """Names of all tensors of a step, also of tied weights that are saved under another name."""
    names = set(here.saved)
    for manifest in here.manifests:
        names.update(alias for alias, owner in manifest.aliases.items() if owner in here.saved)
    return sorted(names)


def _take(pipeline: Trained, here: Here, held: Mapping[int, set[str]]) -> None:
    """Loads a step, of which each machine's first process holds some tensors."""
    session = pipeline.session
    if session.rank in held:
        mine = msgspec.to_builtins(here.manifests)
    else:
        mine = []
    manifests = [one for own in exchange(session, mine) for one in own]
    merged = manifest_of(manifests[0], manifests)
    somewhere = set[str]().union(*held.values())
    everywhere = somewhere.intersection(*held.values())
    lacking = somewhere - everywhere - merged.aliases.keys()
    found = {**here.saved, **_sent(pipeline, here, held, sorted(lacking))}
    take(pipeline, merged, lambda: found)


def _sent(pipeline: Trained, here: Here, held: Mapping[int, set[str]], lacking: Sequence[str]) -> Contents:
    """The tensors that some machine lacks, sent to all by the first that has them; each rank keeps those it needs."""
    session = pipeline.session
    own = set[str]()
    for worker in pipeline.workers:
        for stage in worker.stages:
            own.update(saved for _, saved, _ in weights_of(worker, stage))
    source = {name: min(first for first, names in held.items() if name in names) for name in lacking}
    mine = {name: here.saved[name] for name in lacking if source[name] == session.rank}
    forms: JsonObject = {}
    for part in exchange(session, {name: [saved.shape, name_of(saved.dtype)] for name, saved in mine.items()}):
        forms |= part
    found = {}
    for name in lacking:
        if name in mine:
            tensor = mine[name].read()
        else:
            shape, dtype = forms[name]
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        broadcast(session, tensor, source[name])
        if name not in here.saved:
            if weight_of(name) not in own:
                tensor = tensor.to("meta")
            found[name] = Saved(tuple(tensor.shape), tensor.dtype, read_of(tensor))
    return found
