"""PTD-P's arithmetic of a GPT, compared with what its authors published and with computed profiles."""

import pytest

from pipefit.planner import gpt_profile
from pipefit.planner.transformer import Transformer, flops_per_iteration, mfu, num_parameters
from pipefit.spec import Device

# Parameters in billions, heads, hidden, layers: Narayanan et al., table 1.
TABLE = [
    (1.7, 24, 2304, 24),
    (3.6, 32, 3072, 30),
    (7.5, 32, 4096, 36),
    (18.4, 48, 6144, 40),
    (39.1, 64, 8192, 48),
    (76.1, 80, 10240, 60),
    (145.6, 96, 12288, 80),
    (310.1, 128, 16384, 96),
    (529.6, 128, 20480, 105),
    (1008.0, 160, 25600, 128),
]


@pytest.mark.parametrize(("billions", "heads", "hidden", "layers"), TABLE)
def test_the_published_parameters_come_out(billions, heads, hidden, layers):
    assert num_parameters(Transformer(layers, hidden, heads)) / 1e9 == pytest.approx(billions, abs=0.06)


def test_the_formula_with_recompute_is_the_papers_in_one_piece():
    gpt = Transformer(96, 12288, 96)
    s, h, v = gpt.sequence, gpt.hidden, gpt.vocab
    papers = 96 * 7 * s * gpt.layers * h * h * (1 + s / (6 * h) + v / (16 * gpt.layers * h))
    assert flops_per_iteration(gpt, 7, recompute=True) == pytest.approx(papers, rel=1e-12)


def test_a_computed_profile_has_the_parameters_and_flop_of_the_formulas():
    device = Device(flops=100e12, efficiency=1.0)
    gpt = Transformer(12, 1024, 16)
    profile = gpt_profile(12, 1024, 16, device=device, microbatch=4)
    # The projection shares the embedding's weights and so counts once in the formula.
    weights = sum(layer.weight_bytes for layer in profile.layers[:-1]) / 2
    assert weights == pytest.approx(num_parameters(gpt), rel=1e-12)
    seconds = sum(layer.total_s for layer in profile.layers)
    assert seconds * 100e12 == pytest.approx(flops_per_iteration(gpt, 4), rel=1e-12)
    # A device that is fully used reaches its peak by the formula too.
    assert mfu(gpt, 4 / seconds, 1, device.flops) == pytest.approx(1)
    stream = 4 * 2048 * 1024
    assert profile.layers[1].saved_bytes == stream * (34 + 5 * 16 * 2048 / 1024)
