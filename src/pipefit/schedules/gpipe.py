"""GPipe, and its two baselines: naive model parallelism and data parallelism."""

from __future__ import annotations

from pipefit.ir.instruction import bwd, forward_backward, fwd
from pipefit.schedules.registry import Orders, Task, schedule


@schedule(name="naive")
def _naive(task: Task) -> Orders:
    """Naive model parallelism: one micro-batch at a time, one rank at a time.

        F0 .  .  .  .  B0 F1 .  .  .  .  B1   rank 0
        .  F0 .  .  B0 .  .  F1 .  .  B1 .    rank 1
        .  .  F0 B0 .  .  .  .  F1 B1 .  .    rank 2

    F forward, B backward, digits micro-batches; drawn for f = b.
    Time m·[p(f+b) + 2(p−1)c]; utilisation 1/p; one micro-batch of activations.
    """
    for stage, mbs in task.one_stage_each():
        yield forward_backward(stage, mbs)


@schedule(name="data-parallel", layout="replicas")
def _data_parallel(task: Task) -> Orders:
    """Data parallelism: the whole model on every rank, micro-batches round-robin, gradients averaged.

        F0 B0 F3 B3   rank 0
        F1 B1 F4 B4   rank 1
        F2 B2 F5 B5   rank 2

    F forward, B backward of the whole model, digits micro-batches; drawn for f = b.
    """
    for stage, mbs in task.one_stage_each():
        yield forward_backward(stage, mbs)


@schedule(name="gpipe")
def _gpipe(task: Task) -> Orders:
    """GPipe: all forwards, then all backwards in reverse.

        F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0   rank 0
        .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .    rank 1
        .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .    rank 2

    F forward, B backward, digits micro-batches; drawn for f = b.
    Time (m+p−1)(f+b) + 2(p−1)c; bubble (p−1)/(m+p−1); m micro-batches of activations.
    Source: GPipe (NeurIPS 2019) §2.2, figure 2c.
    """
    for stage, mbs in task.one_stage_each():
        forwards = [fwd(stage, mb) for mb in mbs]
        backwards = [bwd(stage, mb) for mb in reversed(mbs)]
        yield forwards + backwards
