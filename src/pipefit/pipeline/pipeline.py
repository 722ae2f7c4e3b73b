"""Pipeline: a model, its training and its plan as one object; every rank makes the same one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.checkpoint import Checkpoint, load, save
from pipefit.checkpoint.committed import commit_step, resume_records
from pipefit.checkpoint.run_state import RunState
from pipefit.checkpoint.whole import load_whole, whole_state
from pipefit.cutting import Cut
from pipefit.draw.drawing import Drawing, drawing_of
from pipefit.errors import DataError, ScheduleError
from pipefit.parallel import Region
from pipefit.pipeline.assembly import assemble, is_lent_whole, release_run, sharded_mesh
from pipefit.pipeline.batches import DataComparison, check_fit
from pipefit.pipeline.generation import generate
from pipefit.pipeline.given_model import GivenModel
from pipefit.pipeline.loaders import LoaderPosition, number_of
from pipefit.pipeline.losses import evaluate
from pipefit.pipeline.nonfinite import finite
from pipefit.pipeline.plan_model import Planned
from pipefit.pipeline.pretrained import save_folder
from pipefit.pipeline.programs import Programs
from pipefit.pipeline.rebalancing import Rebalancer
from pipefit.pipeline.recovery import Fit, Recovery
from pipefit.pipeline.repair import Repair
from pipefit.pipeline.request import Decision, agreed_plan
from pipefit.pipeline.run_report import PipelineReport
from pipefit.pipeline.training_loop import TrainingLoop
from pipefit.runtime.calls import among_ranks, collective, rolled
from pipefit.runtime.meeting import can_restart
from pipefit.runtime.microbatches import pair_of
from pipefit.runtime.replicas import verify_replicas
from pipefit.runtime.session import Session, current
from pipefit.runtime.worker import Worker
from pipefit.schedules import find
from pipefit.spec import Plan
from pipefit.spec.arguments import checked
from pipefit.spec.options import Parallelism, Precision, Request, Spilled, Updates
from pipefit.stage.compiler import compile_seconds
from pipefit.stage.materialise import give_back
from pipefit.stage.precision import LossScale
from pipefit.stage.training import Loss, Metric
from pipefit.timeline import Timeline


@checked("optimizer", "input_ids")
class Pipeline:
    """Trains a model over a pipeline of ranks.

        pipe = Pipeline(layers, loss=cross_entropy, optimizer=lambda weights: AdamW(weights), stages=2)
        losses = pipe.fit(loader, steps=100)

    Started as a plain script, all ranks run in this process. Started by `pipefit run`, `pipefit train --ranks` or
    `torchrun`, each process is one rank, and all of them make this object and call its methods in the same way.

    Args:
        model: an `nn.Sequential` or a list of layers, each taking the output of the one before (tensors, also in
            tuples, lists and dicts). Any other module is cut (see `pipefit.cut`); one of transformers needs no example
            for this.
        loss: from the model's output and the target to their mean loss over the samples given, or to a pair of it and a
            dict of metrics, numbers that are averaged like the loss; None: the own loss of a model of transformers,
            whose batches are dicts with labels.
        optimizer: from a list of parameters to an optimizer, called for each stage; a function whose argument is named
            `named` gets pairs (name, parameter).
        stages: a number, layer counts, "auto" (balanced by a profile that is measured now; needs `example`), or None.
        schedule: its name; see `pipefit schedules`. "auto": the best one (needs `example`). None: "1f1b", or a
            schedule that suits spilling where stages spill.
        microbatches: per weight update; None: chosen with the schedule "auto", else 4.
        plan: a plan, the result of `pipefit.plan`, or a path; then stages, schedule, microbatches, chunks, replicas,
            recompute and the tensor width are those of the plan.
        example: one batch, (input, target) or a dict, for measuring and for cutting.
        parallelism: distribution of the model over processes: ranks, chunks, replicas, tensor width and the like.
        precision: "fp32" (the model's own type), "tf32" (the same, with products rounded by a GPU), "bf16" or "fp16"
            (layers run under autocast, weights stay float32); or a `Precision`, with the first scale of the loss, or
            with `compile=True`: layers train by torch.compile.
        updates: learning-rate schedule, clipping, weights of micro-batches, seed.
        spill: stages are kept on the host or on disk; a cap on the device's memory (with `example`) also determines
            the stages.

    Raises:
        PipefitError: the arguments do not fit together; the message names a remedy.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Cut,
        *,
        loss: Loss | None = None,
        optimizer: Callable[[Any], Optimizer],
        stages: int | Sequence[int] | str | None = None,
        schedule: str | None = None,
        microbatches: int | None = None,
        plan: Plan | Planned | Decision | str | Path | None = None,
        example: Any = None,
        parallelism: Parallelism = Parallelism(),
        precision: Precision | str = "fp32",
        updates: Updates = Updates(),
        spill: Spilled | None = None,
    ) -> None:
        session = current()
        session.roll_call("Pipeline()")
        with session.sharing_errors(lambda: "Pipeline()"):
            self.given = given = GivenModel.of(
                model,
                loss=loss,
                optimizer=optimizer,
                example=example,
                device=parallelism.device,
                precision=precision,
                updates=updates,
            )
            self.model = model
            self.layers = list(given.work.layers)

            request = Request(schedule, microbatches, stages, plan, parallelism, spill)
            decision = agreed_plan(request, given.work, updates, session)
            agreed = decision.plan
            mesh = sharded_mesh(agreed, self.layers, session)
            self.training = given.training(mesh)
            programs = Programs(agreed, self.training, self.layers, spill)

            program = programs.shortest()
            self._is_lent_whole = is_lent_whole(program, self.layers, session)
            self.engine = assemble(program, agreed, given, mesh, self.training, session, spill)
            self._position = LoaderPosition(updates.seed)
            self.state = RunState(self._position)
            self.loop = TrainingLoop(self.engine, given, self._after_updates, self.state)
            self.comparison = DataComparison(session, self.state)
            self.recovery: Recovery | None = None
            self.follow(agreed, programs, session)
            self.repair = Repair(self)
            self.rebalancer: Rebalancer | None = None
            if parallelism.rebalance:
                self.rebalancer = Rebalancer(self, decision)
            self._verify_every = parallelism.verify_replicas
            self.verified = 0

            # JSON data of the caller, committed with a step on a disk tier, and that of the step from which it resumed.
            self.notes: Callable[[], Mapping[str, Any]] | None = None
            self.resumed_notes: dict[str, Any] = {}
            if spill is not None and spill.resume is not False:
                self.resumed_notes = resume_records(self)

    def follow(self, plan: Plan, programs: Programs, session: Session) -> None:
        """Follows a plan from now on, for which the engine has its workers."""
        self.session = session
        self.plan = plan
        self.schedule = find(plan.schedule)
        self.programs = programs
        self.program = programs.shortest()
        self.state.scales = [worker.scale for worker in self.workers if worker.scale is not None]
        self.loop.follow(self.schedule, plan.num_microbatches, programs.of)
        self.comparison.session = session
        if self.recovery is not None:
            self.recovery.follow(session)

    def _after_updates(self) -> None:
        """Compares replicas if that is due, and commits the step, after each pass."""
        if self._verify_every and self.num_updates - self.verified >= self._verify_every:
            self.session.unit(self.verify_replicas)
        commit_step(self, self.notes)
        self.repair.prepare()

    def verify_replicas(self) -> None:
        """Compares the weights of replicas, unless `verify_replicas` is 0; a checkpoint begins with it.

        Raises:
            DisagreementError: on every rank: two differ; the message names the first tensor.
        """
        if self._verify_every != 0:
            verify_replicas(self.session, self.workers, self.program.header, self.num_updates)
            self.verified = self.num_updates

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number; 0 when all ranks run in one process."""
        return self.session.rank

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.engine.device

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The ranks that this process runs, each with its stages, optimizers and tiers, for measuring and saving."""
        return tuple(self.engine.workers)

    @property
    def region(self) -> Region | None:
        """The processes that share this one's rank by tensor parallelism; None without it."""
        return self.engine.mesh.region

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of the loss and the number of skipped updates, the same on every rank; None: it is not scaled."""
        return self.state.loss_scale

    @property
    def num_updates(self) -> int:
        """Weight updates since training began."""
        return self.state.num_updates

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the metrics that the loss returned, of the last step or evaluation, the same on every rank."""
        return self.loop.metrics

    @property
    def stop_requested(self) -> bool:
        """Whether the run was asked to stop (SIGTERM), the same on every rank: end a loop of `step` and save."""
        return self.session.stop.agreed

    @property
    def held_bytes(self) -> float | None:
        """Peak bytes of tensors of this process in one pass; None: not measured yet."""
        return self.loop.held_bytes

    # ---- training --------------------------------------------------------------------------------------------------

    @among_ranks
    def step(self, x: Any, y: Any) -> float:
        """Trains on one batch and returns its mean loss, the same number on every rank.

        Args:
            x: the model's input, tensors whose first dimension counts samples; the same on every rank.
            y: the target.

        Raises:
            ScheduleError: the schedule is asynchronous: it has no step to wait for; use `fit`.
            DataError: the batch cannot be split into micro-batches, or has gradients behind it.
            NonFiniteLossError: the loss or a gradient is not finite; see `Updates.nonfinite`.
        """
        if not self.schedule.is_synchronous:
            raise ScheduleError(
                f"{self.schedule.name} is asynchronous: its updates overlap, so there is no single step to run; use "
                "fit(batches), which drains at its end"
            )
        self.comparison.batch((x, y))
        pending = self.loop.start_step(*pair_of((x, y), trains=True)).losses
        loss = pending.wait()[0]
        self.loop.metrics = pending.metrics[0]
        return finite(loss, self.num_updates, self.training.nonfinite)

    @rolled
    def fit(
        self,
        batches: Iterable[Any],
        steps: int | None = None,
        *,
        callbacks: Sequence[Any] = (),
        held_out: Iterable[Any] | None = None,
        evaluate_every: int = 0,
    ) -> list[float]:
        """Trains on batches of (input, target), one for each step, and returns the loss of every step.

        An asynchronous schedule runs its steps as one segment and drains at its end. A synchronous one never waits for
        a loss: it is read while the next step runs.

        When the run is asked to stop (SIGTERM) it ends after the current step, an asynchronous one at the end of its
        segment, and returns the losses so far; then a few seconds remain to save. Another `fit` ends the process.
        After a fault, the first `fit` of a run that was started again resumes from the newest step in the memory of
        the machines, or in the folder of `Checkpoints` among its callbacks; steps that are done are not repeated.

        Args:
            batches: the same on every rank. A loader (a `DataLoader`, or batches with `state_dict`) continues after the
                last batch trained on: to the end of its epoch, or with `steps` for as many epochs as needed.
            steps: number of batches to take; None: all.
            callbacks: functions of a `Record`, called at every step, or objects; see `pipefit.pipeline.callbacks`. One
                that saves or pauses must be given on all ranks. Training ends three steps after one of them returns
                STOP, immediately after an evaluation.
            held_out: batches to evaluate on.
            evaluate_every: steps between evaluations, counted since training began; 0: only at the end. An
                asynchronous schedule drains for each.

        Raises:
            DataError: there is no data, or less than `steps`.
            NonFiniteLossError: a loss or a gradient is not finite; see `Updates.nonfinite`.
        """
        check_fit(steps, held_out, evaluate_every)
        if self.session.stop.agreed:
            raise SystemExit(128 + signal.SIGTERM)
        asked = Fit([], False, batches, steps, callbacks)
        if can_restart():
            self.recovery = self.recovery or Recovery(self)
            asked = self.recovery.begin(asked)
        done, is_done, batches, steps, callbacks = asked
        if is_done:
            return done
        if self.rebalancer is not None:
            self.rebalancer.begin(steps, callbacks)
            callbacks = [*callbacks, self.rebalancer]
        number = number_of(batches)
        if not self.schedule.is_synchronous and steps is None:
            steps = self._position.num_left(batches)
            if steps is None:
                raise DataError(f"{self.schedule.name} needs to know its number of steps: give fit(…, steps=N)")
        iterator = self.comparison.batches(self._position.batches(batches, steps is not None), number, steps)
        evaluate = None if held_out is None else partial(self.evaluate, held_out)
        losses = done + self.loop.fit(iterator, steps, callbacks, evaluate, evaluate_every)
        if not losses:
            raise DataError("there is no data: the iterable of batches is empty")
        return losses

    @overload
    def evaluate(self, batches: Iterable[Any], metric: None = None) -> float: ...

    @overload
    def evaluate(self, batches: Iterable[Any], metric: Metric) -> tuple[float, float]: ...

    @collective
    def evaluate(self, batches: Iterable[Any], metric: Metric | None = None) -> float | tuple[float, float]:
        """The mean loss over some batches, in evaluation mode, on every rank; nothing is trained.

        Args:
            batches: of (input, target).
            metric: from output and target to a number, averaged like the loss; then (loss, metric) is returned.
        """
        if self.session.repairs is not None and isinstance(batches, Iterator):
            self.session.repairs.only_once = "it evaluates on an iterator, which cannot be read again"
        found = evaluate(self.engine, self.program.header, batches, metric, self.given.weigh)
        self.loop.metrics = found.metrics
        if metric is None:
            return found.loss
        return (found.loss, found.measured)

    @collective
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Tensor:
        """Text from a causal language model of transformers, in evaluation mode, the same on every rank.

        It equals the text of the model's own `generate`. Further settings of `model.generation_config` apply here too,
        except beams. Each stage keeps the keys and values of its layers; a pass makes one token of every sequence.

        Args:
            input_ids: the prompts, (sequences, tokens), the same on every rank; shorter ones are padded on their left.
            attention_mask: 0 where a prompt is padded, else 1; None: determined by transformers.
            max_new_tokens: maximum number of tokens to add.
            do_sample: draw each token by its probability; else take the most probable one.
            temperature: divisor of the logits before sampling.
            top_k: only so many of the most probable tokens are drawn; None: all.
            top_p: only the most probable tokens that together have this probability; None: all.
            seed: of the sampling, which equals that of the whole model after `torch.manual_seed(seed)`.
            eos_token_id: ends a sequence, which is padded from there; None: the model's own.

        Returns:
            The prompts with their continuations, (sequences, tokens), int64 on the CPU.

        Raises:
            ModelError: the model generates no text, or cannot do so in stages.
            DataError: the prompts are not a tensor of token ids, or not the same on every rank.
        """
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": do_sample}
        if do_sample:
            options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        if eos_token_id is not None:
            options["eos_token_id"] = eos_token_id if isinstance(eos_token_id, int) else list(eos_token_id)
        return generate(self.engine, self.program.header, self.layers, input_ids, attention_mask, seed, options)

    # ---- results ---------------------------------------------------------------------------------------------------

    @collective
    def state_dict(self) -> dict[str, Tensor]:
        """All weights and buffers under the user's own names, on the CPU. All ranks of a run must call it together."""
        return whole_state(self)

    @rolled
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads weights and buffers by the user's names. All ranks of a run must call it together.

        Raises:
            ModelError: a name is missing, unknown or has another shape, or names of one weight have different values.
        """
        load_whole(self, state)
        commit_step(self, self.notes, now=True)

    @collective
    def save(
        self, path: str | Path, *, extra: dict[str, Any] | None = None, keep: int | None = None, wait: bool = True
    ) -> Path:
        """Saves weights (the user's names, safetensors), optimizers and the position of the training.

        Every rank of a run must call it, between two steps or in a callback.

        Args:
            path: directory of the run; the checkpoint becomes `path/step-000300`, whole or not at all.
            extra: JSON data that `load` returns, such as the position in the data.
            keep: number of the newest checkpoints that stay; None: all.
            wait: for the files; else for a copy that a thread writes; the next save or load and the end of `fit` wait.

        Returns:
            The directory of the checkpoint.

        Raises:
            PipefitError: it could not be saved; earlier checkpoints are unchanged.
        """
        return save(self, path, extra=extra, keep=keep, wait=wait)

    @collective
    def save_pretrained(self, folder: str | Path) -> Path:
        """Writes a folder that transformers reads with `from_pretrained`: configuration, weights, tokenizer.

        Every rank of a run must call it; each writes its own stages, so all need access to the folder. Of a model with
        adapters only these are written, for `PeftModel.from_pretrained`.

        Raises:
            ModelError: the model is not one of transformers.
            PipefitError: the folder cannot be written.
        """
        save_folder(self, self.model, self.layers, Path(folder))
        return Path(folder)

    @collective
    def load(self, path: str | Path, *, weights_only: bool = False) -> Checkpoint:
        """Resumes from a checkpoint, which any number of ranks, stages and any schedule may have saved.

        Args:
            path: directory of a run, whose newest whole checkpoint is taken, or of one checkpoint.
            weights_only: leave optimizers, learning rates and counters as they are.

        Returns:
            The checkpoint, with its step and the caller's `extra`.

        Raises:
            PipefitError: there is none, or it is of another model or optimizer; nothing was changed.
        """
        found = load(self, path, weights_only=weights_only)
        commit_step(self, lambda: found.extra, now=True)
        return found

    @collective
    def timeline(self, last: int = 3) -> Timeline:
        """The last measured passes of all ranks. All ranks of a run must call it together."""
        return self.loop.timeline(last)

    @collective
    def report(self, last: int = 8) -> PipelineReport:
        """A summary of the time of the last passes, to be printed. All ranks of a run must call it together."""
        compile_s = compile_seconds() if self.training.compiler else 0.0
        own = self.loop.moved_bytes, self.held_bytes, compile_s
        return PipelineReport.of(self.timeline(last), self.plan, self.session, *own, self.engine.device)

    def draw(self) -> Drawing:
        """The picture of the schedule under unit costs, displayed in a notebook."""
        if self.schedule.is_synchronous:
            return drawing_of(self.program)
        return drawing_of(self.programs.of(4 * len(self.plan.partition.stages)))

    def settle(self) -> None:
        """Waits until the records of the last step have arrived on the tier and are committed.

        Raises:
            TierError: the tier has failed.
        """
        for worker in self.workers:
            if worker.spilling:
                worker.spilling.settle()

    @rolled
    def close(self) -> None:
        """Gives the model back: all its weights in every process that had them, and its own classes.

        Every rank of a run must call it. A spilled model, one from the meta device and one that is split by tensor
        parallelism stay in parts. These, and one whose replicas shared weights, cannot be run by the pipeline
        afterwards. Worker processes of a loader end.
        """
        if not self.engine.has_weights:
            return
        self._position.resume(None)
        # A unit may be repeated, so it changes nothing.
        state = self.session.unit(lambda: whole_state(self) if self._is_lent_whole else {})
        self.engine.gather_weights(self.program.header)
        if self._is_lent_whole:
            give_back(self.layers, state)
            self._is_lent_whole = False
        release_run(self.engine, self.program.header)
