"""State: counters, schedules, averages, caches, weights that a forward makes or changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.zoo.hand import WIDTH, Block, Host, Shelf
from tests.zoo.specimen import tokens, vectors

put = Shelf("state")
IMAGES = vectors(3, 8, 8)


class WarmUp(Block):
    """Grows with the number of its calls, counted in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h + super().forward(h) * min(1.0, self.calls / 10)


@put("warm-up by a counter in Python")
def warm_up() -> nn.Module:
    return Host(*(WarmUp() for _ in range(4)))


@put("counter of the model in Python")
class CountsItself(Host):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


@put("annealed temperature, changed by the model")
class Annealed(Host):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.temperature = max(0.5, self.temperature * 0.9)
        h = self.embed(x)
        for block in self.blocks:
            h = F.softmax(block(h) / self.temperature, -1) + h
        return self.head(h)


@put("counter in a dict of a block")
def in_dict() -> nn.Module:
    class Steps(Block):
        def __init__(self) -> None:
            super().__init__()
            self.state = {"step": 0}

        def forward(self, h: Tensor) -> Tensor:
            self.state["step"] += 1
            return super().forward(h) * (1 + 0.1 * self.state["step"])

    return Host(*(Steps() for _ in range(4)))


@put("alternates between two ways")
def alternates() -> nn.Module:
    class Alternates(Block):
        def __init__(self) -> None:
            super().__init__()
            self.odd = False
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            self.odd = not self.odd
            return super().forward(h) if self.odd else self.other(h)

    return Host(Block(), Alternates(), Block(), Alternates())


@put("counter as a buffer")
def counter_buffer() -> nn.Module:
    class Counts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, h: Tensor) -> Tensor:
            self.steps += 1
            return super().forward(h) / self.steps

    return Host(*(Counts() for _ in range(4)))


