"""Batch norms of every kind, in models of every form, in every way of training: equal to plain torch, or refused."""

import pytest
import torch
from tests.stage.norms import CHANNELS, KINDS, LENGTH, ONLY_WHOLE
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit import Parallelism, Pipeline, cut
from pipefit.errors import ModelError
from pipefit.testing import check

pytestmark = pytest.mark.slow
ALL = KINDS | ONLY_WHOLE


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.linear = ALL[kind](), nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Blocks(nn.Module):
    """Is cut around its blocks, or at lines of its graph where a norm depends on what came before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))
        self.head = nn.Linear(LENGTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.sin(block(x))
        return self.head(x)


class Lines(nn.Module):
    """Is cut at lines of its graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(kind), Block(kind), Block(kind)
        self.head = nn.Linear(LENGTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.head(self.third(torch.sin(self.second(x))) + x)


def example(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, CHANNELS, LENGTH, generator=generator, dtype=torch.float64)
    return 2 * x + 1, torch.randn(samples, CHANNELS, 2, generator=generator, dtype=torch.float64)


def model(form: str, kind: str) -> object:
    torch.manual_seed(0)
    if form == "sequence":
        return nn.Sequential(nn.Linear(LENGTH, LENGTH), Block(kind), Block(kind), nn.Linear(LENGTH, 2)).double()
    made = Blocks(kind) if form == "blocks" else Lines(kind)
    return cut(made.double(), example(3, 0)[0])


WAYS = {
    "1f1b": ("1f1b", Parallelism(ranks=2)),
    "stages recomputed": ("1f1b", Parallelism(ranks=2, recompute="stage")),
    "layers recomputed": ("1f1b", Parallelism(ranks=2, recompute="layer")),
    "halves": ("zb-h1", Parallelism(ranks=2)),
    "copies": ("1f1b", Parallelism(ranks=4, replicas=(2,))),
    "pipedream": ("pipedream", Parallelism(ranks=2)),
    "2bw": ("pipedream-2bw", Parallelism(ranks=2)),
}
EXACT = ["act after", "act after, cumulative", "act before", "patched", "twice", "borrows", "frozen", "hooked"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", EXACT)
def test_a_norm_with_a_forward_of_its_own_trains_as_in_plain_torch(kind: str, way: str) -> None:
    schedule, spread = WAYS[way]
    found = check(model("sequence", kind), schedule=schedule, parallelism=spread, example=example, loss=F.mse_loss)
    assert found.equal, found


@pytest.mark.parametrize("way", ["1f1b", "layers recomputed", "2bw"])
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (form, kind)
        for form in ("blocks", "lines")
        for kind in ("act after", "act after, cumulative", "twice", "frozen")
    ],
)
def test_so_it_does_in_a_model_that_is_cut(form: str, kind: str, way: str) -> None:
    schedule, spread = WAYS[way]
    found = check(model(form, kind), schedule=schedule, parallelism=spread, example=example, loss=F.mse_loss)
    assert found.equal, found


@pytest.mark.parametrize("form", ["sequence", "blocks", "lines"])
@pytest.mark.parametrize("way", ["1f1b", "stages recomputed", "layers recomputed", "halves", "copies"])
def test_a_forward_that_reads_its_averages_reads_what_torch_has_there(form: str, way: str) -> None:
    """With copies of a stage each would read averages of its own micro-batches alone: they change once per update."""
    schedule, spread = WAYS[way]
    found = check(model(form, "reads"), schedule=schedule, parallelism=spread, example=example, loss=F.mse_loss)
    assert found.equal, found


@pytest.mark.parametrize("kind", ["no norm", "instance", "by hand"])
def test_buffers_that_copies_of_a_stage_would_change_apart_are_refused(kind: str) -> None:
    schedule, spread = WAYS["copies"]
    with pytest.raises(ModelError, match=r"changes (the buffer 1\.norm\.running_mean|its running averages).*one copy"):
        check(model("sequence", kind), schedule=schedule, parallelism=spread, example=example, loss=F.mse_loss)


@pytest.mark.parametrize("form", ["sequence", "lines"])
def test_another_buffer_that_a_replay_would_change_is_refused(form: str) -> None:
    schedule, spread = WAYS["layers recomputed"]
    with pytest.raises(ModelError, match="so it cannot be replayed"):
        check(model(form, "instance"), schedule=schedule, parallelism=spread, example=example, loss=F.mse_loss)


def test_an_error_in_a_forward_leaves_the_model_with_its_own_buffers() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("no")

    made = nn.Sequential(nn.Linear(LENGTH, LENGTH), ALL["act after"](), Fails()).double()
    before = [id(buffer) for buffer in made.buffers()]
    pipe = Pipeline(made, loss=F.mse_loss, optimizer=torch.optim.SGD, stages=1, microbatches=2)
    with pytest.raises(ModelError, match="ArithmeticError"):
        pipe.step(*example(4, 0))
    assert [id(buffer) for buffer in made.buffers()] == before
