"""What the executor itself costs on this machine, measured by a pipeline that has next to nothing to compute."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipefit.ir.op import Op
from pipefit.ir.program import Program
from pipefit.profiling import profile_layers
from pipefit.runtime.session import Session
from pipefit.spec import Plan, Profile, Topology
from pipefit.train.batch import feed_of
from pipefit.train.pipeline import Pipeline
from pipefit.train.predicted import USUAL, RuntimeCosts, cost_of, per_core, predict

__all__ = ["runtime_costs"]

_WIDTH, _PASSES = 8, 40
_FEW, _MANY = 4, 16
_COLD = 1 << 19
_HALVINGS = 10
_SCHEDULES = ("1f1b", "gpipe")


def runtime_costs(session: Session, topology: Topology) -> RuntimeCosts:
    """Measures, in about two seconds; every rank of the run must ask, and all get the first rank's figures.

    Forward, backward, loss, load, send and step are timed in the executor, less what the profiler says of the same tiny
    layer. What the simulator then still lacks of the time of a pass is the receives', as far as it grows with the
    micro-batches, and for the rest that of the pass itself.

    Args:
        session: of the run.
        topology: the links between its ranks.
    """
    if not session.is_distributed or torch.cuda.is_available():
        return USUAL
    random = torch.get_rng_state()
    layers = nn.Sequential(*(nn.Sequential(_Cold(), nn.Linear(_WIDTH, _WIDTH)) for _ in range(session.num_ranks)))
    x = torch.randn(_MANY, _WIDTH)
    alone = profile_layers(
        list(layers), x[:1], nn.functional.mse_loss, x[:1], repeats=_PASSES, threads=None, optimizer=_sgd
    )
    cut_s = _cut_s(x)
    few, many = ([_passes(layers, x[:num], schedule) for schedule in _SCHEDULES] for num in (_FEW, _MANY))
    costs = _rest(_told(alone, many[0].kinds, cut_s), alone, topology, few, many)
    torch.set_rng_state(random)
    return _from_rank_0(costs)


class _Passes(NamedTuple):
    """Mean seconds of a pass on this rank, and median ones of operations by stage; what ran."""

    pass_s: float
    kinds: dict[tuple[str, int], float]
    plan: Plan
    program: Program

    def foretold_s(self, costs: RuntimeCosts, alone: Profile, topology: Topology) -> float:
        """Seconds of a pass, as the simulator has it."""
        return predict(self.program, cost_of(alone, self.plan, topology, 0.0, costs)).makespan_s


def _passes(layers: nn.Sequential, x: torch.Tensor, schedule: str) -> _Passes:
    pipe = Pipeline(
        layers,
        loss=nn.functional.mse_loss,
        optimizer=_sgd,
        schedule=schedule,
        microbatches=len(x),
        stages=[1] * len(layers),
        device="cpu",
    )
    seconds = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        pipe.step(x, x)
        seconds.append(time.perf_counter() - began)
    timeline = pipe.timeline(last=_PASSES - 2)
    kinds = {key: item.median_s for key, item in timeline.by_kind().items()}
    # Not the median: where the threads that carry the messages have no core of their own, a pass now and then stands
    # still for a while, and so do those of a real model.
    usual = sorted(seconds)[: -(_PASSES // 10)]
    return _Passes(statistics.fmean(usual), kinds, pipe.plan, timeline.program)


def _told(alone: Profile, kinds: Mapping[tuple[str, int], float], cut_s: float) -> RuntimeCosts:
    """The first rank's view: it loads, and its loss is another's."""
    last = max(stage for _, stage in kinds)
    forward, backward = (kinds[op.value, 0] for op in (Op.FWD, Op.BWD))
    step = kinds[Op.STEP.value, 0]
    loss = next((seconds for (op, _), seconds in kinds.items() if op == Op.LOSS.value), 0.0)
    first, final = alone.layers[0], alone.layers[last]
    # Beyond the first stage a forward takes a message, whose gradient goes back.
    beyond = (forward - first.forward_s + kinds[Op.FWD.value, last] - final.forward_s) / 2
    host = {
        Op.FWD: beyond,
        Op.RECOMPUTE: beyond,
        Op.BWD: (backward - first.backward_s + kinds[Op.BWD.value, last] - final.backward_s) / 2,
        Op.LOSS: loss - alone.loss_s,
        Op.LOAD: kinds[Op.LOAD.value, 0],
        Op.STEP: step - alone.optimizer_of([0]),
        Op.SEND: kinds[Op.SEND.value, 0],
    }
    host_s = {op.value: max(seconds, 1e-6) for op, seconds in host.items()}
    overhead_s = max(host_s[Op.FWD], USUAL.overhead_s)
    return RuntimeCosts(overhead_s, host_s[Op.SEND], host_s, 0.0, cut_s)


def _rest(
    costs: RuntimeCosts, alone: Profile, topology: Topology, few: list[_Passes], many: list[_Passes]
) -> RuntimeCosts:
    """What the simulator lacks, as the receives' and the pass's own."""

    def receiving(seconds: float) -> RuntimeCosts:
        return costs._replace(host_s={**costs.host_s, Op.RECV.value: seconds})

    def lacking_s(passes: list[_Passes], told: RuntimeCosts) -> float:
        return statistics.fmean(each.pass_s - each.foretold_s(told, alone, topology) for each in passes)

    low, high = 0.0, max(each.pass_s for each in many) / _MANY
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        told = receiving(middle)
        low, high = (middle, high) if lacking_s(many, told) > lacking_s(few, told) else (low, middle)
    told = receiving(low)
    # Between two passes all ranks are at work at once, and the simulation lets them share the cores.
    crowd = per_core(topology, len(alone.layers))
    return told._replace(pass_s=max(lacking_s(many, told) / crowd, 0.0))


def _cut_s(x: torch.Tensor) -> float:
    """Seconds of cutting a batch, for each micro-batch."""
    times_s = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        feed_of([(x, x)], _MANY, 0, "train")
        times_s.append(time.perf_counter() - began)
    return min(times_s) / _MANY


def _from_rank_0(costs: RuntimeCosts) -> RuntimeCosts:
    told: list[Any] = [json.dumps(costs._replace(host_s=dict(costs.host_s))._asdict())]
    dist.broadcast_object_list(told, 0)
    return RuntimeCosts(**json.loads(told[0]))


class _Sweep(torch.autograd.Function):
    """Passes a tensor on, both ways, and reads through a buffer meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.buffer = buffer
        buffer.sum()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.buffer.sum()
        return grad, None, None


class _Cold(nn.Module):
    """Nothing, but afterwards the processor's caches hold other things, as after the layers of a real model."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self._buffer = torch.ones(_COLD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sweep.apply(x, self.anchor, self._buffer)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.0)
