"""How long PipeDream's partitioner takes, and how that grows.

Run as `OMP_NUM_THREADS=1 python benchmarks/partition_time.py`.
"""

from __future__ import annotations

import random
import time

from pipefit.partition import pipedream
from pipefit.spec import Layer, Level, Profile, Topology
from pipefit.spec.published import load_profile


def chain(num_layers: int) -> Profile:
    rng = random.Random(0)

    def figure(scale: float) -> float:
        return rng.uniform(1, 10) * scale

    layers = (
        Layer(f"layer{i}", figure(1e-3), figure(1e-3), figure(1e-3), figure(1e5), figure(1e6), figure(1e6))
        for i in range(num_layers)
    )
    return Profile(f"chain of {num_layers}", 1, tuple(layers))


def measure(profile: Profile, *widths: int, cost: str = "ring", **options: object) -> None:
    rates = [12e9, 1.25e9, 0.5e9] if len(widths) > 1 else [1.25e9]
    topology = Topology(tuple(Level(str(w), w, r) for w, r in zip(widths, rates, strict=False)))
    start = time.process_time()
    result = pipedream(profile, topology, cost=cost, **options)  # type: ignore[arg-type]
    seconds = time.process_time() - start
    shape = " × ".join(map(str, widths))
    limit = " memory limit" if "memory_bytes" in options else ""
    print(f"{profile.model:14} {shape:9} {cost:14} {result.shape:14}{limit} {seconds:6.2f} s of processor")


if __name__ == "__main__":
    measure(load_profile("vgg16"), 4)  # the first one loads numpy's parts
    for cost in ("pipedream-code", "ring", "paper"):
        measure(load_profile("resnet50"), 4, 4, cost=cost)
    for num_layers in (125, 250, 500, 1000):
        measure(chain(num_layers), 64)
    for num_devices in (8, 16, 32):
        measure(chain(1000), num_devices)
    measure(chain(1000), 64, memory_bytes=5e9)
    for num_layers in (125, 250, 500, 1000):
        measure(chain(num_layers), 8, 8, search="hierarchical")
    for widths in ((2, 32), (4, 16), (16, 4), (4, 4, 4)):
        measure(chain(1000), *widths, search="hierarchical")
    measure(chain(1000), 8, 8)
    measure(chain(1000), 8, 8, cost="pipedream-code")
