"""Trainings whose layers move by themselves; functions that a rank can import by name."""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from tests.pipeline.rearranging_jobs import LAYERS, MICROBATCHES, SAMPLES, Trained, falling, loss, optimizer_for
from tests.testing.equality_models import make
from torch import Tensor, nn

import pipefit as pf
from pipefit.errors import PlanError
from pipefit.pipeline.rebalancing import Rebalancer
from pipefit.pipeline.request import Decision
from pipefit.planner import by_hand
from pipefit.runtime.faults import noted
from pipefit.runtime.session import current
from pipefit.spec import Layer, Profile

SLOW, WHEN, STEPS = 1, 50, 96
EACH_S = 10.0
"""Seconds of every layer on a rank that is not slow."""


class Measured(Rebalancer):
    """Layers that have waited for a clock of the test: ranks are as fast as it says, on any machine."""

    def figures_of(self, passes: Sequence[Any]) -> list[Any]:
        plan = self._pipe.plan
        step = self._pipe.num_updates
        times = []
        for stage, (spec, ranks) in enumerate(zip(plan.partition.stages, plan.placement.ranks, strict=True)):
            if self._pipe.rank in ranks:
                slow = 3.0 if self._pipe.rank == SLOW and step > WHEN else 1.0
                times.append((stage, EACH_S * len(spec.layers) * slow))
        measured, _, period_s, move_s = super().figures_of(passes)
        assert period_s > 0 and [stage for stage, _ in measured] == [stage for stage, _ in times]
        return [times, 0.0, 1000.0, move_s]


class Run(NamedTuple):
    """A training that has ended.

    Attributes:
        trained: losses and weights.
        counts: layers of each stage, before and after.
        shares: of the copies at the end.
        lines: of the log.
        notes: in the folder of the run.
    """

    trained: Trained
    counts: list[list[int]]
    shares: tuple[int, ...]
    lines: list[str]
    notes: list[dict[str, Any]]


class Warnings(logging.Handler):
    """The lines that a user sees."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trained(
    name: str,
    ranks: int,
    rebalance: bool,
    spread: Mapping[str, Any] = MappingProxyType({}),
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> Run:
    """A training of some steps."""
    seen = Warnings()
    logging.getLogger("pipefit.rebalance").addHandler(seen)
    torch.manual_seed(0)
    model, example = make(name)
    third = EACH_S / 3
    profile = Profile("model", 1, tuple(Layer(f"layer {i}", third, third, third, 0, 0, 8) for i in range(LAYERS)))
    plan = by_hand(LAYERS, num_ranks=ranks, schedule="1f1b", num_microbatches=MICROBATCHES, **spread)
    decision = Decision(plan, profile)
    pipe = pf.Pipeline(
        model,
        plan=decision,
        loss=loss,
        optimizer=optimizer or optimizer_for(name),
        updates=pf.Updates(seed=7, scheduler=falling, clip_norm=1.0),
        parallelism=pf.Parallelism(rebalance=rebalance),
    )
    if rebalance:
        pipe.rebalancer = Measured(pipe, decision)
    counts = [[len(stage.layers) for stage in pipe.plan.partition.stages]]
    losses = pipe.fit([example(SAMPLES, step) for step in range(STEPS)])
    counts.append([len(stage.layers) for stage in pipe.plan.partition.stages])
    notes = noted(pipe.session.folder) if pipe.session.folder else []
    return Run((losses, pipe.state_dict()), counts, pipe.plan.shares, seen.lines, notes)


class Counting(nn.Linear):
    """A layer with a state in no parameter or buffer."""

    def get_extra_state(self) -> Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: Tensor) -> None:
        pass


def by_rank(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer with other settings on each rank: its groups cannot be joined."""
    made = torch.optim.SGD(parameters, 0.05, momentum=0.1)
    made.param_groups[0]["momentum"] += 0.1 * current().rank
    return made


def troubled() -> tuple[list[str], Run]:
    """The messages of two trainings that are refused, and one in which a move is."""
    cases: list[tuple[Any, Mapping[str, Any]]] = [(nn.Linear, {"replicas": (2,), "shard": "optimizer"}), (Counting, {})]
    messages = []
    for layer, spread in cases:
        model, _ = make("plain")
        model[4] = layer(4, 6).double()
        plan = by_hand(LAYERS, num_ranks=2, schedule="1f1b", num_microbatches=MICROBATCHES, **spread)
        moving = pf.Parallelism(rebalance=True)
        try:
            pf.Pipeline(model, plan=plan, loss=loss, optimizer=optimizer_for("plain"), parallelism=moving)
        except PlanError as problem:
            messages.append(str(problem))
    return messages, trained("plain", 2, True, optimizer=by_rank)
