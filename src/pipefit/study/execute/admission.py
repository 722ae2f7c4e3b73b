"""Admitting a trial: it is built once, cut for the device, and its state put on the tier."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.errors import InfeasibleError, ModelError, PipefitError
from pipefit.partition.capacity import hydra, shard_bytes
from pipefit.profiling import analytic_profile, profile_sizes
from pipefit.runtime.microbatches import largest_part
from pipefit.spec import Device, Partition, Profile
from pipefit.stage.materialise import can_be_drawn, materialise
from pipefit.study.execute.recipe import Recipe, check_batch, recipe_of
from pipefit.study.execute.records import record_bytes
from pipefit.study.execute.shards import Structure
from pipefit.study.trial import Trial

__all__ = ["Built", "build_trial", "cut_evenly"]


class Built(NamedTuple):
    """A trial with its first weights.

    Attributes:
        recipe: what trains.
        structure: the model in shards, with its weights in it, or without any.
        counts: layers of each shard.
        tier_bytes: what its state takes in the end, twice each record, with the optimizer's states.
        device_bytes: what its largest shard needs on the device; 0: not measured.
    """

    recipe: Recipe
    structure: Structure
    counts: list[int]
    tier_bytes: int
    device_bytes: float

    def first(self, shard: int) -> dict[str, Tensor]:
        """The first weights and buffers of a shard; a model that came without them draws those of its layers now."""
        materialise(self.structure.layers[shard], self.recipe.training.seed, torch.device("cpu"), self.recipe.own)
        return self.structure.tensors(shard)


def build_trial(trial: Trial, capacity_bytes: float) -> Built:
    """Builds a trial for a device.

    Where the device is limited, a model whose layers can draw their own weights is built without any: it may be larger
    than the memory of the host. What a layer draws is the same either way.

    Args:
        trial: what it is.
        capacity_bytes: of the device; 0: no limit, then the model is cut only where the trial says so.

    Raises:
        InfeasibleError: it needs more memory than the device has, however it is cut.
        PipefitError: something in it does not fit.
    """
    recipe = recipe_of(trial, empty=capacity_bytes > 0)
    if recipe.is_empty and not can_be_drawn(recipe.layers):
        raise ModelError(
            "a model on the meta device must be one whose layers draw their own weights: no two share one, and every "
            "module with weights has reset_parameters()"
        )
    batch = check_batch(recipe.batch_at(0), 0)
    counts, device_bytes = _known_cut(trial, recipe, batch, capacity_bytes)
    structure = Structure(recipe.layers, Partition.from_counts(counts, len(recipe.layers)))
    weights = sum(record_bytes(structure.tensors(shard)) for shard in range(structure.num_shards))
    leaves = [leaf for leaf in pytree.tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
    boundaries = 4 * structure.num_shards * sum(leaf.nbytes for leaf in leaves)
    needed = int(2 * (1 + recipe.state_per_weight) * weights + boundaries)
    return Built(recipe, structure, counts, needed, device_bytes)


def _known_cut(trial: Trial, recipe: Recipe, batch: tuple[Any, Any], capacity_bytes: float) -> tuple[list[int], float]:
    """As `_cut`; trials that differ in numbers of the training alone are measured once per process."""
    if not isinstance(trial.model, str) or not capacity_bytes:
        return _cut(trial, recipe, batch, capacity_bytes)
    shapes = [(leaf.shape, leaf.dtype) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    options = sorted((key, repr(value)) for key, value in trial.options.items())
    training = (trial.microbatches, trial.shards, recipe.state_per_weight, capacity_bytes)
    key = repr((trial.model, options, shapes, training))
    if key not in _CUTS:
        _CUTS[key] = _cut(trial, recipe, batch, capacity_bytes)
    return _CUTS[key]


_ANY_DEVICE = Device(flops=1e12)
"""Only bytes are asked for."""
_CUTS: dict[str, tuple[list[int], float]] = {}


def cut_evenly(num_layers: int, num_shards: int) -> list[int]:
    """Layers of each shard, as nearly alike as can be."""
    size, more = divmod(num_layers, num_shards)
    return [size + (shard < more) for shard in range(num_shards)]


def _cut(trial: Trial, recipe: Recipe, batch: tuple[Any, Any], capacity_bytes: float) -> tuple[list[int], float]:
    num_layers, wanted = len(recipe.layers), trial.shards
    if wanted > num_layers:
        raise PipefitError(f"{wanted} shards need as many layers, the model has {num_layers}")
    if not capacity_bytes:
        return cut_evenly(num_layers, max(wanted, 1)), 0.0
    profile = _profile(trial, recipe, batch)
    if wanted:
        partition = Partition.from_counts(cut_evenly(num_layers, wanted), num_layers)
    else:
        partition = hydra(profile, capacity_bytes, recipe.state_per_weight)
    sizes = [
        shard_bytes(profile, stage.layers[0], stage.layers[-1] + 1, recipe.state_per_weight)
        for stage in partition.stages
    ]
    if max(sizes) > capacity_bytes:
        raise InfeasibleError(
            f"shard {sizes.index(max(sizes))} of {wanted} needs {int(max(sizes))} bytes on the device, there are "
            f"{int(capacity_bytes)}; ask for more shards, or leave their number to pipefit (shards = 0)"
        )
    return [len(stage.layers) for stage in partition.stages], max(sizes)


def _profile(trial: Trial, recipe: Recipe, batch: tuple[Any, Any]) -> Profile:
    """What layers need; boundary tensors count for every micro-batch of a step: a shard sees them all at once."""
    x, y = batch
    size = largest_part(x, trial.microbatches)
    layers = [(layer.prefix, layer.module) for layer in recipe.layers]
    if recipe.is_empty:
        model = nn.Sequential(OrderedDict(layers))
        profile = analytic_profile(model, x, _ANY_DEVICE, recipe.training.loss, y, microbatch_size=size)
    else:
        profile = profile_sizes(
            layers,
            x,
            recipe.training.loss,
            y,
            microbatch_sizes=[size],
            repeats=3,
            limit_s=2.0,
            threads=None,
        )
    told = tuple(
        msgspec.structs.replace(layer, output_bytes=trial.microbatches * layer.output_bytes) for layer in profile.layers
    )
    return msgspec.structs.replace(profile, model=trial.name or "the model", layers=told)
