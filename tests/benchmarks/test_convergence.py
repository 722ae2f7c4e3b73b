"""The study of convergence: its updates are those of `Pipeline`, and its delays those of the papers."""

import numpy as np
import pytest
import torch
from benchmarks.convergence import SCHEDULES, delays, first_weights, study, table, train
from torch import nn

from pipefit import Pipeline

DEPTH, WIDTH, STEPS = 3, 5, 12


def batches():
    draw = np.random.default_rng(1)
    return [(draw.normal(size=(6, 64)), draw.integers(10, size=6)) for _ in range(STEPS)]


def pipeline_losses(schedule: str, rate: float, momentum: float) -> list[float]:
    """The same layers, weights and batches, trained by pipefit in one process."""
    model = nn.Sequential()
    weights = first_weights(DEPTH, WIDTH, [7])
    for stage, weight in enumerate(weights):
        layer = nn.Linear(*weight.shape[1:], bias=False, dtype=torch.float64)
        layer.weight.data = torch.tensor(weight[0].T)
        model.append(layer if stage == DEPTH - 1 else nn.Sequential(layer, nn.Tanh()))
    pipe = Pipeline(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda own: torch.optim.SGD(own, lr=rate, momentum=momentum),
        stages=DEPTH,
        schedule=schedule,
        microbatches=1 if schedule.startswith("pipedream") and schedule != "pipedream-2bw" else DEPTH,
    )
    return pipe.fit([(torch.tensor(x), torch.tensor(y)) for x, y in batches()], steps=STEPS)


def test_each_stage_is_as_many_updates_behind_as_the_papers_say():
    found = {method: delays(method, 4) for method in SCHEDULES}
    assert found == {
        "1F1B": [0, 0, 0, 0],
        "2BW": [1, 1, 1, 1],
        "stashing": [3, 2, 1, 0],
        "vertical sync": [3, 3, 3, 3],
        "without stashing": [3, 2, 1, 0],
    }


@pytest.mark.parametrize("method", [method for method in SCHEDULES if method != "without stashing"])
def test_the_losses_are_those_of_a_pipeline(method):
    rates, momenta = np.array([0.3, 0.1]), np.array([0.0, 0.9])
    losses, _ = train(
        first_weights(DEPTH, WIDTH, [7, 7]),
        batches(),
        rates.reshape(-1, 1, 1),
        momenta.reshape(-1, 1, 1),
        delays(method, DEPTH),
    )
    for setting in range(2):
        expected = pipeline_losses(SCHEDULES[method], rates[setting], momenta[setting])
        assert [loss[setting] for loss in losses] == pytest.approx(expected, rel=1e-9)


def test_without_stashing_the_backward_takes_other_weights():
    args = (first_weights(DEPTH, WIDTH, [7]), batches(), np.array([[[0.3]]]), np.array([[[0.0]]]))
    stashed, _ = train(*args, delays("stashing", DEPTH))
    newest, _ = train(*args, delays("without stashing", DEPTH), newest=True)
    assert stashed[0] == newest[0] and stashed[-1] != newest[-1]


@pytest.mark.slow
def test_the_study_has_a_row_for_each_depth_and_momentum():
    found = study(steps=2, seeds=1)
    assert len(found) == 5 * 4 * 2 * 6
    assert len(table(found).splitlines()) == 1 + 8
