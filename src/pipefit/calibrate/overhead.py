"""Costs of the executor on this machine: seconds that an instruction and a message take beyond their work."""

from __future__ import annotations

from itertools import repeat
from statistics import fmean

import torch
from torch import nn

from pipefit.cost import USUAL, RuntimeCosts
from pipefit.ir.op import Op
from pipefit.pipeline.pipeline import Pipeline
from pipefit.profiling.clock import Clock, median_of
from pipefit.runtime.collectives import from_first
from pipefit.runtime.session import Session
from pipefit.spec.options import Parallelism
from pipefit.stage.accelerator import default_kind
from pipefit.timeline import Timeline, by_kind

_WIDTH = 8
_MICROBATCHES = 16
_PASSES = 16


def runtime_costs(session: Session) -> RuntimeCosts:
    """Measures the costs in about a second; all ranks call it and get the figures of the first.

    A pipeline of tiny layers runs 1F1B. The overhead of an instruction is the time of a forward in the executor minus
    the time of the layer in isolation; the cost of posting a message is the time of a send.

    Args:
        session: of the run.

    Returns:
        The costs; the usual ones in a run of one process, or on GPUs, whose work hides them.
    """
    if not session.is_distributed or default_kind() != "cpu":
        return USUAL
    with torch.random.fork_rng(devices=[]):
        x = torch.randn(_MICROBATCHES, _WIDTH)
        layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(session.num_ranks)]
        layer = nn.Linear(_WIDTH, _WIDTH)
    cpu = torch.device("cpu")
    pipe = Pipeline(
        nn.Sequential(*layers),
        loss=nn.functional.mse_loss,
        optimizer=lambda weights: torch.optim.SGD(weights, 0.0),
        schedule="1f1b",
        microbatches=_MICROBATCHES,
        stages=[1] * len(layers),
        parallelism=Parallelism(device=cpu),
    )
    # Shapes are agreed on, and process groups are made, in the first passes.
    for _ in range(2):
        batches = repeat((x, x), _PASSES)
        pipe.loop.fit(batches, _PASSES)
    timeline = pipe.timeline(last=_PASSES)
    clock = Clock(cpu)
    sample = x[:1]
    layer_s = median_of([clock.seconds(lambda: layer(sample)) for _ in range(_PASSES)])
    return RuntimeCosts(*from_first(session, lambda: costs_of(timeline, layer_s)))


def costs_of(timeline: Timeline, layer_s: float) -> tuple[float, float]:
    """The overhead of an instruction and the cost of posting a message, in seconds.

    Args:
        timeline: of passes with one layer on each stage.
        layer_s: seconds of the layer in isolation.
    """
    forwards = []
    sends = []
    for (op, _), item in by_kind(timeline).items():
        if op == Op.FWD.value:
            forwards.append(item.median_s)
        elif op == Op.SEND.value:
            sends.append(item.median_s)
    overhead_s = max(fmean(forwards) - layer_s, USUAL.overhead_s)
    return overhead_s, fmean(sends)
