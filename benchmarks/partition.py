"""Seconds of PipeDream's partitioner, and their growth with layers and devices."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import NamedTuple

from pipefit.partition import pipedream
from pipefit.spec import Layer, Level, Profile, Topology
from pipefit.spec.published import load_profile


class PartitionRow(NamedTuple):
    """One search: of which model, over which levels of devices, under which cost, what it found, and its seconds."""

    model: str
    shape: str
    cost: str
    found: str
    note: str
    seconds: float


def chain(num_layers: int) -> Profile:
    """Layers with random figures."""
    rng = random.Random(0)

    def figure(scale: float) -> float:
        return rng.uniform(1, 10) * scale

    layers = (
        Layer(f"layer{i}", figure(1e-3), figure(1e-3), figure(1e-3), figure(1e5), figure(1e6), figure(1e6))
        for i in range(num_layers)
    )
    return Profile(f"chain of {num_layers}", 1, tuple(layers))


def measure(profile: Profile, *widths: int, cost: str = "ring", **options: object) -> PartitionRow:
    """One search; its processor time."""
    rates = [12e9, 1.25e9, 0.5e9] if len(widths) > 1 else [1.25e9]
    topology = Topology(tuple(Level(str(w), w, r) for w, r in zip(widths, rates, strict=False)))
    start = time.process_time()
    result = pipedream(profile, topology, cost=cost, **options)
    seconds = time.process_time() - start
    shape = " × ".join(map(str, widths))
    note = "memory limit" if "memory_bytes" in options else ""
    return PartitionRow(profile.model, shape, cost, result.shape, note, seconds)


def partition_times() -> Iterator[PartitionRow]:
    """The searches of the table, one after the other."""
    yield measure(load_profile("vgg16"), 4)  # the first one loads numpy's parts
    for cost in ("pipedream-code", "ring", "paper"):
        yield measure(load_profile("resnet50"), 4, 4, cost=cost)
    for num_layers in (125, 250, 500, 1000):
        yield measure(chain(num_layers), 64)
    for num_devices in (8, 16, 32):
        yield measure(chain(1000), num_devices)
    yield measure(chain(1000), 64, memory_bytes=5e9)
    for num_layers in (125, 250, 500, 1000):
        yield measure(chain(num_layers), 8, 8, search="hierarchical")
    for widths in ((2, 32), (4, 16), (16, 4), (4, 4, 4)):
        yield measure(chain(1000), *widths, search="hierarchical")
    yield measure(chain(1000), 8, 8)
    yield measure(chain(1000), 8, 8, cost="pipedream-code")


def main() -> None:
    """Prints what each search found, and its processor seconds."""
    for row in partition_times():
        print(
            f"{row.model:14} {row.shape:9} {row.cost:14} {row.found:14} {row.note:13} {row.seconds:6.2f} s of processor"
        )
