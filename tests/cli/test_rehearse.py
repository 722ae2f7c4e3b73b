"""`pipefit rehearse`: the ranks of a plan, one after the other, in this process."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipefit.cli import main
from pipefit.planner import by_hand
from pipefit.spec.plan import SpillSpec

MODEL = ("--model", "gpt", "--option", "layers=6,hidden=16,heads=4,vocab=32,context=8")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """16 processes: 2 ranks of 2 chunks, 4 copies, tensor width 2."""
    made = by_hand(
        8,
        num_ranks=8,
        schedule="interleaved",
        num_microbatches=16,
        num_chunks=2,
        replicas=(4,),
        tensor=2,
        shard="optimizer",
    )
    return made.save(tmp_path / "plan.json")


def test_ranks_with_the_same_stages_are_rehearsed_once(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "--plan", str(plan), *MODEL, "--rank", "all", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["ranks"]
    assert (first["stages"], second["stages"]) == ([0, 2], [1, 3])
    assert first["made_groups"] == second["made_groups"] > first["num_groups"]
    for rank in (first, second):
        assert rank["num_messages"] and rank["num_collectives"] and rank["inside_bytes"]
        assert rank["peak_bytes"] > rank["weight_bytes"] + rank["grad_bytes"] + rank["optim_bytes"]
        # Widths that the model's rule splits and the usual law of a GPT agree but for biases, norms and positions.
        assert rank["simulated"]["weight_bytes"] == pytest.approx(rank["weight_bytes"], rel=0.15)


def test_any_rank_can_be_rehearsed_and_its_table_names_what_was_not_checked(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", "--plan", str(plan), *MODEL, "--rank", "15", "--optimizer", "sgd"]) == 0
    out = capsys.readouterr().out
    assert "counted" in out and "simulated" in out and "rank 15" in out
    assert "not checked: NCCL" in out


def test_a_model_that_does_not_fit_the_plan_is_refused(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rehearse", "--plan", str(plan), "--model", "gpt", "--option"]
    assert main([*words, "layers=7,heads=4"]) == 2
    assert "the partition has 8 layers, the model has 9" in capsys.readouterr().err
    assert main([*words, "layers=6,heads=1"]) == 2
    assert "heads=1 is no multiple of tensor=2" in capsys.readouterr().err


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.register_buffer("scale", torch.arange(8.0) / 8)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x)) * self.scale
        return x

def example(size, seed=0):
    return torch.ones(size, 8), torch.ones(size, 8)

def logged(output, target):
    return nn.functional.mse_loss(output, target), {"most": output.max().item()}

def whole():
    return Net(), nn.functional.mse_loss, example

def reading():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), logged, example
"""


def test_a_model_of_the_user_is_cut_and_one_that_reads_numbers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    for layers in (6, 2):
        by_hand(layers, num_ranks=2, schedule="1f1b", num_microbatches=2).save(tmp_path / f"{layers}.json")
    words = ["rehearse", "--rank", "1", "--batch", "4"]
    assert main([*words, "--plan", str(tmp_path / "6.json"), "--model", f"{own}:whole", "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["sent_bytes"] >= 4 * 8 * 4
    assert main([*words, "--plan", str(tmp_path / "2.json"), "--model", f"{own}:reading"]) == 2
    assert "the model reads the numbers of a tensor, which a rehearsal does not have" in capsys.readouterr().err


def test_ranks_that_do_not_exist_and_spilled_plans_are_refused(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", "--plan", str(plan), *MODEL, "--rank", "16"]) == 2
    assert "processes 0 to 15" in capsys.readouterr().err
    assert main(["rehearse", "--plan", str(plan), *MODEL, "--rank", "first"]) == 2
    assert "--rank: expected the number of a process or all, got 'first'" in capsys.readouterr().err
    spilled = replace(by_hand(8, num_ranks=1, schedule="1f1b", num_microbatches=2), spill=SpillSpec("host", 1e9))
    spilled.save(tmp_path / "spilled.json")
    assert main(["rehearse", "--plan", str(tmp_path / "spilled.json"), *MODEL]) == 2
    assert "real memory" in capsys.readouterr().err
