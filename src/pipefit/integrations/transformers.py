"""The Trainer of transformers over a pipeline: its own loop, callbacks and schedules, with the passes of `Pipeline`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils.generic import ModelOutput

from pipefit.cutting import Cut, cut
from pipefit.cutting.own import is_transformers, without_adapters
from pipefit.errors import PipefitError, PlanError
from pipefit.integrations.one_replica import as_one_replica, from_rank
from pipefit.integrations.split_losses import ITEMS, Arguments, Batch, for_each_sample, split_of
from pipefit.integrations.stage_optimizers import StageOptimizers
from pipefit.integrations.trainer_arguments import check_arguments
from pipefit.integrations.trainer_passes import forward, train
from pipefit.pipeline.pipeline import Pipeline
from pipefit.pipeline.request import given_plan
from pipefit.runtime.collectives import meet
from pipefit.runtime.session import Session, current
from pipefit.schedules import find
from pipefit.spec import Plan
from pipefit.spec.options import AUTO, Request, Updates
from pipefit.stage.accelerator import is_accelerator

# Before `TrainingArguments` makes a process group of its own. A worker of a loader is no rank, and needs none.
if "RANK" in os.environ:
    with contextlib.suppress(PipefitError):
        current()

_ANY_NORM = 1e30
"""A limit that no gradient reaches: the Trainer wants to know the norm also where it does not clip."""


class _CalledError(Exception):
    """Ends a loss function when it calls its model, and has the arguments of the call."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments


