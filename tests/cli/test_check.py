"""`pipefit check`: the users' first question, from the command line."""

import pytest
from tests.verbs import answered, refused

from pipefit.cli import main
from pipefit.testing import CheckResult

SMALL = ("check", "--model", "mlp", "--option", "layers=3,width=8", "--ranks", "2")

OWN = """
import torch
from torch import nn

def with_lambda():
    def example(batch, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, 4, generator=generator), torch.randn(batch, 2, generator=generator)
    layers = [nn.Linear(4, 3), nn.Linear(3, 2)]
    return layers, lambda output, target: (output - target).square().mean(), example

def squares(output, target):
    return (output - target).square().mean()

def plain():
    layers, _, example = with_lambda()
    return layers, squares, example

def wrong_shapes():
    layers, loss, example = with_lambda()
    return [nn.Linear(5, 3)], loss, example
"""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream", "pipedream-2bw"])
def test_a_pipeline_is_equal_to_its_reference(schedule, capsys):
    data = answered(capsys, *SMALL, "--schedule", schedule)
    assert data["equal"] is True and data["first_difference"] is None
    assert max(data["loss_diff"], data["grad_diff"], data["weight_diff"]) <= 1e-10


def test_a_difference_is_exit_1_and_names_the_first_tensor(capsys, monkeypatch):
    import pipefit.testing

    wrong = CheckResult(False, 0.0, 0.5, 0.25, "hidden0.weight", 1e-10)
    monkeypatch.setattr(pipefit.testing, "check", lambda *args, **options: wrong)
    data = answered(capsys, *SMALL, code=1)
    assert (data["equal"], data["first_difference"], data["grad_diff"]) == (False, "hidden0.weight", 0.5)
    assert main(list(SMALL)) == 1
    assert "DIFFERENT, first in hidden0.weight" in capsys.readouterr().out


def test_options_reach_the_pipeline(capsys):
    arguments = ("--schedule", "interleaved", "--chunks", "2", "--recompute", "stage", "--clip", "0.5", "--steps", "2")
    data = answered(
        capsys, "check", "--model", "mlp", "--option", "layers=4,width=8,dropout=0.5", *arguments, "--dtype", "float32"
    )
    assert data["equal"] and (data["steps"], data["dtype"], data["num_ranks"]) == (2, "float32", 2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_half_precision_is_held_against_one_process_in_it(precision, capsys):
    data = answered(capsys, *SMALL, "--precision", precision, "--loss-scale", "64")
    assert data["equal"] and (data["precision"], data["dtype"], data["tolerance"]) == (precision, "float32", 1e-4)


@pytest.mark.dist
def test_a_model_of_transformers_is_checked_over_processes_that_share_its_layers(capsys):
    sizes = "hidden_size=16,intermediate_size=32,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2"
    model = ("--model", "transformers:LlamaForCausalLM", "--option", f"{sizes},vocab_size=50")
    data = answered(capsys, "check", *model, "--ranks", "2", "--tensor", "2", "--steps", "1")
    assert data["equal"] and (data["tensor"], data["transport"]) == (2, "distributed")


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "users_models.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def test_a_user_s_own_model_with_a_lambda_is_checked_in_one_process(own, capsys):
    assert answered(capsys, "check", "--model", "users_models.py:with_lambda")["equal"]


@pytest.mark.dist
def test_a_model_in_a_file_is_checked_with_processes(own, capsys):
    data = answered(capsys, "check", "--model", "users_models.py:plain", "--transport", "distributed")
    assert data["equal"] and data["transport"] == "distributed"


@pytest.mark.dist
def test_what_cannot_travel_to_other_processes_says_what_to_do(own, capsys):
    err = refused(capsys, "check", "--model", "users_models.py:with_lambda", "--transport", "distributed")
    assert "--transport local" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*SMALL, "--schedule", "1f2b"], "did you mean 1f1b?"),
        ([*SMALL, "--microbatches", "0"], "--microbatches: expected a whole number of at least 1"),
        ([*SMALL, "--ranks", "9"], "specified multiple times"),
        (["check", "--model", "mlp", "--option", "layers=3", "--ranks", "9"], "9 stages"),
        ([*SMALL, "--batch", "2"], "micro-batch"),
        ([*SMALL, "--dtype", "int8"], "float64"),
        ([*SMALL, "--stages", "2,2"], "add up to 4"),
        ([*SMALL, "--schedule-option", "wramup=2"], "did you mean warmup?"),
        (["check", "--model", "users_models.py:wrong_shapes"], "running it on its example raised RuntimeError"),
    ],
)
def test_what_does_not_fit_together_is_refused_in_one_message(arguments, told, own, capsys):
    assert told in refused(capsys, *arguments)
