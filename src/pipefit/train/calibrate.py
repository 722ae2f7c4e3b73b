"""What the executor itself costs on this machine, measured by a pipeline that has next to nothing to compute."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipefit.runtime.session import Session
from pipefit.train.pipeline import Pipeline

__all__ = ["USUAL", "RuntimeCosts", "runtime_costs"]

_WIDTH, _MICROBATCHES, _PASSES = 8, 16, 12
# Instructions of the compute lane per micro-batch on the first rank: load, forward, backward; and of messages: two.
_COMPUTES, _MESSAGES = 3, 2


class RuntimeCosts(NamedTuple):
    """Seconds of the executor.

    Attributes:
        overhead_s: on every instruction of the compute lane, beyond what the profile has measured.
        post_s: of posting one message.
    """

    overhead_s: float
    post_s: float


USUAL = RuntimeCosts(10e-6, 20e-6)
"""Where nothing was measured: ranks in one process, or a GPU, whose work hides it."""


def runtime_costs(session: Session) -> RuntimeCosts:
    """Measures, in a fraction of a second; every rank of the run must ask, and all get the first rank's figures.

    The processor time of a pass over stages of one tiny layer, minus that of the same layer outside the executor. It is
    the time of the calling thread alone, so other programs on the machine hardly show. The messages are taken to cost
    what is usual, since only the sum of both figures can be told apart from the rest.
    """
    if not session.is_distributed or torch.cuda.is_available():
        return USUAL
    random = torch.get_rng_state()
    layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(session.num_ranks)))
    x = torch.randn(_MICROBATCHES, _WIDTH)
    alone_s = _alone_s(nn.Linear(_WIDTH, _WIDTH), x[:1])
    pipe = Pipeline(
        layers,
        loss=nn.functional.mse_loss,
        optimizer=_no_step,
        schedule="1f1b",
        microbatches=_MICROBATCHES,
        stages=[1] * session.num_ranks,
        device="cpu",
    )
    passes_s = []
    for _ in range(_PASSES):
        began = time.thread_time()
        pipe.step(x, x)
        passes_s.append(time.thread_time() - began)
    # The least: what is beyond it is somebody else's.
    extra_s = min(passes_s) / _MICROBATCHES - alone_s - _MESSAGES * USUAL.post_s
    told = torch.tensor(max(extra_s / _COMPUTES, USUAL.overhead_s), dtype=torch.float64)
    dist.broadcast(told, 0)
    torch.set_rng_state(random)
    return RuntimeCosts(float(told), USUAL.post_s)


def _alone_s(layer: nn.Module, x: torch.Tensor) -> float:
    """Processor time of a forward and a backward, the least of several."""
    times_s = []
    grad = torch.ones_like(x)
    for _ in range(4 * _PASSES):
        began = time.thread_time()
        torch.autograd.backward([layer(x.detach().requires_grad_())], [grad])
        times_s.append(time.thread_time() - began)
    return min(times_s)


def _no_step(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.0)
