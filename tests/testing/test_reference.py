"""The reference of `check` is the user's model in plain torch, and shares no code with what it checks."""

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipelines import case_of
from tests.stage.norms import CHANNELS, KINDS, LENGTH, ONLY_WHOLE, ActAfter
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

import pipefit
from pipefit import Parallelism, cut
from pipefit.errors import ModelError
from pipefit.testing import Case, check, compare, expected, run
from pipefit.testing.users_model import whole

# Types, and the generator of a device, which torch keeps in a module for each kind of device.
NAMED = {"Cut", "Traced", "NamedLayer", "generator_of"}
LOWER = ("pipefit.stage", "pipefit.runtime", "pipefit.cutting", "pipefit.parallel", "pipefit.spill", "pipefit.pipeline")


class Block(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = ActAfter(CHANNELS), nn.Linear(LENGTH, LENGTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.linear(self.norm(x)))


class Blocks(nn.Module):
    """Is cut around its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(LENGTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(F.dropout(x, 0.2, self.training))


class Lines(nn.Module):
    """Is cut at lines of its graph: most of its weights belong to no module that could be a block."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.first, self.second, self.third = (ActAfter(CHANNELS) for _ in range(3))
        for name in "abc":
            self.register_parameter(name, nn.Parameter(torch.randn(LENGTH, LENGTH)))
        self.head, self.dropout = nn.Linear(LENGTH, 2), dropout

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.first(x @ self.a)), self.dropout, self.training)
        y = torch.sin(self.second(x @ self.b))
        return self.head(self.third(y @ self.c) + x)


def sequence(*names: str) -> nn.Sequential:
    made = [KINDS[name]() for name in names]
    return nn.Sequential(nn.Linear(LENGTH, LENGTH), *made, nn.Dropout(0.3), nn.Linear(LENGTH, 2)).double()


def data(samples: int, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(samples, CHANNELS, n, generator=generator, dtype=torch.float64) for n in (LENGTH, 2)
    )  # fmt: skip
    return 2 * x + 1, y


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "sequence":
        return sequence("act after", "plain")
    models = {"blocks": Blocks, "lines": Lines, "lines without dropout": lambda: Lines(0.0)}
    found = cut(models[kind]().double(), data(3, 0)[0])
    assert found.way == ("around its blocks" if kind == "blocks" else "of its traced graph")
    return found


def case(made: Any, schedule: str = "1f1b", num_microbatches: int = 2, num_ranks: int = 2, **more: Any) -> Case:
    depth = len(getattr(made, "layers", made))
    counts = [depth // num_ranks + (stage < depth % num_ranks) for stage in range(num_ranks)]
    options = {"num_ranks": num_ranks, "schedule": schedule, "num_microbatches": num_microbatches, "counts": counts}
    return case_of(model=made, batches=[data(7, step) for step in range(3)], loss=F.mse_loss, **options, **more)


@pytest.fixture
def called() -> Iterator[set[type]]:
    """The classes of all modules that are called."""
    found: set[type] = set()

    def note(module: nn.Module, given: Any) -> None:
        found.add(type(module))

    hook = register_module_forward_pre_hook(note)
    yield found
    hook.remove()


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
@pytest.mark.parametrize("kind", ["sequence", "blocks", "lines without dropout"])
def test_no_class_of_the_package_is_in_the_reference(kind: str, schedule: str, called: set[type]) -> None:
    made = model(kind)
    called.clear()
    expected(case(made, schedule))
    assert ActAfter in called
    assert not [one for one in called if one.__module__.startswith(("pipefit.", "torch.fx"))]


@pytest.mark.parametrize("kind", ["sequence", "blocks", "lines"])
def test_its_model_is_made_of_the_users_classes(kind: str) -> None:
    made = model(kind)
    own = made if isinstance(made, nn.Module) else made.model
    classes = [type(one) for one in own.modules()]
    pipe = pipefit.Pipeline(made, loss=F.mse_loss, optimizer=torch.optim.SGD, stages=2, microbatches=2)
    pipe.fit([data(7, 0)])  # what it does to the user's modules is not in the reference either
    root = whole(case(made)).root
    assert [type(one) for one in root.modules()][1:] == classes[1:]
    pipe.close()


@pytest.mark.parametrize("file", ["reference.py", "delayed.py", "users_model.py", "averages.py"])
def test_the_reference_imports_nothing_that_computes(file: str) -> None:
    """But for the types of models that it is given."""
    source = Path(pipefit.__file__).parent / "testing" / file
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith(LOWER) for alias in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LOWER):
            assert {alias.name for alias in node.names} <= NAMED, f"{file}: {ast.unparse(node)}"


