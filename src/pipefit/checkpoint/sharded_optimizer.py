"""Optimizers that are sharded over replicas, made whole while a checkpoint is written or read.

A checkpoint has one form, whoever writes or reads it: whole states under the parameters' names. Before a stage's first
replica writes, the others send it their parts; after all have read whole states, each keeps its part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pipefit.parallel.buckets import view_in
from pipefit.parallel.sharded_weights import ShardedStore

if TYPE_CHECKING:
    from pipefit.checkpoint.state import Trained
    from pipefit.runtime.worker import Worker

Parts = dict[tuple[int, int, str], Tensor]


@contextlib.contextmanager
def whole_optimizers(pipeline: Trained, *, writing: bool) -> Iterator[None]:
    """Inside, the optimizers of sharded stages are whole. Every rank must enter together.

    Args:
        pipeline: between two steps.
        writing: the first replica of each stage has all states; else they are to be filled, and each replica keeps its
            part of them.
    """
    own: list[tuple[Worker, int, Optimizer]] = []
    try:
        for stage, ranks in enumerate(pipeline.plan.placement.ranks):
            holders = {
                w.rank: w
                for w in pipeline.workers
                if stage in w.optimizers and isinstance(w.stores[stage], ShardedStore)
            }
            parts = _collected(pipeline, stage, ranks, holders) if holders and writing else []
            for worker in holders.values():
                own.append((worker, stage, worker.optimizers[stage]))
                worker.optimizers[stage] = _whole(worker, stage, parts)
        yield
        if not writing:
            for worker, stage, optimizer in own:
                _keep_part(worker, stage, worker.optimizers[stage], optimizer)
    finally:
        for worker, stage, optimizer in own:
            worker.optimizers[stage] = optimizer


def _collected(pipeline: Trained, stage: int, ranks: Sequence[int], holders: dict[int, Worker]) -> list[Parts]:
    """The parts of all replicas, for the first; nothing for the others."""
    mine = [_parts(worker, stage) for worker in holders.values()]
    if not pipeline._session.is_distributed:
        return mine
    # Replicas with the same part of a tensor-parallel stage belong together.
    mesh, host = pipeline.workers[0].mesh, torch.device("cpu")
    first, *others = (mesh.process_of(rank) + mesh.index for rank in ranks)
    if ranks[0] not in holders:
        dist.send_object_list(mine, first, device=host)
        return []
    for other in others:
        box: list[Any] = [None]
        dist.recv_object_list(box, other, device=host)
        mine += box
    return mine


def _parts(worker: Worker, stage: int) -> Parts:
    """The states of a replica's pieces: (index, start, key) and the tensor, on the host."""
    store, optimizer = worker.stores[stage], worker.optimizers[stage]
    assert isinstance(store, ShardedStore)
    return {
        (piece.index, piece.start, key): value.detach().cpu().contiguous()
        for piece in store.pieces
        for key, value in optimizer.state.get(piece.master, {}).items()
        if isinstance(value, Tensor)
    }


def _whole(worker: Worker, stage: int, parts: Sequence[Parts]) -> Optimizer:
    """An optimizer of whole weights with the groups and options of a sharded one, and the states of some parts."""
    store, optimizer = worker.stores[stage], worker.optimizers[stage]
    assert isinstance(store, ShardedStore)
    whole: Optimizer = object.__new__(type(optimizer))
    whole.defaults = optimizer.defaults
    whole.param_groups = [
        {**group, "params": [store.masters[index] for index in indices]}
        for group, indices in zip(optimizer.param_groups, store.groups, strict=True)
    ]
    states: dict[int, dict[str, Tensor]] = {}
    # By name: the processes of a tensor-parallel rank join these tensors one by one, so all need them in one order.
    for (index, start, key), value in sorted((item for part in parts for item in part.items()), key=itemgetter(0)):
        master, state = store.masters[index], states.setdefault(index, {})
        if value.dim() == 0:
            state[key] = value
            continue
        flat = state.setdefault(key, torch.zeros(master.numel(), dtype=value.dtype))
        flat[start : start + len(value)] = value
    whole.state = {
        store.masters[index]: {k: view_in(v, 0, store.masters[index]) if v.dim() else v for k, v in state.items()}
        for index, state in states.items()
    }
    for index, master in enumerate(store.masters):
        if store.is_whole(index):
            whole.state[master] = optimizer.state.get(master, {})
    return whole


def _keep_part(worker: Worker, stage: int, whole: Optimizer, optimizer: Optimizer) -> None:
    """Takes options, and this replica's part of whole states, over into the sharded optimizer."""
    store = worker.stores[stage]
    assert isinstance(store, ShardedStore)
    for group, full in zip(optimizer.param_groups, whole.param_groups, strict=True):
        group.update({key: value for key, value in full.items() if key != "params"})
    optimizer.state.clear()
    for index, master in enumerate(store.masters):
        if store.is_whole(index) and master in whole.state:
            optimizer.state[master] = whole.state[master]
    for piece in store.pieces:
        master = store.masters[piece.index]
        if master in whole.state:
            optimizer.state[piece.master] = {
                key: _part_of(key, value, master, piece.start, piece.stop) for key, value in whole.state[master].items()
            }


def _part_of(key: str, value: object, master: Tensor, start: int, stop: int) -> object:
    """A stretch of a state that is shaped like its weight; counters stay."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0 and (master.dim() or key == "step"):
        return value.clone()
    flat = torch.empty(master.numel(), dtype=value.dtype, device=value.device)
    view_in(flat, 0, master).copy_(value)
    return flat[start:stop].clone()
