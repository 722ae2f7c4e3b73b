"""Training in plain torch, the reference of the zoo: a loop over micro-batches. Nothing of pipefit is used here.

One thing is not torch's own: a mini-batch in several micro-batches has no definition of batch norm in torch. It is that
of GPipe (Huang et al. 2019, section 2.2): each micro-batch is normalised by its own statistics, and the running
averages move once, by the statistics of the whole mini-batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Loss = Callable[[Any, Any], Tensor]
Batch = tuple[Any, Any]

LEARNING_RATE = 0.05


class Trained(NamedTuple):
    """The result of a training.

    Attributes:
        losses: of each step, the mean over its samples.
        states: weights and buffers after each step.
    """

    losses: list[float]
    states: list[dict[str, Tensor]]


class _Statistics(NamedTuple):
    """A call of a batch norm: what it normalised, and the share of these statistics in the new averages."""

    values: Tensor
    mean: Tensor
    var: Tensor
    share: float


class WholeBatchAverages(TorchFunctionMode):
    """The batch norms of a model in training, their running averages left alone until the mini-batch is complete."""

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        super().__init__()
        self._means = {id(norm.running_mean) for norm in norms}
        self._calls: list[list[_Statistics]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is not F.batch_norm:
            return func(*args, **named)
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {"training": False, "momentum": 0.1} | dict(zip(names, args, strict=False)) | named
        mean, var = given.get("running_mean"), given.get("running_var")
        if not given["training"] or id(mean) not in self._means:
            return func(*args, **named)
        channels_first = given["input"].detach().transpose(0, 1).flatten(1)
        self._calls[-1].append(_Statistics(channels_first, mean, var, given["momentum"]))
        return func(**{**given, "running_mean": None, "running_var": None})

    def begin(self) -> None:
        """Begins a micro-batch."""
        self._calls.append([])

    @torch.no_grad()
    def commit(self) -> None:
        """Moves the running averages by the mini-batch: once for each call of a forward."""
        for parts in zip(*self._calls, strict=True):
            values = torch.cat([part.values for part in parts], 1)
            parts[0].mean.lerp_(values.mean(1).to(parts[0].mean.dtype), parts[0].share)
            parts[0].var.lerp_(values.var(1).to(parts[0].var.dtype), parts[0].share)
        self._calls.clear()


def train(model: nn.Module, loss: Loss, batches: Iterable[Batch], micro_batches: int) -> Trained:
    """Trains a model, which is changed, by SGD on some batches, each in several micro-batches."""
    trained = Trained([], [])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    norms = [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    averages = WholeBatchAverages([norm for norm in norms if norm.running_mean is not None])
    counted = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
    for batch in batches:
        counters = [(counter, counter.clone()) for counter in counted]
        total = 0.0
        for x, y, share in split(batch, micro_batches):
            for counter, value in counters:
                counter.copy_(value)
            averages.begin()
            with averages:
                part = loss(call(model, x), y) * share
            if part.requires_grad:
                part.backward()
            total += part.item()
        averages.commit()
        optimizer.step()
        optimizer.zero_grad()
        trained.losses.append(total)
        trained.states.append(state_of(model))
    return trained


def split(batch: Batch, micro_batches: int) -> list[tuple[Any, Any, float]]:
    """The micro-batches of a batch, with their shares of its samples; the larger ones come first."""
    if micro_batches == 1:
        return [(*batch, 1.0)]
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    samples = len(leaves[0])
    parts = []
    for number in range(micro_batches):
        x, y = pytree.tree_map_only(Tensor, lambda leaf, at=number: leaf.tensor_split(micro_batches)[at], batch)
        size = len(leaves[0].tensor_split(micro_batches)[number])
        parts.append((x, y, size / samples))
    return parts


def call(model: nn.Module, x: Any) -> Any:
    """The output of a model: a dict has its keyword arguments, a tuple its positional ones."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of weights and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


# ------------------------------------------------------------------------------------------------------- the zoo's loss


def leaves_of(output: Any) -> list[Tensor]:
    """The tensors of an output, in whatever it wraps them."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [leaf for key in sorted(output, key=str) for leaf in leaves_of(output[key])]
    if isinstance(output, list | tuple):
        return [leaf for part in output for leaf in leaves_of(part)]
    if dataclasses.is_dataclass(output):
        return [leaf for one in dataclasses.fields(output) for leaf in leaves_of(getattr(output, one.name))]
    if hasattr(output, "to_dense"):
        return [output.to_dense()]
    return []


def bounded(output: Any, y: Tensor) -> Tensor:
    """A loss of any output and one number per sample, whose gradient is bounded whatever the scale of the output."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves_of(output):
        if leaf.is_sparse:
            leaf = leaf.to_dense()
        if leaf.is_complex():
            leaf = torch.view_as_real(leaf)
        if not leaf.is_floating_point() or not leaf.requires_grad:
            continue
        wanted = 0.0
        if leaf.dim() and len(leaf) == len(y):
            wanted = y.view(-1, *[1] * (leaf.dim() - 1))
        total = total + torch.log1p((leaf - wanted).square()).mean()
    return total


# --------------------------------------------------------------------------------------------------------- differences


class Difference(NamedTuple):
    """The largest difference between two trainings, and where it is."""

    size: float
    place: str

    def __str__(self) -> str:
        """The difference for people."""
        return f"{self.place} differs by {self.size:.1e}"


def difference(wanted: Trained, found: Trained) -> Difference:
    """The largest difference, relative to the largest element of each tensor where that is more than 1."""
    worst = Difference(0.0, "nothing")
    for step, (a, b) in enumerate(zip(wanted.losses, found.losses, strict=True), 1):
        worst = max(worst, Difference(_apart(torch.tensor(a), torch.tensor(b)), f"the loss of step {step}"))
    for step, (mine, others) in enumerate(zip(wanted.states, found.states, strict=True), 1):
        for name, value in mine.items():
            if name not in others:
                return Difference(float("inf"), f"{name} is missing; it")
            worst = max(worst, Difference(_apart(value, others[name]), f"{name} after step {step}"))
    return worst


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if not a.numel() or torch.equal(a, b):
        return 0.0
    a, b = (one.to(torch.complex128 if one.is_complex() else torch.float64) for one in (a, b))
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    finite = a.isfinite()
    if not finite.any():
        return 0.0
    return float((a - b)[finite].abs().max() / a[finite].abs().max().clamp(min=1))


def sensitivity(model: nn.Module, loss: Loss, batches: Sequence[Batch], micro_batches: int, wanted: Trained) -> float:
    """The change of a training when its first weights are rounded otherwise: what no two orders of summing agree on."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            rounding = 4 * torch.finfo(parameter.dtype).eps
            parameter.mul_((1 + rounding * noise).to(parameter.dtype))
    return difference(wanted, train(other, loss, batches, micro_batches)).size
