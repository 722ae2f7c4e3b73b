"""Bandwidth and latency between ranks, from round trips of messages of several sizes; the speed of each rank.

A message of n bytes takes latency + n / bandwidth. Pairs are measured one after the other, so that they do not
share a link, and the ranks of a host one after the other, so that they do not share its cores.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace

from pipefit.errors import TopologyError
from pipefit.profiling.clock import Clock
from pipefit.runtime.collectives import exchange_in_group, meet
from pipefit.runtime.progress import MEASURING
from pipefit.runtime.session import Session
from pipefit.spec.topology import Device, Level, Topology
from pipefit.stage import accelerator
from pipefit.stage.device import random_state_kept

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)


_DIFFERENT = 1.25
"""Ranks whose speeds differ by less are alike: measured speeds of equal ones differ by some per cent."""


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and bandwidth with the least relative error of the measured times.

    Args:
        num_bytes: at least two different message sizes.
        seconds: one way, per size.

    Returns:
        (latency_s ≥ 0, bandwidth_bytes_per_s > 0).

    Raises:
        TopologyError: fewer than two sizes, or times that do not grow with the size.

    >>> latency_s, bandwidth = fit_link([1e3, 1e6, 1e7], [1e-4 + n / 2e9 for n in (1e3, 1e6, 1e7)])
    >>> round(latency_s * 1e6), round(bandwidth / 1e6)
    (100, 2000)
    """
    if len(set(num_bytes)) < 2 or len(num_bytes) != len(seconds) or min(seconds) <= 0:
        raise TopologyError("a link needs measured times above 0 at two message sizes at least")
    sizes = np.asarray(num_bytes, float)
    times = np.asarray(seconds)
    slope, latency = np.polyfit(sizes, times, 1, w=1 / times).tolist()
    if latency < 0:  # without a latency the slope alone is fitted
        latency = 0.0
        rates = sizes / times
        slope = float(rates.sum() / (rates**2).sum())
    if slope <= 0:
        raise TopologyError("larger messages were not slower: measure larger sizes, or on a quiet machine")
    return latency, 1 / slope