class RunningMean(Block):
    """Subtracts a running mean that it keeps as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(h.detach().mean(0), 0.1)
        return super().forward(h - self.mean)


@put("running mean as a buffer, in place")
def running_mean() -> nn.Module:
    return Host(*(RunningMean() for _ in range(4)))


class AssignedMean(RunningMean):
    def forward(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return Block.forward(self, h - self.mean)


@put("running mean as a buffer, assigned")
def assigned_mean() -> nn.Module:
    return Host(*(AssignedMean() for _ in range(4)))


@put("running mean as a plain attribute")
def plain_mean() -> nn.Module:
    class Plain(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mean: Any = 0.0

        def forward(self, h: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            return super().forward(h - self.mean)

    return Host(*(Plain() for _ in range(4)))


@put("running maximum as a number")
def running_max() -> nn.Module:
    class Highest(Block):
        def __init__(self) -> None:
            super().__init__()
            self.highest = 1.0

        def forward(self, h: Tensor) -> Tensor:
            self.highest = max(self.highest, float(h.detach().abs().max()))
            return super().forward(h / self.highest)

    return Host(*(Highest() for _ in range(4)))


class Codebook(nn.Module):
    """Vector quantisation whose codes are running averages of what they stand for (van den Oord et al. 2017)."""

    def __init__(self, codes: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("code", torch.randn(codes, WIDTH))
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("total", self.code.clone())

    def forward(self, h: Tensor) -> Tensor:
        h = self.linear(h)
        nearest = torch.cdist(h, self.code).argmin(1)
        chosen = F.one_hot(nearest, len(self.code)).to(h.dtype)
        if self.training:
            with torch.no_grad():
                self.size.lerp_(chosen.sum(0), 0.1)
                self.total.lerp_(chosen.T @ h, 0.1)
                self.code.copy_(self.total / self.size.clamp(min=1e-3)[:, None])
        return h + (self.code[nearest] - h).detach()


@put("codebook with running averages")
def codebook() -> nn.Module:
    return Host(Block(), Codebook(), Block(), Codebook(), Block())


@put("codebook with running averages, not in a list")
class OneCodebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.quantise = Codebook()
        self.decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        q = self.quantise(z)
        return self.decoder(q), (z - q.detach()).square().mean()


@put("momentum encoder, moved by the forward")
class Momentum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.target = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.target.requires_grad_(False)
        self.predict = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, others in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.lerp_(others, 0.1)
        return self.predict(self.online(x)) - self.target(x).detach()


@put("keeps its last output", not_by_hand="each micro-batch needs the one before, from its end to its beginning")
class LastOutput(Host):
    def __init__(self) -> None:
        super().__init__(after=8)
        self.last: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x + self.last)
        self.last = output.detach().mean()
        return output


@put("each block keeps its last output")
def last_of_block() -> nn.Module:
    class Remembers(Block):
        def __init__(self) -> None:
            super().__init__()
            self.last: Any = 0.0

        def forward(self, h: Tensor) -> Tensor:
            output = super().forward(h + 0.5 * self.last)
            self.last = output.detach().mean()
            return output

    return Host(*(Remembers() for _ in range(4)))


@put("first call initialises a parameter by its data")
def data_initialised() -> nn.Module:
    class ActNorm(Block):
        """Kingma and Dhariwal 2018: scale and bias from the first batch."""

        def __init__(self) -> None:
            super().__init__()
            self.scale, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
            self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

        def forward(self, h: Tensor) -> Tensor:
            if not self.ready:
                with torch.no_grad():
                    self.bias.copy_(-h.mean(0))
                    self.scale.copy_(1 / (h.std(0) + 1e-3))
                    self.ready.fill_(True)
            return super().forward((h + self.bias) * self.scale)

    return Host(*(ActNorm() for _ in range(4)))


@put("first call initialises a parameter, with a flag in Python")
def flagged() -> nn.Module:
    class Flagged(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.ready = False

        def forward(self, h: Tensor) -> Tensor:
            if not self.ready:
                self.scale.data = 1 / (h.detach().std(0) + 1e-3)
                self.ready = True
            return super().forward(h * self.scale)

    return Host(*(Flagged() for _ in range(4)))


@put("lazily made parameters")
def lazy() -> nn.Module:
    return Host(*(nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh()) for _ in range(4)))


@put("table that grows with the longest sequence", tokens(20, 6))
class GrowingTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.table: Any = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.table is None or len(self.table) < ids.shape[1]:
            self.table = torch.arange(ids.shape[1], dtype=self.head.weight.dtype)[:, None].sin().expand(-1, WIDTH)
        h = self.embed(ids) + self.table[: ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class OwnNorm(nn.BatchNorm1d):
    """Norm and activation in one, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


@put("batch norm with its own forward")
def own_norm() -> nn.Module:
    return Host(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), OwnNorm(WIDTH)) for _ in range(4)))


@put("batch norm with its own forward, in a sequential")
def own_norm_sequential() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), OwnNorm(8)) for _ in range(4)))


@put("batch norm with children")
def norm_with_children() -> nn.Module:
    class WithChildren(nn.BatchNorm1d):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.drop, self.act = nn.Identity(), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
            )
            return self.act(self.drop(x))

    return Host(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), WithChildren(WIDTH)) for _ in range(4)))


@put("batch norm of scaled input")
def scaled_norm() -> nn.Module:
    class Scaled(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x + 1) * self.weight

    return Host(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(WIDTH)) for _ in range(4)))


