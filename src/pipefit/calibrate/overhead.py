"""Costs of the executor on this machine, measured by a pipeline with almost no computation."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

import torch
from torch import nn

from pipefit.cost import USUAL, RuntimeCosts, of_plan
from pipefit.ir.op import Op
from pipefit.pipeline.pipeline import Pipeline
from pipefit.profiling import profile_layers
from pipefit.profiling.links import per_core
from pipefit.runtime.collectives import from_first
from pipefit.runtime.session import Session
from pipefit.simulate import simulate
from pipefit.spec import Profile, Topology
from pipefit.spec.options import Parallelism
from pipefit.timeline import Timeline, by_kind

_WIDTH = 8
_MICROBATCHES = 16
_PASSES = 16
_ROUNDS = 7
_REPEATS = 9
_CACHE = 1 << 19
_PARTS = 256
"""Parts of a micro-batch's time in which the cost of a message is found."""

Seconds = Mapping[tuple[str, int], float]
"""Seconds by the name of an operation and its stage."""


def runtime_costs(session: Session, topology: Topology) -> RuntimeCosts:
    """Measures the costs in a few seconds; all ranks call it and get the figures of the first.

    A pipeline of tiny layers runs 1F1B. The cost of an operation is its time in the executor minus the time of the
    same layer in the profiler. The remaining difference between the simulation and these passes is the cost of arrived
    messages: with few cores the threads that carry them have no core of their own.

    Args:
        session: of the run.
        topology: the links between its ranks.

    Returns:
        The costs; the usual ones in a run of one process, or on GPUs, whose work hides them.
    """
    if not session.is_distributed or torch.cuda.is_available():
        return USUAL
    with torch.random.fork_rng(devices=[]):
        x = torch.randn(_MICROBATCHES, _WIDTH)
        layers = [_Layer() for _ in range(session.num_ranks)]
    pipe = Pipeline(
        # A rank frees the layers of other stages, but the profiler needs all.
        nn.Sequential(*copy.deepcopy(layers)),
        loss=nn.functional.mse_loss,
        optimizer=_sgd,
        schedule="1f1b",
        microbatches=_MICROBATCHES,
        stages=[1] * len(layers),
        parallelism=Parallelism(device="cpu"),
    )
    # Shapes are agreed on, and process groups are made, in the first passes.
    pipe.loop.fit(iter([(x, x)] * _PASSES), _PASSES)
    rounds = [_round(pipe, layers, x, topology) for _ in range(_ROUNDS)]
    figures = {name: median(getattr(one, name) for one in rounds) for name in RuntimeCosts._fields if name != "host_s"}
    host_s = {op: median(one.host_s[op] for one in rounds) for op in rounds[0].host_s}
    return RuntimeCosts(**from_first(session, lambda: figures | {"host_s": host_s}))


def _round(pipe: Pipeline, layers: Sequence[nn.Module], x: torch.Tensor, topology: Topology) -> RuntimeCosts:
    """The costs by one profile of the layers and some passes right after it."""
    loss = nn.functional.mse_loss
    profile = profile_layers(layers, x[:1], loss, x[:1], repeats=_REPEATS, threads=None, optimizer=_sgd)
    pipe.loop.fit(iter([(x, x)] * _PASSES), _PASSES)
    timeline = pipe.timeline(last=_PASSES)
    kinds = {key: item.median_s for key, item in by_kind(timeline).items()}
    # Between two passes all ranks compute at once, and the simulation lets them share the cores.
    crowd = per_core(topology, len(layers))
    costs = _costs(kinds, profile)._replace(pass_s=_between_s(timeline) / crowd)
    return costs._replace(arrival_s=arrival_s(timeline, kinds, costs, pipe, profile, topology))


def _costs(kinds: Seconds, profile: Profile) -> RuntimeCosts:
    """Costs by operation: seconds in the executor minus those of the layers, the mean of the stages."""
    layers = list(enumerate(profile.layers))
    work: dict[tuple[str, int], float] = {(Op.LOSS.value, -1): profile.loss_s}
    work |= {(Op.FWD.value, stage): layer.forward_s for stage, layer in layers}
    work |= {(Op.BWD.value, stage): layer.backward_s for stage, layer in layers}
    work |= {(Op.STEP.value, stage): profile.optimizer_of([stage]) for stage, _ in layers}
    beyond: dict[str, list[float]] = {op.value: [] for op in (Op.LOAD, Op.FWD, Op.LOSS, Op.BWD, Op.SEND, Op.STEP)}
    for (op, stage), seconds in kinds.items():
        if op in beyond:
            beyond[op].append(seconds - work.get((op, stage), 0.0))
    host_s = {op: max(fmean(seconds), 1e-6) for op, seconds in beyond.items()}
    host_s[Op.RECOMPUTE.value] = host_s[Op.FWD.value]
    host_s |= dict.fromkeys((Op.BWD_INPUT.value, Op.BWD_WEIGHT.value), host_s[Op.BWD.value])
    return RuntimeCosts(max(host_s[Op.FWD.value], USUAL.overhead_s), host_s[Op.SEND.value], host_s)


def _between_s(timeline: Timeline) -> float:
    """Seconds between two passes on the first rank, the median of all."""
    passes = [[e for e in timeline.events if (e.rank, e.repeat) == (0, k)] for k in range(timeline.num_repeats)]
    return median(min(e.start_s for e in b) - max(e.end_s for e in a) for a, b in pairwise(passes))


def arrival_s(
    timeline: Timeline, kinds: Seconds, costs: RuntimeCosts, pipe: Pipeline, profile: Profile, topology: Topology
) -> float:
    """Seconds of each arrived message for which a simulated pass takes as long as a measured one.

    Args:
        timeline: of the passes.
        kinds: seconds of its instructions, which the simulation is given.
        costs: all other costs.
        pipe: that ran, one layer per stage.
        profile: of its layers.
        topology: the links between its ranks.
    """

    def every(op: Op) -> tuple[float, ...]:
        return tuple(kinds[op.value, stage] for stage in range(len(profile)))

    cost = replace(
        of_plan(profile, pipe.plan, topology, state_per_weight=0.0, runtime=costs),
        forward_s=every(Op.FWD),
        backward_input_s=every(Op.BWD),
        backward_weight_s=(0.0,) * len(profile),
        step_s=every(Op.STEP),
        loss_s=kinds[Op.LOSS.value, -1],
        load_s=kinds[Op.LOAD.value, 0],
        overhead_s=0.0,
        host_s={},
    )
    goal_s = _pass_s(timeline)
    part_s = goal_s / pipe.plan.num_microbatches / _PARTS

    def simulated_s(parts: int) -> float:
        arriving = replace(cost, arrival_s=parts * part_s)
        return _pass_s(simulate(timeline.program, arriving, repeats=timeline.num_repeats))

    return part_s * bisect_left(range(1, _PARTS), goal_s, key=simulated_s)


def _pass_s(timeline: Timeline) -> float:
    """Seconds from the end of a pass to the end of the next, the median of all."""
    return median(b - a for a, b in pairwise(timeline.step_ends_s))


class _Layer(nn.Module):
    """A linear layer, and work after which the caches hold other data and code, as after a real model's layer."""

    image: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.work = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(1, 16), nn.ReLU())
        self.register_buffer("image", torch.randn(1, 16, 8, 8), persistent=False)
        self.register_buffer("cache", torch.ones(_CACHE), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 0 * (self.cache.sum() + self.work(self.image).sum())


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.0)
