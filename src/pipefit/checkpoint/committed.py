"""The state that a disk tier commits with each step: all that its records do not hold and a resumed run needs.

The numbers (where the training stands, learning-rate schedules and the like) are JSON data of the commit. Buffers,
weights that stages share, and whatever else stays on the device are a safetensors file that the commit names: copied
and written in the background where they are few, else written tensor by tensor before the next step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pipefit.checkpoint.manifest import Optimization
from pipefit.checkpoint.optim import Read, by_parameter, optimization_of, optimizer_tensors, restore_optimizer
from pipefit.checkpoint.state import Trained, weights_of
from pipefit.checkpoint.tensor_files import write_tensors
from pipefit.errors import PipefitError, TierError
from pipefit.runtime.collectives import agree, attempt
from pipefit.runtime.worker import Worker
from pipefit.spec.sealed import FileEntry
from pipefit.spill.rank import Spilling
from pipefit.spill.tier_file import Commit

MOST_BYTES = 64 << 20
"""Most bytes that are copied and written while the next step runs; more is written from where it is before that."""


class RankState(msgspec.Struct, frozen=True):
    """The numbers of a rank after a step.

    Attributes:
        reason: why a run cannot resume from here; "": it can.
        ordinal: micro-batches seen, which seeds the next one's random numbers.
        loss_scale: its value and history; None: the loss is not scaled.
        optimization: of each stage.
        known: of each spilled stage, the states that its optimizer has made.
        extra: the caller's own data, such as the position in the training data.
    """

    reason: str = ""
    ordinal: int = 0
    loss_scale: dict[str, Any] | None = None
    optimization: list[Optimization] = []
    known: dict[int, list[int]] = {}
    extra: dict[str, Any] = {}


def commit_step(pipeline: Trained, extra: Callable[[], Mapping[str, Any]] | None, now: bool = False) -> None:
    """Between two steps: starts to commit the records that this process's ranks have written.

    Nothing is done where that is not due yet.

    Where there are several ranks this waits until their own is committed. So none begins to overwrite its records of
    the step before while another could still have to go back to it: whatever reaches a rank in the next step comes from
    ranks that have committed this one.

    Args:
        pipeline: that has come to a step.
        extra: the caller's data.
        now: whether or not it is due; a step that is committed already is not again.
    """
    spillings = [(worker, worker.spilling) for worker in pipeline.workers if worker.spilling is not None]
    for worker, spilling in spillings:
        is_due = (now and spilling.commit_every) or spilling.is_commit_due(pipeline.num_updates)
        if spilling.disk is None or not is_due:
            spilling.check_writes()
        else:
            spilling.settle()
            spilling.commit(pipeline.num_updates, *_state_of(pipeline, worker, spilling, extra))
    if pipeline.plan.placement.num_ranks > 1:
        for _, spilling in spillings:
            spilling.settle()


def _state_of(
    pipeline: Trained, worker: Worker, spilling: Spilling, extra: Callable[[], Mapping[str, Any]] | None
) -> tuple[dict[str, Any], FileEntry | bytes | None]:
    """A rank's numbers, and the tensors that its records do not hold: written already, or a copy of them."""
    tensors: FileEntry | bytes | None = None
    try:
        state = RankState(
            ordinal=pipeline.loop.next_ordinal,
            loss_scale=worker.scale.state() if worker.scale is not None else None,
            optimization=optimization_of(worker, list(worker.stages)),
            known={stage: sorted(store.states.known) for stage, store in spilling.stores.items() if store.states},
            extra=json.loads(json.dumps(dict(extra()))) if extra is not None else {},
        )
        found = dict(_resident(worker, spilling))
        if sum(tensor.nbytes for tensor in found.values()) > MOST_BYTES:
            assert spilling.disk is not None
            path = spilling.disk.files.spare()
            try:
                path.unlink(missing_ok=True)
                tensors = write_tensors(path, found, {})
            except OSError as problem:
                raise TierError(f"{path}: {problem.strerror}; {spilling.disk.files.status()}") from None
        elif found:
            tensors = save({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()})
    except TierError:
        raise
    except PipefitError as problem:
        state = RankState(str(problem))
    return msgspec.to_builtins(state, str_keys=True), tensors


def _resident(worker: Worker, spilling: Spilling) -> Iterator[tuple[str, Tensor]]:
    """Weights, buffers and states that no record holds, by stage and name; one of several names comes once."""
    passed = {address for store in spilling.stores.values() for address in store.stand_ins}
    for stage in worker.stages:
        weights = ((name, tensor) for name, _, tensor in weights_of(worker, stage))
        for name, tensor in (*weights, *optimizer_tensors(worker, stage, all_ties=True)):
            if tensor.data_ptr() not in passed:
                passed.add(tensor.data_ptr())
                yield f"{stage}/{name}", tensor


def rank_state(commit: Commit) -> RankState:
    """The numbers that a step was committed with.

    Raises:
        TierError: they are of another form.
    """
    try:
        return msgspec.convert(commit.state, RankState, str_keys=True, strict=False)
    except msgspec.ValidationError as problem:
        raise TierError(
            f"the state of step {commit.step} cannot be read: {problem}; resume from a checkpoint"
        ) from None


def resume_records(pipeline: Trained) -> dict[str, Any]:
    """Puts the ranks of this process where their tiers' records stand, before the first step.

    Returns:
        The caller's data that was committed with the step.

    Raises:
        TierError: on every rank: the state is damaged, or of another optimizer or learning-rate schedule.
    """
    try:
        found: dict[str, Any] = agree(pipeline._session, attempt(lambda: _resumed(pipeline)), TierError)[0]
    except TierError:
        for worker in pipeline.workers:
            if worker.spilling is not None:
                worker.spilling.close()
        raise
    return found


def _resumed(pipeline: Trained) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for worker in pipeline.workers:
        assert worker.spilling is not None and worker.spilling.resumed is not None
        commit = worker.spilling.resumed
        state = rank_state(commit)
        tensors: dict[str, Read] = {}
        if commit.tensors is not None:
            assert worker.spilling.disk is not None
            path = worker.spilling.disk.files.path.parent / commit.tensors.name
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as problem:
                raise TierError(f"{path}: {problem}; resume from a checkpoint") from None
            # Copies: the file is overwritten while the run lasts.
            tensors = {name: lambda name=name, file=file: file.get_tensor(name).clone() for name in file.keys()}
        _restore(worker, state, tensors)
        pipeline.loop.num_updates, pipeline.loop.next_ordinal = commit.step, state.ordinal
        extra = state.extra
    return extra


@torch.no_grad()
def _restore(worker: Worker, state: RankState, tensors: Mapping[str, Read]) -> None:
    assert worker.spilling is not None
    for stage in worker.stages:
        begin = f"{stage}/"
        mine = {name.removeprefix(begin): read for name, read in tensors.items() if name.startswith(begin)}
        for name, _, tensor in weights_of(worker, stage):
            if name in mine:
                tensor.copy_(mine[name]())
        store = worker.spilling.stores.get(stage)
        if store is not None and store.states is not None:
            store.states.known = set(state.known.get(stage, ()))
        if stage in worker.optimizers:
            restore_optimizer(worker, stage, state.optimization, by_parameter(mine))()
    if worker.scale is not None and state.loss_scale is not None:
        worker.scale.load(state.loss_scale)
