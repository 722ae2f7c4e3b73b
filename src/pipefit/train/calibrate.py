"""What the executor itself costs on this machine, measured by a pipeline that has next to nothing to compute."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipefit.ir.op import Op
from pipefit.profiling import profile_layers
from pipefit.runtime.session import Session
from pipefit.spec import Profile
from pipefit.train.batch import feed_of
from pipefit.train.pipeline import Pipeline

__all__ = ["USUAL", "RuntimeCosts", "runtime_costs"]

_WIDTH, _PASSES = 8, 20
_FEW, _MANY = 4, 16
_COLD = 1 << 19


class RuntimeCosts(NamedTuple):
    """Seconds of the executor.

    Attributes:
        overhead_s: on an instruction of the compute lane that `host_s` does not name, beyond what the profile measured.
        post_s: of posting one message.
        host_s: on instructions by operation, beyond what the profile measured.
        pass_s: of a rank between two passes over a synchronous program.
        cut_s: of cutting the batch, for each of its micro-batches.
        copy_s_per_byte: of a send, on the sender's core.
    """

    overhead_s: float
    post_s: float
    host_s: Mapping[str, float] = MappingProxyType({})
    pass_s: float = 0.0
    cut_s: float = 0.0
    copy_s_per_byte: float = 0.2e-9


USUAL = RuntimeCosts(10e-6, 20e-6)
"""Where nothing was measured: ranks in one process, or a GPU, whose work hides it."""


def runtime_costs(session: Session) -> RuntimeCosts:
    """Measures, in about a second; every rank of the run must ask, and all get the first rank's figures.

    Forward, backward, loss, load, send and step are timed in the executor, less what the profiler says of the same tiny
    layer. What a pass then still needs in processor time is the receives', as far as it grows with the micro-batches,
    and for the rest that of the pass itself. Where cores are few, that of the threads that carry the messages counts.
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
    few, many = (_passes(layers, x[:num], num) for num in (_FEW, _MANY))
    costs = _told(alone, few, many, cut_s)
    torch.set_rng_state(random)
    return _from_rank_0(costs)


class _Passes(NamedTuple):
    """Processor time of a pass on this rank, the least of several, and median seconds of operations by stage."""

    used_s: float
    kinds: dict[tuple[str, int], float]


def _passes(layers: nn.Sequential, x: torch.Tensor, num: int) -> _Passes:
    pipe = Pipeline(
        layers,
        loss=nn.functional.mse_loss,
        optimizer=_sgd,
        schedule="1f1b",
        microbatches=num,
        stages=[1] * len(layers),
        device="cpu",
    )
    used_s, clock = [], _clock(len(layers))
    for _ in range(_PASSES):
        began = clock()
        pipe.step(x, x)
        used_s.append(clock() - began)
    times = pipe.timeline(last=_PASSES - 2).by_kind()
    # The least: what is beyond it is somebody else's.
    return _Passes(min(used_s), {key: item.median_s for key, item in times.items()})


def _clock(num_ranks: int) -> Callable[[], float]:
    """Processor time: of this thread, or of all where those that carry the messages have no core of their own."""
    return time.thread_time if len(os.sched_getaffinity(0)) >= 2 * num_ranks else time.process_time


def _told(alone: Profile, few: _Passes, many: _Passes, cut_s: float) -> RuntimeCosts:
    """The first rank's view: it loads, and its loss is another's."""
    kinds = many.kinds
    last = max(stage for _, stage in kinds)
    forward, backward = (kinds[op.value, 0] for op in (Op.FWD, Op.BWD))
    load, send = kinds[Op.LOAD.value, 0], kinds[Op.SEND.value, 0]
    step = kinds[Op.STEP.value, 0]
    loss = next((seconds for (op, _), seconds in kinds.items() if op == Op.LOSS.value), 0.0)
    first, final = alone.layers[0], alone.layers[last]
    # Beyond the first stage a forward takes a message, whose gradient goes back.
    beyond = (forward - first.forward_s + kinds[Op.FWD.value, last] - final.forward_s) / 2
    growth = (many.used_s - few.used_s) / (_MANY - _FEW)
    receive = growth - forward - backward - load - send - cut_s
    pass_s = many.used_s - _MANY * growth - step
    host = {
        Op.FWD: beyond,
        Op.RECOMPUTE: beyond,
        Op.BWD: (backward - first.backward_s + kinds[Op.BWD.value, last] - final.backward_s) / 2,
        Op.LOSS: loss - alone.loss_s,
        Op.LOAD: load,
        Op.STEP: step - alone.optimizer_of([0]),
        Op.SEND: send,
        Op.RECV: receive,
    }
    host_s = {op.value: max(seconds, 1e-6) for op, seconds in host.items()}
    overhead_s = max(host_s[Op.FWD], USUAL.overhead_s)
    return RuntimeCosts(overhead_s, host_s[Op.SEND], host_s, max(pass_s, 0.0), cut_s)


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
