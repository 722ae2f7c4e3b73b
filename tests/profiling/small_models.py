"""A small model and quick measurements, for the tests of profiles."""

import torch
from torch import nn

from pipefit.spec.profile import Profile
from pipefit.spec.topology import Device

QUICK = {"repeats": 2, "warmup": 1}


DEVICE = Device(flops=1e12, memory_bandwidth_bytes_per_s=1e11, efficiency=0.5)


FIGURES = ("forward_s", "backward_input_s", "backward_weight_s", "output_bytes", "saved_bytes", "weight_bytes")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def by_name(profile: Profile) -> dict:
    return {layer.name: layer for layer in profile.layers}
