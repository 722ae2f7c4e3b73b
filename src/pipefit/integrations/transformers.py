"""The Trainer of transformers over a pipeline: its own loop, callbacks and schedules, with the passes of `Pipeline`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from pipefit.cutting import Cut, cut
from pipefit.cutting.own import without_adapters
from pipefit.errors import PipefitError, PlanError
from pipefit.integrations.one_replica import as_one_replica, from_first
from pipefit.integrations.split_losses import ITEMS, Split, for_each_sample, split_of
from pipefit.integrations.stage_optimizers import StageOptimizers
from pipefit.integrations.trainer_arguments import check_arguments
from pipefit.integrations.trainer_passes import forward, train
from pipefit.pipeline.pipeline import Pipeline
from pipefit.pipeline.request import given_plan
from pipefit.runtime.collectives import meet
from pipefit.runtime.session import current
from pipefit.schedules import find
from pipefit.spec import Plan
from pipefit.spec.options import Precision, Request, Updates

# Before `TrainingArguments` makes a process group of its own. A worker of a loader is no rank, and needs none.
if "RANK" in os.environ:
    with contextlib.suppress(PipefitError):
        current()


_ANY_NORM = 1e30
"""A limit that no gradient reaches: the Trainer wants to know the norm also where it does not clip."""


class _Called(Exception):
    """The arguments with which a loss function calls its model."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class _Model(nn.Module):
    """What the Trainer takes for its model: a function of keyword arguments, under the name of the model's class."""

    def __init__(self, model: Any, answer: Any) -> None:
        super().__init__()
        self._of = (model,)  # in a tuple, so that it is no part of this module
        self._answer = answer

    def _get_name(self) -> str:
        return type(without_adapters(self._of[0])).__name__

    def parameters(self, recurse: bool = True) -> Any:
        return self._of[0].parameters(recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the pipeline removes gradients itself."""

    def forward(self, **arguments: Any) -> Any:
        return self._answer(arguments)


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` whose model runs over a pipeline of processes.

        trainer = PipelineTrainer(model=model, args=args, train_dataset=…, data_collator=…)
        trainer.train()

    Started by `torchrun --nproc-per-node 2 script.py` or `pipefit run -n 2 script.py`. All processes together are one
    replica: rank 0 reads the data, and batches have the size that one process would use. Losses, metrics and
    checkpoints are those of `Trainer` in one process.

    Args:
        pipeline: stages, schedule, micro-batches and the like as a `pipefit.Request`, or a plan or its file; None: one
            stage for each process. Its micro-batches are those of an update: a multiple of
            `gradient_accumulation_steps`.
        options: those of `Trainer`.

    Raises:
        PipefitError: an argument cannot be honoured; the message names each.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        pipeline: Request | Plan | str | Path | None = None,
        **options: Any,
    ) -> None:
        args = args or TrainingArguments(output_dir="tmp_trainer")
        check_arguments(args)
        self.session = current()
        as_one_replica(args, self.session)
        self._request = _request_of(pipeline)
        self._cuts: dict[int, Cut] = {}
        self._pipe: Pipeline | None = None
        self._optimizers: StageOptimizers | None = None
        self._saved_states: dict[int, Any] | None = None
        self._samples: list[Any] = []
        self._norm: Tensor | None = None
        self._needs_outputs = True
        super().__init__(model, args, *positional, **options)

    # ---- what the Trainer's own loop calls --------------------------------------------------------------------------

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves the model where it is: each process moves its own stages."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return _Model(model, self._outputs)

    def train(self, *positional: Any, **options: Any) -> Any:
        """Trains as `Trainer.train` does; afterwards every process has the whole model, on the CPU."""
        found = super().train(*positional, **options)
        self._close()
        return found

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The batches of an update, which rank 0 reads, and the number of their labels."""
        found: Any = None
        if self.session.rank == 0:
            found, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = from_first(self.session, found)
        self._samples = []
        return batches, self._get_num_items_in_batch(batches, device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keeps a batch; with the last one of an update runs the update, and returns its whole loss."""
        self._samples.append(dict(inputs))
        if len(self._samples) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        batches = []
        for batch in self._samples:
            batches.append((self._arguments(batch, num_items_in_batch), _with_items(batch, num_items_in_batch)))
        pipe = self._opened(batches[0])
        assert self._optimizers is not None
        self._optimizers.take_settings(pipe)
        loss, self._norm = train(pipe, self._split, batches)
        if self.session.stop.agreed:
            self.control.should_training_stop = True
        return torch.tensor(loss, device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm

    def _maybe_log_save_evaluate(self, *positional: Any, **options: Any) -> None:
        """Logs, evaluates and saves; callbacks of rank 0 decide on what, and on the end."""
        self._agree_on_control()
        super()._maybe_log_save_evaluate(*positional, **options)
        self._agree_on_control()

    def _agree_on_control(self) -> None:
        vars(self.control).update(from_first(self.session, vars(self.control)))

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """The loss, outputs and labels of rank 0's batch, on every rank."""
        inputs = from_first(self.session, dict(inputs))
        self._needs_outputs = not prediction_loss_only or not self._has_own_loss
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def hyperparameter_search(self, *positional: Any, **options: Any) -> Any:
        """Refused: trials of this kind are for one process.

        Raises:
            PipefitError: always.
        """
        raise PipefitError("PipelineTrainer has no hyperparameter_search; `pipefit study` runs trials over devices")

    def end(self) -> None:
        """Ends the trackers; the ranks leave at the end of the script."""
        self._close()
        self.accelerator.trackers.clear()

    # ---- the passes -------------------------------------------------------------------------------------------------

    @property
    def _has_own_loss(self) -> bool:
        """Whether the loss is the model's own, which it returns with its outputs."""
        changed = type(self).compute_loss is not Trainer.compute_loss
        return not changed and self.compute_loss_func is None and self.label_smoother is None

    def _arguments(self, batch: Mapping[str, Any], num_items: Any) -> dict[str, Any]:
        """The arguments with which the loss function calls the model for a batch."""

        def note(arguments: dict[str, Any]) -> Any:
            raise _Called(arguments)

        try:
            self.compute_loss(_Model(self.model, note), dict(batch), num_items_in_batch=num_items)
        except _Called as call:
            return for_each_sample(call.arguments)
        raise PipefitError(f"{type(self).__name__}.compute_loss never calls its model as model(**inputs)")

    def _loss(self, output: Any, target: Mapping[str, Any]) -> Tensor:
        """The loss of a micro-batch as the Trainer would pass it to its backward; runs where the last stage is."""
        inputs = dict(target)
        items = inputs.pop(ITEMS, None)
        if items is not None:
            items = items[0]
        # The Trainer multiplies the loss in place, which torch refuses for the output of a stage itself.
        given = {name: value.clone() if name == "loss" else value for name, value in output.items()}
        loss: Any = self.compute_loss(_Model(self.model, lambda _: given), inputs, num_items_in_batch=items)
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = self.compute_loss_func is not None
            is_scaled |= self.model_accepts_loss_kwargs and items is not None
        if not is_scaled:
            loss = loss / self.current_gradient_accumulation_steps
        return loss

    def _outputs(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        """The outputs of the model for a batch, in evaluation mode, on every rank."""
        batch = for_each_sample(arguments)
        pipe = self._opened((batch, batch))
        found = forward(pipe, self._split, batch, self._needs_outputs)
        return {name: value.to(self.args.device) for name, value in found.items()}

    # ---- the pipeline -----------------------------------------------------------------------------------------------

    def _opened(self, example: tuple[dict[str, Any], dict[str, Any]]) -> Pipeline:
        """The pipeline over the model, made with the first batch."""
        if self._pipe is not None and self._pipe.model is self._cuts.get(id(self.model)):
            return self._pipe
        self._close()
        steps = self.args.gradient_accumulation_steps
        if self.optimizer is None:
            self.create_optimizer()
        if self._optimizers is None or self._optimizers.model is not self.model:
            self._optimizers = StageOptimizers(self.model, self.optimizer, self.optimizer_cls_and_kwargs)
        self._split = split_of(self, example[1], self._request, self.session)
        self.model.train()
        if id(self.model) not in self._cuts:
            self._cuts = {id(self.model): cut(self.model, self._split.first(example[0]))}
        request = self._request
        x, y = self._split.first(example[0]), self._split.first(example[1])
        pipe = Pipeline(
            self._cuts[id(self.model)],
            loss=self._loss,
            optimizer=self._optimizers.of_stage,
            stages=request.stages,
            schedule=request.schedule,
            microbatches=self._split.parts * steps,
            plan=request.plan,
            example=(x, y) if "auto" in (request.stages, request.schedule) else None,
            parallelism=request.parallelism,
            precision=Precision("bf16" if self.args.bf16 else "fp32"),
            updates=Updates(clip_norm=self.args.max_grad_norm or _ANY_NORM, nonfinite="off", seed=self.args.seed),
        )
        pipe.state.num_updates = self.state.global_step
        pipe.state.ordinal = self.state.global_step * pipe.plan.num_microbatches
        self._optimizers.load(pipe, self._saved_states)
        self._saved_states = None
        self._pipe = pipe
        return pipe

    def _close(self) -> None:
        """Gives the whole model back to every process, on the CPU; states of optimizers are kept."""
        if self._pipe is None:
            return
        assert self._optimizers is not None
        self._saved_states = self._optimizers.own_states(self._pipe)
        self._pipe.close()
        self._pipe = None
        self.model.to("cpu")

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes a folder for `from_pretrained`; with a pipeline each process writes its own stages."""
        if self._pipe is None:
            super()._save(output_dir, state_dict)
            meet(self.session)
            return
        folder = output_dir or self.args.output_dir
        self._pipe.save_pretrained(folder)
        if not self.args.should_save:
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Writes the states of all stages in the Trainer's own form, for any number of processes."""
        assert self._optimizers is not None
        whole = self._optimizers.whole_state(self._pipe, self.session)
        if self.args.should_save:
            torch.save(whole, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)
        meet(self.session)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Reads what `Trainer` or this class has written; stages take their states when the pipeline is made."""
        if checkpoint is None or not os.path.isfile(os.path.join(checkpoint, OPTIMIZER_NAME)):
            return
        self._close()
        whole = torch.load(os.path.join(checkpoint, OPTIMIZER_NAME), map_location="cpu", weights_only=True)
        for group, saved in zip(self.optimizer.param_groups, whole["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        self._saved_states = whole["state"]
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._close()
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._close()
        super()._load_best_model()


def _with_items(batch: Mapping[str, Any], num_items: Any) -> dict[str, Any]:
    return for_each_sample({**batch, ITEMS: num_items})


def _request_of(pipeline: Any) -> Request:
    """The request that a user gives as `pipeline`.

    Raises:
        PlanError: it asks for what the Trainer's loop cannot use.
    """
    if pipeline is None:
        pipeline = Request()
    elif not isinstance(pipeline, Request):
        pipeline = Request(plan=pipeline)
    plan = given_plan(pipeline.plan)
    if plan is not None:
        pipeline = replace(pipeline, plan=plan)
    asked = pipeline.parallelism
    name = pipeline.schedule or (plan.schedule if plan else None)
    is_asynchronous = name not in (None, "auto") and not find(name).is_synchronous
    refused = {
        "tensor parallelism": asked.tensor > 1 or (plan is not None and plan.tensor > 1),
        "a sharded optimizer": asked.shard_optimizer or (plan is not None and plan.sharded_optimizer),
        "spilled stages": pipeline.spill is not None or (plan is not None and plan.spill is not None),
        f"the schedule {name}, whose updates overlap": is_asynchronous,
    }
    found = [what for what, is_asked in refused.items() if is_asked]
    if found:
        raise PlanError(f"pipeline: PipelineTrainer does not take {', '.join(found)}; `pipefit train` does")
    return pipeline