@pytest.mark.parametrize("name", sorted(KINDS | ONLY_WHOLE))
def test_with_one_micro_batch_it_is_a_training_loop_of_torch(name: str) -> None:
    torch.manual_seed(0)
    kind = (KINDS | ONLY_WHOLE)[name]
    made = nn.Sequential(nn.Linear(LENGTH, LENGTH), kind(), nn.Tanh(), kind(), nn.Linear(LENGTH, 2)).double()
    task = case(made, num_microbatches=1)
    whole = copy.deepcopy(made)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for x, y in task.batches:
        optimizer.zero_grad()
        F.mse_loss(whole(x), y).backward()
        optimizer.step()
    weights = expected(task).weights[0]
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-12, atol=1e-13, msg=key)


def test_a_norm_that_loses_its_own_forward_is_found() -> None:
    """The pipeline once trained it as a plain norm, and so did the reference."""
    torch.manual_seed(0)
    own = sequence("act after", "act after")
    lost = copy.deepcopy(own)
    for norm in (lost[1], lost[2]):
        norm.forward = nn.BatchNorm1d.forward.__get__(norm)  # type: ignore[method-assign]
    found = compare(run(case(lost)), expected(case(own)), 1e-10)
    assert not found.equal and found.loss_diff > 1e-3


def example(samples: int, seed: int) -> tuple[Any, Any]:
    return data(samples, seed)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("kind", ["sequence", "blocks", "lines"])
def test_a_model_of_any_form_with_norms_and_dropout_is_equal(kind: str, schedule: str) -> None:
    found = check(
        model(kind), schedule=schedule, parallelism=Parallelism(ranks=3), example=example, loss=F.mse_loss, steps=4
    )
    assert found.equal, found
    assert found.num_norms == {"sequence": 2, "blocks": 4, "lines": 3}[kind]


@pytest.mark.parametrize("name", sorted(KINDS | ONLY_WHOLE))
def test_a_norm_of_any_kind_is_equal(name: str) -> None:
    torch.manual_seed(0)
    kind = (KINDS | ONLY_WHOLE)[name]
    made = nn.Sequential(nn.Linear(LENGTH, LENGTH), kind(), nn.Tanh(), kind(), nn.Linear(LENGTH, 2))
    found = check(made, schedule="1f1b", parallelism=Parallelism(ranks=2), example=example, loss=F.mse_loss)
    assert found.equal, found


class Tied(nn.Module):
    """Two stages hold one weight, in different versions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.first, self.last = nn.Linear(LENGTH, LENGTH), nn.Linear(LENGTH, LENGTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream-2bw"])
def test_a_tied_weight_of_a_cut_model_has_a_version_in_each_stage(schedule: str) -> None:
    torch.manual_seed(0)
    made = cut(Tied().double(), data(3, 0)[0])
    assert made.way == "around its blocks"

    def batch(samples: int, seed: int) -> tuple[Any, Any]:
        x, _ = data(samples, seed)
        return x, x.flip(0)

    found = check(
        made,
        schedule=schedule,
        parallelism=Parallelism(ranks=3),
        example=batch,
        loss=F.mse_loss,
        steps=5,
        microbatches=1 if schedule == "pipedream" else 3,
    )
    assert found.equal, found


class Scaled(nn.Sequential):
    """A sequence that does more than its layers."""

    def forward(self, input: Tensor) -> Tensor:
        return 3 * super().forward(input)


@pytest.mark.parametrize("kind", ["forward", "hook"])
def test_a_sequence_with_a_forward_of_its_own_is_not_taken_apart(kind: str) -> None:
    made: nn.Sequential = (Scaled if kind == "forward" else nn.Sequential)(*sequence("plain", "act after"))
    if kind == "hook":
        made.register_forward_hook(lambda module, given, output: 3 * output)
    with pytest.raises(ModelError, match=r"a forward or hooks of its own.*pipefit\.cut"):
        check(made, example=example, loss=F.mse_loss)
    if kind == "forward":
        found = cut(made.double(), data(3, 0)[0])
        assert check(found, example=example, loss=F.mse_loss).equal, "each norm is a block: a layer of its own"
