"""The measurements of the machine that come before a plan or a prediction, made small.

A run measures its links, the tier, the layers and the executor for some seconds. Tests of what the run then does need
the figures, but no good ones.
"""

from collections.abc import Callable
from typing import Any

from pipefit.calibrate import overhead, tensor_shard
from pipefit.compare import rounds
from pipefit.pipeline import memory_cap, step_figures
from pipefit.profiling import kinds, machine, measure
from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.links import measure_links
from pipefit.profiling.machine import CpuUse
from pipefit.profiling.tier_rates import measure_tier


def shrink(set_to: Callable[[Any, str, Any], None] = setattr) -> None:
    """Sets the sizes, in this process and in those that are forked from it."""
    smaller = {measure_links: {"sizes": (1 << 10, 1 << 16, 1 << 20)}, measure_tier: {"num_bytes": 1 << 20}}
    for function, sizes in smaller.items():
        set_to(function, "__kwdefaults__", {**function.__kwdefaults__, **sizes})
    set_to(agreed_profile, "__defaults__", (3, 1))  # repeats, warmup
    for room in (measure, rounds):
        set_to(room, "_WARM_UP_S", 0.0)
    set_to(memory_cap, "_NUM_STEPPED", 1 << 14)
    set_to(kinds, "_MOST", 3)
    set_to(machine, "_COPIED_BYTES", 1 << 20)
    set_to(step_figures, "_MOST_MEASURED", 1)
    set_to(overhead, "_PASSES", 3)
    set_to(tensor_shard, "_REPEATS", 4)
    # Tests run next to each other: nobody asks whether the machine is busy, and measures once more.
    set_to(CpuUse, "now", lambda: None)
