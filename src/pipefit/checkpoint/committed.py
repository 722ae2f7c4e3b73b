"""The state that a disk tier commits with each step: the state of a resumed run that its records do not hold.

The numbers (position of the training, learning-rate schedules and the like) are JSON data of the commit. Buffers,
weights that stages share, and other tensors that stay on the device are copied into separate records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from torch import Tensor

from pipefit.checkpoint.manifest import Optimization
from pipefit.checkpoint.optim import optimization_of
from pipefit.checkpoint.resident import Row, read_resident, resident_tensors, restore_resident, write_resident
from pipefit.checkpoint.trained import Trained
from pipefit.errors import PipefitError, TierError
from pipefit.runtime.collectives import agree, attempt
from pipefit.runtime.worker import Worker
from pipefit.spec.files import JsonObject
from pipefit.spill.rank import Spilling
from pipefit.spill.tier_file import Commit


class RankState(msgspec.Struct, frozen=True):
    """The numbers of a rank after a step.

    Attributes:
        reason: the reason why a run cannot resume from here; "": it can.
        ordinal: micro-batches seen, which seeds the next one's random numbers.
        loss_scale: its value and history; None: the loss is not scaled.
        optimization: of each stage.
        known: of each spilled stage, the states that its optimizer has made.
        resident: (stage, names of its tensors) of each record of those that stay on the device.
        places: of these records, as `ParkedTensors.describe` gives them.
        extra: the caller's data.
        position: in the loader of the training data.
    """

    reason: str = ""
    ordinal: int = 0
    loss_scale: JsonObject | None = None
    optimization: list[Optimization] = []
    known: dict[int, list[int]] = {}
    resident: list[Row] = []
    places: list[Any] = []
    extra: JsonObject = {}
    position: JsonObject | None = None


def commit_step(pipeline: Trained, extra: Callable[[], Mapping[str, Any]] | None, now: bool = False) -> None:
    """Between two steps: starts to commit the records that this process's ranks have written, if it is due.

    With several ranks this waits until this rank's commit is done. So no rank overwrites its records of the step before
    while another might have to resume from it: every message of the next step comes from a rank that has committed this
    one.

    Args:
        pipeline: between two steps.
        extra: the caller's data.
        now: commit even if it is not due; a committed step is not committed again.
    """
    step = pipeline.state.num_updates
    spillings = [(worker, worker.spilling) for worker in pipeline.workers if worker.spilling is not None]
    for worker, spilling in spillings:
        is_due = (now and spilling.commit_every) or spilling.is_commit_due(step)
        if spilling.tier.files is None or not is_due:
            spilling.check_writes()
        else:
            spilling.settle()
            state = msgspec.to_builtins(_state_of(pipeline, worker, spilling, extra), str_keys=True)
            spilling.commit(step, state)
    if pipeline.plan.placement.num_ranks > 1:
        for _, spilling in spillings:
            spilling.settle()


def _state_of(
    pipeline: Trained, worker: Worker, spilling: Spilling, extra: Callable[[], Mapping[str, Any]] | None
) -> RankState:
    """A rank's numbers; starts the writes of the tensors that its records do not hold."""
    known = {stage: sorted(store.states.known) for stage, store in spilling.stores.items() if store.states}
    data = {}
    try:
        if extra is not None:
            data = json.loads(json.dumps(dict(extra())))
        return RankState(
            **pipeline.state.saved(),
            optimization=optimization_of(worker, list(worker.stages)),
            known=known,
            resident=write_resident(spilling, _resident(worker, spilling)),
            places=spilling.resident.describe(),
            extra=data,
        )
    except TierError:
        raise
    except PipefitError as problem:
        return RankState(str(problem))


def _resident(worker: Worker, spilling: Spilling) -> Iterator[tuple[int, str, Tensor]]:
    """(stage, name, tensor) of what no record holds."""
    passed = {address for store in spilling.stores.values() for address in store.stand_ins}
    for stage in worker.stages:
        yield from resident_tensors(worker, stage, passed)


def rank_state(commit: Commit) -> RankState:
    """The numbers that were committed with a step.

    Raises:
        TierError: they are of another form.
    """
    try:
        return msgspec.convert(commit.state, RankState, str_keys=True, strict=False)
    except msgspec.ValidationError as problem:
        raise TierError(
            f"the state of step {commit.step} cannot be read: {problem}; resume from a checkpoint"
        ) from None


def resume_records(pipeline: Trained) -> JsonObject:
    """Restores the ranks of this process from their tiers' records, before the first step.

    Returns:
        The caller's data that was committed with the step.

    Raises:
        TierError: on every rank: the state is damaged, or of another optimizer or learning-rate schedule.
    """
    try:
        return agree(pipeline.session, attempt(lambda: _resumed(pipeline)), TierError)[0]
    except TierError:
        for worker in pipeline.workers:
            if worker.spilling is not None:
                worker.spilling.tier.close()
        raise


def _resumed(pipeline: Trained) -> JsonObject:
    extra = {}
    for worker in pipeline.workers:
        assert worker.spilling is not None and worker.spilling.resumed is not None
        commit = worker.spilling.resumed
        state = rank_state(commit)
        _restore(worker, worker.spilling, state)
        pipeline.state.resume(commit.step, state.ordinal, state.loss_scale, state.position)
        extra = state.extra
    return extra


def _restore(worker: Worker, spilling: Spilling, state: RankState) -> None:
    spilling.resident.restore(state.places)
    tensors = read_resident(spilling, state.resident)
    for stage in worker.stages:
        restore_resident(worker, stage, tensors.get(stage, {}), state.optimization, state.known.get(stage, ()))
