"""Pipeline: a model, its training and its plan as one object; every rank makes the same one."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.checkpoint import Checkpoint, load, save
from pipefit.checkpoint.committed import commit_step, resume_records
from pipefit.draw.drawing import Drawing, drawing_of
from pipefit.errors import DataError, ScheduleError
from pipefit.ir.program import Program, WeightRule
from pipefit.parallel import Region
from pipefit.pipeline.agreement import Agreement
from pipefit.pipeline.assemble import assemble
from pipefit.pipeline.capped import one_number, plan_of
from pipefit.pipeline.divided import Divided
from pipefit.pipeline.evaluate import evaluate
from pipefit.pipeline.gather import full_state
from pipefit.pipeline.history import PassHistory
from pipefit.pipeline.live import Live, own_figures
from pipefit.pipeline.losses import PendingLosses, finite
from pipefit.pipeline.peak_memory import HeldMemory, held_memory_bytes, peak_memory_bytes
from pipefit.pipeline.planned import Planned
from pipefit.pipeline.resumed import same_plan, told_apart
from pipefit.pipeline.setup import check_ranks, default_device, wanted_ranks
from pipefit.pipeline.sharding import release_flat, with_sharding
from pipefit.pipeline.spill_options import Spilled, spilled_shape
from pipefit.pipeline.stream import stream_feed
from pipefit.pipeline.time_report import PipelineReport
from pipefit.pipeline.traffic import traffic
from pipefit.planner import by_hand
from pipefit.profiling.agreed import profile_of
from pipefit.runtime.engine import PassResult
from pipefit.runtime.microbatches import Weigh, feed_of, pair_of
from pipefit.runtime.session import current
from pipefit.runtime.worker import Worker
from pipefit.schedules import find, shape_of
from pipefit.spec import Plan
from pipefit.stage.precision import LossScale, first_scale, half_of
from pipefit.stage.split import NamedLayer, named_layers
from pipefit.stage.ties import tied_groups
from pipefit.stage.training import MakeOptimizer, MakeScheduler, Training
from pipefit.timeline import Timeline
from pipefit.verify import verify

__all__ = ["Pipeline"]

OnStep = Callable[[int, float], None]


class Pipeline:
    """Trains a model over a pipeline of ranks.

    Started alone, all ranks run in this process. Started by `pipefit run`, `pipefit train --ranks` or `torchrun`, each
    process is one rank, and every one of them makes this object and calls its methods alike.

    Args:
        model: an `nn.Sequential` or a list of layers, each taking what the one before gives (tensors, alone or in
            tuples, lists and dicts).
        loss: from the model's output and the target to their mean loss over the samples given.
        optimizer: from a list of parameters to an optimizer; called for each stage.
        stages: a number, layer counts, "auto" (balanced by a profile that is measured now; needs `example`), or None.
        schedule: its name; see `pipefit schedules`. None: "1f1b", and what suits them where stages spill.
        microbatches: per weight update.
        chunks: stages per rank, for the looped schedules.
        ranks: of a run in one process; None: as the stages and replicas ask for, and one under a cap on memory.
        replicas: copies of each stage, or one number for all.
        recompute: keep only stage inputs and replay forwards before backwards.
        tensor: processes that share each rank by tensor parallelism; for models whose layers have a tensor rule (gpt).
        sequence_parallel: they also divide the sequence where all of them would compute the same.
        scatter_gather: without that, each sends its part of a message between ranks, and the receiver gathers.
        plan: a plan, what `pipefit.plan` gave, or a path; then stages, schedule, microbatches, chunks, replicas,
            recompute and the tensor width are its.
        scheduler: from an optimizer to its learning-rate schedule, which steps with it.
        shard_optimizer: divide the optimizer's states over the replicas of each stage, also of those of a plan.
        precision: "fp32" (the model's own type), "bf16" or "fp16": layers run under autocast, weights stay float32.
        loss_scale: first scale of the loss, which then follows the gradients; None: 65536 for fp16, else no scaling.
        clip_norm: largest global norm of an update's gradients, over all stages.
        weigh: how much a micro-batch counts in its batch's mean, from its target; None: its number of samples. Give the
            number of tokens that count when the loss averages over them.
        example: (input, target) of one batch, for profiling.
        seed: of the random numbers inside the model (dropout): they depend on neither ranks, stages nor schedule.
        device: where ranks compute; None: the process's GPU when there is one, else the CPU.
        options: integers particular to the schedule, such as {"warmup": 2}.
        spill: stages live on the host or on disk; with a cap on the device's memory and `example` it cuts them itself.

    Raises:
        PipefitError: what was given does not fit together; the message says what to do.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        loss: Callable[[Any, Any], Tensor],
        optimizer: MakeOptimizer,
        stages: int | Sequence[int] | str | None = None,
        schedule: str | None = None,
        microbatches: int = 4,
        chunks: int = 1,
        ranks: int | None = None,
        replicas: int | Sequence[int] = (),
        recompute: bool = False,
        tensor: int = 1,
        sequence_parallel: bool = False,
        scatter_gather: bool = True,
        shard_optimizer: bool = False,
        precision: str = "fp32",
        loss_scale: float | None = None,
        plan: Plan | Planned | str | None = None,
        scheduler: MakeScheduler | None = None,
        clip_norm: float | None = None,
        weigh: Weigh | None = None,
        example: tuple[Any, Any] | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        options: dict[str, int] | None = None,
        spill: Spilled | None = None,
    ) -> None:
        self._session = current()
        self.model = model
        self.layers: list[NamedLayer] = named_layers(model)
        self.device = torch.device(device) if device is not None else default_device()
        self._weigh = weigh
        self.spill = spill
        half = half_of(precision)
        copies = (replicas,) if isinstance(replicas, int) else tuple(replicas)
        plan = plan or same_plan(spill, stages == "auto", self._session)
        if spill is not None and plan is None:
            if spill.cap_bytes is not None:
                plan, _, _ = plan_of(
                    self.layers,
                    spill,
                    optimizer,
                    example,
                    microbatches,
                    loss,
                    clip_norm is not None,
                    self.device,
                    num_ranks=ranks or one_number(copies),
                    copies=one_number(copies),
                    schedule=schedule,
                    num_chunks=chunks if chunks > 1 else 0,
                    half=half,
                )
            elif schedule is None and ranks in (None, 1) and not self._session.is_distributed:
                schedule = "spilled"
        if plan is None:
            self.plan = by_hand(
                len(self.layers),
                num_ranks=wanted_ranks(self._session, stages, chunks, copies, tensor, ranks),
                schedule=schedule or "1f1b",
                num_microbatches=microbatches,
                num_chunks=chunks,
                stages=None if stages is None or isinstance(stages, int | str) else list(stages),
                replicas=copies,
                recompute=recompute,
                tensor=tensor,
                sequence_parallel=sequence_parallel,
                scatter_gather=scatter_gather,
                sharded_optimizer=shard_optimizer,
                options=options,
                profile=profile_of(self.layers, example, microbatches, self._session, loss)
                if stages == "auto"
                else None,
                model=type(model).__name__,
            )
        else:
            self.plan = plan.plan if isinstance(plan, Planned) else plan if isinstance(plan, Plan) else Plan.load(plan)
        check_ranks(self._session, self.plan)
        self.plan = with_sharding(self.plan, shard_optimizer)
        self.schedule = find(self.plan.schedule)
        self._divided = Divided.of(self.layers, self.plan, self._session, self.device)
        loss = self._divided.loss(loss)
        self._training = Training(
            loss, optimizer, scheduler, clip_norm, seed, half=half, loss_scale=first_scale(half, loss_scale)
        )
        self.spill = told_apart(spill, self.layers, self.plan, self._training, self._session)
        self._ties = tied_groups(self.layers, self.plan.partition)
        self._programs: dict[tuple[int, int], Program] = {}
        # Replicas of a stage that share out whole mini-batches need one each, so a round of them is the least to run.
        in_turn = self.schedule.weights in (WeightRule.STASH, WeightRule.VERTICAL)
        self.program = self._program(math.lcm(*map(len, self.plan.placement.ranks)) if in_turn else 1)
        self._engine = assemble(
            self.program, self.plan, self._divided, self._training, self._session, self.device, self.spill, model
        )
        self.num_updates = 0
        self._next_ordinal = 0
        # What a step on a disk tier is committed with beside the training itself, such as the position in the data.
        self.notes: Callable[[], Mapping[str, Any]] | None = None
        self.noted = resume_records(self) if spill is not None and spill.resume is not False else {}
        self.history = PassHistory()
        self.held_bytes: float | None = None
        # Whether every step also tells all ranks of each other's bubble and memory, and the last it told.
        self.tells_live = False
        self.live: Live | None = None
        self._agreement = Agreement(self._session)

    # ---- making it -------------------------------------------------------------------------------------------------

    def _program(self, num_steps: int) -> Program:
        """The program of some steps, proven before it is used."""
        key = (self.plan.num_microbatches, num_steps)
        if key not in self._programs:
            clip = self._training.needs_norm
            shape = shape_of(self.plan, num_steps=num_steps, ties=self._ties, clip=clip)
            program = self.schedule(spilled_shape(shape, self.spill))
            verify(program).raise_if_bad()
            self._programs[key] = program
        return self._programs[key]

    # ---- training --------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number; 0 when all ranks run in one process."""
        return self._session.rank

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The ranks that this process runs, each with its stages, optimizers and tiers: for who measures or saves."""
        return tuple(self._engine.workers)

    @property
    def region(self) -> Region | None:
        """The processes that share this one's rank by tensor parallelism; None without it."""
        return self._divided.mesh.region

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the loss and how many updates were skipped, the same on every rank; None: it is not scaled."""
        return self.workers[0].scale

    def step(self, x: Any, y: Any) -> float:
        """Trains on one batch and gives its mean loss, the same number on every rank.

        Args:
            x: the model's input, tensors whose first dimension counts samples; the same on every rank.
            y: the target.

        Raises:
            ScheduleError: the schedule is asynchronous: it has no step to wait for; use `fit`.
            DataError: the batch cannot be cut into micro-batches.
            NonFiniteLossError: the loss is not a number.
        """
        if not self.schedule.is_synchronous:
            raise ScheduleError(
                f"{self.schedule.name} is asynchronous: its updates overlap, so there is no single step to run; use "
                "fit(batches), which drains at its end"
            )
        self._agreement.batch((x, y))
        return finite(self._start_step(x, y).wait()[0], self.num_updates)

    @property
    def stop_requested(self) -> bool:
        """Whether the run was asked to stop (SIGTERM), as all ranks know since the same step: save and leave."""
        return self._session.stop.agreed

    def _start_step(self, x: Any, y: Any) -> PendingLosses:
        self._divided.check(x)
        feed = feed_of([(x, y)], self.plan.num_microbatches, self._next_ordinal, "train", self._weigh)
        result = self._run(self.program, feed)
        self._advance(1)
        told = own_figures(self._session, result) if self.tells_live else ()
        return PendingLosses(self._engine, result, self.plan.num_microbatches, 1, *told)

    def _run(self, program: Program, feed: Any) -> PassResult:
        for worker in self.workers:
            worker.train(True)
        watch = self._memory_watch()
        result = self._engine.run(program, feed, look=watch.look if watch else None)
        if watch is not None:
            self.held_bytes = watch.held_bytes
        self.history.add(program, result)
        return result

    def _memory_watch(self) -> HeldMemory | None:
        """Looks at the memory in one pass: the second of a synchronous schedule, when the optimizers have states."""
        workers = self.workers
        due = self.held_bytes is None and (self.num_updates > 0 or not self.schedule.is_synchronous)
        return HeldMemory.watching(workers[0]) if due and len(workers) == 1 else None

    def _advance(self, num_steps: int) -> None:
        self.num_updates += num_steps
        self._next_ordinal += num_steps * self.plan.num_microbatches
        commit_step(self, self.notes)

    def fit(self, batches: Iterable[Any], steps: int | None = None, on_step: OnStep | None = None) -> list[float]:
        """Trains on batches of (input, target), each one step's worth, and gives the loss of every step.

        An asynchronous schedule runs all steps as one segment and drains at its end. A synchronous one never waits for
        a loss: it is read while the next step runs.

        When the run is asked to stop (SIGTERM) it ends after the step under way, an asynchronous one at the end of its
        segment, and gives the losses so far; there are then a few seconds to save. Another `fit` leaves the process.

        Args:
            batches: the same on every rank.
            steps: how many batches to take; None: all.
            on_step: called on every rank with the step's number (from 1) and loss.

        Raises:
            DataError: there is no data, or less than `steps`.
            NonFiniteLossError: a loss is not a number.
        """
        if steps is not None and steps < 1:
            raise DataError(f"steps: expected at least 1, got {steps}")
        if self.stop_requested:
            raise SystemExit(128 + signal.SIGTERM)
        run = self._fit_synchronous if self.schedule.is_synchronous else self._fit_segment
        losses = run(self._agreement.batches(batches, steps), batches, steps, on_step or (lambda step, loss: None))
        if not losses:
            raise DataError("there is no data: the iterable of batches is empty")
        return losses

    def _fit_synchronous(
        self, iterator: Iterator[Any], batches: Iterable[Any], steps: int | None, on_step: OnStep
    ) -> list[float]:
        losses: list[float] = []
        first = self.num_updates
        pending: PendingLosses | None = None

        def settle() -> None:
            if pending is not None:
                losses.append(finite(pending.wait()[0], first + len(losses) + 1))
                if self.tells_live:
                    self.live = Live.of(pending.extra[:-1])
                on_step(len(losses), losses[-1])

        while steps is None or self.num_updates - first < steps:
            if self.stop_requested or (batch := next(iterator, None)) is None:
                break
            started = self._start_step(*pair_of(batch))
            settle()
            pending = started
        settle()
        if steps is not None and 0 < len(losses) < steps and not self.stop_requested:
            raise DataError(f"the data ended after {len(losses)} of {steps} steps; give more, or fewer steps")
        return losses

    def _fit_segment(
        self, iterator: Iterator[Any], batches: Iterable[Any], steps: int | None, on_step: OnStep
    ) -> list[float]:
        if steps is None:
            try:
                steps = len(batches)
            except TypeError:
                raise DataError(
                    f"{self.schedule.name} needs to know its number of steps: give fit(…, steps=N)"
                ) from None
            if not steps:
                return []
        feed = stream_feed(map(pair_of, iterator), steps, self.plan.num_microbatches, self._next_ordinal, self._weigh)
        first = self.num_updates
        result = self._run(self._program(steps), feed)
        self._advance(steps)
        losses = list(PendingLosses(self._engine, result, self.plan.num_microbatches, steps).wait())
        for step, loss in enumerate(losses, 1):
            on_step(step, finite(loss, first + step))
        return losses

    def evaluate(
        self, batches: Iterable[Any], metric: Callable[[Any, Any], float] | None = None
    ) -> float | tuple[float, float]:
        """The mean loss over some batches, in evaluation mode, on every rank; nothing is trained.

        Args:
            batches: of (input, target).
            metric: from output and target to a number, averaged like the loss; then (loss, metric) is given.
        """
        loss, measured = evaluate(self._engine, self.program.header, self._divided, batches, metric, self._weigh)
        return loss if metric is None else (loss, measured)

    # ---- what came of it -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All weights and buffers under the user's own names, on the CPU. Every rank of a run must ask together."""
        return full_state(self._engine, self.layers, self.plan)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes weights and buffers by the user's names.

        Raises:
            ModelError: a name is missing or has another shape.
        """
        state = {name: self._divided.mesh.part(name, value) for name, value in state.items()}
        for worker in self.workers:
            for index, stage in worker.stages.items():
                with worker.presence(index, change=True):
                    stage.load_state_dict(state)
        commit_step(self, self.notes, now=True)

    def save(self, path: str | Path, *, extra: dict[str, Any] | None = None, keep: int | None = None) -> Path:
        """Saves weights (the user's names, safetensors), optimizers and where the training stands.

        Every rank of a run must call it, between two steps or in `on_step`.

        Args:
            path: directory of the run; the checkpoint becomes `path/step-000300`, whole or not at all.
            extra: JSON data that `load` gives back, such as the position in the data.
            keep: how many of the newest checkpoints stay; None: all.

        Returns:
            The directory of the checkpoint.

        Raises:
            PipefitError: it could not be saved; earlier checkpoints are as they were.
        """
        return save(self, path, extra=extra, keep=keep)

    def load(self, path: str | Path, *, weights_only: bool = False) -> Checkpoint:
        """Goes on from a checkpoint, which any number of ranks, stages and any schedule may have saved.

        Args:
            path: directory of a run, whose newest whole checkpoint is taken, or of one checkpoint.
            weights_only: leave optimizers, learning rates and counters as they are.

        Returns:
            Which checkpoint it was, its step, and the caller's `extra`.

        Raises:
            PipefitError: there is none, or it is of another model or optimizer; nothing was changed.
        """
        found = load(self, path, weights_only=weights_only)
        commit_step(self, lambda: found.extra, now=True)
        return found

    def timeline(self, last: int = 3) -> Timeline:
        """The last passes as they were measured, of all ranks. Every rank of a run must ask together."""
        return self.history.timeline(self._engine, last)

    def report(self, last: int = 8) -> PipelineReport:
        """Where the time of the last passes went: print it. Every rank of a run must ask together."""
        moved = traffic(self._session, self.history.moved_bytes)
        held = held_memory_bytes(self._session, self.held_bytes)
        return PipelineReport(self.timeline(last), self.plan, peak_memory_bytes(self._session), moved, held)

    def draw(self) -> Drawing:
        """The picture of the schedule under unit costs; it shows itself in a notebook."""
        if self.schedule.is_synchronous:
            return drawing_of(self.program)
        return drawing_of(self._program(4 * len(self.plan.partition.stages)))

    def settle(self) -> None:
        """Waits for what the last step has begun on a tier: its records have arrived, and are committed.

        Raises:
            TierError: the tier has failed.
        """
        for worker in self.workers:
            if worker.spilling:
                worker.spilling.settle()

    def close(self) -> None:
        """Gives batch norms back their own class; the model can then be used without pipefit, unless it was spilled."""
        for worker in self.workers:
            if worker.spilling:
                worker.spilling.close()
            for stage in worker.stages.values():
                stage.release()
            release_flat(worker)
        self._divided.release()
