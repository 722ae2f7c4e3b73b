"""A user's model and training, before there is a plan for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipefit.cutting import FirstLoss, as_layers, refuse_aside, warn_of_own_loss
from pipefit.errors import ModelError
from pipefit.parallel import Mesh
from pipefit.profiling.workload import Workload
from pipefit.runtime.microbatches import Weigh, pair_of, weigh_of
from pipefit.runtime.session import current
from pipefit.spec.options import Precision, Updates
from pipefit.stage.accelerator import allow_tf32
from pipefit.stage.compiler import backend_of
from pipefit.stage.device import process_device
from pipefit.stage.materialise import InitialiseLayer, is_meta
from pipefit.stage.optimizing import OptimizerMaker, check_scheduler
from pipefit.stage.precision import TF32, first_scale, half_of
from pipefit.stage.record_layout import is_absent
from pipefit.stage.split import NamedLayer, joined, named_layers
from pipefit.stage.training import Loss, Training

_log = logging.getLogger("pipefit.pipeline")


@dataclass(frozen=True)
class GivenModel:
    """A user's model as layers, and all settings of its training.

    Attributes:
        work: layers, loss, optimizer, device and example.
        weigh: from a micro-batch's target to its weight in the batch; None: its number of samples.
        is_proved: whether it is known that no layer passes a value to another one past the layers between.
        loss_scale: the first scale of the loss; None: it is not scaled.
        initialise: the model's own function to draw a layer's weights; None: it has none.
        updates: settings of the weight updates.
        model: the user's own.
    """

    work: Workload
    weigh: Weigh | None
    is_proved: bool
    loss_scale: float | None
    initialise: InitialiseLayer | None
    updates: Updates
    model: Any

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        loss: Loss | None,
        optimizer: Any,
        example: Any,
        device: Any,
        precision: Precision | str,
        updates: Updates,
    ) -> GivenModel:
        """Takes the arguments of `Pipeline`; cuts a model that is no sequence of layers.

        Raises:
            PipefitError: the model cannot be cut, has no loss, or another argument is wrong.
        """
        if example is not None:
            example = pair_of(example)
        made = as_layers(model, example)
        weigh = updates.weigh
        is_own = loss is None
        if weigh is None and is_own:
            weigh = made.weigh
        loss = loss or made.loss
        if loss is None:
            raise ModelError(f"{type(model).__name__} has no loss of its own: give loss=function(output, target)")
        if weigh is None:
            weigh = weigh_of(loss)
        layers = list(made.layers)
        _refuse_stand_ins(layers)
        if isinstance(model, torch.nn.Module) and not model.training and current().rank == 0:
            _log.warning("%s is in evaluation mode, and trains so: call train() on it before", type(model).__name__)
        if example is not None and loss is not made.loss and not is_meta(layers):
            refuse_aside(made.whole or [layer.module for layer in layers], loss, example, weigh)
        if is_own and made.whole is not None and current().rank == 0 and not current().is_rehearsal:
            warn_of_own_loss(made.whole, weigh, example and example[0])
        maker = OptimizerMaker(optimizer, layers, updates.no_decay)
        check_scheduler(updates.scheduler)
        if current().is_rehearsal:
            place = torch.device("meta")
        else:
            place = process_device(device)
        precision = Precision.of(precision)
        half = half_of(precision.dtype)
        if precision.dtype == TF32:
            allow_tf32(place)
        work = Workload(
            layers,
            loss,
            maker,
            place,
            example,
            clips=bool(updates.clip_norm),
            half=half,
            model=type(model).__name__,
            compiler=backend_of(precision.compile, place),
        )
        loss_scale = first_scale(half, precision.loss_scale)
        initialise = getattr(model, "initialise_layer", None)
        return cls(work, weigh, made.is_proved, loss_scale, initialise, updates, model)

    def check_layers(self) -> None:
        """Checks that gradients are on, and that a sequence still has the layers of which the pipeline was made.

        Raises:
            ModelError: they are off, or it has others, or hooks of its own.
        """
        if not torch.is_grad_enabled():
            raise ModelError(
                "training needs gradients, which are switched off here, as by torch.no_grad() or inference_mode(): "
                "call it outside of such a context"
            )
        layers = self.work.layers
        if not isinstance(self.model, torch.nn.Module) or hasattr(layers[0].module, "through"):
            return  # the layers are in a list, or the model was cut and its own forward runs
        if [layer.module for layer in named_layers(self.model)] != [layer.module for layer in layers]:
            raise ModelError(
                "the model has other layers than when the Pipeline was made, which would not be used: make another one "
                "after a layer is added, removed or replaced"
            )

    def training(self, mesh: Mesh) -> Training:
        """The settings that each rank of a mesh trains with."""
        work = self.work
        updates = self.updates
        loss = mesh.loss(work.loss)
        if work.example is None and self.weigh is None and mesh.region is None:
            loss = FirstLoss(loss, joined(work.layers))
        return Training(
            loss,
            work.optimizer,
            updates.scheduler,
            updates.clip_norm or None,
            updates.seed,
            work.half,
            self.loss_scale,
            work.compiler,
            updates.nonfinite,
        )


def _refuse_stand_ins(layers: Sequence[NamedLayer]) -> None:
    """Refuses weights whose numbers another Pipeline has."""
    for layer in layers:
        for name, parameter in layer.module.named_parameters():
            if is_absent(parameter):
                path = ".".join(filter(None, (layer.name, name)))
                raise ModelError(
                    f"{path} has no memory: its numbers are with another Pipeline, which spills or shards it; take "
                    "that one's state_dict() before its close(), and load it into a new model"
                )
