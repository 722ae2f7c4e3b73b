"""What passes between the turns of a step: activations, gradients, sums of batch norms, and norms for clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Kind, Op
from pipefit.runtime.executor import Execution
from pipefit.study.execute.boundary import packed, unpacked
from pipefit.study.execute.cursor import Cursor
from pipefit.study.execute.records import Record, read_record, write_record
from pipefit.study.execute.shards import Shard, Structure
from pipefit.study.execute.slices import Slice
from pipefit.study.turns import Turn

__all__ = ["Between", "reduce_norms"]

_BOUNDARY = (Kind.ACT, Kind.GRAD)


@dataclass(frozen=True)
class Between:
    """The records of the step under way that no shard owns: what one turn leaves for another to take.

    Attributes:
        folder: of the trial, on the tier.
        structure: of its model.
        cursor: where the trial stands; the norms that it holds change here.
    """

    folder: Path
    structure: Structure
    cursor: Cursor

    # ---- before a turn ---------------------------------------------------------------------------------------------

    def take(self, part: Slice, shard: Shard, run: Execution) -> None:
        """Gives the executor and the shard what earlier turns have left for this one."""
        for kind, stage in dict.fromkeys((v.kind, v.stage) for v in part.turn.takes if v.kind in _BOUNDARY):
            run.values.update(unpacked(kind, stage, self._read(f"{kind}-{stage}"), run.worker.device))
        self._take_gradients(part, shard)
        if any(value.kind == Kind.NORM for value in part.turn.takes):
            run.norms[0] = _squares(self.cursor)

    def _take_gradients(self, part: Slice, shard: Shard) -> None:
        """Batch norms' sums from the forward, gradients that borrowers left, and a shard's own where it steps later."""
        if part.turn.steps and Op.FWD not in part.ops:
            self._take_sums(shard)
        if Op.BWD in part.ops:
            self._take_lent(shard)
        elif part.turn.steps:
            gradients = self._read(f"wgrad-{shard.index}").tensors
            for name, parameter in _named(shard):
                parameter.grad = gradients[name].to(shard.worker.device) if name in gradients else None

    def _take_lent(self, shard: Shard) -> None:
        """What shards above have added to the gradients of weights that they share with this one."""
        shared = {shard.home_name(name): p for name, p in _named(shard)} | shard.borrowed
        for name, above in self.structure.next_above(shard.index).items():
            left = self._read(f"lent-{above}").tensors
            shared[name].grad = left[name].to(shard.worker.device) if name in left else None

    def _take_sums(self, shard: Shard) -> None:
        modules = shard.worker.stages[shard.index].batchnorms
        if modules:
            sums = self._read(f"sums-{shard.index}").tensors
            for place, module in enumerate(modules):
                module._gathered = {0: sums[str(place)].to(shard.worker.device)} if str(place) in sums else {}

    # ---- after it --------------------------------------------------------------------------------------------------

    def leave(self, part: Slice, shard: Shard, run: Execution) -> None:
        """Writes what the turn has made for later ones."""
        leaves = [value for value in part.turn.leaves if value.kind in _BOUNDARY]
        for kind, stage in dict.fromkeys((value.kind, value.stage) for value in leaves):
            mbs = [value.at for value in leaves if (value.kind, value.stage) == (kind, stage)]
            self._write(f"{kind}-{stage}", *packed(kind, stage, mbs, run.values))
        if Op.BWD in part.ops:
            self._leave_gradients(part.turn, shard)
        if Op.FWD in part.ops and not part.turn.steps:
            self._leave_sums(shard)

    def _leave_gradients(self, turn: Turn, shard: Shard) -> None:
        """Gradients of borrowed weights go to the shard below that has them; under clipping all wait for the norm."""
        if shard.borrowed:
            left = {n: p.grad for n, p in shard.borrowed.items() if p.grad is not None}
            self._write(f"lent-{shard.index}", left)
            for parameter in shard.borrowed.values():
                parameter.grad = None
        if not turn.steps:
            self.cursor.norms[str(shard.index)] = _norms(shard)
            own = {name: p.grad for name, p in _named(shard) if p.grad is not None}
            self._write(f"wgrad-{shard.index}", own)
            for _, parameter in _named(shard):
                parameter.grad = None

    def _leave_sums(self, shard: Shard) -> None:
        modules = shard.worker.stages[shard.index].batchnorms
        if modules:
            found = {str(place): module.gathered(0) for place, module in enumerate(modules)}
            self._write(f"sums-{shard.index}", {k: v for k, v in found.items() if v is not None})
            for module in modules:
                module._gathered = {}

    # ---- files -----------------------------------------------------------------------------------------------------

    def _read(self, name: str) -> Record:
        return read_record(self.folder / f"{name}.between", self.cursor.step)

    def _write(self, name: str, tensors: Mapping[str, Tensor], extra: Mapping[str, Any] | None = None) -> None:
        write_record(self.folder / f"{name}.between", self.cursor.step, tensors, extra or {})


def reduce_norms(cursor: Cursor, shard: Shard) -> Callable[[Execution, Instruction], None]:
    """The norm for clipping: this shard's gradients are here, of the others the cursor has the norms."""

    def reduce(run: Execution, i: Instruction) -> None:
        cursor.norms[str(shard.index)] = _norms(shard)
        run.norms[i.version] = _squares(cursor)

    return reduce


def _norms(shard: Shard) -> list[float]:
    """The norm of each gradient of a shard."""
    gradients = shard.worker.counted_gradients(shard.index)
    return [float(norm) for norm in torch._foreach_norm(gradients)] if gradients else []


def _squares(cursor: Cursor) -> Tensor:
    """The sum of squares of all gradients, added up as one process adds them."""
    every = [norm for shard in range(len(cursor.counts)) for norm in cursor.norms.get(str(shard), ())]
    return torch.tensor(every, dtype=torch.float64).square().sum().reshape(1)


def _named(shard: Shard) -> list[tuple[str, Any]]:
    return [(owned.name, owned.parameter) for owned in shard.worker.owned[shard.index]]
