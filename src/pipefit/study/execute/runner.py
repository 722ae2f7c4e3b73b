"""Turns of an open trial, each from the trial's tier and back to it, and the export of its weights.

The trial is a spilled run of one rank: its stages are the shards, its program that of `study.turns`, and a turn is a
slice of that program, which the executor runs with the handlers and stores of any spilled run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pipefit.checkpoint.whole import write_whole
from pipefit.errors import NonFiniteLossError, PipefitError
from pipefit.pipeline.losses import PendingLosses, evaluate
from pipefit.runtime.compiled import compile_rank
from pipefit.runtime.executor import Execution
from pipefit.runtime.finite import check_unread
from pipefit.runtime.handlers import HANDLERS
from pipefit.runtime.microbatches import feed_of, pair_of
from pipefit.runtime.progress import Progress
from pipefit.runtime.spill_handlers import PARKED
from pipefit.runtime.transport import Message
from pipefit.runtime.worker import Worker
from pipefit.stage.payload import Structure
from pipefit.study.execute.open_trial import OpenTrial
from pipefit.study.execute.trial_files import write_loss
from pipefit.study.simulation import TimedTurn
from pipefit.study.turns import Turn


def take_turn(opened: OpenTrial) -> TimedTurn:
    """Takes the next turn of a trial: fetches, computes, evicts, commits.

    If it raises, the device no longer holds the state of the tier: the trial must be closed.

    Raises:
        NonFiniteLossError: the loss is not a number; the step is not committed.
    """
    start_s = time.monotonic()
    opened.refresh()
    step = opened.step
    number = opened.state.turn
    turn = opened.turns[number]
    run = _execution(opened, turn)
    ready_s = time.monotonic()
    try:
        for waiting in run.run(HANDLERS, range(turn.first, turn.end)):
            raise PipefitError(f"the turn waits for ever at '{waiting}'")
        check_unread(run)
    except NonFiniteLossError as problem:  # its updates are those of one turn
        raise NonFiniteLossError(f"step {step + 1}: {problem}") from problem
    ran_s = time.monotonic()
    loss, held_out = _keep(opened, turn, run)
    opened.end_turn()
    end_s = time.monotonic()
    copies_s = sum(copy.ended_s - copy.started_s for copy in run.copies.values())
    moved_s = ready_s - start_s + copies_s + end_s - ran_s
    return TimedTurn(opened.number, -1, step, number, start_s, end_s, loss, held_out, moved_s)


def _execution(opened: OpenTrial, turn: Turn) -> Execution:
    """The executor's state before a turn."""
    state = opened.state
    spilling = opened.spilling
    opened.spilling.take_slots()
    opened.load_resident(turn.stage)
    store = spilling.stores[turn.stage]
    if store.num_updates != opened.step:
        store.hold(opened.step)
    store.reached = set(state.reached.get(turn.stage, ()))
    spilling.parts.clear()
    in_double = partial(torch.tensor, dtype=torch.float64, device=opened.worker.device)
    for stage, norms in state.norms.items():
        spilling.parts[0, stage] = [in_double(norms)]
    batch = pair_of(opened.recipe.batch_at(opened.step), trains=True)
    count = opened.trial.microbatches
    feed = feed_of(batch, count, opened.step * count, "train", opened.recipe.weigh)
    transport = opened.engine.transports[0]
    transport.begin(feed)
    opened.worker.flags = {(stage, shape): found for stage, shape, found in state.flags}
    run = Execution(compile_rank(opened.program, 0), opened.worker, transport, feed, Progress())
    for kind, stage, mb, marks, text in state.payloads:
        if text is None:
            structure = None
        else:
            structure = Structure.loads(text)
        run.values[PARKED + kind, stage, mb] = Message([], list(marks), structure)
    if state.squares:
        run.norms[0] = in_double(state.squares)
    return run


def _keep(opened: OpenTrial, turn: Turn, run: Execution) -> tuple[float, float]:
    """Commits a turn.

    Returns:
        The step's loss when it is complete, and the loss on held-out data when it is due; else NaN.
    """
    state = opened.state
    if run.losses:
        state.loss = PendingLosses(opened.engine, [run], opened.trial.microbatches, 1).wait()[0]
        if not math.isfinite(state.loss):
            what = f"the loss of step {opened.step + 1} is {state.loss}"
            raise NonFiniteLossError(f"{what}: lower the learning rate or clip the gradients")
    _note(opened, turn, run)
    opened.keep_resident(turn.stage)
    if state.turn + 1 < len(opened.turns):
        state.turn += 1
        opened.commit(opened.step)
        return math.nan, math.nan
    loss = state.loss
    held_out = math.nan
    for store in opened.spilling.stores.values():
        store.rebase()
    if opened.trial.evaluate:
        held_out = _evaluate(opened)
    write_loss(opened.folder, opened.step, loss, held_out)
    state.turn = 0
    state.norms = {}
    state.squares = []
    state.payloads = []
    state.reached = {}
    opened.commit(opened.step + 1)
    return loss, held_out


def _note(opened: OpenTrial, turn: Turn, run: Execution) -> None:
    """Records in the state the data of the next turn that are not tensors."""
    state = opened.state
    state.norms = {stage: torch.cat(norms).tolist() for (_, stage), norms in opened.spilling.parts.items() if norms}
    if run.norms:
        state.squares = run.norms[0].tolist()
    state.flags = [(stage, shape, list(found)) for (stage, shape), found in opened.worker.flags.items()]
    state.reached[turn.stage] = sorted(opened.spilling.stores[turn.stage].reached)
    state.payloads = []
    for (kind, stage, mb), value in run.values.items():
        if kind.startswith(PARKED):
            if value.structure is None:
                structure = None
            else:
                structure = value.structure.dumps()
            state.payloads.append((kind.removeprefix(PARKED), stage, mb, list(value.flags), structure))


def _evaluate(opened: OpenTrial) -> float:
    """The mean loss on held-out data after the current step; NaN where it is not due."""
    done = opened.step + 1
    every = opened.trial.evaluate
    if done % every and done != opened.trial.steps:
        return math.nan
    recipe = opened.recipe
    assert recipe.held_out is not None
    for stage, store in opened.spilling.stores.items():
        opened.load_resident(stage)
        if store.num_updates != done:
            store.hold(done)
    return evaluate(opened.engine, opened.program.header, recipe.held_out(), None, recipe.weigh).loss


def export(opened: OpenTrial, path: str) -> None:
    """Writes the model's `state_dict` as a safetensors file, with a weight of several names under each.

    Raises:
        PipefitError: the file cannot be written.
    """
    opened.refresh()
    opened.spilling.take_slots()
    stand_ins: dict[str, Tensor] = {}
    for stage, module in opened.worker.stages.items():
        opened.load_resident(stage)
        opened.spilling.stores[stage].hold(opened.step)
        stand_ins |= module.state_dict()
    write_whole(Path(path), stand_ins, {}, _weights(opened.worker))
    opened.release()


def _weights(worker: Worker) -> Iterator[Tensor]:
    """Weights and buffers, a shard on the device at a time."""
    for stage, module in worker.stages.items():
        with worker.presence(stage):
            yield from module.state_dict().values()
