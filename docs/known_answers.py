"""The tables of docs/known-answers.md: `python -m docs.known_answers` writes them into the page."""

from __future__ import annotations

import re
from collections.abc import Iterator

from docs.pages import ROOT

from pipefit.partition import pipedream
from pipefit.planner import gpt_profile, plan
from pipefit.planner.machines import load_topology
from pipefit.spec import Device, Level, Topology
from pipefit.spec.published import load_profile

PAGE = ROOT / "docs/known-answers.md"

# Levels from the inside, each as (width, GB/s).
Levels = tuple[tuple[int, float], ...]
A: Levels = ((4, 12), (4, 1.25))
B: Levels = ((8, 25), (2, 3.125))
CONVENTIONS = ("pipedream-code", "ring", "paper")

SERVER, CLUSTER = load_topology("dgx-a100-1024").levels
PTDP = {  # billions of parameters: layers, hidden, heads, devices, batch; tensor width, depth
    1.7: (24, 2304, 24, 32, 512, 1, 1),
    3.6: (30, 3072, 32, 64, 512, 2, 1),
    7.5: (36, 4096, 32, 128, 512, 4, 1),
    18.4: (40, 6144, 48, 256, 1024, 8, 1),
    39.1: (48, 8192, 64, 512, 1536, 8, 2),
    76.1: (60, 10240, 80, 1024, 1792, 8, 4),
    145.6: (80, 12288, 96, 1536, 2304, 8, 8),
    310.1: (96, 16384, 128, 1920, 2160, 8, 16),
    529.6: (105, 20480, 128, 2520, 2520, 8, 35),
    1008.0: (128, 25600, 160, 3072, 3072, 8, 64),
}


def line(model: str, levels: Levels, cost: str) -> str:
    """One row of `pipedream`, by the hierarchical search without a preference for data parallelism."""
    machine = Topology(tuple(Level(f"level {i}", width, rate * 1e9) for i, (width, rate) in enumerate(levels)))
    found = pipedream(load_profile(model), machine, cost=cost, search="hierarchical", margin=0.0)
    shape = " × ".join(f"{width} at {rate:g}" for width, rate in levels)
    return (
        f"{model:8}  {shape:21}  {cost:14}  {found.configuration:20} {found.time_s * 1e3:9.4f} ms"
        f"  {found.speedup_over_data_parallel:5.2f}  {found.data_parallel_s / found.straight_s:5.2f}"
    )


def shape(billions: float, bytes_per_parameter: int, memory_gb: int) -> str:
    """The answer of `ptdp` with 1F1B and micro-batches of one sample."""
    layers, hidden, heads, devices, batch, _, _ = PTDP[billions]
    device = Device(memory_bytes=memory_gb * 1e9, flops=312e12, efficiency=0.5)
    machine = Topology((SERVER, Level("cluster", devices // 8, CLUSTER.bandwidth_bytes_per_s)), device)
    found = plan(
        gpt_profile(layers, hidden, heads, device=device),
        machine,
        method="ptdp",
        schedules=["1f1b"],
        global_batch=batch,
        microbatch_sizes=[1],
        state_per_weight=(bytes_per_parameter - 4) / 2,
    )
    stages = found.partition.stages
    return f"{stages[0].tensor}, {len(stages):2} ({max(found.prediction.peak_bytes) / 1e9:4.1f} GB)"


def tables() -> Iterator[list[str]]:
    """The lines of each table, in the order of the page."""
    yield [line("vgg16", levels, "pipedream-code") for levels in (((4, 1),), A, B)]
    yield [line("vgg16", ((16, rate),), cost) for rate in (0.15, 1, 3.125) for cost in CONVENTIONS]
    for model in ("resnet50", "gnmt"):
        yield [line(model, levels, cost) for levels in (A, B) for cost in CONVENTIONS]
    yield [
        f"{billions:6}   {row[-2]}, {row[-1]:2}    {shape(billions, 16, 80)}   {shape(billions, 20, 70)}"
        for billions, row in PTDP.items()
    ]


def filled(page: str) -> str:
    """Returns the page with its tables made anew."""
    made = tables()
    return re.sub(
        r"^```text\n.*?^```$",
        lambda _: "\n".join(["```text", *next(made), "```"]),
        page,
        flags=re.MULTILINE | re.DOTALL,
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
