"""Tiny models, one for each way in which a pipeline can go wrong; eight layers each, enough for eight stages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.models.gpt import Attention

WIDTH, CLASSES, TOKENS = 5, 3, 7


def plain() -> nn.Sequential:
    sizes = [4, 5, 6, 5]
    blocks = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(sizes, [*sizes[1:], 4], strict=True)]
    return nn.Sequential(*blocks, nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 4), nn.Linear(4, CLASSES))


def batch_norm() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Tanh(),
        nn.BatchNorm1d(WIDTH, momentum=None),
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH, affine=False),
        nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    )


def dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, WIDTH),
        nn.Dropout(0.4),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.4, inplace=True),
        nn.Tanh(),
        nn.Dropout(0.4),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, CLASSES),
    )


class Unembed(nn.Module):
    """The last layer of a language model, whose weight is the first layer's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(len(weight)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def tied() -> nn.Sequential:
    first = nn.Embedding(TOKENS, WIDTH)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(first, *middle, Unembed(first.weight))


class Twin(nn.Module):
    """Two layers of these, one weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def tied_neighbours() -> nn.Sequential:
    """Two groups that share a weight: neighbours (often one stage), and layers far apart."""
    near, far = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
    return nn.Sequential(
        nn.Linear(4, WIDTH), Twin(near), Twin(near), Twin(far), nn.Linear(WIDTH, WIDTH), Twin(far), nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


class Split(nn.Module):
    """Starts a skip connection: what the end needs travels beside what the middle changes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Beside(nn.Module):
    """Changes the first of several tensors and hands on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, payload: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, skip = payload
        return torch.tanh(self.linear(x)), skip


class Join(nn.Module):
    """Ends a skip connection."""

    def forward(self, payload: tuple[Tensor, Tensor]) -> Tensor:
        x, skip = payload
        return x * skip


def skip() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, WIDTH), Split(), Beside(), Beside(), Beside(), Beside(), Join(), nn.Linear(WIDTH, CLASSES)
    )


class EmbedWithMask(nn.Module):
    """Tokens to vectors, and which tokens count, as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"x": self.table(tokens), "mask": (tokens > 1).long(), "where": tokens.bool()}


class Masked(nn.Module):
    """Uses the mask that travels with the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, payload: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**payload, "x": torch.tanh(self.linear(payload["x"])) * payload["mask"].unsqueeze(-1)}


class Classify(nn.Module):
    """The end of the masked model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, TOKENS)

    def forward(self, payload: dict[str, Tensor]) -> Tensor:
        return self.linear(payload["x"])


def integer_mask() -> nn.Sequential:
    return nn.Sequential(EmbedWithMask(), *(Masked() for _ in range(6)), Classify())


def convolution() -> nn.Sequential:
    """Autograd keeps a convolution's weight itself, not a view of it: the test of weight stashing."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)),
        nn.Conv1d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.Conv1d(3, 3, 3, padding=1),
        nn.Tanh(),
        nn.Conv1d(3, 2, 3, padding=1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


def _frozen(*layers: int) -> Callable[[], nn.Sequential]:
    def make() -> nn.Sequential:
        model = plain()
        for index in layers:
            model[index].requires_grad_(False)
        return model

    return make


def frozen_norms() -> nn.Sequential:
    """Nothing of the first half trains, but its batch norms still gather averages."""
    model = batch_norm()
    model[:4].requires_grad_(False)
    return model


def frozen_tie() -> nn.Sequential:
    """A tied weight that does not train, at a stage that holds nothing else."""
    model = tied()
    model[0].requires_grad_(False)
    return model


class Unused(nn.Module):
    """Has a weight that no sample reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def idle_weight() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, WIDTH), Unused(), *(nn.Linear(WIDTH, WIDTH) for _ in range(5)), nn.Linear(WIDTH, CLASSES)
    )


def used_twice() -> nn.Sequential:
    """One module at several places of the sequence."""
    shared, drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
    return nn.Sequential(
        nn.Linear(4, WIDTH), shared, drop, nn.Tanh(), shared, drop, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    )


class Prompt(nn.Module):
    """Sends a weight itself along with the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.prompt


def travelling_weight() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, WIDTH), Prompt(), Beside(), Beside(), Beside(), Beside(), Join(), nn.Linear(WIDTH, CLASSES)
    )


class Rows(nn.Module):
    """Attention between three rows that are made of a vector, and back to one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(WIDTH, 12)
        self.attention = Attention(4, 2, 0.3)
        self.join = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.join(self.attention(self.spread(x).view(-1, 3, 4)).flatten(1))


class Normed(nn.Module):
    """Batch norm and dropout, between operations that change their input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH),
                                   nn.ReLU(inplace=True), nn.Dropout(0.3))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x * 1) + x


def composed() -> nn.Sequential:
    """Layers of several modules, whose replays are worth something."""
    first = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(
        nn.Linear(4, WIDTH), first, Rows(), Normed(), Rows(), Normed(), Rows(), nn.Linear(WIDTH, CLASSES)
    )


def vectors(batch: int, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (batch,), generator=generator)


def sentences(batch: int, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, TOKENS, (2, batch, 3), generator=generator)
    return words[0], words[1]


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[int, int], tuple[Any, Any]]]] = {
    "plain": (plain, vectors),
    "batch norm": (batch_norm, vectors),
    "dropout": (dropout, vectors),
    "tied ends": (tied, sentences),
    "tied neighbours": (tied_neighbours, vectors),
    "a tied weight that is frozen": (frozen_tie, sentences),
    "a skip over stages": (skip, vectors),
    "an integer mask beside activations": (integer_mask, sentences),
    "convolutions": (convolution, vectors),
    "a frozen beginning": (_frozen(0, 1, 2), vectors),
    "a frozen first half": (_frozen(0, 1, 2, 3), vectors),
    "a frozen first half with batch norms": (frozen_norms, vectors),
    "a frozen middle": (_frozen(2, 3, 4), vectors),
    "all but the end frozen": (_frozen(0, 1, 2, 3, 4, 5, 6), vectors),
    "a weight that nothing reaches": (idle_weight, vectors),
    "a layer used twice": (used_twice, vectors),
    "a weight that travels": (travelling_weight, vectors),
    "attention, batch norm and dropout": (composed, vectors),
}


def make(name: str) -> tuple[nn.Sequential, Callable[[int, int], tuple[Any, Any]]]:
    factory, example = MODELS[name]
    torch.manual_seed(0)
    return factory().double(), example
