"""A rank that becomes slow while a run trains: steps without moves, with `rebalance`, and by the best plan for it.

A layer only waits, as long as the rank takes for it. So speeds are exact on any machine, and few cores serve many
ranks.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

import pipefit as pf
from benchmarks.unequal import SAMPLES, Wait, machine, profile
from pipefit.pipeline.rebalancing import Rebalancer
from pipefit.pipeline.request import Decision
from pipefit.planner import plan as search
from pipefit.runtime.faults import noted
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.spec import Plan

SHARE = 0.15
"""Of the seconds of a layer of `benchmarks.unequal`."""

_slowness = [1.0]
"""Of this rank, now."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return Wait.apply(self.linear(x), SHARE * _slowness[0])  # type: ignore[no-any-return]


class Run(NamedTuple):
    """A training: its losses, the seconds of its steps, and the notes of its moves."""

    losses: list[float]
    seconds: list[float]
    notes: list[dict[str, object]]


def planned(slowness: tuple[float, ...], layers: int, microbatches: int) -> Plan:
    """The best plan by 1F1B for ranks of these speeds."""
    sizes = {"global_batch": SAMPLES * microbatches, "microbatch_sizes": [SAMPLES]}
    depths = [len(slowness)]
    return search(profile(layers), machine(slowness), schedules=["1f1b"], depths=depths, **sizes)


def trained(plan: Plan, rebalance: bool, slow: int, times: float, when: int, steps: int) -> Run:
    """Trains on this rank, which becomes slow after some steps if it is the one."""
    torch.manual_seed(0)
    layers = plan.partition.num_layers
    spread = pf.Parallelism(rebalance=rebalance)
    pipe = pf.Pipeline(
        nn.Sequential(*(Layer() for _ in range(layers))),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.AdamW(params, 0.01),
        plan=Decision(plan, profile(layers)),
        parallelism=spread,
    )
    moments = [time.perf_counter()]

    def step(record: pf.Record) -> None:
        moments.append(time.perf_counter())
        if record.step >= when and current().rank == slow:
            _slowness[0] = times

    _slowness[0] = 1.0
    x = torch.randn(SAMPLES * plan.num_microbatches, 4, dtype=torch.float64)
    losses = pipe.fit([(x, x.flip(0))] * steps, callbacks=[step])
    folder = current().folder
    notes = noted(folder) if folder else []
    return Run(losses, [after - before for before, after in pairwise(moments)], notes)


class Timed(Rebalancer):
    """The policy, with the seconds that it has taken."""

    own_s = 0.0

    def step(self, record: pf.Record) -> None:
        began = time.perf_counter()
        super().step(record)
        self.own_s += time.perf_counter() - began


def alternating(repeats: int, width: int) -> tuple[list[tuple[float, float]], float]:
    """Seconds of 16 steps of two trainings, without and with the policy, alternating; and of the policy in all."""
    pipes = []
    for rebalance in (False, True):
        torch.manual_seed(0)
        pipe = pf.Pipeline(
            nn.Sequential(*(nn.Linear(width, width) for _ in range(8))),
            loss=nn.MSELoss(),
            optimizer=lambda params: torch.optim.SGD(params, 0.01),
            stages=2,
            microbatches=8,
            parallelism=pf.Parallelism(rebalance=rebalance),
        )
        pipes.append(pipe)
    policy = pipes[1].rebalancer = Timed(pipes[1], Decision(pipes[1].plan))
    x = torch.randn(256, width)
    found = []
    for _ in range(repeats):
        pair = []
        for pipe in pipes:
            began = time.perf_counter()
            pipe.fit([(x, x)] * 16)
            pair.append(time.perf_counter() - began)
        found.append((pair[0], pair[1]))
    return found, policy.own_s


def main(
    *, layers: int = 8, microbatches: int = 8, times: float = 3.0, when: int = 50, steps: int = 120, repeats: int = 15
) -> None:
    """Trains with a rank that becomes slow, and measures steps before and after; then the cost where nothing moves."""
    slow = 1
    speeds = tuple(times if rank == slow else 1.0 for rank in range(3))
    first = planned((1.0, 1.0, 1.0), layers, microbatches)
    best = planned(speeds, layers, microbatches)
    print(f"{layers} layers on 3 ranks; rank {slow} takes {times:g} × as long from step {when} on")

    def run(plan: Plan, rebalance: bool, since: int) -> Run:
        return launch(trained, 3, plan, rebalance, slow, times, since, steps, threads=1, quiet=True)[0]

    still = run(first, False, when)
    moving = run(first, True, when)
    known = run(best, False, 0)
    for note in moving.notes:
        print(
            f"  after step {note['step']}: {note['move']}; {note['why']} (-{note['gain']:.0%}, {note['seconds']:.3f} s)"
        )
    end = slice(-(steps - when) // 3, None)
    best_s = statistics.median(known.seconds[end])
    rows = {
        "before": moving.seconds[8:when],
        "after, without moves": still.seconds[end],
        "after, rebalance": moving.seconds[end],
        "after, best plan": known.seconds[end],
    }
    for title, seconds in rows.items():
        median_s = statistics.median(seconds)
        print(f"  {title:22} {median_s:6.3f} s per step, {best_s / median_s:5.1%} of the best plan's throughput")
    apart = max(abs(a - b) for a, b in zip(still.losses, moving.losses, strict=True))
    print(f"  losses differ by at most {apart:.1e} from those without moves, in float64")
    pairs, own_s = launch(alternating, 2, repeats, 512, threads=1, quiet=True)[0]
    without, others = (statistics.median(column) / 16 for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    share = own_s / sum(pair[1] for pair in pairs)
    print(f"where nothing moves: {1e3 * without:.2f} ms per step, with rebalance {1e3 * others:.2f} ms: {ratio:.3f} ×")
    print(f"exchanging times and deciding took {share:.1%} of the time")
