"""How much memory each rank has used at most."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable

import torch

from pipefit.runtime.collectives import gather_rows
from pipefit.runtime.in_use import in_use
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.spill.lanes import Copy

_PATIENCE_S = 0.5


def peak_memory_bytes(session: Session) -> list[float]:
    """The most memory each process has held: of its GPU when it has one, else its resident set. Every rank must ask."""
    if torch.cuda.is_available():
        own = float(torch.cuda.max_memory_allocated())
    else:
        own = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
    return [row[0] for row in gather_rows(session, [own])]


class HeldMemory:
    """The most bytes of tensors that a rank holds in one pass, seen after each of its instructions.

    What it holds before is counted, weights and gradients and the optimizer's states; what is added in the pass is
    the growth of the memory in use, which the allocator tells exactly. What comes and goes inside an instruction is
    not seen.

    Args:
        worker: whose pass it is.
        tell: bytes in use now.
    """

    def __init__(self, worker: Worker, tell: Callable[[], float]) -> None:
        self._tell = tell
        self._kept = _kept_bytes(worker)
        self._begin = self._highest = tell()
        self._left_s = _PATIENCE_S
        self._worker = worker

    def _steps(self) -> list[Copy]:
        return self._worker.spilling.steps if self._worker.spilling else []

    @classmethod
    def watching(cls, worker: Worker) -> HeldMemory | None:
        """One for a worker; None where the system does not tell."""
        tell = in_use(worker.device)
        return None if tell is None else cls(worker, tell)

    def look(self) -> None:
        """Looks, until looking has taken half a second."""
        # What a step on the host takes for a moment is not the device's, but of a processor the allocator is the same.
        if self._left_s > 0 and all(step.ended() for step in self._steps()):
            began = time.perf_counter()
            self._highest = max(self._highest, self._tell())
            self._left_s -= time.perf_counter() - began

    @property
    def held_bytes(self) -> float:
        """The most so far."""
        return self._kept + self._highest - self._begin


def _kept_bytes(worker: Worker) -> float:
    """Of weights, their gradients, buffers and the optimizers' states, as far as they are on the worker's device.

    What is spilled is away between two passes; its slots are there.
    """
    tensors = [p for stage in worker.stages.values() for _, p in stage.named_parameters()]
    tensors += [p.grad for p in tensors if p.grad is not None]
    tensors += [x for stage in worker.stages.values() for layer in stage.layers for x in layer.module.buffers()]
    spilled = worker.spilling.stores if worker.spilling else {}
    for stage, optimizer in worker.optimizers.items():
        if stage not in spilled or not spilled[stage].on_host:
            tensors += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    slots = worker.spilling.arena.num_bytes if worker.spilling else 0
    return float(sum(storages.values()) + slots)


def held_memory_bytes(session: Session, own: float | None) -> list[float]:
    """Peak bytes of tensors of every rank; [] where one does not know. Every rank must call it."""
    held = [row[0] for row in gather_rows(session, [math.nan if own is None else own])]
    return [] if any(map(math.isnan, held)) else held
