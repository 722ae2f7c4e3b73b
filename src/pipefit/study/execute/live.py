"""A trial on a device: admitted once, then one turn at a time, each from the tier and back."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.errors import NonFiniteLossError, PipefitError
from pipefit.ir.op import Op
from pipefit.runtime.compiled import compile_rank
from pipefit.runtime.executor import Execution, Feed
from pipefit.runtime.handlers import HANDLERS
from pipefit.runtime.local import LocalTransport, Mailbox
from pipefit.runtime.microbatches import cut, feed_of
from pipefit.runtime.progress import Progress
from pipefit.spec import Partition
from pipefit.study.entry import Admitted, Report
from pipefit.study.execute.admission import build_trial
from pipefit.study.execute.between import Between, reduce_norms
from pipefit.study.execute.cursor import Cursor, commit, read_cursor, write_loss
from pipefit.study.execute.judged import HeldOut
from pipefit.study.execute.recipe import Recipe, check_batch, on_meta, recipe_of
from pipefit.study.execute.records import Record, read_record, write_record
from pipefit.study.execute.shards import Shard, Structure
from pipefit.study.execute.slices import Slice, slice_of
from pipefit.study.trial import Trial
from pipefit.study.turns import step_program, turns_of

__all__ = ["LiveTrial", "NoRoomError"]


class NoRoomError(PipefitError):
    """The tier is too full for a trial now."""


class LiveTrial:
    """What a worker's process knows of a trial. All that must last lies in the trial's folder.

    Args:
        number: in the study.
        trial: what it is.
        folder: its own, on the tier.
        device: where this worker computes.
        capacity_bytes: of the device; 0: no limit.
    """

    def __init__(
        self, number: int, trial: Trial, folder: Path, device: torch.device, capacity_bytes: float = 0.0
    ) -> None:
        self.number, self.trial, self.folder, self.device = number, trial, folder, device
        self.capacity_bytes = capacity_bytes
        self._shards: dict[int, tuple[tuple[int, ...], Shard]] = {}
        self._recipe: Recipe | None = None
        self._structure: Structure | None = None
        self._slices: list[Slice] = []
        self._program = step_program(1, trial.microbatches)

    # ---- admission -------------------------------------------------------------------------------------------------

    def admit(self, room_bytes: float = math.inf) -> Admitted:
        """Builds the trial, cuts it for the device and puts its state on the tier; or finds it there from earlier.

        Raises:
            InfeasibleError: it needs more memory than the device has, however it is cut.
            NoRoomError: the tier has no room for it now.
        """
        cursor = read_cursor(self.folder)
        if cursor is None:
            cursor = self._begin(room_bytes)
        self._prepare(cursor)
        return Admitted(
            len(self._slices),
            len(cursor.counts),
            cursor.parameters,
            cursor.tier_bytes,
            cursor.device_bytes,
            cursor.step,
            cursor.turn,
        )

    def _begin(self, room_bytes: float) -> Cursor:
        built = build_trial(self.trial, self.capacity_bytes)
        if built.tier_bytes > room_bytes:
            raise NoRoomError(f"its state needs {built.tier_bytes} bytes on the tier, {int(room_bytes)} are free")
        self.folder.mkdir(parents=True, exist_ok=True)
        structure = built.structure
        for shard in range(structure.num_shards):
            write_record(self.record(shard, 0), 0, built.first(shard), {})
            structure.release(shard)
        cursor = Cursor(
            built.counts,
            [0] * len(built.counts),
            parameters=structure.num_parameters,
            tier_bytes=built.tier_bytes,
            device_bytes=built.device_bytes,
        )
        commit(self.folder, cursor)
        self._recipe, self._structure = built.recipe, structure
        return cursor

    # ---- readiness -------------------------------------------------------------------------------------------------

    def _prepare(self, cursor: Cursor) -> None:
        """Makes what can be made again in any process: structure, data, program."""
        if self._recipe is None or self._structure is None:
            recipe = on_meta(self.trial) or recipe_of(self.trial)
            self._structure = Structure(recipe.layers, Partition.from_counts(cursor.counts, len(recipe.layers)))
            for shard in range(self._structure.num_shards):
                self._structure.release(shard)
            self._recipe = recipe
        if not self._slices:
            clip = self._recipe.training.clip_norm is not None
            self._program = step_program(len(cursor.counts), self.trial.microbatches, clip)
            whole = compile_rank(self._program, 0)
            self._slices = [slice_of(whole, turn) for turn in turns_of(self._program)]

    @property
    def held_bytes(self) -> int:
        """What this worker keeps of the trial between turns."""
        return sum(shard.num_bytes for _, shard in self._shards.values())

    def forget(self) -> None:
        """Lets go of what the device holds; the tier has it."""
        for _, shard in self._shards.values():
            shard.forget()
        self._shards.clear()

    # ---- a turn ----------------------------------------------------------------------------------------------------

    def turn(self) -> Report:
        """Takes the next turn: reads, computes, writes, commits.

        Raises:
            NonFiniteLossError: the loss is not a number; the step is not committed.
        """
        start_s = time.monotonic()
        cursor = read_cursor(self.folder)
        if cursor is None:
            raise PipefitError(f"{self.folder}: the trial was not admitted here")
        self._prepare(cursor)
        part = self._slices[cursor.turn]
        step, turn = cursor.step, cursor.turn
        try:
            shard = self._shard(cursor, part.turn.stage)
            execution = self._execution(cursor, part, shard)
            computing_s = time.monotonic()
            for waiting in execution.run({**HANDLERS, Op.REDUCE: reduce_norms(cursor, shard)}):
                raise PipefitError(f"the turn waits for ever at '{waiting}'")
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            writing_s = time.monotonic()
            loss, held_out = self._keep(cursor, part, shard, execution)
        except BaseException:
            self.forget()  # what the device holds is no longer what the tier has
            raise
        end_s = time.monotonic()
        return Report(self.number, step, turn, start_s, end_s, loss, held_out, computing_s - start_s, end_s - writing_s)

    def _execution(self, cursor: Cursor, part: Slice, shard: Shard) -> Execution:
        """The executor's state before the turn."""
        feed = self._feed(cursor)
        transport = LocalTransport(0, Mailbox())
        transport.begin(feed.signatures)
        flags = {
            (int(stage), signature): list(found)
            for (stage, _, signature), found in ((key.partition(":"), found) for key, found in cursor.flags.items())
        }
        shard.worker.train(True)
        run = Execution(part.compiled, shard.worker, transport, feed, flags, Progress())
        self._between(cursor).take(part, shard, run)
        return run

    def _between(self, cursor: Cursor) -> Between:
        assert self._structure is not None
        return Between(self.folder, self._structure, cursor)

    def _feed(self, cursor: Cursor) -> Feed:
        assert self._recipe is not None
        batch = check_batch(self._recipe.batch_at(cursor.step), cursor.step)
        feed = feed_of([batch], self.trial.microbatches, cursor.step * self.trial.microbatches, "train")
        shapes = [_shapes(part) for part in cut(batch[0], self.trial.microbatches)]
        return replace(feed, signatures=shapes)

    def _shard(self, cursor: Cursor, index: int) -> Shard:
        """The shard on the device: the one that is there when nobody has changed it since, else read anew."""
        assert self._structure is not None and self._recipe is not None
        versions = self._versions_of(cursor, index)
        known = self._shards.pop(index, None)
        if known is not None and known[0] == versions:
            shard = known[1]
        else:
            if known is not None:
                known[1].forget()
            if self.capacity_bytes or self._structure.shares_modules:
                self.forget()
            borrowed: dict[str, Tensor] = {}
            for home in sorted(set(self._structure.borrowed(index).values())):
                names = [name for name, of in self._structure.borrowed(index).items() if of == home]
                lender = self._read_shard(cursor, home)
                borrowed |= {name: lender.tensors[name] for name in names}
            record = self._read_shard(cursor, index)
            shard = Shard(self._structure, index, self._recipe.training, self.device, record, borrowed)
        self._shards[index] = versions, shard
        return shard

    def _versions_of(self, cursor: Cursor, index: int) -> tuple[int, ...]:
        """Of the records that a shard is made from."""
        assert self._structure is not None
        return tuple(cursor.versions[home] for home in sorted({index, *self._structure.borrowed(index).values()}))

    # ---- keeping it ------------------------------------------------------------------------------------------------

    def _keep(self, cursor: Cursor, part: Slice, shard: Shard, run: Execution) -> tuple[float, float]:
        """Writes what the turn has made and commits it.

        Returns:
            The step's loss when it is complete, and that on held-out data when it is due; else NaN.
        """
        if run.losses:
            cursor.loss = _loss_of(run, self.trial.microbatches)
            if not math.isfinite(cursor.loss):
                what = f"the loss of step {cursor.step + 1} is {cursor.loss}"
                raise NonFiniteLossError(f"{what}: lower the learning rate or clip the gradients")
        self._between(cursor).leave(part, shard, run)
        if part.turn.steps or shard.buffers_changed():
            self._write_shard(cursor, shard)
        for (stage, signature), found in run.flags.items():
            cursor.flags[f"{stage}:{signature}"] = list(found)
        complete = cursor.turn + 1 == len(self._slices)
        loss, held_out = cursor.loss, math.nan
        if complete:
            write_loss(self.folder, cursor.step, loss)
            if self.trial.evaluate:
                held_out = self._evaluate(cursor)
                write_loss(self.folder, cursor.step, held_out, held_out=True)
            cursor.step, cursor.turn, cursor.norms = cursor.step + 1, 0, {}
        else:
            cursor.turn += 1
        commit(self.folder, cursor)
        return (loss, held_out) if complete else (math.nan, math.nan)

    def _evaluate(self, cursor: Cursor) -> float:
        """The loss on held-out data after the step under way, shard after shard; NaN where it is not due."""
        done, every = cursor.step + 1, self.trial.evaluate
        if done % every and done != self.trial.steps:
            return math.nan
        assert self._recipe is not None and self._recipe.held_out is not None
        judged = HeldOut.of(self._recipe.held_out(), self.trial.microbatches)
        for index in range(len(cursor.counts)):
            judged.through(self._shard(cursor, index).worker.stages[index])
        return judged.loss(self._recipe.training.loss)

    # ---- files -----------------------------------------------------------------------------------------------------

    def structure(self, cursor: Cursor) -> Structure:
        """The model's structure, made when it is first asked for."""
        self._prepare(cursor)
        assert self._structure is not None
        return self._structure

    def record(self, shard: int, version: int) -> Path:
        """Where a version of a shard lies."""
        return self.folder / f"shard-{shard}.{'ab'[version % 2]}"

    def _read_shard(self, cursor: Cursor, shard: int) -> Record:
        return read_record(self.record(shard, cursor.versions[shard]), cursor.versions[shard])

    def _write_shard(self, cursor: Cursor, shard: Shard) -> None:
        tensors, extra = shard.state()
        version = cursor.versions[shard.index] + 1
        write_record(self.record(shard.index, version), version, tensors, extra)
        cursor.versions[shard.index] = version
        self._shards[shard.index] = self._versions_of(cursor, shard.index), shard


def _loss_of(run: Execution, num_microbatches: int) -> float:
    """The mean loss of the step, added up as `Pipeline` does."""
    table = torch.zeros(num_microbatches, dtype=torch.float64)
    losses = dict(run.losses)
    table[list(losses)] = torch.stack([loss.reshape(()).double() for loss in losses.values()]).cpu()
    return float(table.view(1, -1).sum(1)[0])


def _shapes(payload: Any) -> str:
    return ",".join(f"{tuple(leaf.shape)}{leaf.dtype}" for leaf in pytree.tree_leaves(payload))
