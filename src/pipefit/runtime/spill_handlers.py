"""The handlers of spilling: they start copies, and say what follows once one has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pipefit.errors import ModelError
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Kind
from pipefit.ir.spill import SLOTTED
from pipefit.runtime.executor import Execution
from pipefit.runtime.transport import Message
from pipefit.spill.lanes import Copy
from pipefit.spill.rank import Spilling
from pipefit.spill.stage_store import SpilledStore
from pipefit.spill.tiers import Key

PARKED = "parked "
"""Before the kind of a value of the run that waits on the tier: its flags and structure, without tensors."""


def fetch(run: Execution, i: Instruction) -> None:
    """Starts to load a stage's weights, states or gradients, or data at a cut; whoever needs them waits."""
    if i.kind not in SLOTTED:
        copy, arrived = _unparked(run, i)
    else:
        store = _store(run, i)
        copy, arrived = store.fetch(i.kind, i.version, i.slot), partial(store.arrived, i.kind, i.version, i.slot)
    _time(run, copy)

    def end() -> bool:
        copy.wait()
        arrived()
        return True

    run.endings[run.index] = end


def evict(run: Execution, i: Instruction) -> None:
    """Starts to write back what has changed, or data at a cut; an input of the model is just let go of."""
    if i.kind == Kind.INPUT:
        del run.values[i.kind, i.stage, i.version]
        return
    if i.kind == Kind.WGRAD:
        # Their marks go with them.
        run.worker.forget_idle_gradients(i.stage)
    copy = _store(run, i).evict(i.kind, i.version) if i.kind in SLOTTED else _park(run, i)
    _spilling(run, i).writes.append(copy)
    _time(run, copy)


def _park(run: Execution, i: Instruction) -> Copy:
    """Starts to write an activation or its gradient, of which the rank keeps only flags and structure."""
    message: Message = run.values.pop((i.kind, i.stage, i.version))
    run.values[PARKED + i.kind, i.stage, i.version] = message._replace(leaves=[])
    return _spilling(run, i).parked.write(Key(i.stage, i.kind, i.version), message.leaves)


def _unparked(run: Execution, i: Instruction) -> tuple[Copy, Callable[[], None]]:
    """An activation or its gradient on its way back, and what makes it a value of the run again once it is there."""
    copy, tensors = _spilling(run, i).parked.read(Key(i.stage, i.kind, i.version))

    def arrived() -> None:
        message = run.values.pop((PARKED + i.kind, i.stage, i.version))
        run.values[i.kind, i.stage, i.version] = message._replace(leaves=tensors())

    return copy, arrived


def saving(run: Execution, i: Instruction) -> contextlib.AbstractContextManager[None]:
    """Around a forward: what autograd saves of a stage that keeps it must not lie in its slot."""
    spill, spilling = run.compiled.program.header.spill, run.worker.spilling
    if spill is None or spilling is None or i.stage not in spill.keeps:
        return contextlib.nullcontext()
    return spilling.stores[i.stage].saving()


def step_on_host(run: Execution, i: Instruction, work: Callable[[], None] | None) -> None:
    """Starts an optimizer's step on the host; the next fetch of the stage's weights waits for it."""
    spilling = _spilling(run, i)
    copy = spilling.stores[i.stage].step_on_host(i.version, work)
    spilling.steps.append(copy)
    _time(run, copy)


def norm_part(run: Execution, i: Instruction) -> None:
    """Takes a stage's part of the global norm while its gradients are on the device."""
    _spilling(run, i).parts[i.version, i.stage] = norms_of(run.worker.counted_gradients(i.stage))


def _time(run: Execution, copy: Copy) -> None:
    """The times of the instruction will be those of its copy, which its lane knows."""
    run.at_end.append(partial(copy.record_times, run.starts, run.ends, run.index))


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """The norm of each gradient, as a scalar in double precision."""
    return [norm.double() for norm in torch._foreach_norm(gradients)] if gradients else []


def _spilling(run: Execution, i: Instruction) -> Spilling:
    if run.worker.spilling is None:
        raise ModelError(f"'{i}': nothing lives on a tier in this run")
    return run.worker.spilling


def _store(run: Execution, i: Instruction) -> SpilledStore:
    spilling = _spilling(run, i)
    if i.stage not in spilling.stores:
        raise ModelError(f"'{i}': stage {i.stage} does not live on a tier in this run")
    return spilling.stores[i.stage]
