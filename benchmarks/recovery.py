"""Faults: seconds from a death to the next step, in place or by a restart; the cost of a lost rank, and of copies."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pipefit as pf
from pipefit.checkpoint.memory import EVERY
from pipefit.cost import CostModel
from pipefit.models import gpt
from pipefit.models.examples import mean_cross_entropy
from pipefit.pipeline.callbacks import Record
from pipefit.planner import by_hand, plan_without
from pipefit.runtime.launch import launch
from pipefit.runtime.repairs import REPAIR
from pipefit.runtime.session import current
from pipefit.schedules import program_of
from pipefit.simulate import simulate
from pipefit.spec import Plan
from pipefit.units import format_bytes, format_seconds

WIDTHS = (64, 512, 1448)
"""Of four square layers; with Adam a stage's state is three times its weights."""

GPT = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 32_768, "context": 32, "tied": False}
"""A model of 135 M parameters, under SGD."""

_LAYERS = 4
_LAYOUTS = ((2, 1), (4, 1), (4, 2))
"""Ranks, and copies of the pipeline."""

_DELAYS_S = (0.04, 0.02, 0.02)
"""Of a forward and of the halves of a backward for inputs and for weights; of the first stage both are for weights."""

_DELAYED = ((2, 2, 4), (3, 2, 3))
"""Stages, copies, and micro-batches of each copy."""


class CopyRow(NamedTuple):
    """The cost of copies of a training in memory.

    Attributes:
        num_bytes: of the weights and optimizer states.
        without_s: median step without copies.
        with_s: median step with a copy after each.
    """

    num_bytes: int
    without_s: float
    with_s: float


class Task(NamedTuple):
    """A training.

    Attributes:
        width: of four square layers; 0: the GPT.
        copies: of the pipeline.
        steps: in all.
        dies: the step after which the last rank dies; 0: none.
        place: a folder for times; "": no checkpoints.
    """

    width: int
    copies: int
    steps: int
    dies: int = 0
    place: str = ""


def _write(path: Path, number: float) -> None:
    path.write_text(repr(number))


def _model(task: Task) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    """The model, its loss and a batch."""
    torch.manual_seed(0)
    if task.width:
        model = nn.Sequential(*(nn.Linear(task.width, task.width) for _ in range(_LAYERS)))
        x = torch.randn(16, task.width)
        return model, nn.MSELoss(), (x, x)
    words = torch.randint(0, GPT["vocab"], (2, 4, GPT["context"]))
    return gpt(dropout=0.0, **GPT), mean_cross_entropy, (words[0], words[1])


def _train(task: Task) -> list[float]:
    """Trains; returns the seconds of the steps."""
    model, loss, batch = _model(task)
    parallelism = pf.Parallelism(data_parallel=task.copies)
    optimizer: Any = torch.optim.Adam
    if not task.width:
        optimizer = torch.optim.SGD
    pipe = pf.Pipeline(model, loss=loss, optimizer=optimizer, microbatches=4, parallelism=parallelism)
    place = Path(task.place)
    ends = []

    def note(record: Record) -> None:
        ends.append(time.time())
        if not task.dies:
            return
        start = current().start
        if record.step == task.dies and current().rank == start.full - 1 and not start.restart:
            _write(place / "step", statistics.median(after - before for before, after in pairwise(ends[1:])))
            _write(place / "killed", time.time())
            os.kill(os.getpid(), signal.SIGKILL)
        if current().rank == 0 and (record.step > task.dies or start.restart) and not (place / "next").exists():
            _write(place / "next", time.time())

    saves = [pf.Checkpoints(pipe, place / "checkpoints", every=4)] if task.place and task.width else []
    pipe.fit([batch] * task.steps, callbacks=[note, *saves])
    return [after - before for before, after in pairwise(ends[1:])]


def go_on_s(ranks: int, task: Task, in_place: bool) -> tuple[float, float]:
    """Seconds from the death of the last rank to the next finished step, and the median of a step before it."""
    os.environ[REPAIR] = str(int(in_place))
    with tempfile.TemporaryDirectory() as place:
        launch(_train, ranks, task._replace(place=place), threads=1, quiet=True, recover=1)
        step, died, went_on = (float(Path(place, name).read_text()) for name in ("step", "killed", "next"))
    return went_on - died, step


