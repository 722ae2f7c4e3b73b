"""What `evict` and `fetch` do with activations: these wait on the tier from a stage's forward to its replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pipefit.ir.instruction import Instruction
from pipefit.memory.lanes import Copy
from pipefit.memory.parking import Parking
from pipefit.memory.tiers import Key
from pipefit.runtime.executor import Execution

__all__ = ["park", "unpark"]


@dataclass(frozen=True)
class _Returning:
    """An activation on its way back; once it is there, it is a value of the run again."""

    copy: Copy
    tensors: Callable[[], list[Tensor]]
    run: Execution
    instruction: Instruction

    def ready(self) -> bool:
        """Always: a copy comes to its end by itself, so `wait` may block."""
        return True

    def wait(self) -> None:
        self.copy.wait()
        i, values = self.instruction, self.run.values
        values[i.kind, i.stage, i.version] = values.pop(("parked", i.stage, i.version))._replace(leaves=self.tensors())


def park(run: Execution, i: Instruction, parking: Parking) -> Copy:
    """Starts to write an activation, of which the rank keeps only what it is called."""
    act = run.values.pop((i.kind, i.stage, i.version))
    run.values["parked", i.stage, i.version] = act._replace(leaves=[])
    return parking.leave(Key(i.stage, i.kind, i.version), act.leaves)


def unpark(run: Execution, i: Instruction, parking: Parking) -> Copy:
    """Starts to read it again; whoever needs it waits."""
    copy, tensors = parking.take(Key(i.stage, i.kind, i.version))
    run.handles[run.index] = _Returning(copy, tensors, run, i)
    return copy
