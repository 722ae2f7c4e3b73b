"""What each step on a disk tier is committed with: all that its records do not hold, so that a run goes on from there.

That is mostly small: where the training stands, learning-rate schedules, buffers, weights that stages share, and the
like, as the bytes of a safetensors file with the rest as JSON data in its head. Where more of the weights and states
stays on the device, they are written to a file of their own, tensor by tensor.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from pipefit.checkpoint.manifest import Optimization
from pipefit.checkpoint.optim import OPTIM, optimization_of, restore_optimizer, trained_of
from pipefit.checkpoint.state import Trained, aliases_of, weights_of
from pipefit.checkpoint.tensors import write_tensors
from pipefit.errors import PipefitError, TierError
from pipefit.runtime.collectives import agree, attempt
from pipefit.runtime.worker import Worker
from pipefit.spill.disk import DiskTier
from pipefit.spill.split_tier import SplitTier
from pipefit.spill.tier_file import Aside

__all__ = ["MOST_BYTES", "Standing", "commit_step", "standing_of", "take_over"]

MOST_BYTES = 64 << 20
"""What is copied and written beside the next step; more is written from where it is, and the next step waits."""
_HEAD = "pipefit"


class Standing(msgspec.Struct, frozen=True):
    """Where a rank stands after a step, beside tensors.

    Attributes:
        reason: why a run cannot go on from here; "": it can.
        ordinal: micro-batches seen, which seeds the next one's random numbers.
        loss_scale: its value and how it came to be; None: the loss is not scaled.
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


class _Resident(NamedTuple):
    """A tensor that no record holds: its name in the state, and itself."""

    name: str
    tensor: Tensor


def commit_step(pipeline: Trained, extra: Callable[[], Mapping[str, Any]] | None, now: bool = False) -> None:
    """Between two steps: what this process's ranks have written becomes the committed step, in the background.

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
        if not (now and spilling.commit_every) and not spilling.is_due(pipeline.num_updates):
            spilling.passes()
        elif spilling.lasts:
            spilling.settle()
            state, aside = _state_of(pipeline, worker, extra)
            spilling.commit(pipeline.num_updates, state, aside)
        else:
            spilling.commit(pipeline.num_updates, b"")
    if pipeline.plan.placement.num_ranks > 1:
        for _, spilling in spillings:
            spilling.settle()


def _state_of(
    pipeline: Trained, worker: Worker, extra: Callable[[], Mapping[str, Any]] | None
) -> tuple[bytes, Aside | None]:
    """A rank's standing and copies of what its records do not hold; what is too much for that, in a file."""
    aside, tensors = None, {}
    try:
        standing = _standing(pipeline, worker, extra)
        found = {entry.name: entry.tensor for entry in _resident(worker)}
        if sum(tensor.nbytes for tensor in found.values()) > MOST_BYTES:
            aside = _set_aside(worker, found)
        else:
            tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}
    except TierError:
        raise
    except PipefitError as problem:
        standing = Standing(str(problem))
    return save(tensors, {_HEAD: msgspec.json.encode(standing).decode()}), aside


def _set_aside(worker: Worker, tensors: Mapping[str, Tensor]) -> Aside:
    """Writes tensors to a file that the last committed step does not need.

    Raises:
        TierError: the disk refused.
        PipefitError: a tensor is of a type that the file cannot hold.
    """
    assert worker.spilling is not None and isinstance(worker.spilling.tier, DiskTier | SplitTier)
    path = worker.spilling.tier.spare()
    try:
        path.unlink(missing_ok=True)
        return Aside(path.name, *write_tensors(path, tensors, {}))
    except OSError as problem:
        raise TierError(f"{path}: {problem.strerror}; {worker.spilling.tier.cure()}") from None


def _standing(pipeline: Trained, worker: Worker, extra: Callable[[], Mapping[str, Any]] | None) -> Standing:
    """Where a rank stands.

    Raises:
        PipefitError: that cannot be told.
    """
    assert worker.spilling is not None
    return Standing(
        ordinal=pipeline._next_ordinal,
        loss_scale=worker.scale.state() if worker.scale is not None else None,
        optimization=optimization_of(worker, list(worker.stages)),
        known={stage: sorted(store.states.known) for stage, store in worker.spilling.stores.items() if store.states},
        extra=json.loads(json.dumps(dict(extra()))) if extra is not None else {},
    )


