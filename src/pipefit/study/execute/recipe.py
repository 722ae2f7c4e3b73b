"""From a trial to what trains: its layers, loss, optimizer and data. Called only once the trial is admitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.errors import DataError, PipefitError
from pipefit.pipeline.layer_sizes import state_per_weight
from pipefit.run.bundle import bundle_of
from pipefit.run.optimizers import make_optimizer, warmed_cosine
from pipefit.run.sources import source_of
from pipefit.stage.materialise import InitialiseLayer, is_meta
from pipefit.stage.split import NamedLayer, named_layers
from pipefit.stage.training import Training
from pipefit.study.trial import Trial

__all__ = ["Recipe", "check_batch", "on_meta", "recipe_of"]

Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Recipe:
    """A trial, built.

    Attributes:
        layers: of the model.
        training: loss, optimizer, schedule, clipping and seed.
        batch_at: the batch of a step, by its number from 0.
        held_out: gives the batches to judge by.
        own: the model's way to draw the weights of a layer, if it has one.
    """

    layers: list[NamedLayer]
    training: Training
    batch_at: Callable[[int], Batch]
    held_out: Callable[[], Sequence[Batch]] | None = None
    own: InitialiseLayer | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the model came without weights: each layer draws its own once there is room for it."""
        return is_meta(self.layers)

    @cached_property
    def state_per_weight(self) -> float:
        """Bytes that the optimizer keeps for each byte of weights."""
        return state_per_weight(self.layers, self.training.optimizer)


def recipe_of(trial: Trial, empty: bool = False) -> Recipe:
    """Builds the model with the trial's seed, on the default device of the moment, and readies its data.

    Args:
        trial: what it is.
        empty: a model by name whose layers can draw their own weights comes without them.

    Raises:
        PipefitError: something in the trial does not fit; what a factory raises passes as it is.
    """
    torch.manual_seed(trial.seed)
    if isinstance(trial.model, str):
        bundle = bundle_of(trial.model, dict(trial.options), trial.seed, empty)
        model: Any = bundle.layers
        loss = trial.loss or bundle.loss
        data, held_out = (trial.data, trial.held_out) if callable(trial.data) else _named_data(trial, bundle)
    else:
        model, loss, data, held_out = trial.model(), trial.loss, trial.data, trial.held_out
        if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList):
            model = [model]
    assert callable(loss) and callable(data)
    training = Training(loss, _optimizer(trial), _scheduler(trial), trial.clip or None, trial.seed)
    own = getattr(model, "initialise_layer", None)
    return Recipe(named_layers(model), training, data, held_out, own)


def _optimizer(trial: Trial) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return make_optimizer(trial.optimizer, trial.lr) if isinstance(trial.optimizer, str) else trial.optimizer


def _scheduler(trial: Trial) -> Callable[[torch.optim.Optimizer], Any] | None:
    return warmed_cosine(trial.warmup, trial.steps) if trial.warmup and not trial.scheduler else trial.scheduler


def _named_data(trial: Trial, bundle: Any) -> tuple[Callable[[int], Batch], Callable[[], Sequence[Batch]]]:
    """Batches by step's number, and those to judge by: those that `pipefit train` has with the same seed."""
    assert not callable(trial.data)
    wanted = trial.data or ((bundle.data,) if bundle.data else ("synthetic",))
    if wanted == ("synthetic",):
        if trial.evaluate:
            raise DataError("synthetic data has no held-out part: leave out evaluate, or take other data")
        return lambda step: bundle.example(trial.batch, trial.seed + step % 4), tuple
    with torch.device("cpu"):
        source = source_of(bundle, wanted, trial.batch, trial.seed)
    if not hasattr(source.batches, "batch_at"):
        raise DataError(f"{source.name}: a study needs data whose batches can be asked for by number")
    at: Callable[[int], Batch] = source.batches.batch_at
    return at, lambda: source.held_out


def check_batch(batch: Any, step: int) -> Batch:
    """A pair of tensors or trees of them.

    Raises:
        DataError: it is none.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise DataError(f"data({step}) must give (input, target), got {type(batch).__name__}")
    return batch[0], batch[1]


def on_meta(trial: Trial) -> Recipe | None:
    """The recipe with a model that takes no memory; None where that cannot be done faithfully."""
    try:
        with torch.device("meta"):
            recipe = recipe_of(trial)
    except (PipefitError, RuntimeError, NotImplementedError, ValueError, TypeError):
        return None
    for layer in recipe.layers:
        for module in layer.module.modules():
            own = vars(module).values()
            if any(isinstance(value, Tensor) and value.is_meta for value in own):
                return None  # a tensor that is neither weight nor buffer would stay without values
    return recipe
