"""Seconds of a process of a tensor-parallel rank: the work of its shards, measured, then every exchange.

The work is measured in a rehearsal, without waits. Each kind and size of exchange found in it is measured among all
processes, between stretches of work as long as those of the layers: after longer work, processes arrive at more
different times and with colder caches.

A profile holds seconds of a process on its own core, and the simulation lets processes share cores. So seconds measured
while n processes shared c cores are multiplied by c/n: a simulation of all processes then gives the measured seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipefit.cost.tensor import tensor_shard
from pipefit.parallel import Mesh, Region, release, shard_layers
from pipefit.parallel.loss import Loss
from pipefit.parallel.region import Exchange, IsolatedRegion
from pipefit.pipeline.assembly import mesh_of
from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.clock import Clock
from pipefit.profiling.links import per_core
from pipefit.profiling.tensors import batch_of, map_tensors, placed, take, tensors_of
from pipefit.profiling.untouched import untouched
from pipefit.profiling.workload import Workload
from pipefit.runtime.collectives import from_first
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.session import Session
from pipefit.spec import Plan, Profile, Topology
from pipefit.stage.materialise import is_meta, lent_weights
from pipefit.stage.split import NamedLayer
from pipefit.stage.training import with_metrics

_WORK = 512
_REPEATS = 40

Ways = tuple[list[Exchange], list[Exchange]]
"""Exchanges of a forward and of its backward."""


def profile_on_ranks(plan: Plan, profile: Profile, topology: Topology, session: Session, work: Workload) -> Profile:
    """Returns the profile of one process of a rank, from that of the whole model; all ranks make the same call.

    Under tensor parallelism it is a shard's: measured, or computed where layers have no weights yet.
    """
    if plan.tensor == 1:
        return profile
    if is_meta(work.layers):
        return tensor_shard(profile, plan.tensor, topology)
    return profile_of_shard(work, plan, session, topology)


def profile_of_shard(work: Workload, plan: Plan, session: Session, topology: Topology) -> Profile:
    """Measures one process's shard of each layer, with its exchanges with the other processes of the rank.

    All processes of the run make the same call, with whole layers, and get the figures of the first one; the layers are
    restored afterwards.

    Args:
        work: the whole model and its training.
        plan: its tensor width, and whether the sequence is sharded.
        session: the processes of the run.
        topology: the links between them, and the cores that they share, as in the simulation of the plan.

    Raises:
        PipefitError: the processes do not fit the plan, or the model or its input cannot be sharded.
    """
    layers = work.layers
    example = work.batch("measuring the layers")
    region = mesh_of(plan, session).region
    assert region is not None
    size = largest_part(example[0], plan.num_microbatches)
    silent = IsolatedRegion(region.group, region.size, 0, region.sequence)
    roots = nn.ModuleList([layer.module for layer in layers])
    with lent_weights(roots), _rehearsed(layers, silent) as shards:
        device = next((parameter.device for parameter in roots.parameters()), torch.device("cpu"))
        shards.check(example[0])
        shard_loss = shards.loss(work.loss)
        profile = agreed_profile(replace(work, loss=shard_loss), [size], session)
        batch = batch_of(example[0])
        x, y = (placed(take(item, size, batch), device, None) for item in example)
        each, ends = _exchanges(layers, x, y, shard_loss, silent, device)
    every = list(ends)
    for forward, backward in each:
        every += forward + backward
    clock = Clock(device)
    crowd = per_core(topology, session.num_ranks)
    fill = _matrix_products((profile.step_s or 0.0) / max(len(every), 1), clock, session)
    different = list(dict.fromkeys(every))
    seconds = []
    for one in different:
        together = _samples_s(one, region, fill, clock)
        isolated = _samples_s(one, silent, fill, clock)
        seconds.append(added_s(together, isolated, crowd))
    first = from_first(session, lambda: seconds)
    return _with_exchanges(profile, each, ends, dict(zip(different, first, strict=True)))


@contextmanager
def _rehearsed(layers: Sequence[NamedLayer], rehearsal: IsolatedRegion) -> Iterator[Mesh]:
    """The context of layers that are sharded as in a run, without the other processes."""
    wholes = [(p, p.data) for layer in layers for p in layer.module.parameters()]
    mesh = Mesh(rehearsal.size, 0, rehearsal)
    shard_layers(layers, mesh)
    try:
        yield mesh
    finally:
        release(mesh)
        for parameter, whole in wholes:
            parameter.data = whole


def _exchanges(
    layers: Sequence[NamedLayer],
    x: Any,
    y: Any,
    loss: Loss,
    rehearsal: IsolatedRegion,
    device: Any,
) -> tuple[list[Ways], list[Exchange]]:
    """The exchanges of each layer, and of the loss."""
    each = []
    with untouched(layers, device, None):
        for layer in layers:
            x, *ways = _both_ways(layer.module, x, rehearsal)
            each.append((ways[0], ways[1]))

        def scalar(output: Any) -> Tensor:
            value, _ = with_metrics(loss(output, y))
            return value

        _, forward, backward = _both_ways(scalar, x, rehearsal)
    return each, forward + backward


def _both_ways(
    work: Callable[[Any], Any], payload: Any, rehearsal: IsolatedRegion
) -> tuple[Any, list[Exchange], list[Exchange]]:
    given = map_tensors(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), payload)
    rehearsal.exchanges.clear()
    result = work(given)
    forward = rehearsal.exchanges.copy()
    rehearsal.exchanges.clear()
    roots = [leaf for leaf in tensors_of(result) if leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return result, forward, rehearsal.exchanges.copy()


def _matrix_products(seconds: float, clock: Clock, session: Session) -> Callable[[], None]:
    """A function that runs matrix products for about so many seconds, the same number on every process."""
    one = torch.ones(_WORK, _WORK, device=clock.device)
    fastest_s = min(clock.seconds(lambda: one @ one) for _ in range(5))
    count = from_first(session, lambda: max(round(seconds / fastest_s), 1))

    def work() -> None:
        for _ in range(count):
            one @ one

    return work


def _samples_s(exchange: Exchange, among: Region, work: Callable[[], None], clock: Clock) -> list[float]:
    """Seconds of work followed by an exchange, several times."""
    x = torch.zeros(exchange.shape, dtype=exchange.dtype, device=clock.device)

    def both() -> None:
        work()
        exchange.run(among, x)

    dist.barrier()
    return [clock.seconds(both) for _ in range(_REPEATS)][2:]


def added_s(together: Sequence[float], alone: Sequence[float], crowd: float) -> float:
    """Returns the seconds that an exchange adds to a process on its own core.

    Args:
        together: seconds of work and exchange, of processes that share cores.
        alone: seconds of the same work without the exchange.
        crowd: processes per core meanwhile, at least 1.

    >>> added_s([6.0] * 20, [2.0] * 20, crowd=2)
    2.0
    """
    added = statistics.median(together) - statistics.median(alone)
    return max(added / crowd, 1e-6)


def _with_exchanges(
    profile: Profile, each: Sequence[Ways], ends: Sequence[Exchange], seconds: Mapping[Exchange, float]
) -> Profile:
    """The profile with the seconds of its exchanges."""

    def total(exchanges: Sequence[Exchange]) -> float:
        return sum(seconds[exchange] for exchange in exchanges)

    layers = []
    for layer, (forward, backward) in zip(profile.layers, each, strict=True):
        forward_s = layer.forward_s + total(forward)
        backward_s = layer.backward_input_s + total(backward)
        layers.append(msgspec.structs.replace(layer, forward_s=forward_s, backward_input_s=backward_s))
    return msgspec.structs.replace(profile, layers=tuple(layers), loss_s=profile.loss_s + total(ends))
