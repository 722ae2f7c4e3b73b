"""What each process of a rank takes for its parts of the layers: its work measured as divided, then every exchange.

The work is measured in a rehearsal, where nobody waits. Each kind and size of exchange found in it is measured by
itself, among all processes, between stretches of work as long as those of the layers: partners come to a sum neither
together nor to warm caches, the less so the longer they have worked.

A profile holds seconds of a process that has a core of its own, and the simulation lets processes share cores. So what
was measured while n processes shared c cores is counted c/n times: in a simulation of all of them it comes out again
as it was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.parallel import Mesh, Region, make_mesh
from pipefit.parallel.rehearsal import Exchange, Rehearsal
from pipefit.pipeline.tensor_parallel import TensorParallel
from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.clock import Clock
from pipefit.profiling.links import per_core
from pipefit.profiling.tensors import batch_of, map_tensors, take, tensors_of
from pipefit.profiling.untouched import untouched
from pipefit.runtime.collectives import gather_rows
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.session import Session
from pipefit.spec import Plan, Profile, Topology
from pipefit.stage.split import NamedLayer

__all__ = ["added_s", "profile_of_parts"]

_WORK, _REPEATS, _COUNTED = 512, 40, 0.95

Seconds = Mapping[Exchange, float]


def profile_of_parts(
    layers: Sequence[NamedLayer],
    plan: Plan,
    example: tuple[Any, Any],
    session: Session,
    topology: Topology,
    *,
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    clips: bool = False,
) -> Profile:
    """Measures what a process has of each layer, the exchanges with the others of its rank included.

    All processes of the run call it alike, with whole layers, and get the figures of the first one; the layers are
    afterwards as before.

    Args:
        layers: of the whole model.
        plan: how wide, and whether the sequence is divided.
        example: (input, target) of a whole batch.
        session: the processes of the run.
        topology: the links between them, and the cores that they share, as the plan is simulated with.
        loss: as in `profile_layers`.
        optimizer: as in `profile_layers`.
        clips: as in `profile_layers`.

    Raises:
        PipefitError: the processes do not go with the plan, or the model or its input cannot be divided so.
    """
    device = next((p.device for layer in layers for p in layer.module.parameters()), torch.device("cpu"))
    num_ranks, sequence = plan.placement.num_ranks, plan.sequence_parallel
    mesh = make_mesh(num_ranks, plan.tensor, session.rank, session.num_ranks, device, sequence)
    assert mesh.region is not None
    size = largest_part(example[0], plan.num_microbatches)
    with _rehearsed(layers, mesh.region) as (divided, rehearsal):
        divided.check(example[0])
        shared = divided.loss(loss)
        measured = agreed_profile(layers, example, [size], session, loss=shared, optimizer=optimizer, clips=clips)
        batch = batch_of(example[0])
        x, y = (map_tensors(lambda leaf: leaf.to(device), take(item, size, batch)) for item in example)
        each, ends = _exchanges(layers, x, y, shared, rehearsal, device)
    num_exchanges = sum(len(way) for ways in each for way in ways) + len(ends)
    crowd = per_core(topology, session.num_ranks)
    work = _work(measured.step_s / num_exchanges if measured.step_s and num_exchanges else 0.0, device, session)
    return _priced(measured, each, ends, _measured(mesh.region, each, ends, work, crowd, device, session))


@contextmanager
def _rehearsed(layers: Sequence[NamedLayer], region: Region) -> Iterator[tuple[TensorParallel, Rehearsal]]:
    """The layers divided as in the region, among processes that are not there."""
    wholes = [(p, p.data) for layer in layers for p in layer.module.parameters()]
    rehearsal = Rehearsal(region.group, region.size, 0, region.sequence)
    divided = TensorParallel.on(layers, Mesh(region.size, 0, rehearsal))
    try:
        yield divided, rehearsal
    finally:
        divided.release()
        for parameter, whole in wholes:
            parameter.data = whole


Ways = tuple[list[Exchange], list[Exchange]]
"""Exchanges of a forward and of its backward."""


def _exchanges(
    layers: Sequence[NamedLayer], x: Any, y: Any, loss: Callable[[Any, Any], Tensor], rehearsal: Rehearsal, device: Any
) -> tuple[list[Ways], list[Exchange]]:
    """The exchanges of each layer, and of the loss."""
    each = []
    with untouched([(layer.prefix, layer.module) for layer in layers], device, None):
        for layer in layers:
            x, *ways = _both_ways(layer.module, x, rehearsal)
            each.append((ways[0], ways[1]))
        _, forward, backward = _both_ways(lambda output: loss(output, y), x, rehearsal)
    return each, forward + backward


def _both_ways(
    work: Callable[[Any], Any], payload: Any, rehearsal: Rehearsal
) -> tuple[Any, list[Exchange], list[Exchange]]:
    given = map_tensors(lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), payload)
    rehearsal.exchanges.clear()
    result = work(given)
    forward = rehearsal.exchanges.copy()
    rehearsal.exchanges.clear()
    roots = [leaf for leaf in tensors_of(result) if leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return result, forward, rehearsal.exchanges.copy()


def _work(seconds: float, device: torch.device, session: Session) -> Callable[[], None]:
    """Matrix products that take about so long, as many on every process."""
    one = torch.ones(_WORK, _WORK, device=device)
    samples = []
    clock = Clock(device)
    for _ in range(5):
        samples.append(_seconds(clock, lambda: one @ one))
    count = round(gather_rows(session, [max(round(seconds / min(samples)), 1)])[0][0])

    def work() -> None:
        for _ in range(count):
            one @ one

    return work


def _seconds(clock: Clock, action: Callable[[], object]) -> float:
    began = clock.mark()
    action()
    ended = clock.mark()
    clock.settle()
    return clock.between(began, ended)


def _measured(
    region: Region,
    each: Sequence[Ways],
    ends: Sequence[Exchange],
    work: Callable[[], None],
    crowd: float,
    device: torch.device,
    session: Session,
) -> Seconds:
    """Seconds of every different exchange, as the first process of the run has them."""
    found = list(dict.fromkeys([*(one for ways in each for way in ways for one in way), *ends]))
    silent = Rehearsal(region.group, region.size, 0, region.sequence)
    mine = [_exchange_s(one, region, silent, work, crowd, device) for one in found]
    return dict(zip(found, gather_rows(session, mine)[0], strict=True))


def _exchange_s(
    exchange: Exchange, region: Region, silent: Region, work: Callable[[], None], crowd: float, device: torch.device
) -> float:
    """Seconds that an exchange adds to work, beyond what it takes in a rehearsal."""
    x, clock = torch.zeros(exchange.shape, dtype=exchange.dtype, device=device), Clock(device)

    def samples(among: Region) -> list[float]:
        def turn() -> None:
            work()
            exchange.run(among, x)

        dist.barrier()
        return [_seconds(clock, turn) for _ in range(_REPEATS)][2:]

    return added_s(samples(region), samples(silent), crowd)


def added_s(together: Sequence[float], alone: Sequence[float], crowd: float) -> float:
    """What an exchange adds to a process that has a core of its own; the slowest few turns are left out.

    Args:
        together: seconds of turns of work and exchange, of processes that share cores.
        alone: as many turns of theirs without the exchange.
        crowd: processes for each core meanwhile, at least 1.

    >>> added_s([6.0] * 20, [2.0] * 20, crowd=2)
    2.0
    """
    counted = round(len(together) * _COUNTED)
    both, work = (statistics.mean(sorted(turns)[:counted]) for turns in (together, alone))
    return max((both - work) / crowd, 1e-6)


def _priced(measured: Profile, each: Sequence[Ways], ends: Sequence[Exchange], seconds: Seconds) -> Profile:
    """The profile with its exchanges."""

    def total(exchanges: Sequence[Exchange]) -> float:
        return sum(seconds[exchange] for exchange in exchanges)

    layers = tuple(
        msgspec.structs.replace(
            layer,
            forward_s=layer.forward_s + total(forward),
            backward_input_s=layer.backward_input_s + total(backward),
        )
        for layer, (forward, backward) in zip(measured.layers, each, strict=True)
    )
    return msgspec.structs.replace(measured, layers=layers, loss_s=measured.loss_s + total(ends))
