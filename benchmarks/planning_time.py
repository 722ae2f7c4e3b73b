"""Processor seconds of planning."""

import subprocess
import sys
import time

from pipefit.planner import gpt_profile, plan
from pipefit.planner.machines import load_topology
from pipefit.spec import Layer, Profile, Topology

GPTS = {
    "18B": (40, 6144, 48, 64, 256),
    "175B": (96, 12288, 96, 1024, 1536),
    "175B ": (96, 12288, 96, 512, 1536),
    "1T": (128, 25600, 160, 3072, 3072),
}


def layer(index: int) -> Layer:
    return Layer(f"l{index}", 1e-3 * (1 + index % 3), 1e-3 * (1 + index % 3), 1e-3, 1e5, 4e5, 1e6)


def report(name: str, profile: Profile, topology: Topology, batch: int, method: str = "auto") -> None:
    began = time.process_time()
    found = plan(profile, topology, global_batch=batch, method=method)
    seconds = time.process_time() - began
    stages, chunks = found.partition.stages, found.num_chunks
    shape = f"depth {len(stages) // chunks} × data {found.data} × tensor {stages[0].tensor} × chunks {chunks}"
    rate = f"{found.prediction.throughput:.4g} samples/s" if found.prediction else ""
    print(f"| {name}, {method} | {found.schedule}, {shape}, b {found.microbatch_size} | {rate} | {seconds:.1f} s |")


def one(name: str) -> None:
    """One case in a process of its own: programs that one plan counted would save time in the next."""
    if name in GPTS:
        layers, hidden, heads, devices, batch = GPTS[name]
        topology = load_topology(f"dgx-a100-{devices}")
        for method in ("auto", "ptdp"):
            profile = gpt_profile(layers, hidden, heads, device=topology.device)
            report(f"GPT {name.strip()} on {devices} GPUs, batch {batch}", profile, topology, batch, method)
        return
    num_layers, devices = map(int, name.split())
    profile = Profile("chain", 2, tuple(layer(index) for index in range(num_layers)))
    report(f"chain of {num_layers} layers on local:{devices}, batch 64", profile, Topology.local(devices), 64)


def main() -> None:
    for case in ("8 2", "8 4", "32 4", "128 4", "32 8", "128 8", *GPTS):
        subprocess.run([sys.executable, __file__, case], check=True)


if __name__ == "__main__":
    one(sys.argv[1])
