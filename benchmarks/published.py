"""Published figures of pipeline training next to what `plan` computes: nothing here sets a constant.

The machines' constants come from data sheets and micro-benchmarks (see their files), the sizes of micro-batches and
chunks from the authors' scripts. `python -m benchmarks.published [NAME …]`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import msgspec

from pipefit.planner import gpt_profile, plan
from pipefit.planner.machines import load_topology
from pipefit.planner.ptdp import Gpt, flops_per_iteration, num_parameters
from pipefit.spec import Plan, Topology
from pipefit.spec.published import load_profile


def dgx(devices: int) -> Topology:
    """Servers of eight A100 GPUs."""
    topology = load_topology("dgx-a100-64")
    inner, outer = topology.levels
    return msgspec.structs.replace(topology, levels=(inner, msgspec.structs.replace(outer, width=devices // 8)))


def gpt_plan(
    gpt: Gpt, devices: int, batch: int, t: int, p: int, b: int | None, fits: bool = True, **more: object
) -> Plan:
    """The plan of a GPT with the widths and the micro-batch size given."""
    topology = dgx(devices)
    if not fits:
        topology = msgspec.structs.replace(topology, device=msgspec.structs.replace(topology.device, memory_bytes=1e15))
    layers = gpt_profile(gpt.layers, gpt.hidden, gpt.heads, device=topology.device)
    settings = {"schedules": ["1f1b"], "recompute": "layer", "sharded": False, "blocking": True} | more
    sizes = [b] if b else None
    return plan(layers, topology, global_batch=batch, tensors=[t], depths=[p], microbatch_sizes=sizes, **settings)


def tflops(gpt: Gpt, batch: int, devices: int, found: Plan) -> float:
    """TFLOP/s of a device by the paper's count, which includes the replay."""
    return found.prediction.throughput / batch * flops_per_iteration(gpt, batch, recompute=True) / devices / 1e12


def share(ours: float, theirs: float) -> str:
    return f"{ours / theirs - 1:+.1%}"


# Heads, hidden, layers, t, p, GPUs, batch, TFLOP/s: Narayanan et al. 2021, table 1. Micro-batch size and layers of a
# virtual stage (0: 1F1B): Megatron-LM, examples/sc21/run_table_1.sh.
TABLE_1 = [
    (24, 2304, 24, 1, 1, 32, 512, 137, 16, 0),
    (32, 3072, 30, 2, 1, 64, 512, 138, 16, 0),
    (32, 4096, 36, 4, 1, 128, 512, 142, 16, 0),
    (48, 6144, 40, 8, 1, 256, 1024, 135, 8, 0),
    (64, 8192, 48, 8, 2, 512, 1536, 138, 4, 0),
    (80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 5),
    (96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 5),
    (128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 3),
    (128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 1),
    (160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 0),
]