@put("batch norm that is called twice")
def norm_twice() -> nn.Module:
    class Twice(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            return self.norm(super().forward(self.norm(h)))

    return Host(*(Twice() for _ in range(4)))


@put("batch norm with cumulative averages", IMAGES)
def cumulative() -> nn.Module:
    def block(before: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=None), nn.ReLU(True))

    return nn.Sequential(block(3), block(6), block(6), block(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


@put("batch norm with frozen averages", IMAGES)
def frozen_norm() -> nn.Module:
    class Frozen(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    def block(before: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, 6, 3, padding=1), Frozen(6), nn.ReLU())

    return nn.Sequential(block(3), block(6), block(6), block(6), nn.Flatten(), nn.Linear(6 * 64, 3))


@put("batch norm whose averages are read by a later block", not_by_hand="they are known after the mini-batch only")
class ReadsAverages(Host):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[0][1].running_var.mean()


@put("batch norm of a parameter-free class", IMAGES)
def plain_norm() -> nn.Module:
    def block(before: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, 6, 3, padding=1), nn.BatchNorm2d(6, affine=False), nn.GELU())

    return nn.Sequential(block(3), block(6), block(6), block(6), nn.Flatten(), nn.Linear(6 * 64, 3))


@put("batch renormalisation by its own averages")
def renormalised() -> nn.Module:
    class Renorm(nn.BatchNorm1d):
        """Ioffe 2017, with r and d from the running averages."""

        def forward(self, x: Tensor) -> Tensor:
            r = (x.detach().std(0) / self.running_var.sqrt()).clamp(0.5, 2)
            return super().forward(x) * r

    return Host(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), Renorm(WIDTH)) for _ in range(4)))


@put("functional batch norm with buffers of its own")
def functional_norm() -> nn.Module:
    class Functional(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("var", torch.ones(WIDTH))

        def forward(self, h: Tensor) -> Tensor:
            return super().forward(F.batch_norm(h, self.mean, self.var, training=self.training))

    return Host(*(Functional() for _ in range(4)))


@put("instance norm with running averages", IMAGES)
def instance_norm() -> nn.Module:
    def block(before: int) -> nn.Module:
        norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Conv2d(before, 6, 3, padding=1), norm, nn.ReLU())

    return nn.Sequential(block(3), block(6), block(6), block(6), nn.Flatten(), nn.Linear(6 * 64, 3))


@put("spectral norm, as a hook")
def old_spectral() -> nn.Module:
    return Host(*(nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(4)))


@put("spectral norm, as a parametrization")
def new_spectral() -> nn.Module:
    return Host(*(nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(4)))


@put("weight norm, as a hook")
def old_weight_norm() -> nn.Module:
    class Old(nn.Module):
        """Salimans and Kingma 2016, by a pre-hook that sets the weight."""

        def __init__(self) -> None:
            super().__init__()
            self.g, self.v = nn.Parameter(torch.ones(WIDTH, 1)), nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
            self.register_forward_pre_hook(lambda module, given: module.renew())

        def renew(self) -> None:
            self.weight = self.v * (self.g / self.v.norm(dim=1, keepdim=True))

        def forward(self, h: Tensor) -> Tensor:
            return torch.tanh(F.linear(h, self.weight))

    return Host(*(Old() for _ in range(4)))


@put("weight norm, as a parametrization")
def new_weight_norm() -> nn.Module:
    return Host(*(nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(4)))


@put("orthogonal parametrization")
def orthogonal() -> nn.Module:
    return Host(*(nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(4)))


@put("weights clipped by the forward")
def clipped() -> nn.Module:
    class Clipped(Block):
        def forward(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.clamp_(-0.2, 0.2)
            return super().forward(h)

    return Host(*(Clipped() for _ in range(4)))


@put("lists of past means, one for each block")
def histories() -> nn.Module:
    class History(Block):
        def __init__(self) -> None:
            super().__init__()
            self.past: list[Tensor] = []

        def forward(self, h: Tensor) -> Tensor:
            self.past = [*self.past[-2:], h.detach().mean(0)]
            return super().forward(h - torch.stack(self.past).mean(0))

    return Host(*(History() for _ in range(4)))


@put("switches its own mode")
def switches() -> nn.Module:
    class Switches(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            self.norm.eval()
            return super().forward(self.norm(h))

    return Host(*(Switches() for _ in range(4)))


SPECIMENS = put.specimens
