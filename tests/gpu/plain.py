"""Training in plain torch, on the CPU and in float64: what every run on a GPU is compared with."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
TOLERANCE = 1e-9
"""Of float64, relative: a GPU adds up in another order."""

WIDTH, CLASSES, TOKENS = 16, 5, 11


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(7)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES)).double()


class Head(nn.Module):
    """Its weight is the embedding's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T).mean(1)


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Embedding(TOKENS, WIDTH)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(first, *blocks, Head(first.weight)).double()


def batches(steps: int = 4, samples: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (samples,), generator=generator),
        )
        for _ in range(steps)
    ]


def sentences(steps: int = 4, samples: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, TOKENS, (samples, 3), generator=generator),
            torch.randint(0, TOKENS, (samples,), generator=generator),
        )
        for _ in range(steps)
    ]


def trained(
    model: nn.Module,
    data: Sequence[Batch],
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    clip_norm: float | None = None,
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of each step, and the weights at the end."""
    model = copy.deepcopy(model)
    stepping = optimizer(list(model.parameters()))
    losses = []
    for x, y in data:
        stepping.zero_grad()
        found = loss(model(x), y)
        found.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        stepping.step()
        losses.append(float(found.detach()))
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def assert_close(
    got: tuple[Sequence[float], dict[str, Tensor]],
    wanted: tuple[Sequence[float], dict[str, Tensor]],
    tolerance: float = TOLERANCE,
) -> None:
    """Compares losses and weights, wherever these are."""
    losses, weights = got
    torch.testing.assert_close(
        torch.tensor(losses, dtype=torch.float64), torch.tensor(wanted[0], dtype=torch.float64), rtol=tolerance, atol=0
    )
    assert weights.keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        torch.testing.assert_close(
            weights[name].cpu(),
            value.cpu(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )
