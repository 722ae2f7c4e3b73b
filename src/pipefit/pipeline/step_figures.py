"""Figures of a training while it runs: bubble and memory of every rank, and FLOP for MFU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pipefit.errors import PipefitError
from pipefit.ir.op import COMPUTE_OPS
from pipefit.profiling import analytic_profile, measure_device
from pipefit.profiling.live_bytes import LiveBytes
from pipefit.profiling.tensors import tensors_of
from pipefit.profiling.workload import Workload
from pipefit.runtime.executor import Execution
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.spec.topology import Device
from pipefit.stage.accelerator import peak_bytes
from pipefit.stage.record_layout import storage_bytes

_PATIENCE_S = 0.5
_LEAST_MEASURED = 3
_MOST_MEASURED = 9
_ALIKE = 0.95
"""Measurements of a device's speed, and the ratio of two that agree."""


def own_figures(session: Session, runs: Sequence[Execution], timed: Sequence[Execution]) -> list[float]:
    """This process's summand of a step's bubble, and of the peak memories and learning rates of all processes.

    Args:
        session: the ranks of the run.
        runs: the ranks of this process in the step.
        timed: the same, or in the step before.
    """
    bubbles = [_bubble(run.compiled.instructions, run.starts, run.ends) for run in timed]
    memory = [0.0] * session.num_ranks
    memory[session.rank] = peak_bytes(runs[0].worker.device)
    rates = [0.0] * session.num_ranks
    stepped = [max(own) for run in runs for own in run.rates.values()]
    coming = [float(group["lr"]) for one in runs[0].worker.optimizers.values() for group in one.param_groups]
    rates[session.rank] = max(stepped or coming, default=0.0)
    return [sum(bubbles) / runs[0].compiled.program.header.num_ranks, *memory, *rates]


def _bubble(instructions: Sequence[Any], starts: Sequence[float], ends: Sequence[float]) -> float:
    busy = 0.0
    for i, start, end in zip(instructions, starts, ends, strict=True):
        if i.op in COMPUTE_OPS:
            busy += end - start
    whole = max(ends, default=0.0) - min(starts, default=0.0)
    if whole > 0:
        return 1 - busy / whole
    return 0.0


class ModelFlop(NamedTuple):
    """The basis of MFU: FLOP of the model, forward and backward once, over the FLOP per second of the devices.

    Attributes:
        flop_per_sample: of forward and backward of the model, without replays.
        flops: FLOP per second that all ranks together reach.
        convention: a description of both, in words.
    """

    flop_per_sample: float
    flops: float
    convention: str

    def mfu(self, samples_per_s: float) -> float:
        """The share of the devices' FLOP that goes into the model."""
        return samples_per_s * self.flop_per_sample / self.flops


def count_flop(work: Workload, num_ranks: int) -> ModelFlop | None:
    """Counts the model's FLOP on tensors without data, and measures those of the device.

    Args:
        work: the model and an example.
        num_ranks: of the run.

    Returns:
        None where the model's FLOP cannot be counted.
    """
    x, y = work.batch("MFU")
    # On a device of one FLOP per second, seconds are FLOP.
    one = Device(flops=1.0, efficiency=1.0)
    try:
        count = analytic_profile(work.layers, x, one, work.loss, y)
    except (PipefitError, RuntimeError, NotImplementedError, TypeError):
        return None
    total = sum(layer.total_s for layer in count.layers) + count.loss_s
    if not total:
        return None
    flops = _highest_flops(work.device)
    reached = f"those that a large matrix product reaches, {flops / 1e9:.0f} GFLOP/s per rank"
    convention = f"model FLOP, forward and backward once, over {reached}"
    return ModelFlop(total / count.microbatch_size, flops * num_ranks, convention)


def _highest_flops(device: torch.device) -> float:
    """FLOP per second of a device: the highest of measurements, when two of them agree, because others may be busy."""
    found: list[float] = []
    while len(found) < _MOST_MEASURED:
        found.append(measure_device(device, threads=None, repeats=1).flops)
        first, *others = sorted(found, reverse=True)
        if len(found) >= _LEAST_MEASURED and others[0] >= _ALIKE * first:
            break
    return max(found)


class HeldMemory:
    """Peak bytes of tensors of a rank in one pass.

    On a CPU the storages of all tensors are counted. On a GPU, for spilled stages and for compiled layers it is the sum
    of the tensors before the pass (weights, gradients, optimizer states) and the growth of the memory in use, which the
    allocator reports after each instruction: memory that is allocated and freed inside one instruction is not seen.

    Args:
        worker: of the pass.
        tell: returns the bytes in use.
    """

    def __init__(self, worker: Worker, tell: Callable[[], float]) -> None:
        self._tell = tell
        gc.collect()  # what was measured before leaves garbage, which must not go during the pass
        self._kept = _kept_bytes(worker)
        self._begin = self._highest = tell()
        self._left_s = _PATIENCE_S
        self._worker = worker
        is_compiled = any(stage.compiled for stage in worker.stages.values())
        self._count: LiveBytes | None = None
        if worker.device.type == "cpu" and not worker.spilling and not is_compiled:
            self._count = LiveBytes("cpu")

    @contextmanager
    def counting(self) -> Iterator[None]:
        """The context of the pass."""
        if self._count is None:
            yield
            return
        self._count.add(_kept_tensors(self._worker))
        with self._count:
            yield

    def look(self) -> None:
        """Reads the memory in use, until reading has taken half a second in total."""
        if self._count is not None:
            return
        # Temporary memory of a step on the host is not the device's, but on a CPU the allocator is the same.
        steps = []
        if self._worker.spilling:
            steps = self._worker.spilling.steps
        if self._left_s > 0 and all(step.is_launched() for step in steps):
            began = time.perf_counter()
            self._highest = max(self._highest, self._tell())
            self._left_s -= time.perf_counter() - began

    @property
    def held_bytes(self) -> float:
        """The peak so far."""
        if self._count is not None:
            return float(self._count.peak_bytes)
        return self._kept + self._highest - self._begin


def _kept_bytes(worker: Worker) -> float:
    """Bytes of weights, gradients, buffers and optimizer states on the worker's device.

    Spilled stages are away between two passes; their slots count.
    """
    slots_bytes = 0
    if worker.spilling:
        slots_bytes = worker.spilling.arena.num_bytes
    return float(slots_bytes + storage_bytes(_kept_tensors(worker)))


def _kept_tensors(worker: Worker) -> list[torch.Tensor]:
    """Weights, gradients, buffers and optimizer states on the worker's device, between two passes."""
    spilled = {}
    if worker.spilling:
        spilled = worker.spilling.stores
    tensors: list[torch.Tensor] = []
    for stage in worker.stages.values():
        for _, parameter in stage.named_parameters():
            tensors.append(parameter)
            if parameter.grad is not None:
                tensors.append(parameter.grad)
        for layer in stage.layers:
            tensors += layer.module.buffers()
    for store in worker.stores.values():
        tensors += store.kept()
    for index, optimizer in worker.optimizers.items():
        if index not in spilled or not spilled[index].on_host:
            tensors += tensors_of(list(optimizer.state.values()))
    for buckets in worker.buckets.values():
        tensors += buckets.flats
    return tensors