def copy_cost(width: int, repeats: int) -> CopyRow:
    """Steps of two copies of a stage with and without copies in memory, in alternating runs."""
    seconds: dict[str, list[float]] = {"0": [], "1": []}
    for _ in range(repeats):
        for every, found in seconds.items():
            os.environ[EVERY] = every
            found += launch(_train, 2, Task(width, 2, 30), threads=1, quiet=True, recover=1)[0]
    del os.environ[EVERY]
    return CopyRow(12 * _LAYERS * width * (width + 1), *(statistics.median(found) for found in seconds.values()))


class _Delay(torch.autograd.Function):
    """The identity, whose forward and backward wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Delayed(nn.Module):
    """A layer that waits instead of computing, so that ranks need no cores of their own."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        _, self._input_s, self._weight_s = _DELAYS_S
        if is_first:
            self._input_s = 0.0
            self._weight_s = _DELAYS_S[1] + _DELAYS_S[2]

    def forward(self, x: Tensor) -> Tensor:
        weight = _Delay.apply(self.weight, 0.0, self._weight_s)
        return _Delay.apply(x, _DELAYS_S[0], self._input_s) @ weight


def _delayed_step(plan: Plan) -> float:
    """The median step of delayed layers, one for each stage."""
    layers = [Delayed(is_first=stage == 0) for stage in range(len(plan.partition.stages))]
    pipe = pf.Pipeline(nn.Sequential(*layers), plan=plan, loss=nn.MSELoss(), optimizer=torch.optim.SGD)
    x = torch.randn(plan.num_microbatches, 4)
    ends = []
    pipe.fit([(x, x)] * 6, callbacks=[lambda record: ends.append(time.perf_counter())])
    return statistics.median(after - before for before, after in pairwise(ends[1:]))


def lost_rank(p: int, d: int, m: int) -> list[tuple[str, Plan, float, float]]:
    """The plan of copies of a pipeline, and those without a rank of each stage: schedule, predicted, measured step."""
    forward_s, input_s, weight_s = _DELAYS_S
    inputs_s = (0.0, *(input_s,) * (p - 1))
    weights_s = (input_s + weight_s, *(weight_s,) * (p - 1))
    cost = CostModel((forward_s,) * p, inputs_s, weights_s)
    plan = by_hand(p, num_ranks=p * d, replicas=(d,) * p, schedule="1f1b", num_microbatches=m * d)
    plans = {"undisturbed": plan}
    for stage in range(p):
        plans[f"without a rank of stage {stage}"] = plan_without(plan, stage, cost=cost)
    found = []
    for what, made in plans.items():
        predicted = simulate(program_of(made), cost, memory=False).makespan_s
        measured = launch(_delayed_step, made.placement.num_ranks, made, threads=1, quiet=True)
        found.append((what, made, predicted, max(measured)))
    return found


def main(repeats: int = 3, large: bool = False) -> None:
    """Prints the tables; `repeats` runs of each row.

    Args:
        repeats: runs of each row.
        large: also the GPT of 135 M parameters on four ranks, which needs 8 GB.
    """
    print("from a death to the end of the next step, median (least)")
    tasks = [(f"{ranks} ranks, copies: {copies}", ranks, Task(64, copies, 30, 20)) for ranks, copies in _LAYOUTS]
    if large:
        tasks.append(("GPT of 135 M, 4 ranks, 2 copies", 4, Task(0, 2, 5, 3)))
    for what, ranks, task in tasks:
        ways = {"by a restart": False}
        if task.copies > 1:
            ways = {"in place": True, **ways}
        words = []
        for way, in_place in ways.items():
            times, steps = zip(*(go_on_s(ranks, task, in_place) for _ in range(repeats)), strict=True)
            middle, least = format_seconds(statistics.median(times)), format_seconds(min(times))
            words.append(f"{way} {middle:>9} ({least:>8}) with steps of {format_seconds(statistics.median(steps)):>8}")
        print(f"{what:<32} {', '.join(words)}", flush=True)
    print("\na step before and after the loss of a rank, layers that wait instead of computing")
    for sizes in _DELAYED:
        print("{} stages, {} copies, {} micro-batches each".format(*sizes))
        for what, plan, predicted, measured in lost_rank(*sizes):
            shown = format_seconds(predicted), format_seconds(measured)
            print(f"  {what:<26}{plan.schedule:<9}predicted {shown[0]:>8}, measured {shown[1]:>8}", flush=True)
    print("\nstate             step without copies   with a copy each")
    for width in WIDTHS:
        row = copy_cost(width, repeats)
        print(f"{format_bytes(row.num_bytes):<18}{format_seconds(row.without_s):>19}{format_seconds(row.with_s):>19}")