def _resident(worker: Worker) -> Iterator[_Resident]:
    """Weights, buffers and states of a rank that none of its records holds; what has several names comes once."""
    assert worker.spilling is not None
    passed: set[int] = set()
    for store in worker.spilling.stores.values():
        passed |= store.stand_ins
    for stage in worker.stages:
        for name, tensor in (*_weights(worker, stage), *_states(worker, stage)):
            if tensor.data_ptr() not in passed:
                passed.add(tensor.data_ptr())
                yield _Resident(f"{stage}/{name}", tensor)


def _weights(worker: Worker, stage: int) -> Iterator[tuple[str, Tensor]]:
    for name, _, tensor in weights_of(worker, aliases_of(worker.stages[stage].layers), stage):
        yield name, tensor


def _states(worker: Worker, stage: int) -> Iterator[tuple[str, Tensor]]:
    optimizer = worker.optimizers.get(stage)
    if optimizer is not None:
        for name, master, _ in trained_of(worker, stage):
            for key, value in optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor):
                    yield f"{OPTIM}{name}/{key}", value


def standing_of(state: bytes) -> Standing:
    """Reads what a step was committed with, but for its tensors.

    Raises:
        TierError: it is damaged.
    """
    try:
        head = json.loads(state[8 : 8 + int.from_bytes(state[:8], "little")])
        return msgspec.json.decode(head["__metadata__"][_HEAD], type=Standing)
    except (ValueError, KeyError, msgspec.MsgspecError) as problem:
        raise TierError(
            f"what the step was committed with cannot be read: {problem}; go on from a checkpoint"
        ) from None


def take_over(pipeline: Trained) -> dict[str, Any]:
    """Puts the ranks of this process where their tiers' records stand, before the first step.

    Returns:
        What the caller had committed with the step.

    Raises:
        TierError: on every rank: what was committed is damaged, or of another optimizer or learning-rate schedule.
    """
    try:
        found: dict[str, Any] = agree(pipeline._session, attempt(lambda: _taken(pipeline)), TierError)[0]
    except TierError:
        for worker in pipeline.workers:
            if worker.spilling is not None:
                worker.spilling.close()
        raise
    return found


@torch.no_grad()
def _taken(pipeline: Trained) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for worker in pipeline.workers:
        assert worker.spilling is not None and worker.spilling.resumed is not None
        committed = worker.spilling.resumed
        standing = standing_of(committed.state)
        with contextlib.ExitStack() as files:
            tensors: dict[str, Callable[[], Tensor]] = {}
            for name, tensor in load(committed.state).items():
                tensors[name] = tensor.clone
            if committed.aside is not None:
                assert isinstance(worker.spilling.tier, DiskTier | SplitTier)
                path = worker.spilling.tier.spare().parent / committed.aside.name
                file = files.enter_context(safe_open(path, framework="pt"))
                tensors |= {name: partial(_read, file, name) for name in file.keys()}
            _take(worker, standing, tensors)
        pipeline.num_updates, pipeline._next_ordinal = committed.step, standing.ordinal
        extra = standing.extra
    return extra


def _read(file: Any, name: str) -> Tensor:
    """A copy: the file is written anew while the run lasts."""
    tensor: Tensor = file.get_tensor(name).clone()
    return tensor


def _take(worker: Worker, standing: Standing, tensors: Mapping[str, Callable[[], Tensor]]) -> None:
    assert worker.spilling is not None
    for stage in worker.stages:
        for name, tensor in _weights(worker, stage):
            if f"{stage}/{name}" in tensors:
                tensor.copy_(tensors[f"{stage}/{name}"]())
        store = worker.spilling.stores.get(stage)
        if store is not None and store.states is not None:
            store.states.known = set(standing.known.get(stage, ()))
        if stage in worker.optimizers:
            states: dict[str, dict[str, Callable[[], Tensor]]] = {}
            begin = f"{stage}/{OPTIM}"
            for name in (name for name in tensors if name.startswith(begin)):
                parameter, _, key = name.removeprefix(begin).rpartition("/")
                states.setdefault(parameter, {})[key] = tensors[name]
            restore_optimizer(worker, stage, standing.optimization, states)()
    if worker.scale is not None and standing.loss_scale is not None:
        worker.scale.load(standing.loss_scale)
