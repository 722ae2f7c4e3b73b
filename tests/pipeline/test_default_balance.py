"""Stages that nobody has chosen: as equal as FLOP and parameters can tell, and the same on every rank."""

import copy

import pytest
import torch
from torch import nn

from pipefit import Parallelism, Pipeline
from pipefit.runtime.launch import launch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(self.up(x).relu())


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 32), *(Block() for _ in range(4)), nn.Linear(32, 50))


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(64).reshape(8, 8) % 50, torch.arange(64).reshape(8, 8) % 50


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def counts(model: nn.Module, num_stages: int | None, **options) -> list[int]:
    pipe = Pipeline(
        model, loss=loss, optimizer=lambda params: torch.optim.SGD(params, 0.1), stages=num_stages, **options
    )
    return [len(stage.layers) for stage in pipe.plan.partition.stages]


@pytest.mark.parametrize("example", [None, tokens()])
def test_four_equal_blocks_between_embedding_and_head_go_to_one_rank_each(example):
    assert counts(blocks(), 4, example=example) == [2, 1, 1, 2]
    assert counts(blocks(), None, parallelism=Parallelism(ranks=4), example=example) == [2, 1, 1, 2]


def test_with_an_example_flop_count_and_not_only_parameters():
    def convolutions() -> nn.Sequential:
        first = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.AvgPool2d(16)]
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    assert counts(convolutions(), 2)[0] > 4  # most parameters are in the head
    x, y = torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
    assert counts(convolutions(), 2, example=(x, y))[0] < 4  # most FLOP in the second convolution


def test_the_count_leaves_the_model_as_it_was():
    model = blocks()
    before = copy.deepcopy(model)
    counts(model, 4, example=tokens())
    assert [block.calls for block in model[1:5]] == [0] * 4
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    )


def test_layers_whose_flop_cannot_be_counted_are_balanced_by_parameters():
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum().item())

    def model() -> nn.Sequential:
        return nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU(), Reads(8, 8), Reads(8, 8))

    assert counts(model(), 2, example=(torch.randn(2, 8), torch.randn(2, 8))) == [4, 1]


def test_layers_without_parameters_are_divided_by_number():
    assert counts(nn.Sequential(*(nn.Tanh() for _ in range(3)), nn.Linear(1, 1)), 2) == [3, 1]
    bare = [nn.Tanh() for _ in range(6)]
    assert counts(nn.Sequential(*bare[:3], nn.Linear(1, 1), *bare[3:]), 2) in ([3, 4], [4, 3])


def test_layers_by_hand_stay_as_they_are():
    assert counts(blocks(), [3, 1, 1, 1]) == [3, 1, 1, 1]


def on_a_rank() -> list[int]:
    return counts(blocks(), None, example=tokens())


@pytest.mark.dist
@pytest.mark.slow
def test_every_rank_divides_alike():
    assert launch(on_a_rank, 2, threads=1, quiet=True) == [[3, 3]] * 2