class _Model(nn.Module):
    """A stand-in that the Trainer calls in place of the model; a function gives its outputs.

    Args:
        model: gives the stand-in its parameters, the name of its class, and all else that it is asked for.
        function: from the arguments of a call, by name, to the outputs.
    """

    def __init__(self, model: Any, function: Any) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, so that it is no part of this module
        self._function = function

    def _get_name(self) -> str:
        return type(without_adapters(self._model[0])).__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model[0], name)

    def parameters(self, recurse: bool = True) -> Any:
        return self._model[0].parameters(recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the pipeline removes gradients itself."""

    def forward(self, **arguments: Any) -> Any:
        return self._function(arguments)


class _Loss:
    """The loss of a trainer as an object without attributes that ranks compare: some of a trainer's differ in order."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(self, output: Any, target: Any) -> Any:
        return self._trainer._loss(output, target)


class _Agreement(TrainerCallback):
    """The last of the callbacks: those of rank 0 decide also between the batches of an update."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        _agree_on(control, self._session)


def _agree_on(control: Any, session: Session) -> None:
    vars(control).update(from_rank(session, vars(control)))


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` whose model runs over a pipeline of processes.

        trainer = PipelineTrainer(model=model, args=args, train_dataset=…, data_collator=…)
        trainer.train()

    Started by `torchrun --nproc-per-node 2 script.py` or `pipefit run -n 2 script.py`. All processes together are one
    replica: rank 0 reads the data, and batches have the size that one process would use. Losses, metrics and
    checkpoints are those of `Trainer` in one process.

    Args:
        pipeline: stages, schedule, micro-batches and the like as a `Request`, or a plan or its file; None: one
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
        if isinstance(model, Cut):
            raise PipefitError("model: got a Cut, as of pf.pretrained; give a module, with its weights in memory")
        self.session = current()
        as_one_replica(args, self.session)
        self._request = _request_of(pipeline)
        self._pipe: Pipeline | None = None
        self._piped: Any = None
        self._trains = False
        self._optimizers: Any = None
        self._batches: list[Any] = []
        self._norm: Tensor | None = None
        self._only: str | None = None
        super().__init__(model, args, *positional, **options)
        # Batches stay on the CPU: rank 0 sends them to the other ranks, and each stage moves what it needs.
        self.accelerator.device_placement = False

    model: Any
    optimizer: Any

    # ---- what the Trainer's own loop calls --------------------------------------------------------------------------

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Moves a model that the user has put on a GPU to the host, from where each process takes its own stages."""
        if any(is_accelerator(parameter.device) for parameter in model.parameters()):
            model.to("cpu")

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return _Model(model, self._outputs)

    def train(self, *positional: Any, **options: Any) -> Any:
        """Trains as `Trainer.train` does; afterwards every process has the whole model, on the CPU."""
        self._close()
        self._batches = []
        self.remove_callback(_Agreement)
        self.add_callback(_Agreement(self.session))
        found = super().train(*positional, **options)
        self._close()
        return found

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The batches of an update, which rank 0 reads, and the number of their labels."""
        found = None
        if self.session.rank == 0:
            found, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = from_rank(self.session, found)
        return batches, self._get_num_items_in_batch(batches, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keeps a batch; with the last one of an update runs the update, and returns its whole loss."""
        target = for_each_sample({**inputs, ITEMS: num_items_in_batch})
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_accepted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = is_accepted or self.compute_loss_func is not None
        share = 1.0
        if not is_scaled:
            share /= self.current_gradient_accumulation_steps
        self._batches.append((self._arguments(inputs, num_items_in_batch), target, share))
        loss = 0.0
        if self.accelerator.sync_gradients:
            x, y, _ = self._batches[0]
            pipe = self._opened(x, y, trains=True)
            self._optimizers.give_settings(pipe)
            loss, self._norm = train(pipe, self._split, self._batches)
            self._batches = []
            self.control.should_training_stop |= self.session.stop.agreed
        return torch.tensor(loss, device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm

    def _maybe_log_save_evaluate(self, *positional: Any, **options: Any) -> None:
        """Logs, evaluates and saves; callbacks of rank 0 decide on what, and on the end."""
        _agree_on(self.control, self.session)
        super()._maybe_log_save_evaluate(*positional, **options)
        _agree_on(self.control, self.session)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The loss, outputs and labels of rank 0's batch, on every rank."""
        inputs = from_rank(self.session, dict(inputs))
        is_own = type(self).compute_loss is Trainer.compute_loss
        self._only = None
        if prediction_loss_only and is_own and not (self.compute_loss_func or self.label_smoother):
            self._only = "loss"
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

    def _arguments(self, batch: Batch, num_items: Any) -> Arguments:
        """The arguments with which the loss function calls the model for a batch."""

        def note(arguments: Arguments) -> Any:
            raise _CalledError(arguments)

        try:
            self.compute_loss(_Model(self.model, note), dict(batch), num_items_in_batch=num_items)
        except _CalledError as call:
            return for_each_sample(call.arguments)
        raise PipefitError(f"{type(self).__name__}.compute_loss never calls its model as model(**inputs)")

    def _loss(self, output: Batch, target: Batch) -> Any:
        """The loss of a micro-batch as the Trainer would pass it to its backward; runs where the last stage is."""
        inputs = dict(target)
        items = inputs.pop(ITEMS, None)
        if items is not None:
            items = items[0]
        # The Trainer multiplies the loss in place, which torch refuses for the output of a stage itself.
        given = self._as_given(pytree.tree_map_only(Tensor, lambda one: one if one.dim() else one.clone(), output))
        return self.compute_loss(_Model(self.model, lambda _: given), inputs, num_items_in_batch=items)

    def _outputs(self, arguments: Batch) -> Any:
        """The outputs of the model for a batch, in evaluation mode, on every rank."""
        batch = for_each_sample(arguments)
        has_loss = self.can_return_loss or not batch.keys().isdisjoint(["labels", *self.label_names])
        pipe = self._opened(batch, batch, trains=False)
        found = forward(pipe, self._split, batch, has_loss, self._only)
        return self._as_given(pytree.tree_map_only(Tensor, lambda one: one.to(self.args.device), found))

    def _as_given(self, output: Any) -> Any:
        """Outputs as the model gives them: those of transformers have names, numbers and attributes."""
        if is_transformers(self.model):
            return ModelOutput(output)
        return output

    # ---- the pipeline -----------------------------------------------------------------------------------------------

    def _opened(self, x: Batch, y: Batch, trains: bool) -> Pipeline:
        """The pipeline over the model; made with the first batch, the inputs of the model and of the loss.

        One that was made for an evaluation has no optimizer. The training makes another one.
        """
        if self._pipe is not None and self._piped is self.model and (self._trains or not trains):
            return self._pipe
        self._close()
        optimizer: Any = partial(torch.optim.SGD, lr=0.0)
        if trains:
            whole = getattr(self.optimizer, "optimizer", self.optimizer)
            if self._optimizers is None or self._optimizers.whole is not whole:
                self._optimizers = StageOptimizers(self.model, whole, self.optimizer_cls_and_kwargs)
            optimizer = self._optimizers.of_stage
        x, y = pytree.tree_map_only(Tensor, Tensor.cpu, (x, y))  # where the model is
        self._split = split_of(self, y, self._request, trains)
        first = self._split.feed(x, y, 0, "train")[0]
        self.model.train()
        request = self._request
        parallelism = request.parallelism
        if parallelism.device is None:
            parallelism = replace(parallelism, device=self.args.device)
        example = None
        if AUTO in (request.stages, request.schedule):
            example = first.input, first.target
        self._pipe = Pipeline(
            cut(self.model, first.input),
            loss=_Loss(self),
            optimizer=optimizer,
            stages=request.stages,
            schedule=request.schedule,
            microbatches=self._split.size,
            plan=request.plan,
            example=example,
            parallelism=parallelism,
            precision="bf16" if self.args.bf16 else "fp32",
            updates=Updates(clip_norm=self.args.max_grad_norm or _ANY_NORM, nonfinite="off", seed=self.args.seed),
        )
        self._pipe.state.num_updates = self.state.global_step
        self._pipe.state.ordinal = self.state.global_step * self._pipe.plan.num_microbatches
        self._piped = self.model
        self._trains = trains
        if trains:
            self._optimizers.give_states(self._pipe)
        return self._pipe

    def _close(self) -> None:
        """Gives the whole model back to every process, on the CPU; each keeps the states of its stages."""
        if self._pipe is not None:
            if self._trains:
                self._optimizers.take_states(self._pipe, from_every_rank=False)
            self._trains = False
            self._pipe.close()
            self._pipe = None
            self._piped.to("cpu")

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes a folder for `from_pretrained`; with a pipeline each process writes its own stages."""
        folder = Path(output_dir or self.args.output_dir or "")
        if self._pipe is None:
            super()._save(str(folder), state_dict)
            meet(self.session)
            return
        if not is_transformers(self.model):
            super()._save(str(folder), self._pipe.state_dict())
            meet(self.session)
            return
        self._pipe.save_pretrained(folder)
        if self.args.should_save:
            processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._trains:
            self._optimizers.take_states(self._pipe, from_every_rank=True)
        super()._save_optimizer_and_scheduler(output_dir)
        if self._trains:
            self._optimizers.whole.state.clear()

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)
        meet(self.session)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._close()
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._close()
        super()._load_best_model()


_USUAL: Mapping[str, Any] = {"tensor": 1, "shard": "none", "spill": None}
"""Settings of requests and plans that must stay as they are: the whole model has to come back at the end."""


def _request_of(pipeline: Any) -> Request:
    """The request that a user gives as `pipeline`.

    Raises:
        PlanError: it asks for what the Trainer's loop cannot use.
    """
    if not isinstance(pipeline, Request):
        pipeline = Request(plan=pipeline)
    request: Request = replace(pipeline, plan=given_plan(pipeline.plan))
    found = []
    for part in (request, request.parallelism, request.plan):
        found += [name for name, usual in _USUAL.items() if getattr(part, name, usual) != usual]
    name = (request.plan or request).schedule
    if name not in (None, AUTO) and not find(name).is_synchronous:
        found.append(f"the schedule {name}, whose updates overlap")
    if found:
        raise PlanError(f"pipeline: PipelineTrainer does not take {', '.join(found)}; `pipefit train` does")
    return request
