"""Handlers of copies between tiers: they start here, and continue while the rank computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Kind
from pipefit.ir.spill import SLOTTED
from pipefit.runtime.executor import Execution
from pipefit.runtime.transport import Message
from pipefit.spill.lanes import Copy
from pipefit.spill.tiers import Key

PARKED = "parked "
"""Prefix of the kind of a value that waits on the tier: its flags and structure, without tensors."""


def fetch(run: Execution, i: Instruction) -> None:
    """Starts to load a stage's weights, states or gradients, or data at a cut."""
    if i.kind not in SLOTTED:
        copy, arrived = _unparked(run, i)
    else:
        store = run.spilling.stores[i.stage]
        copy = store.fetch(i.kind, i.version, i.slot)
        arrived = partial(store.arrived, i.kind, i.version, i.slot)
    _time(run, copy)

    def end() -> bool:
        copy.join()
        arrived()
        return True

    run.wait_later(end)


def evict(run: Execution, i: Instruction) -> None:
    """Starts to write back changed values, or data at a cut; an input of the model is only freed."""
    if i.kind == Kind.WGRAD:
        # Their marks are removed with them.
        run.worker.forget_idle_gradients(i.stage)
    if i.kind in SLOTTED:
        copy = run.spilling.stores[i.stage].evict(i.kind, i.version)
    else:
        copy = _park(run, i)
    run.spilling.writes.append(copy)
    _time(run, copy)


def _park(run: Execution, i: Instruction) -> Copy:
    """Starts to write an activation or its gradient, of which the rank keeps only flags and structure."""
    message: Message = run.values.pop((i.kind, i.stage, i.version))
    run.values[PARKED + i.kind, i.stage, i.version] = message._replace(leaves=[])
    return run.spilling.parked.write(Key(i.stage, i.kind, i.version), message.leaves)


def _unparked(run: Execution, i: Instruction) -> tuple[Copy, Callable[[], None]]:
    """The copy of an activation or gradient from the tier, and the function that makes it a value of the run again."""
    copy, tensors = run.spilling.parked.read(Key(i.stage, i.kind, i.version))

    def arrived() -> None:
        message = run.values.pop((PARKED + i.kind, i.stage, i.version))
        run.values[i.kind, i.stage, i.version] = message._replace(leaves=tensors())

    return copy, arrived


def saving(run: Execution, i: Instruction) -> contextlib.AbstractContextManager[None]:
    """The context of a forward: tensors that autograd saves of a stage that keeps them must not be in its slot."""
    spill = run.header.spill
    if spill is not None and i.stage in spill.keeps:
        return run.worker.stores[i.stage].saving(run.worker.stages[i.stage].halves)
    return contextlib.nullcontext()


def step_on_host(run: Execution, i: Instruction, work: Callable[[], object] | None) -> None:
    """Starts an optimizer's step on the host; the next fetch of the stage's weights waits for it."""
    spilling = run.spilling
    copy = spilling.stores[i.stage].step_on_host(i.version, work)
    spilling.steps.append(copy)
    _time(run, copy)


def _time(run: Execution, copy: Copy) -> None:
    """Sets the times of the instruction to those of its copy: its lane records them, on a GPU `read_times` does."""
    run.copies[run.index] = copy
    if run.moments is None:
        run.at_end.append(partial(copy.record_times, run.starts, run.ends, run.index))
