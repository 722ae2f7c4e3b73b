"""`pipefit profile`: measured and computed."""

import pytest
from tests.verbs import answered, refused

from pipefit.cli import main
from pipefit.spec import Profile

SMALL = ("--model", "mlp", "--option", "layers=3,width=8", "--repeats", "1")

OWN = """
import torch
from torch import nn

def good(width: int = 4):
    print("a model that says something while it is built")
    def example(batch, seed=0):
        return torch.zeros(batch, width), torch.zeros(batch, dtype=torch.int64)
    return [nn.Linear(width, 3), nn.Linear(3, 2)], nn.CrossEntropyLoss(), example

def raising():
    raise RuntimeError("no weights here")

def silent():
    return nn.Linear(2, 2)

def bad_example():
    return nn.Linear(2, 2), nn.CrossEntropyLoss(), lambda batch, seed=0: 1 / 0

def misfit():
    def example(batch, seed=0):
        return torch.zeros(batch, 4), torch.zeros(batch, dtype=torch.int64)
    return nn.Linear(3, 2), nn.CrossEntropyLoss(), example
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with the user's own models, as the working directory."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_profile_is_measured_and_written(tmp_path, capsys):
    path = tmp_path / "mlp.profile.json"
    data = answered(capsys, "profile", *SMALL, "--microbatch-size", "4", "-o", str(path))
    profile = Profile.load(path)
    assert (data["num_layers"], data["microbatch_size"], data["output"]) == (len(profile), 4, str(path))
    assert (
        data["forward_s"] == pytest.approx(sum(layer.forward_s for layer in profile.layers)) and data["forward_s"] > 0
    )
    assert data["weight_bytes"] == sum(layer.weight_bytes for layer in profile.layers)
    assert profile.optimizer_s > 0


@pytest.mark.slow
def test_several_sizes_are_in_one_file(tmp_path, capsys):
    path = tmp_path / "p.json"
    assert answered(capsys, "profile", *SMALL, "-b", "2,8", "-o", str(path))["microbatch_sizes"] == [2, 8]
    assert Profile.load(path).at(8).microbatch_size == 8


def test_people_get_a_row_for_each_layer(capsys):
    assert main(["profile", *SMALL, "-b", "2"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("hidden0", "head", "total", "whole step"))


def test_a_device_that_is_not_here_is_computed_for(tmp_path, capsys):
    topology = tmp_path / "t.toml"
    topology.write_text(
        'format = "pipefit.topology/1"\n[device]\nflops = "1 TFLOP/s"\nefficiency = 1.0\n'
        '[[levels]]\nname = "host"\nwidth = 1\nbandwidth_bytes_per_s = "1 GB/s"\n'
    )
    data = answered(capsys, "profile", *SMALL, "-b", "16", "--analytic", "--topology", str(topology))
    forward_flop = 2 * 16 * (64 * 8 + 8 * 8 + 8 * 10)
    assert data["forward_s"] == pytest.approx(forward_flop / 1e12, rel=1e-6)


def test_a_machine_is_known_by_name(capsys):
    data = answered(capsys, "profile", *SMALL, "-b", "16", "--analytic", "--topology", "dgx-a100-8")
    assert 0 < data["forward_s"] < 1e-4  # some kernels of microseconds; the arithmetic takes nanoseconds


def test_a_user_s_own_factory_is_profiled_and_may_print(own, capsys):
    assert (
        answered(capsys, "profile", "--model", "own.py:good", "--option", "width=6", "--repeats", "1")["num_layers"]
        == 2
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "gtp"], "did you mean gpt"),
        (["--model", "mlp", "--option", "layer=2"], "did you mean layers"),
        (["--model", "mlp", "--option", "layers=two"], "expected a whole number, got 'two'"),
        (["--model", "own.py:raising"], "no weights here"),
        (["--model", "own.py:goood"], "did you mean good?"),
        (["--model", "none.py:f"], "there is no file"),
        (["--model", "own.py:silent"], "the shapes of its input are not known"),
        (["--model", "own.py:bad_example"], "division by zero"),
        (["--model", "own.py:misfit"], "raised RuntimeError"),
        (["--model", "mlp", "-b", "0"], "expected a whole number of at least 1, got 0"),
        (["--model", "mlp", "-b", "four"], "like 2,1"),
        (["--model", "mlp", "-b", "4,4"], "different sizes"),
        (["--model", "mlp", "--repeats", "0"], "--repeats: expected a whole number of at least 1"),
        (["--model", "mlp", "--device", "moon"], "--device moon: cannot be used here"),
        (["--model", "mlp", "--analytic"], "--analytic needs --topology"),
        (["--model", "mlp", "--topology", "local:2"], "add --analytic"),
        (["--model", "mlp", "-o", "p.txt"], "one of .json"),
        (["--model", "mlp", "-o", "."], "got a directory"),
        ([], "--model"),
    ],
)
def test_what_cannot_be_profiled_is_refused_in_one_message(arguments, told, own, capsys):
    assert told in refused(capsys, "profile", *arguments)
