"""Builds a trial when it is admitted: its model, loss, optimizer and data, and the shards of the model for a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.errors import DataError, InfeasibleError, ModelError, PipefitError
from pipefit.models.examples import Batch
from pipefit.partition.capacity import hydra, shard_bytes
from pipefit.pipeline.layer_sizes import state_per_weight
from pipefit.profiling import analytic_profile, profile_sizes
from pipefit.run.optimizers import make_optimizer, rates
from pipefit.run.sources import bundle_of, source_of
from pipefit.runtime.microbatches import Weigh, largest_part, pair_of, weigh_of
from pipefit.spec import Device, Partition, Profile
from pipefit.stage.materialise import InitialiseLayer, can_be_drawn, is_meta
from pipefit.stage.record_layout import Layout
from pipefit.stage.split import NamedLayer, is_sequence, joined, named_layers
from pipefit.stage.training import Training
from pipefit.study.trial import Figures, Trial
from pipefit.study.turns import step_program, turns_of


@dataclass(frozen=True)
class Recipe:
    """A trial, built.

    Attributes:
        layers: of the model.
        training: loss, optimizer, schedule, clipping and seed.
        batch_at: the batch of a step, by its number from 0.
        held_out: gives the held-out batches.
        weigh: from a micro-batch's target to its weight in the batch; None: its number of samples.
        initialise: the model's function that draws the weights of a layer, if it has one.
    """

    layers: list[NamedLayer]
    training: Training
    batch_at: Callable[[int], Batch]
    held_out: Callable[[], Sequence[Batch]] | None = None
    weigh: Weigh | None = None
    initialise: InitialiseLayer | None = None

    @property
    def is_empty(self) -> bool:
        """Returns whether the model has no weights yet: each layer draws its own when there is memory for it."""
        return is_meta(self.layers)

    @cached_property
    def state_per_weight(self) -> float:
        """Bytes that the optimizer keeps for each byte of weights."""
        return state_per_weight(self.layers, self.training.optimizer)


def recipe_of(trial: Trial, empty: bool = False) -> Recipe:
    """Builds the model with the trial's seed, on the current default device, and prepares its data.

    Args:
        trial: its definition.
        empty: build a model by name without weights, if its layers can draw them.

    Raises:
        PipefitError: something in the trial does not fit; exceptions of a factory pass unchanged.
    """
    torch.manual_seed(trial.seed)
    if isinstance(trial.model, str):
        bundle = bundle_of(trial.model, dict(trial.options), trial.seed, empty)
        model: Any = bundle.layers
        loss: Any = trial.loss or bundle.loss
        data: Any
        if callable(trial.data):
            data = trial.data
            held_out = trial.held_out
        else:
            data, held_out = _named_data(trial, bundle)
    else:
        model = trial.model()
        loss = trial.loss
        data = trial.data
        held_out = trial.held_out
        if isinstance(model, nn.Module) and not is_sequence(model):
            model = [model]
    assert callable(loss) and callable(data)
    optimizer = trial.optimizer
    scheduler = trial.scheduler
    if isinstance(optimizer, str):
        optimizer = make_optimizer(optimizer, trial.lr)
    if trial.warmup and not scheduler:
        scheduler = rates("cosine", trial.warmup, trial.steps)
    training = Training(loss, optimizer, scheduler, trial.clip or None, trial.seed)
    weigh = weigh_of(loss)
    if trial.loss is None:
        weigh = getattr(model, "weigh", None) or weigh
    return Recipe(named_layers(model), training, data, held_out, weigh, getattr(model, "initialise_layer", None))


def _named_data(trial: Trial, bundle: Any) -> tuple[Callable[[int], Batch], Callable[[], Sequence[Batch]]]:
    """Batches by number of the step, and held-out batches: those of `pipefit train` with the same seed."""
    assert not callable(trial.data)
    wanted = trial.data or (bundle.data or "synthetic",)
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


def on_meta(trial: Trial) -> Recipe | None:
    """The recipe with a model that takes no memory; None where its weights could not be reproduced."""
    try:
        with torch.device("meta"):
            recipe = recipe_of(trial)
    except (PipefitError, RuntimeError, NotImplementedError, ValueError, TypeError):
        return None
    for module in joined(recipe.layers).modules():
        if any(isinstance(value, Tensor) and value.is_meta for value in vars(module).values()):
            return None  # a tensor that is neither weight nor buffer would stay without values
    return recipe


def build_trial(trial: Trial, capacity_bytes: float) -> tuple[Recipe, list[int], Figures]:
    """Builds a trial for a device: with its first weights, or with layers that draw them when there is memory.

    Where the device is limited, a model whose layers can draw their own weights is built without any: it may be larger
    than the memory of the host. The drawn weights are the same in both cases.

    Args:
        trial: its definition.
        capacity_bytes: of the device; 0: no limit, then the model is split only where the trial specifies it.

    Returns:
        The trial, the layers of each shard, and the figures.

    Raises:
        InfeasibleError: it needs more memory than the device has, for every split.
        PipefitError: something in it does not fit.
    """
    recipe = recipe_of(trial, empty=capacity_bytes > 0)
    if recipe.is_empty and not can_be_drawn(recipe.layers, recipe.initialise):
        raise ModelError(
            "a model on the meta device must be one whose layers draw their own weights: no two share one, and every "
            "module with weights has reset_parameters()"
        )
    batch = pair_of(recipe.batch_at(0))
    partition, device_bytes = _split(trial, recipe, batch, capacity_bytes)
    weights = sum(_record_bytes([recipe.layers[n] for n in shard.layers]) for shard in partition.stages)
    leaves = [leaf for leaf in pytree.tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
    counts = [len(shard.layers) for shard in partition.stages]
    boundaries = 4 * len(counts) * sum(leaf.nbytes for leaf in leaves)
    needed = int(2 * (1 + recipe.state_per_weight) * weights + boundaries)
    parameters = sum(parameter.numel() for parameter in joined(recipe.layers).parameters())
    num_turns = len(turns_of(step_program(len(counts), trial.microbatches, trial.clip > 0)))
    return recipe, counts, Figures(num_turns, len(counts), parameters, needed, device_bytes)


def _record_bytes(layers: Sequence[NamedLayer]) -> int:
    """Bytes of a record with the weights and buffers of some layers."""
    whole = joined(layers)
    return Layout((*whole.parameters(), *whole.buffers())).num_bytes


def _split(trial: Trial, recipe: Recipe, batch: Batch, capacity_bytes: float) -> tuple[Partition, float]:
    """The shards of a model, and the bytes that the largest needs on the device (0: not measured)."""
    num_layers = len(recipe.layers)
    wanted = trial.shards
    state = recipe.state_per_weight
    if wanted > num_layers:
        raise PipefitError(f"{wanted} shards need as many layers, the model has {num_layers}")
    partition = Partition.even(num_layers, max(wanted, 1))
    if not capacity_bytes:
        return partition, 0.0
    profile = _profile(trial, recipe, batch)
    if not wanted:
        partition = hydra(profile, capacity_bytes, state)
    sizes = [shard_bytes(profile, shard.layers[0], shard.layers[-1] + 1, state) for shard in partition.stages]
    if max(sizes) > capacity_bytes:
        raise InfeasibleError(
            f"shard {sizes.index(max(sizes))} of {wanted} needs {int(max(sizes))} bytes on the device, there are "
            f"{int(capacity_bytes)}; give more shards, or leave their number to pipefit (shards = 0)"
        )
    return partition, max(sizes)


def _profile(trial: Trial, recipe: Recipe, batch: Batch) -> Profile:
    """Bytes of the layers; boundary tensors count for each micro-batch of a step: a shard has all of them at once."""
    x, y = batch
    size = largest_part(x, trial.microbatches)
    if recipe.is_empty:
        profile = analytic_profile(recipe.layers, x, Device(flops=1e12), recipe.training.loss, y, microbatch_size=size)
    else:
        measuring = partial(profile_sizes, microbatch_sizes=[size], repeats=1, limit_s=2.0, threads=None)
        profile = measuring(recipe.layers, x, recipe.training.loss, y)
    layers = []
    for layer in profile.layers:
        layers.append(replace(layer, output_bytes=trial.microbatches * layer.output_bytes))
    return replace(profile, model=trial.name or "the model", layers=tuple(layers))
