"""Tensors that no record of a spilled stage holds, in records of their own: written for a commit, and restored from it.

These are buffers, weights that several stages share, and states of optimizers that stay on the device. In the middle of
a step, between two turns of a trial, they are also the gradients of these weights and the statistics of batch norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pipefit.checkpoint.manifest import Optimization
from pipefit.checkpoint.optim import by_parameter, optimizer_tensors, read_of, restore_optimizer
from pipefit.checkpoint.state import weights_of
from pipefit.runtime.worker import Worker
from pipefit.spill.rank import Spilling
from pipefit.spill.tiers import Key
from pipefit.stage.training import Tensors

Row = tuple[int, list[str]]
"""The stage and the names of the tensors of one record."""

_RESIDENT = "resident"
RECORD_BYTES = 16 << 20
"""Bytes of tensors after which a record is full: only few copies of this size are in memory at a time."""
_GRADIENT = "gradient/"
_SUMS = "sums/"


def resident_tensors(
    worker: Worker, stage: int, passed: set[int], unsaved: bool = False
) -> Iterator[tuple[int, str, Tensor]]:
    """(stage, name, tensor) of a stage's tensors that no record holds; one with several names comes once.

    Args:
        worker: the rank.
        stage: of the rank, spilled or not.
        passed: addresses of tensors that are left out; those that are given are added.
        unsaved: whether all parameters and buffers are meant, also buffers that a `state_dict` leaves out.
    """
    own = worker.stages[stage]
    named = []
    if unsaved:
        named += [*own.named_parameters(), *own.named_buffers()]
    else:
        named += [(name, tensor) for name, _, tensor in weights_of(worker, stage)]
    gradients = ((name, parameter.grad) for name, parameter in own.named_parameters())
    named += [(_GRADIENT + name, gradient) for name, gradient in gradients if gradient is not None]
    sums = ((place, norm.gathered(0)) for place, norm in enumerate(own.batchnorms))
    named += [(f"{_SUMS}{place}", found) for place, found in sums if found is not None]
    named += optimizer_tensors(worker, stage, all_ties=True)
    for name, tensor in named:
        if tensor.data_ptr() not in passed:
            passed.add(tensor.data_ptr())
            yield stage, name, tensor.detach()


def write_resident(spilling: Spilling, tensors: Iterable[tuple[int, str, Tensor]]) -> list[Row]:
    """Starts to write tensors, as `resident_tensors` gives them; returns the contents of each record."""
    rows: list[Row] = []
    records: list[list[Tensor]] = []
    for stage, name, tensor in tensors:
        is_full = records and sum(other.nbytes for other in records[-1]) >= RECORD_BYTES
        if not rows or rows[-1][0] != stage or is_full:
            rows.append((stage, []))
            records.append([])
        rows[-1][1].append(name)
        records[-1].append(tensor)
    for key, record in zip(_keys(rows), records, strict=True):
        spilling.writes.append(spilling.resident.write(key, record))
    return rows


def read_resident(spilling: Spilling, rows: Sequence[Row], keep: bool = False) -> dict[int, Tensors]:
    """The tensors of some records, by stage and name.

    Args:
        spilling: of the rank.
        rows: of the records, as `write_resident` gave them.
        keep: whether they will be read again without being written again.
    """
    found: dict[int, Tensors] = {}
    for key, (stage, names) in zip(_keys(rows), rows, strict=True):
        copy, read = spilling.resident.read(key, keep)
        copy.wait()
        # Copies, because the buffers of reads are used again for writes.
        own = found.setdefault(stage, {})
        own.update((name, tensor.clone()) for name, tensor in zip(names, read(), strict=True))
    return found


def _keys(rows: Sequence[Row]) -> list[Key]:
    return [Key(stage, f"{_RESIDENT} {number}") for number, (stage, _) in enumerate(rows)]


@torch.no_grad()
def restore_resident(
    worker: Worker,
    stage: int,
    tensors: Mapping[str, Tensor],
    optimization: Sequence[Optimization],
    known: Iterable[int],
) -> None:
    """Restores what no record of a stage holds: tensors, its optimizer and its learning-rate schedule.

    Args:
        worker: the rank.
        stage: of the rank; spilled or not.
        tensors: those of `resident_tensors`, by name; states of the optimizer become its own.
        optimization: of all stages, or of this one.
        known: states in the stage's records that its optimizer has made.
    """
    own = worker.stages[stage]
    targets = own.state_dict()
    targets.update(own.named_buffers())
    for name in targets.keys() & tensors.keys():
        targets[name].copy_(tensors[name])
    for name, parameter in own.named_parameters():
        if name in tensors:
            gradient = tensors.get(_GRADIENT + name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
    for place, norm in enumerate(own.batchnorms):
        sums = tensors.get(f"{_SUMS}{place}")
        norm.replace(0, None if sums is None else sums.to(worker.device))
    worker.stores[stage].known_states = set(known)
    if stage in worker.optimizers:
        states = by_parameter({name: read_of(tensor) for name, tensor in tensors.items()})
        restore_optimizer(worker, stage, optimization, states)()
