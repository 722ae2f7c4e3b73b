"""Batch norms of every kind that people write, for samples × CHANNELS × LENGTH."""

from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

CHANNELS, LENGTH = 4, 3


class ActAfter(nn.BatchNorm1d):
    """As timm's `BatchNormAct2d`."""

    def __init__(self, channels: int, **options: object) -> None:
        super().__init__(channels, **options)  # type: ignore[arg-type]
        self.drop, self.act = nn.Identity(), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        share = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                share = 1.0 / float(self.num_batches_tracked)
        own = self.training or self.running_mean is None
        normal = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, own, share, self.eps)
        return self.act(self.drop(normal))


class ActBefore(nn.BatchNorm1d):
    """The norm does not see what the module is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.silu(x)) * 2


class Reads(nn.BatchNorm1d):
    """Its output depends on the averages that its norm has just changed."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.running_mean.clone()  # type: ignore[union-attr]
        normal = super().forward(x)
        drift = self.running_mean - before
        return normal * self.running_var.sqrt()[:, None] + drift[:, None]  # type: ignore[union-attr]


class Borrows(nn.Module):
    """Uses the averages of a norm by torch's function, also without calling its module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        x = torch.tanh(norm(x))
        return F.batch_norm(x * 3, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 0.3, norm.eps)


class Twice(nn.Module):
    """Calls one norm two times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.norm(x)) + x)


class ByHand(nn.BatchNorm1d):
    """Has its own formula; torch's function is not called."""

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean((0, 2)), x.var((0, 2))
        if self.training:
            with torch.no_grad():
                self.running_mean = 0.9 * self.running_mean + 0.1 * mean
                self.running_var.mul_(0.9).add_(0.1 * variance)  # type: ignore[union-attr]
                self.num_batches_tracked += 1
        else:
            mean, variance = self.running_mean, self.running_var  # type: ignore[assignment]
        return (x - mean[:, None]) / (variance[:, None] + self.eps).sqrt()


class NoNorm(nn.Module):
    """Keeps a running mean, and is no batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean((0, 2))
        return x - self.running_mean[:, None]


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrised() -> nn.Module:
    """A norm whose weight is a function of another one."""
    norm = nn.BatchNorm1d(CHANNELS)
    parametrize.register_parametrization(norm, "weight", Doubled())
    return norm


def hooked() -> nn.Module:
    """A norm with hooks before and after it."""
    norm = nn.BatchNorm1d(CHANNELS)
    norm.register_forward_pre_hook(lambda module, given: (given[0] * 2 + 1,))
    norm.register_forward_hook(lambda module, given, output: torch.tanh(output))
    return norm


def _patched(self: nn.BatchNorm1d, x: Tensor) -> Tensor:
    return torch.sigmoid(nn.BatchNorm1d.forward(self, x))


def patched() -> nn.Module:
    """A norm whose own forward was replaced on the object."""
    norm = nn.BatchNorm1d(CHANNELS)
    norm.forward = MethodType(_patched, norm)  # type: ignore[method-assign]
    return norm


def frozen() -> nn.Module:
    """A norm in evaluation mode inside a model that trains."""
    norm = ActAfter(CHANNELS)
    norm.running_mean.add_(0.3)  # type: ignore[union-attr]
    return norm.eval()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm1d(CHANNELS),
    "no weight": lambda: nn.BatchNorm1d(CHANNELS, affine=False),
    "cumulative": lambda: nn.BatchNorm1d(CHANNELS, momentum=None),
    "untracked": lambda: nn.BatchNorm1d(CHANNELS, track_running_stats=False),
    "act after": lambda: ActAfter(CHANNELS),
    "act after, cumulative": lambda: ActAfter(CHANNELS, momentum=None, affine=False),
    "act before": lambda: ActBefore(CHANNELS, momentum=0.4),
    "parametrised": parametrised,
    "hooked": hooked,
    "patched": patched,
    "twice": Twice,
    "reads": lambda: Reads(CHANNELS),
    "by hand": lambda: ByHand(CHANNELS),
    "no norm": NoNorm,
    "frozen": frozen,
    "instance": lambda: nn.InstanceNorm1d(CHANNELS, affine=True, track_running_stats=True),
}

ONLY_WHOLE: dict[str, Callable[[], nn.Module]] = {"borrows": Borrows}
"""Kinds for which the norms' inputs cannot be seen by hooks of modules."""
