"""What each process of a rank takes for its parts of the layers: its work measured as divided, then every exchange.

The work is measured in a rehearsal, where nobody waits. Each kind and size of exchange found in it is measured by
itself, among all processes, between stretches of work as long as those of the layers: partners come to a sum neither
together nor to warm caches, the less so the longer they have worked.
"""

from __future__ import annotations

import statistics
import time
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
from pipefit.profiling.payload import batch_of, map_tensors, take, tensors_of
from pipefit.profiling.untouched import untouched
from pipefit.runtime.session import Session
from pipefit.spec import Plan, Profile
from pipefit.stage.split import NamedLayer
from pipefit.train.batch import largest_part
from pipefit.train.divided import Divided
from pipefit.train.profiled import agreed_profile

__all__ = ["profile_of_parts"]

_WORK, _REPEATS, _COUNTED = 512, 40, 0.95

Seconds = Mapping[Exchange, float]


def profile_of_parts(
    layers: Sequence[NamedLayer],
    plan: Plan,
    example: tuple[Any, Any],
    session: Session,
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
    work = _work(measured.step_s / num_exchanges if measured.step_s and num_exchanges else 0.0, device)
    return _priced(measured, each, ends, _measured(mesh.region, each, ends, work, device))


@contextmanager
def _rehearsed(layers: Sequence[NamedLayer], region: Region) -> Iterator[tuple[Divided, Rehearsal]]:
    """The layers divided as in the region, among processes that are not there."""
    wholes = [(p, p.data) for layer in layers for p in layer.module.parameters()]
    rehearsal = Rehearsal(region.group, region.size, 0, region.sequence)
    divided = Divided.on(layers, Mesh(region.size, 0, rehearsal))
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


def _work(seconds: float, device: torch.device) -> Callable[[], None]:
    """Matrix products that take about so long, as many on every process."""
    one = torch.ones(_WORK, _WORK, device=device)
    samples = []
    for _ in range(5):
        began = time.perf_counter()
        one @ one
        _settle(device)
        samples.append(time.perf_counter() - began)
    count = torch.tensor(max(round(seconds / min(samples)), 1))
    dist.broadcast(count, 0)

    def work() -> None:
        for _ in range(int(count)):
            one @ one

    return work


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measured(
    region: Region,
    each: Sequence[Ways],
    ends: Sequence[Exchange],
    work: Callable[[], None],
    device: torch.device,
) -> Seconds:
    """Seconds of every different exchange, as the first process of the run has them."""
    found = list(dict.fromkeys([*(one for ways in each for way in ways for one in way), *ends]))
    silent = Rehearsal(region.group, region.size, 0, region.sequence)
    told = torch.tensor([_exchange_s(one, region, silent, work, device) for one in found], dtype=torch.float64)
    if len(found):
        dist.broadcast(told, 0)
    return dict(zip(found, told.tolist(), strict=True))


def _exchange_s(
    exchange: Exchange, region: Region, silent: Region, work: Callable[[], None], device: torch.device
) -> float:
    """Seconds that an exchange adds to work, beyond what it takes in a rehearsal; the slowest few left out."""
    x = torch.zeros(exchange.shape, dtype=exchange.dtype, device=device)

    def seconds(among: Region) -> list[float]:
        samples = []
        dist.barrier()
        for _ in range(_REPEATS):
            began = time.perf_counter()
            work()
            exchange.run(among, x)
            _settle(device)
            samples.append(time.perf_counter() - began)
        return sorted(samples[2:])

    together, alone = seconds(region), seconds(silent)
    counted = together[: round(len(together) * _COUNTED)]
    return max(statistics.mean(counted) - statistics.median(alone), 1e-6)


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
