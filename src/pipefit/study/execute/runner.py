"""A trial on a device: admitted once, then one turn at a time, each from the trial's tier and back to it.

The trial is a spilled run of one rank: its stages are the shards, its program that of `study.turns`, and a turn is a
slice of that program, which the executor runs with the handlers and stores of any spilled run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.checkpoint.tensor_files import write_tensors
from pipefit.errors import NonFiniteLossError, PipefitError
from pipefit.ir.op import Op
from pipefit.parallel.mesh import Mesh
from pipefit.pipeline.evaluate import evaluate
from pipefit.pipeline.losses import PendingLosses
from pipefit.pipeline.tensor_parallel import TensorParallel
from pipefit.runtime.compiled import CompiledRank
from pipefit.runtime.executor import Execution
from pipefit.runtime.handlers import HANDLERS
from pipefit.runtime.microbatches import cut, feed_of, pair_of
from pipefit.runtime.progress import Progress
from pipefit.runtime.spill_handlers import PARKED
from pipefit.runtime.transport import Message
from pipefit.runtime.worker import Worker
from pipefit.stage.payload import read_structure
from pipefit.study.execute.admission import Recipe, build_trial, on_meta, recipe_of
from pipefit.study.execute.open_trial import OpenTrial
from pipefit.study.execute.trial_files import TrialState, has_state, read_state, write_loss
from pipefit.study.simulation import TimedTurn
from pipefit.study.trial import Figures, NoRoomError, Trial
from pipefit.study.turns import Turn


class TrialRunner:
    """A trial in a worker's process. Everything that must outlive the process is in the trial's folder.

    Args:
        number: in the study.
        trial: its definition.
        folder: of the trial, on the tier.
        device: where this worker computes.
        capacity_bytes: of the device; 0: no limit.
    """

    def __init__(
        self, number: int, trial: Trial, folder: Path, device: torch.device, capacity_bytes: float = 0.0
    ) -> None:
        self.number, self.trial, self.folder, self.device = number, trial, folder, device
        self.capacity_bytes = capacity_bytes
        self._opened: OpenTrial | None = None

    # ---- admission -------------------------------------------------------------------------------------------------

    def admit(self, room_bytes: float = math.inf) -> Figures:
        """Builds the trial, splits it for the device and writes its state to the tier; or finds it there.

        Raises:
            InfeasibleError: it needs more memory than the device has, however it is split.
            NoRoomError: the tier has no room for it now.
        """
        opened = self._open() if has_state(self.folder) else self._begin(room_bytes)
        return opened.state.figures

    def _begin(self, room_bytes: float) -> OpenTrial:
        recipe, counts, figures = build_trial(self.trial, self.capacity_bytes)
        if figures.tier_bytes > room_bytes:
            raise NoRoomError(f"its state needs {figures.tier_bytes} bytes on the tier, {int(room_bytes)} are free")
        self.folder.mkdir(parents=True, exist_ok=True)
        opened = self._opened = self._made(recipe, TrialState(counts, figures), is_new=True)
        for stage in opened.worker.stages:
            opened.keep_resident(stage)
        opened.commit(0)
        opened.release()
        return opened

    def _open(self) -> OpenTrial:
        """The trial at its last commit, by whichever worker."""
        if self._opened is None:
            found = read_state(self.folder)
            if found is None:
                raise PipefitError(f"{self.folder}: there is no state of a trial")
            self._opened = self._made(on_meta(self.trial) or recipe_of(self.trial), found[1], is_new=False)
        self._opened.refresh()
        return self._opened

    def _made(self, recipe: Recipe, state: TrialState, is_new: bool) -> OpenTrial:
        count, is_limited = self.trial.microbatches, self.capacity_bytes > 0
        return OpenTrial(recipe, count, state, self.folder, self.device, is_limited, is_new)

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that the trial holds between turns."""
        return self._opened.slot_bytes if self._opened is not None else 0

    def release(self) -> None:
        """Releases the device's memory; the tier has everything."""
        if self._opened is not None:
            self._opened.release()

    def close(self) -> None:
        """Forgets the trial; turns that were not committed are lost."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.release()  # its tensors and hooks refer to each other: nothing else would free them soon
            opened.spilling.close()

    # ---- a turn ----------------------------------------------------------------------------------------------------

    def turn(self) -> TimedTurn:
        """Takes the next turn: fetches, computes, evicts, commits.

        Raises:
            NonFiniteLossError: the loss is not a number; the step is not committed.
        """
        start_s = time.monotonic()
        try:
            opened = self._open()
            step, number = opened.step, opened.state.turn
            turn, compiled = opened.turns[number]
            run = self._execution(opened, turn, compiled)
            ready_s = time.monotonic()
            for waiting in run.run(HANDLERS):
                raise PipefitError(f"the turn waits for ever at '{waiting}'")
            ran_s = time.monotonic()
            loss, held_out = self._keep(opened, turn, run)
        except BaseException:
            self.close()  # the device no longer holds the state that the tier has
            raise
        if self.capacity_bytes and opened.resident.is_shared:
            self.release()
        end_s = time.monotonic()
        moved_s = ready_s - start_s + _copies_s(run) + end_s - ran_s
        return TimedTurn(self.number, -1, step, number, start_s, end_s, loss, held_out, moved_s)

    def _execution(self, opened: OpenTrial, turn: Turn, compiled: CompiledRank) -> Execution:
        """The executor's state before a turn."""
        state, spilling = opened.state, opened.spilling
        opened.take_slots()
        opened.load_resident(turn.stage)
        store = spilling.stores[turn.stage]
        if store.num_updates != opened.step:
            store.hold(opened.step)
        store.reached = set(state.reached.get(turn.stage, ()))
        spilling.parts.clear()
        for stage, norms in state.norms.items():
            spilling.parts[0, stage] = [torch.tensor(norm, dtype=torch.float64, device=self.device) for norm in norms]
        opened.worker.train(True)
        batch, count = pair_of(opened.recipe.batch_at(opened.step)), self.trial.microbatches
        # Shapes, which another process understands, in place of numbers that stand for them in this one.
        shapes = [_shapes(part) for part in cut(batch[0], count)]
        feed = replace(feed_of([batch], count, opened.step * count, "train"), signatures=shapes)
        transport = opened.engine.transports[0]
        transport.begin(feed.signatures)
        flags: dict[tuple[int, object], list[bool]] = {(stage, shape): found for stage, shape, found in state.flags}
        run = Execution(compiled, opened.worker, transport, feed, flags, Progress())
        for kind, stage, mb, marks, text in state.payloads:
            structure = None if text is None else read_structure(text)
            run.values[PARKED + kind, stage, mb] = Message([], list(marks), structure)
        if state.squares:
            run.norms[0] = torch.tensor(state.squares, dtype=torch.float64, device=self.device)
        return run

    # ---- its commit -------------------------------------------------------------------------------------------------

    def _keep(self, opened: OpenTrial, turn: Turn, run: Execution) -> tuple[float, float]:
        """Commits a turn.

        Returns:
            The step's loss when it is complete, and that on held-out data when it is due; else NaN.
        """
        state = opened.state
        if run.losses:
            state.loss = PendingLosses(opened.engine, [run], self.trial.microbatches, 1).wait()[0]
            if not math.isfinite(state.loss):
                what = f"the loss of step {opened.step + 1} is {state.loss}"
                raise NonFiniteLossError(f"{what}: lower the learning rate or clip the gradients")
        self._note(opened, turn, run)
        ops = {i.op for i in run.compiled.instructions}
        for home in sorted(opened.resident.homes(turn.stage)):
            if (home == turn.stage and turn.steps) or (opened.resident.has_tensors(home) and ops & {Op.FWD, Op.BWD}):
                opened.keep_resident(home)
        if state.turn + 1 < len(opened.turns):
            state.turn += 1
            opened.commit(opened.step)
            return math.nan, math.nan
        loss, held_out = state.loss, math.nan
        for store in opened.spilling.stores.values():
            store.rebase()
        if self.trial.evaluate:
            held_out = self._evaluate(opened)
        write_loss(self.folder, opened.step, loss, held_out)
        state.turn, state.norms, state.squares, state.payloads, state.reached = 0, {}, [], [], {}
        opened.commit(opened.step + 1)
        return loss, held_out

    def _note(self, opened: OpenTrial, turn: Turn, run: Execution) -> None:
        """Notes in the state what the next turn needs in addition to tensors."""
        state = opened.state
        state.norms = {stage: [float(n) for n in norms] for (_, stage), norms in opened.spilling.parts.items()}
        if run.norms:
            state.squares = run.norms[0].tolist()
        state.flags = [(stage, str(shape), list(found)) for (stage, shape), found in run.flags.items()]
        state.reached[turn.stage] = sorted(opened.spilling.stores[turn.stage].reached)
        state.payloads = []
        for (kind, stage, mb), value in run.values.items():
            if kind.startswith(PARKED):
                structure = None if value.structure is None else pytree.treespec_dumps(value.structure)
                state.payloads.append((kind.removeprefix(PARKED), stage, mb, list(value.flags), structure))

    def _evaluate(self, opened: OpenTrial) -> float:
        """The mean loss on held-out data after the step under way; NaN where it is not due."""
        done, every = opened.step + 1, self.trial.evaluate
        if done % every and done != self.trial.steps:
            return math.nan
        recipe = opened.recipe
        assert recipe.held_out is not None
        for stage, store in opened.spilling.stores.items():
            opened.load_resident(stage)
            if store.num_updates != done:
                store.hold(done)
        whole = TensorParallel.on(recipe.layers, Mesh())
        loss, _ = evaluate(opened.engine, opened.program.header, whole, recipe.held_out(), None, None)
        return loss

    # ---- export ----------------------------------------------------------------------------------------------------

    def export(self, path: str) -> str:
        """Writes the model's `state_dict` as a safetensors file; a weight of several names is there under each.

        Raises:
            PipefitError: the trial has no state, or the file cannot be written.
        """
        opened = self._open()
        opened.take_slots()
        stand_ins: dict[str, Tensor] = {}
        for stage, module in opened.worker.stages.items():
            opened.load_resident(stage)
            opened.spilling.stores[stage].hold(opened.step)
            stand_ins |= module.state_dict()
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.writing")
        temporary.unlink(missing_ok=True)
        try:
            write_tensors(temporary, stand_ins, {"format": "pt"}, _weights(opened.worker))
            temporary.replace(target)
        except OSError as problem:
            raise PipefitError(f"{target}: cannot be written: {problem.strerror}") from None
        opened.release()
        return str(target)


def _weights(worker: Worker) -> Iterator[Tensor]:
    """Weights and buffers, a shard on the device at a time."""
    for stage, module in worker.stages.items():
        with worker.presence(stage):
            yield from module.state_dict().values()


def _copies_s(run: Execution) -> float:
    """Seconds of a turn's fetches and evictions."""
    ran = zip(run.compiled.instructions, run.starts, run.ends, strict=True)
    return sum(end - start for i, start, end in ran if i.op in (Op.FETCH, Op.EVICT))


def _shapes(payload: Any) -> str:
    return ",".join(f"{tuple(leaf.shape)}{leaf.dtype}" for leaf in pytree.tree_leaves(payload))
