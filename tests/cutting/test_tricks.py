"""A search for models that fool a cut: of whatever tricks they are made, they train as in plain torch, or are refused.

The reference is `tests.zoo.plain`, a loop of torch that shares no code with pipefit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pipefit as pf
from pipefit.errors import PipefitError
from tests.zoo.hand import WIDTH, Block
from tests.zoo.plain import LEARNING_RATE, Trained, bounded, difference, train

pytestmark = pytest.mark.slow


class Mixed(nn.Module):
    """Blocks, each with tricks of its own, and places that all of them see."""

    def __init__(self, tricks: tuple[str, ...]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Tricky(trick) for trick in tricks)
        self.shared: dict[str, Any] = {}
        for block in self.blocks:
            block.__dict__["shared"] = self.shared

    def forward(self, x: Tensor) -> Any:
        h = first = self.embed(x)
        self.shared["mean"] = torch.zeros(WIDTH, dtype=h.dtype)
        tricks = [block.trick for block in self.blocks]
        mask = h.norm(dim=-1, keepdim=True) > 10 if "mask" in tricks else None
        for block in self.blocks:
            given_one = {"mask": mask, "skip": first, "flag": "bool" in tricks and bool((first.abs() > 12).any())}
            h = block(h, given_one.get(NEEDS.get(block.trick, "")))
        return {"output": self.head(h), "hidden": h} if "dict" in tricks else self.head(h)


NEEDS = {"mask": "mask", "skip": "skip", "bool": "flag"}


class Tricky(Block):
    """One layer with one trick."""

    def __init__(self, trick: str) -> None:
        super().__init__()
        self.trick = trick
        self.norm = nn.BatchNorm1d(WIDTH) if trick == "norm" else nn.Identity()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0
        self.last: Any = None
        if trick == "hook":
            self.register_forward_hook(lambda module, given_one, output: 1.5 * output)
        if trick == "frozen":
            self.linear.requires_grad_(False)

    def forward(self, h: Tensor, extra: Any = None) -> Tensor:
        return getattr(self, f"_{self.trick}", self._plain)(h, extra)

    def _plain(self, h: Tensor, extra: Any) -> Tensor:
        return torch.tanh(self.linear(self.norm(h)))

    def _leaves(self, h: Tensor, extra: Any) -> Tensor:
        self.shared["mean"] = h.detach().mean(0)
        return self._plain(h, extra)

    def _finds(self, h: Tensor, extra: Any) -> Tensor:
        return self._plain(h + self.shared["mean"], extra)

    def _counts(self, h: Tensor, extra: Any) -> Tensor:
        self.calls += 1
        return self._plain(h, extra) * min(1.0, self.calls / 20)

    def _remembers(self, h: Tensor, extra: Any) -> Tensor:
        before = 0.0 if self.last is None else self.last
        self.last = h.detach().mean()
        return self._plain(h + before, extra)

    def _averages(self, h: Tensor, extra: Any) -> Tensor:
        if self.training:
            self.mean.lerp_(h.detach().mean(0), 0.1)
        return self._plain(h - self.mean.clone(), extra)

    def _mask(self, h: Tensor, mask: Tensor) -> Tensor:
        return self._plain(h, None).masked_fill(mask, 0.5)

    def _skip(self, h: Tensor, first: Tensor) -> Tensor:
        return self._plain(h, None) + first

    def _bool(self, h: Tensor, flag: bool) -> Tensor:
        return -self._plain(h, None) if flag else self._plain(h, None)

    def _decides(self, h: Tensor, extra: Any) -> Tensor:
        return self._plain(h, extra) if h.abs().max() > 3 else self._plain(h, extra) - 1

    def _in_place(self, h: Tensor, extra: Any) -> Tensor:
        return torch.tanh(self.linear(h).mul_(2))

    def _detaches(self, h: Tensor, extra: Any) -> Tensor:
        return self._plain(h.detach(), extra) + h


TRICKS = ("plain", "norm", "hook", "frozen", "dict", "leaves", "finds", "counts", "remembers", "averages", "mask",
          "skip", "bool", "decides", "in_place", "detaches")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Training:
    """A model and a way to train it."""

    tricks: tuple[str, ...]
    stages: int
    schedule: str
    micro_batches: int

    def model(self) -> Mixed:
        torch.manual_seed(0)
        return Mixed(self.tricks).double()

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Other data than the example, on its own scale, a small and a large one."""
        generator = torch.Generator().manual_seed(1)
        shape = {"generator": generator, "dtype": torch.float64}
        return [(scale * torch.randn(9, 8, **shape), torch.randn(9, **shape)) for scale in (1.0, 0.05, 20.0)]


trainings = st.builds(
    Training,
    tricks=st.lists(st.sampled_from(TRICKS), min_size=2, max_size=5).map(tuple),
    stages=st.sampled_from((2, 3)),
    schedule=st.sampled_from(("1f1b", "gpipe")),
    micro_batches=st.sampled_from((1, 3)),
)


@settings(max_examples=settings().max_examples * 2 // 5, suppress_health_check=[HealthCheck.too_slow])
@given(trainings)
def test_a_model_of_any_tricks_trains_exactly_or_is_refused(training: Training) -> None:
    wanted = train(training.model(), bounded, training.batches(), training.micro_batches)
    example = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        cut = pf.cut(training.model(), example)
    except PipefitError:
        return
    pipe = pf.Pipeline(
        cut,
        loss=bounded,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        stages=min(training.stages, len(cut)),
        schedule=training.schedule,
        microbatches=training.micro_batches,
    )
    found = Trained([], [])
    for x, y in training.batches():
        found.losses.append(pipe.step(x, y))
        found.states.append({name: value.clone() for name, value in pipe.state_dict().items()})
    pipe.close()
    apart = difference(wanted, found)
    assert apart.size < 1e-9, f"{training}: {apart}"
