"""Learning rates of `pipefit train`: their course, and their course after a resume."""

import json

import pytest
import torch

from pipefit.cli import main
from pipefit.errors import PipefitError
from pipefit.run.optimizers import make_optimizer, rates

WORDS = "train --model mlp --option layers=3,width=16 --batch 8 --transport local --ranks 1 --lr 0.1".split()


def course(kind: str, warmup: int, num_steps: int, count: int) -> list[float]:
    """The learning rates of some steps, with a peak of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)
    scheduler = rates(kind, warmup, num_steps)(optimizer)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("kind", "later"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.7625, 0.525, 0.2875, 0.05]),
        ("cosine", [1.0, 0.860876, 0.525, 0.189124, 0.05]),
    ],
)
def test_rates_rise_to_the_peak_and_then_follow_their_kind(kind, later):
    assert course(kind, 2, 6, 8) == pytest.approx([0.5, 1.0, *later, later[-1]], abs=1e-6)


def test_settings_of_the_optimizer_are_those_given():
    weight = torch.nn.Parameter(torch.ones(1))
    usual, given = (make_optimizer("adamw", 1e-3, *more)([weight]).defaults for more in ((), (0.0, (0.8, 0.95))))
    assert (usual["weight_decay"], usual["betas"]) == (0.1, (0.9, 0.99))
    assert (given["weight_decay"], given["betas"]) == (0.0, (0.8, 0.95))
    for name, betas in (("sgd", (0.9, 0.9)), ("adam", (0.9,)), ("adam", (0.9, 1.0))):
        with pytest.raises(PipefitError, match="--betas"):
            make_optimizer(name, 1e-3, betas=betas)


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_a_resumed_run_keeps_the_rates_of_the_first_one_and_says_so(tmp_path, capsys):
    def trained(*more: str) -> tuple[list[float], str]:
        assert main([*WORDS, *more]) == 0
        entries = [json.loads(line) for line in (tmp_path / more[-1] / "metrics.jsonl").read_text().splitlines()]
        return [entry["learning_rates"][0] for entry in entries if "loss" in entry], capsys.readouterr().out

    first, _ = trained("--steps", "6", "-o", str(tmp_path / "a"))
    step = tmp_path / "a" / "checkpoints" / "step-000006"
    more = ("--resume", str(step), "--steps", "9")
    resumed, told = trained(*more, "--lr-schedule", "linear", "-o", str(tmp_path / "b"))
    assert resumed == pytest.approx([0.005] * 3) and first[-1] > 0.005
    assert "the first run's go on (peak 0.1, warm-up 1, cosine over 6 steps)" in told


@pytest.mark.slow
@pytest.mark.usefixtures("small_probes")
def test_an_epoch_has_every_sample_once(capsys):
    words = [*WORDS, "--data", "digits", "--epochs", "2"]
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 2 * (1438 // 8)
    assert main([*WORDS, "--data", "synthetic", "--epochs", "2"]) == 2
    assert "--epochs: synthetic is drawn at random" in capsys.readouterr().err
