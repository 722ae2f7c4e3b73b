"""Small models for the planner's tests."""

import random

import msgspec

from pipefit.spec import Layer, Profile


def model(
    num_layers: int = 8, seed: int = 0, size: int = 2, weights: float = 1e6, cut: float = 1e4, frozen: int = 0
) -> Profile:
    """A chain whose layers differ by up to a factor of four; of the first `frozen` none trains."""
    rng = random.Random(seed)
    layers = []
    for index in range(num_layers):
        t = rng.uniform(0.5e-3, 2e-3)
        layers.append(Layer(f"layer{index}", t, t, 0.8 * t, cut, 4 * cut, weights * rng.uniform(0.5, 2)))
        if index < frozen:
            none = dict.fromkeys(("backward_input_s", "backward_weight_s", "grad_bytes", "saved_bytes"), 0.0)
            layers[-1] = msgspec.structs.replace(layers[-1], **none, trained_bytes=0.0)
    return Profile("chain", size, tuple(layers), loss_s=1e-4)
