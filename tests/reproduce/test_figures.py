"""Figures of the lectures that are computed by arithmetic."""

import pytest
from torch import nn

from pipefit.reproduce.amoebanet import amoebanet_activations_gb, amoebanet_parameters
from pipefit.reproduce.entry import Bench
from pipefit.reproduce.hydra import study_energy, study_time
from pipefit.reproduce.lectures import find_entry
from pipefit.reproduce.outcome import run_entry


@pytest.mark.parametrize(
    ("layers", "filters", "millions"),
    [(18, 208, 81.5), (18, 416, 319.0), (18, 544, 542.7), (36, 544, 1055.8), (72, 512, 1844.9)],
)
def test_amoebanet_has_the_parameters_of_the_table(layers, filters, millions):
    """Table 1 of GPipe has 82, 318, 542, 1,050 and 1,800 million."""
    assert amoebanet_parameters(Bench(), layers, filters) == pytest.approx(millions, abs=0.1)


def count(*layers: nn.Module) -> int:
    return sum(weight.numel() for layer in layers for weight in layer.parameters())


def relu_conv_norm(inputs: int, outputs: int, kernel: int | tuple[int, int] = 1) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, bias=False), nn.BatchNorm2d(outputs))


def bottleneck(channels: int, *kernels: int | tuple[int, int]) -> nn.Module:
    quarter = channels // 4
    inner = [relu_conv_norm(quarter, quarter, kernel) for kernel in kernels]
    return nn.Sequential(relu_conv_norm(channels, quarter), *inner, relu_conv_norm(quarter, channels))


def test_another_normal_cell_adds_what_its_modules_have():
    """Three more layers are a normal cell in each of the three parts; each part has twice the channels."""
    more = 0
    for channels in (4 * 64, 8 * 64, 16 * 64):
        before = 4 * channels  # an inner cell joins four states
        wide = [bottleneck(channels, (1, 7), (7, 1)) for _ in range(2)]
        points = [relu_conv_norm(channels, channels) for _ in range(3)]
        more += count(relu_conv_norm(before, channels), relu_conv_norm(before, channels), *wide, *points)
    found = amoebanet_parameters(Bench(), 12, 256) - amoebanet_parameters(Bench(), 9, 256)
    assert found == pytest.approx(more / 1e6, rel=1e-9)


def test_gpipe_keeps_less_of_amoebanet_with_every_further_microbatch():
    kept = [amoebanet_activations_gb(Bench(), 18, 544, 2, m) for m in (1, 4, 16)]
    assert kept == sorted(kept, reverse=True)
    whole = amoebanet_activations_gb(Bench(), 18, 544)
    images = 4 * 3 * 224**2 * 128 / 1e9
    assert amoebanet_activations_gb(Bench(), 18, 544, 1) == pytest.approx(whole + images)


def test_energy_is_the_work_and_the_waits_by_their_power():
    run = Bench()
    assert study_energy(run, 0.0, "lrtf") == study_energy(run, 0.0, "", 4) == 12 * 10 * 24
    assert study_energy(run, 1.0, "", 4) == pytest.approx(8 * study_time(run, "", 4))


def test_the_least_memory_of_checkpoints_is_at_the_root():
    for each in run_entry(find_entry("checkpoint-optimum")).values:
        assert each.agrees, each.value.name
