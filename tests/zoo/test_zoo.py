"""The zoo's own parts: its reference, its names, and its page."""

import ast
import copy
import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.zoo import plain
from tests.zoo.collection import specimens_of
from tests.zoo.outcome import EXACT, LATE, REFUSED, WRONG, Result, line
from tests.zoo.table import PAGE, counts, filled

pytestmark = pytest.mark.slow


def test_the_reference_imports_torch_alone():
    tree = ast.parse(inspect.getsource(plain))
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in named if name.split(".")[0] in ("pipefit", "tests")}
    assert ours == set()


def test_with_one_micro_batch_the_reference_is_a_usual_loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).double()
    usual = copy.deepcopy(model)
    batches = [(torch.randn(8, 4).double(), torch.randn(8).double()) for _ in range(3)]
    found = plain.train(model, plain.bounded, batches, 1)
    optimizer = torch.optim.SGD(usual.parameters(), lr=plain.LEARNING_RATE)
    losses = []
    for x, y in batches:
        loss = plain.bounded(usual(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    wanted = plain.Trained(losses, [*found.states[:-1], plain.state_of(usual)])
    assert plain.difference(wanted, found).size < 1e-14


def test_running_averages_are_those_of_the_whole_mini_batch():
    model = nn.BatchNorm1d(3, affine=False).double()
    model.register_parameter("unused", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    x, y = torch.randn(9, 3).double(), torch.randn(9).double()
    plain.train(model, plain.bounded, [(x, y)], 3)
    assert torch.allclose(model.running_mean, 0.1 * x.mean(0))
    assert torch.allclose(model.running_var, 0.9 + 0.1 * x.var(0))
    assert model.num_batches_tracked == 1


def test_a_difference_names_its_place():
    a = plain.Trained([1.0], [{"weight": torch.zeros(2)}])
    b = plain.Trained([1.0], [{"weight": torch.tensor([0.0, 0.5])}])
    assert str(plain.difference(a, b)) == "weight after step 1 differs by 5.0e-01"
    assert plain.difference(a, plain.Trained([1.0], [{}])).size == float("inf")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_each_model_written_by_hand_has_a_name_of_its_own():
    names = [specimen.name for specimen in specimens_of("hand")]
    assert len(names) == len(set(names)) >= 80


def test_the_page_counts_what_a_person_could_cut():
    results = [
        Result("hand/a", EXACT),
        Result("hand/b", REFUSED, "no | way"),
        Result("hand/c", LATE, by_hand=False, why="it waits"),
    ]
    assert "| hand | 3 | 1 | 1 | 0 | 0 | 1 | 0 | 1 of 2, 50 % |" in counts(results)
    page = filled(PAGE.read_text(), results)
    assert "`no / way`" in page
    assert "| hand/c | it waits | accepted, then refused |" in page


def zoo(*words):
    """The command in a process of its own: it silences warnings."""
    return subprocess.run([sys.executable, "-m", "tests.zoo", *words], capture_output=True, text=True, check=False)


def test_a_name_that_no_model_has_is_refused(tmp_path):
    done = zoo("hand/nothing", "--results", str(tmp_path / "zoo.jsonl"))
    assert done.returncode == 2 and "no model's name begins with hand/nothing" in done.stderr


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_that_was_wrong_before_still_fails_the_run(tmp_path):
    name, results = specimens_of("hand")[0].name, tmp_path / "zoo.jsonl"
    results.write_text(line(Result(name, WRONG)) + "\n")
    done = zoo(name, "--results", str(results))
    assert done.returncode == 1 and done.stdout == "1 wrong\n"


def test_the_readme_has_the_numbers_of_the_page():
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith("| **all** |"))
    tried, exact, refused = (cell.strip() for cell in row.split("|")[2:5])
    readme = " ".join((PAGE.parents[1] / "README.md").read_text().split())
    assert f"of {tried} in [the zoo](docs/zoo.md) {exact} are exact and {refused} are refused" in readme
