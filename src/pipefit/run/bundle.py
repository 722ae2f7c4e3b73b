"""The model of a run: with its first weights, or without memory where each layer will draw its own."""

from __future__ import annotations

from typing import Any

import torch

from pipefit.models import ModelBundle, build
from pipefit.stage.materialise import can_be_drawn, initialise
from pipefit.stage.split import named_layers


def bundle_of(model: str, options: dict[str, Any], seed: int, capped: bool) -> ModelBundle:
    """A model for a run, whose weights are the same with and without a cap.

    One that says how a layer draws its weights draws them so, layer by layer; under a cap it comes without weights, for
    a layer draws them once it has a slot. Any other is built in memory, for only its factory knows how.
    """
    if capped:
        with torch.device("meta"):
            bundle = build(model, **options)
        if _draws(bundle):
            return bundle
    bundle = build(model, **options)
    if _draws(bundle):
        for layer in named_layers(bundle.layers):
            initialise(layer, seed, bundle.layers.initialise_layer)
    return bundle


def _draws(bundle: ModelBundle) -> bool:
    return hasattr(bundle.layers, "initialise_layer") and can_be_drawn(named_layers(bundle.layers))
