"""Measures pipefit on one GPU: steps next to plain torch, memory next to its prediction and a cap, and a spilled run.

Each part is a process of its own with a deadline, so a part that hangs or fails is a line of the report and no more.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pipefit.cost import of_plan
from pipefit.cutting import cut
from pipefit.models import ModelBundle, build
from pipefit.pipeline.layer_sizes import state_per_weight
from pipefit.pipeline.pipeline import Pipeline
from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.workload import Workload
from pipefit.runtime.session import current
from pipefit.simulate import simulate
from pipefit.spec import Topology
from pipefit.spec.options import Parallelism, Spilled, Updates
from pipefit.stage.precision import half_of
from pipefit.stage.split import named_layers

MIB = 2**20
DEVICE = torch.device("cuda", 0)
SMALL = {"layers": 8, "hidden": 512, "heads": 8, "context": 256, "vocab": 4096, "tied": False}
LARGE = {"layers": 12, "hidden": 2048, "heads": 16, "context": 1024, "vocab": 16384, "tied": False}
HUGE = {"layers": 24, "hidden": 4096, "heads": 32, "context": 2048, "vocab": 32768, "tied": False}
MEDIUM = {"layers": 12, "hidden": 1024, "heads": 16, "context": 512, "vocab": 4096, "tied": False}
LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
         "num_key_value_heads": 4, "tie_word_embeddings": False}  # fmt: skip
BATCH, MICROBATCHES = 8, 4
Figures = dict[str, Any]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-4, fused=True)


def seconds(work: Callable[[], object], repeats: int = 5, warmup: int = 2) -> float:
    """The median of some repetitions, each from an idle device to an idle device."""
    found = []
    for turn in range(warmup + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if turn >= warmup:
            found.append(time.perf_counter() - start)
    return median(found)


def model(sizes: dict[str, Any]) -> ModelBundle:
    torch.manual_seed(0)
    return build("gpt", **sizes)


def plainly(bundle: ModelBundle, x: Tensor, y: Tensor) -> Callable[[], float]:
    """A step of plain torch with the same micro-batches."""
    layers = bundle.layers.to(DEVICE)
    optimizer = adam(layers.parameters())

    def step() -> float:
        total = torch.zeros((), device=DEVICE)
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            part, target = part.to(DEVICE), target.to(DEVICE)
            with torch.autocast("cuda", torch.bfloat16):
                output = layers(part)
            loss = bundle.loss(output.float(), target) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


def pipeline(bundle: ModelBundle, **options: Any) -> Pipeline:
    settings: dict[str, Any] = {"optimizer": adam, "microbatches": MICROBATCHES, "precision": "bf16"}
    settings |= {"parallelism": Parallelism(device="cuda:0"), "updates": Updates(), "stages": 1}
    return Pipeline(bundle.layers, loss=bundle.loss, **settings | options)


def steps(sizes: dict[str, Any]) -> Figures:
    figures: Figures = {}
    x, y = model(sizes).example(BATCH, 0)
    bundle = model(sizes)
    figures["parameters_m"] = sum(p.numel() for p in bundle.layers.parameters()) / 1e6
    torch_step = plainly(bundle, x, y)
    figures["torch_loss"] = torch_step()
    figures["torch_ms"] = seconds(torch_step) * 1e3
    del torch_step, bundle
    for name, options in (("one_stage", {}), ("four_stages", {"stages": 4})):
        torch.cuda.empty_cache()
        pipe = pipeline(model(sizes), **options)
        figures[f"{name}_loss"] = pipe.step(x, y)
        figures[f"{name}_step_ms"] = seconds(lambda pipe=pipe: pipe.step(x, y)) * 1e3
        figures[f"{name}_fit_ms"] = seconds(lambda pipe=pipe: pipe.fit([(x, y)] * 5), repeats=2, warmup=1) * 1e3 / 5
        records: list[Any] = []
        pipe.fit([(x, y)] * 4, callbacks=[records.append])
        figures[f"{name}_bubble"] = records[-1].bubble
        pipe.close()
        del pipe
    return figures


def spilled() -> Figures:
    """A model larger than a cap against the same one without: seconds, and the peak against the cap."""
    figures: Figures = {}
    x, y = model(MEDIUM).example(BATCH, 0)
    for name, cap in (("resident", None), ("spilled", 1 << 30)):
        gc.collect()
        torch.cuda.empty_cache()
        options: dict[str, Any] = {"example": (x, y)}
        if cap:
            options |= {"spill": Spilled(cap), "stages": None}
        start = time.perf_counter()
        pipe = pipeline(model(MEDIUM), **options)
        figures[f"{name}_planned_in_s"] = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        figures[f"{name}_loss"] = pipe.step(x, y)
        figures[f"{name}_ms"] = seconds(lambda pipe=pipe: pipe.step(x, y), repeats=3, warmup=1) * 1e3
        figures[f"{name}_peak_mib"] = torch.cuda.max_memory_allocated() / MIB
        figures[f"{name}_held_mib"] = (pipe.held_bytes or 0) / MIB
        if cap:
            figures["cap_mib"] = cap / MIB
            figures["schedule"] = pipe.plan.schedule
            figures["stages"] = len(pipe.plan.partition.stages)
        pipe.close()
        del pipe
    return figures


def too_large(sizes: dict[str, Any] = HUGE, cap: str = "40 GiB") -> Figures:
    """A model with more weights, gradients and states than a GPU of 80 GB has room for, in half of it."""
    figures: Figures = {}

    def note(name: str, value: Any) -> None:
        figures[name] = value
        print(name, value, file=sys.stderr, flush=True)

    with torch.device("meta"):
        bundle = model(sizes)
    x, y = bundle.example(BATCH, 0)
    num_parameters = sum(p.numel() for p in bundle.layers.parameters())
    note("parameters_m", num_parameters / 1e6)
    note("states_gib", 16 * num_parameters / 2**30)
    note("gpu_gib", torch.cuda.get_device_properties(DEVICE).total_memory / 2**30)
    start = time.perf_counter()
    pipe = pipeline(bundle, example=(x, y), spill=Spilled(cap), stages=None)
    note("planned_in_s", time.perf_counter() - start)
    assert pipe.plan.spill is not None
    note("predicted_s", pipe.plan.spill.limit_s)
    note("binds", pipe.plan.spill.binds)
    note("stages", len(pipe.plan.partition.stages))
    torch.cuda.reset_peak_memory_stats()
    for number in range(4):
        start = time.perf_counter()
        loss = pipe.step(x, y)
        torch.cuda.synchronize()
        note(f"step_{number}", [loss, time.perf_counter() - start])
    note("peak_gib", torch.cuda.max_memory_allocated() / 2**30)
    return figures


def peak() -> Figures:
    """Memory under a small cap: planned, held between instructions, and the peak of torch's allocator."""
    cap = 192 << 20
    bundle = model({"layers": 16, "hidden": 512, "heads": 8, "context": 128, "vocab": 256, "tied": False})
    x, y = bundle.example(4, 0)
    options = {"example": (x, y), "spill": Spilled(cap, step_on="device"), "stages": None, "precision": "fp32"}
    pipe = pipeline(bundle, **options)
    for _ in range(3):
        pipe.step(x, y)
    spill = pipe.plan.spill
    assert spill is not None and spill.peak_bytes is not None
    return {
        "cap_mib": cap / MIB,
        "planned_mib": spill.peak_bytes / MIB,
        "held_mib": (pipe.held_bytes or 0) / MIB,
        "allocator_mib": torch.cuda.max_memory_allocated() / MIB,
    }


