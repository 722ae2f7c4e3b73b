"""The tables of docs/known-answers.md: `python -m docs.known_answers` writes them into the page."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
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

# Runs of a GPT of 24 layers, hidden size 2,048 and 16 heads on eight V100s in servers of four, 512 samples of 2,048
# tokens per update: tensor width, depth, samples of a micro-batch, what is replayed, and published seconds per update.
V100_RUNS = (
    (1, 1, 1, "none", 23),
    (1, 1, 1, "layer", 29),
    (1, 1, 2, "layer", 29),
    (1, 1, 4, "layer", 28),
    (1, 1, 8, "layer", 28),
    (1, 2, 1, "none", 23),
    (1, 2, 1, "layer", 30),
    (1, 2, 2, "layer", 29),
    (1, 2, 4, "layer", 28),
    (1, 2, 8, "layer", 29),
    (1, 4, 1, "none", 25),
    (1, 4, 2, "none", 24),
    (1, 4, 1, "layer", 32),
    (1, 4, 4, "layer", 30),
    (1, 4, 8, "layer", 32),
    (1, 8, 1, "layer", 37),
    (1, 8, 4, "layer", 35),
    (2, 1, 1, "none", 39),
    (2, 1, 1, "layer", 53),
)


def line(model: str, levels: Levels, cost: str) -> str:
    """One row of `pipedream`, by the hierarchical search without a preference for data parallelism."""
    machine = Topology(tuple(Level(f"level {i}", width, rate * 1e9) for i, (width, rate) in enumerate(levels)))
    profile = load_profile(model)
    if model == "gnmt":
        profile = profile.at(64)  # as in the paper
    found = pipedream(profile, machine, cost=cost, search="hierarchical", margin=0.0)
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


def v100_s(tensor: int, depth: int, size: int, replayed: str) -> float:
    """Seconds per update of one of `V100_RUNS`, predicted with the device of `pcie-4`.

    Published are NVLink and one port of 100 Gbit/s for each GPU; without tensor parallelism both hardly count.
    """
    device = msgspec.structs.replace(load_topology("pcie-4").device, memory_bytes=1e12)
    machine = Topology((Level("server", 4, 75e9, latency_s=1e-5), Level("cluster", 2, 12e9, latency_s=2e-5)), device)
    found = plan(
        gpt_profile(24, 2048, 16, vocab=50257, microbatch=size, device=device, topology=machine),
        machine,
        schedules=["1f1b"],
        global_batch=512,
        tensors=[tensor],
        depths=[depth],
        microbatch_sizes=[size],
        recompute=replayed,
    )
    assert found.prediction is not None
    return 512 / found.prediction.throughput


def v100_line(tensor: int, depth: int, size: int, replayed: str, published_s: int) -> str:
    """A published run, and its prediction."""
    predicted_s = v100_s(tensor, depth, size, replayed)
    widths = f"t {tensor}  p {depth}  b {size}  {replayed:5}"
    return f"{widths}   {published_s:3} s   {predicted_s:5.1f} s   {predicted_s / published_s:.2f}"


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
    yield [v100_line(*run) for run in V100_RUNS]


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
