"""Optimizers that are sharded over replicas, made whole while a checkpoint is written.

A checkpoint always has the same form: whole states under the parameters' names. Before a stage's first replica writes,
the others send it their parts; of whole states that are read each keeps its part.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.parallel.buckets import view_in
from pipefit.parallel.weights import Store

if TYPE_CHECKING:
    from pipefit.checkpoint.trained import Trained
    from pipefit.runtime.worker import Worker

Parts = dict[tuple[int, int, str], Tensor]


@contextlib.contextmanager
def whole_states(pipeline: Trained) -> Iterator[None]:
    """The context in which a sharded stage's first replica has whole states, and whole weights.

    All ranks must enter together.

    Args:
        pipeline: between two steps.
    """
    own: list[tuple[Optimizer, Any]] = []
    try:
        for stage, ranks in enumerate(pipeline.plan.placement.ranks):
            is_sharded = pipeline.program.header.is_sharded(stage)
            holders = {w.rank: w for w in pipeline.workers if is_sharded and stage in w.optimizers}
            if holders:
                parts = _collected(pipeline, stage, ranks, holders)
            else:
                parts = []
            if ranks[0] in holders:
                optimizer = holders[ranks[0]].optimizers[stage]
                own.append((optimizer, optimizer.state))
                optimizer.state = _whole(holders[ranks[0]], stage, parts)
        with pipeline.engine.whole_weights(pipeline.program.header):
            yield
    finally:
        for optimizer, state in own:
            optimizer.state = state


def _collected(pipeline: Trained, stage: int, ranks: Sequence[int], holders: dict[int, Worker]) -> list[Parts]:
    """The parts of all replicas, for the first; nothing for the others."""
    mine = [_parts(worker, stage) for worker in holders.values()]
    if not pipeline.session.is_distributed:
        return mine
    # Replicas with the same part of a tensor-parallel stage belong together.
    mesh = pipeline.workers[0].mesh
    host = torch.device("cpu")
    first, *others = (mesh.process_of(rank) + mesh.index for rank in ranks)
    if ranks[0] not in holders:
        dist.send_object_list(mine, first, device=host)
        return []
    for other in others:
        box: list[Any] = [None]
        with pipeline.session.progress.waiting():
            dist.recv_object_list(box, other, device=host)
        mine += box
    return mine


def _parts(worker: Worker, stage: int) -> Parts:
    """The states of a replica's pieces: (index, start, key) and the tensor, on the host."""
    store = worker.stores[stage]
    optimizer = worker.optimizers[stage]
    found = {}
    for piece in store.pieces:
        for key, value in optimizer.state.get(piece.master, {}).items():
            if isinstance(value, Tensor):
                found[piece.index, piece.start, key] = value.detach().cpu().contiguous()
    return found


def _whole(worker: Worker, stage: int, parts: Sequence[Parts]) -> defaultdict[Tensor, dict[str, Any]]:
    """The states of whole weights, of which some parts are given."""
    store = worker.stores[stage]
    known = worker.optimizers[stage].state
    whole: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for master in store.masters:
        if master in known:
            whole[master] = known[master]
    # By name: the processes of a tensor-parallel rank gather these tensors one by one, so all need the same order.
    pieces = chain.from_iterable(part.items() for part in parts)
    for (index, start, key), value in sorted(pieces, key=itemgetter(0)):
        master = store.masters[index]
        state = whole[master]
        if value.dim() == 0:
            state[key] = value
            continue
        if key not in state:
            state[key] = view_in(torch.zeros(master.numel(), dtype=value.dtype), 0, master)
        state[key].as_strided((master.numel(),), (1,))[start : start + len(value)] = value
    return whole


def put_state(optimizer: Optimizer, store: Store, master: nn.Parameter, state: dict[str, Any]) -> None:
    """Sets the whole state of a parameter in an optimizer, of which a sharded one keeps its part."""
    index = next(index for index, own in enumerate(store.masters) if own is master)
    if store.steps_whole(index):
        optimizer.state[master] = state
        return
    for piece in store.pieces:
        if piece.index == index:
            part = {}
            for key, value in state.items():
                part[key] = _part_of(key, value, master, piece.start, piece.stop)
            optimizer.state[piece.master] = part


def _part_of(key: str, value: object, master: Tensor, start: int, stop: int) -> object:
    """A part of a state with the shape of its weight; counters stay."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and (master.dim() or key == "step")):
        return value
    flat = torch.empty(master.numel(), dtype=value.dtype, device=value.device)
    view_in(flat, 0, master).copy_(value)
    return flat[start:stop].clone()