def llama() -> tuple[Any, Any, Any, Any]:
    """A Llama of transformers of 570 million parameters, its loss and a batch."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA)
    words = torch.randint(config.vocab_size, (BATCH, 1024))
    batch = {"input_ids": words, "labels": words}
    few = words[:1, :32]
    made = cut(transformers.LlamaForCausalLM(config), example={"input_ids": few, "labels": few})
    return made, made.loss, batch, batch


def gpt(sizes: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    bundle = model(sizes)
    return bundle.layers, bundle.loss, *bundle.example(BATCH, 0)


MEMORY: dict[str, tuple[Callable[[], tuple[Any, Any, Any, Any]], str, dict[str, Any]]] = {
    "gpt 155 M, fp32": (lambda: gpt(MEDIUM), "fp32", {}),
    "gpt 155 M": (lambda: gpt(MEDIUM), "bf16", {}),
    "gpt 674 M": (lambda: gpt(LARGE), "bf16", {}),
    "gpt 674 M, layers replayed": (lambda: gpt(LARGE), "bf16", {"recompute": "layer"}),
    "gpt 674 M, 3 stages breadth-first": (lambda: gpt(LARGE), "bf16", {"schedule": "breadth-first", "chunks": 3}),
    "llama 570 M": (llama, "bf16", {}),
    "llama 570 M, layers replayed": (llama, "bf16", {"recompute": "layer"}),
    "llama 570 M, fp32": (llama, "fp32", {}),
}
"""Of each trial the model, the precision and the plan."""


def memory() -> Figures:
    """The peak of a step in MiB: predicted from the measured layers, and that of torch's allocator."""
    figures: Figures = {}
    for name, (make, precision, options) in MEMORY.items():
        gc.collect()
        torch.cuda.empty_cache()
        layers, loss, x, y = make()
        plan: dict[str, Any] = {"recompute": "none", "chunks": 1} | options
        schedule = plan.pop("schedule", "gpipe")
        named = named_layers(layers)
        work = Workload(named, loss, adam, DEVICE, (x, y), half=half_of(precision))
        profile = agreed_profile(work, [BATCH // MICROBATCHES], current(), repeats=1, warmup=0)
        state = state_per_weight(named, adam)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        parallelism = Parallelism(device="cuda:0", ranks=1, **plan)
        settings = {"loss": loss, "optimizer": adam, "microbatches": MICROBATCHES, "schedule": schedule}
        pipe = Pipeline(layers, parallelism=parallelism, precision=precision, **settings)
        cost = of_plan(profile, pipe.plan, Topology.local(1), state_per_weight=state)
        predicted = simulate(pipe.program, cost, repeats=2).peak_bytes(0)
        for _ in range(2):
            pipe.step(x, y)
        torch.cuda.reset_peak_memory_stats()
        pipe.step(x, y)
        counted = torch.cuda.max_memory_allocated() - before
        figures[name] = [predicted / MIB, counted / MIB, predicted / counted - 1]
        pipe.close()
        del pipe, layers, named, work, loss, x, y, cost
    return figures


PARTS: dict[str, tuple[Callable[[], Figures], float]] = {
    "small": (lambda: steps(SMALL), 45),
    "large": (lambda: steps(LARGE), 60),
    "peak": (peak, 45),
    "memory": (memory, 120),
    "spilled": (spilled, 70),
    "too-large": (too_large, 230),
}


def run_part(name: str) -> Figures:
    """The figures of a part, from a process of its own; where it fails, the last lines of its error."""
    _, deadline_s = PARTS[name]
    command = [sys.executable, "-m", "benchmarks", "gpu", "--part", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired as hung:
        where = (hung.stderr or b"").decode(errors="replace")
        return {"failed": f"not done after {deadline_s:g} s", "output": where[-3000:]}
    if done.returncode:
        return {"failed": f"exit code {done.returncode}", "output": done.stderr[-1500:]}
    return json.loads(done.stdout.splitlines()[-1])


def main(part: str = "", output: Path = Path("gpu-report.json"), only: str = "") -> int:
    """Runs all parts and writes a report.

    Args:
        part: Only this part, in this process; its figures go to standard output as JSON.
        output: File of the report.
        only: Names of the parts, separated by commas; default: all.
    """
    if not torch.cuda.is_available():
        print("gpu: needs a CUDA device, and torch sees none here", file=sys.stderr)
        return 2
    if part:
        work, deadline_s = PARTS[part]
        faulthandler.dump_traceback_later(deadline_s - 3)  # where a part that takes too long is
        print(json.dumps(work()))
        return 0
    report: Figures = {}
    for name in only.split(",") if only else PARTS:
        start = time.monotonic()
        report[name] = run_part(name)
        report[name]["took_s"] = time.monotonic() - start
        print(name, json.dumps(report[name], default=str), flush=True)
        output.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return int(any("failed" in figures for figures in report.values()))