def ptdp() -> None:
    """PTD-P, table 1 and the days of training."""
    print("parameters  t  p   GPUs  batch  published  ours  difference  schedule")
    for heads, hidden, layers, t, p, devices, batch, published, b, virtual in TABLE_1:
        gpt = Gpt(layers, hidden, heads)
        chunks = {"schedules": ["interleaved"], "chunks": [layers // p // virtual]} if virtual else {}
        found = gpt_plan(gpt, devices, batch, t, p, b, **chunks)
        ours = tflops(gpt, batch, devices, found)
        print(
            f"{num_parameters(gpt) / 1e9:8.1f} B {t:2} {p:2} {devices:6} {batch:6} {published:8}  {ours:6.1f} "
            f"{share(ours, published):>8}  {found.schedule} v={found.num_chunks}"
        )
    for name, row, tokens, devices, batch, days in (
        ("175 B", Gpt(96, 12288, 96), 300e9, 1024, 1536, 34),
        ("1 T", Gpt(128, 25600, 160), 450e9, 3072, 3072, 84),
    ):
        p, b = (8, 1) if row.layers == 96 else (64, 1)
        found = gpt_plan(row, devices, batch, 8, p, b, **({"schedules": ["interleaved"]} if p == 8 else {}))
        ours = tokens / row.sequence / found.prediction.throughput / 86400
        print(f"days of {name} on {tokens / 1e9:.0f} B tokens: published {days}, ours {ours:.1f} {share(ours, days)}")


def later() -> None:
    """The law on a later measurement: 530 B on 2,240 GPUs with full recompute, 42.1 % MFU (Korthikanti et al. 2022)."""
    gpt = Gpt(105, 20480, 128)
    found = gpt_plan(gpt, 2240, 2240, 8, 35, 1, schedules=["interleaved"], chunks=[3])
    ours = found.prediction.throughput * flops_per_iteration(gpt, 1) / 2240 / 312e12
    print(f"MFU: published 42.1 %, ours {ours:.1%} ({share(ours, 0.421)})")


def widths(gpt: Gpt, batches: list[int], pairs: list[tuple[int, int]], devices: int = 64) -> None:
    """TFLOP/s of a device for pairs of tensor width and depth; micro-batches of one."""
    print(f"{num_parameters(gpt) / 1e9:.1f} B on {devices} GPUs, micro-batches of 1; TFLOP/s per GPU")
    print("batch  " + "  ".join(f"t={t:<2} p={p:<2}" for t, p in pairs))
    for batch in batches:
        cells = []
        for t, p in pairs:
            data = devices // (t * p)
            if batch % data:
                cells.append("     -   ")
                continue
            found = gpt_plan(gpt, devices, batch, t, p, 1, fits=False)
            cells.append(f"{tflops(gpt, batch, devices, found):7.1f}  ")
        print(f"{batch:5}  " + "  ".join(cells))


def tensor_data() -> None:
    """PTD-P, 5.9 B: data against tensor parallelism. Published: throughput falls with t at every batch."""
    widths(Gpt(32, 3840, 32), [32, 128, 512], [(t, 1) for t in (1, 2, 4, 8, 16)])


def pipeline_data() -> None:
    """PTD-P, 5.9 B: data against pipeline parallelism. Published: throughput falls with p at every batch."""
    widths(Gpt(32, 3840, 32), [32, 128, 512], [(1, p) for p in (1, 2, 4, 8, 16, 32)])


def tensor_pipeline() -> None:
    """PTD-P, 161 B: tensor against pipeline parallelism. Published: best at t = p = 8."""
    widths(Gpt(32, 20480, 128), [32, 128], [(2, 32), (4, 16), (8, 8), (16, 4), (32, 2)])


def microbatch() -> None:
    """PTD-P, 91 B, t = p = 8: best micro-batch size. Published: 2."""
    gpt = Gpt(64, 10880, 128)
    for batch in (128, 512):
        cells = [(b, tflops(gpt, batch, 64, gpt_plan(gpt, 64, batch, 8, 8, b))) for b in (1, 2, 4, 8)]
        print(f"batch {batch}: " + ", ".join(f"b={b} {rate:.1f}" for b, rate in cells))


def interleaved() -> None:
    """PTD-P, 175 B on 96 GPUs, t = 8, p = 12: interleaving and scatter/gather. Published: gain falls; up to 11 %.

    Chunks and micro-batches of scatter/gather: Megatron-LM, examples/sc21/run_figure_18.sh.
    """
    gpt = Gpt(96, 12288, 96)
    for batch in (12, 24, 36, 48, 60):
        plain, looped, whole = (
            tflops(gpt, batch, 96, gpt_plan(gpt, 96, batch, 8, 12, 1, **more))
            for more in (
                {},
                {"schedules": ["interleaved"], "chunks": [4]},
                {"schedules": ["interleaved"], "chunks": [4], "whole_messages": True},
            )
        )
        print(
            f"batch {batch}: 1F1B {plain:.1f}, interleaved {looped:.1f} ({share(looped, plain)}), "
            f"scatter/gather {share(looped, whole)}"
        )


# Speed-up over data parallelism, and the shape: Narayanan et al., SOSP 2019, table 1 (4 servers of 4 V100, 10 Gbit/s).
# Mini-batches of a device as in the paper: 64 (VGG, GNMT) and 128.
PIPEDREAM = {"vgg16": ("15-1", 5.28, 64), "resnet50": ("16", 1.0, 128), "gnmt": ("straight", 2.46, 64)}


def pipedream() -> None:
    """PipeDream, table 1, Cluster-A: 4 servers of 4 V100 on 10 Gbit/s."""
    for name, (shape, published, size) in PIPEDREAM.items():
        began = time.process_time()
        found = plan(load_profile(name), load_topology("pcie-4x4"), method="pipedream", microbatch_sizes=[size])
        ours = found.prediction.speedup_over_data_parallel
        widths = "-".join(str(stage.replicas) for stage in found.partition.stages)
        ahead = ours or 1.0
        print(
            f"{name}: published {shape} {published} ×; ours {widths} {ahead:.2f} × ({share(ahead, published)}), "
            f"{time.process_time() - began:.2f} s"
        )


def main() -> None:
    """Prints the sections named, or all."""
    for name in sys.argv[1:] or SECTIONS:
        began = time.process_time()
        print(f"\n== {name}: {(SECTIONS[name].__doc__ or name).splitlines()[0]}")
        SECTIONS[name]()
        print(f"({time.process_time() - began:.1f} s)")


SECTIONS: dict[str, Callable[[], None]] = {
    section.__name__.replace("_", "-"): section
    for section in (ptdp, later, tensor_data, pipeline_data, tensor_pipeline, microbatch, interleaved, pipedream)
}

if __name__ == "__main__":
    main()