def measure_links(
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 20,
    each: Device | None = None,
    device: str | torch.device = "cpu",
    name: str = "measured",
) -> Topology:
    """Measures the links among the ranks of the default process group; every rank calls it and gets the result.

    Ranks on one host form the inner level, hosts the outer one, when every host has as many ranks, in order. The inner
    level also gets the cores that they share. Where the speeds of ranks differ by more than a quarter, every rank gets
    a device of its own; that of rank 0 is the one that profiles are for.

    Args:
        sizes: message sizes in bytes.
        repeats: round trips per size; see `ping_pong`.
        each: every device; see `measure_device`.
        device: where the ranks compute.
        name: of the topology.

    Raises:
        TopologyError: the group has fewer than two ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world < 2:
        raise TopologyError("links are between ranks: expected at least 2, got 1; start with more ranks")
    per_host = _ranks_per_host()
    times = {}
    for a, b in _pairs(world, per_host):
        if rank in (a, b):
            mine = _time_pair(rank, a, b, sizes, repeats, torch.device(device))
        else:
            mine = []
        # Every rank gets the figures of rank a, and no rank disturbs the next pair.
        times[a, b] = exchange_in_group(mine)[a]
    cores = _cores(per_host)
    found = topology_of(times, sizes, world, per_host, each or Device(), name, cores)
    return with_speeds(found, _speeds(rank, per_host, torch.device(device)))


def topology_of(
    times: Mapping[tuple[int, int], Sequence[float]],
    sizes: Sequence[int],
    world: int,
    per_host: int,
    each: Device,
    name: str,
    cores: int | None = None,
) -> Topology:
    """Levels fitted to the seconds between pairs of ranks, per size: links inside a host, and those between hosts."""
    levels = []
    for label, width in (("host", per_host), ("network", world // per_host)):
        is_inner = label == "host"
        chosen = []
        for (a, b), seconds in times.items():
            if (a // per_host == b // per_host) == is_inner:
                chosen.append(seconds)
        if chosen:
            middle = [median_low(same) for same in zip(*chosen, strict=True)]
            latency_s, bandwidth = fit_link(sizes, middle)
            levels.append(Level(label, width, bandwidth, latency_s, cores if is_inner else None))
    return Topology(tuple(levels), device=each, name=name)


def with_speeds(topology: Topology, flops: Sequence[float]) -> Topology:
    """The topology with a device for each rank, where their speeds differ by more than a measurement does.

    Args:
        topology: whose devices are all alike.
        flops: FLOP per second that each rank reaches.
    """
    if max(flops) < _DIFFERENT * min(flops):
        return topology
    devices = tuple(replace(topology.device, flops=own, efficiency=1.0) for own in flops)
    return replace(topology, device=devices[0], devices=devices)


def _speeds(rank: int, per_host: int, device: torch.device) -> list[float]:
    """FLOP per second that each rank reaches in a product, while no other rank of its host computes."""
    mine = 0.0
    for turn in range(per_host):
        if rank % per_host == turn:
            mine = _product_flops(device)
        exchange_in_group(turn)
    return exchange_in_group(mine)


def _product_flops(device: torch.device) -> float:
    """FLOP per second in a product of matrices; of several the fastest, which no other program has disturbed."""
    if accelerator.is_accelerator(device):
        size = 4096
    else:
        size = 384
    with random_state_kept(device):
        matrix = torch.randn(size, size, device=device)
        clock = Clock(device)
        seconds = [clock.seconds(lambda: torch.mm(matrix, matrix)) for _ in range(7)]
    return 2 * size**3 / min(seconds)


def ping_pong(
    send: Callable[[int], Any], receive: Callable[[int], Any], starts: bool, sizes: Sequence[int], repeats: int
) -> list[float]:
    """Seconds of one message of each size one way: half a round trip, the first two left out.

    Every round uses all sizes, so that a slow moment of the machine affects them alike. The lower quartile is taken:
    waiting for a processor that another program uses can take a hundred times as long as the message, and is not a
    property of the link.

    Args:
        send: sends a message of so many bytes and returns when its buffer may be used again.
        receive: returns when a message of so many bytes has arrived.
        starts: whether this side sends first; the other side calls it with False.
        sizes: in bytes.
        repeats: round trips that count, per size.
    """
    trips: list[list[float]] = [[] for _ in sizes]
    for turn in range(repeats + 2):
        for kept, size in zip(trips, sizes, strict=True):
            start = time.perf_counter()
            for act in (send, receive) if starts else (receive, send):
                act(size)
            if turn >= 2:
                kept.append((time.perf_counter() - start) / 2)
    return [sorted(kept)[len(kept) // 4] for kept in trips]


def _time_pair(rank: int, a: int, b: int, sizes: Sequence[int], repeats: int, device: torch.device) -> list[float]:
    buffers = {size: torch.zeros(max(size, 1), dtype=torch.uint8, device=device) for size in sizes}
    if rank == a:
        peer = b
    else:
        peer = a

    def send(size: int) -> None:
        dist.send(buffers[size], peer)

    def receive(size: int) -> None:
        dist.recv(buffers[size], peer)
        accelerator.settle(device)

    return ping_pong(send, receive, rank == a, sizes, repeats)


def _ranks_per_host() -> int:
    """Ranks on each host where all hosts have equally many, in order; else 1: every rank counts as a host."""
    hosts = exchange_in_group(platform.node())
    width = hosts.count(hosts[0])
    even = [host for host in dict.fromkeys(hosts) for _ in range(width)]
    if hosts == even:
        return width
    return 1


def _cores(per_host: int) -> int | None:
    """Cores that the ranks of a host share, the minimum over all hosts; None where GPUs compute."""
    if accelerator.default_kind() != "cpu" or not hasattr(os, "sched_getaffinity"):
        return None
    theirs = exchange_in_group(sorted(os.sched_getaffinity(0)))
    hosts = (theirs[first : first + per_host] for first in range(0, len(theirs), per_host))
    return min(len(set().union(*host)) for host in hosts)


def _pairs(world: int, per_host: int) -> list[tuple[int, int]]:
    """Neighbours inside every host, and one pair between every two consecutive hosts."""
    inner = [(rank - 1, rank) for rank in range(1, world) if rank % per_host]
    outer = [(rank - per_host, rank) for rank in range(per_host, world, per_host)]
    return inner + outer


_TRIES = 3


def links_of(session: Session, num_ranks: int, device: str | torch.device = "cpu") -> Topology:
    """The links between the ranks of a run and their speeds, measured now; in one process links are without cost.

    On a machine too busy to measure them, these are the usual figures of Gloo over loopback.
    """
    if not session.is_distributed:
        return Topology.local(num_ranks, bandwidth_bytes_per_s=1e12, latency_s=0.0)
    with session.at(MEASURING):
        for _ in range(_TRIES):
            meet(session)
            with contextlib.suppress(TopologyError):
                return measure_links(repeats=8, device=device)
    return Topology.local(num_ranks, cores=os.cpu_count())


def per_core(topology: Topology, num_processes: int) -> float:
    """Processes per core of a machine when all processes of a run compute; at least 1.

    The simulation slows them down by this factor, so figures measured while they all ran are divided by it.

    >>> per_core(Topology.local(8, cores=2), 8)
    4.0
    """
    span, cores = topology.machine
    return max(min(span, num_processes) / cores, 1.0)
