"""Measures the parts of transformer blocks on one GPU, next to the seconds that the law of `pipefit plan` predicts.

Each part is a process of its own with a deadline. What it has measured until then counts, and a trial that fails is a
line with its error.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.block_trials import (
    BLOCKING,
    SHAPES,
    TINY,
    Place,
    Way,
    blocking,
    blocks,
    compiled,
    medians,
    parts,
    rounds,
)
from pipefit.planner.machines import load_topology

DEADLINES_S = {"parts": 38.0, "blocks": 45.0, "blocking": 15.0, "compiled": 110.0}
SECONDS = {"parts": 0.06, "blocks": 1.0, "blocking": 0.1, "compiled": 1.0}
"""For how long a work is repeated: blocks until the GPU is as warm as in training, and its clock as slow."""

_MARGIN_S = 4.0
"""Seconds before a deadline after which no trial begins."""

_LEFT_BYTES = 8 << 30
"""Memory that trials may leave in cycles of references."""

# ---- what a process measures ---------------------------------------------------------------------------------------


def kernels_of(ways: Iterable[Way], most: int = 40) -> list[dict[str, Any]]:
    """The kernels of some works, run once, by torch's profiler: those that take longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for way in ways:
            way()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    found = [(event.key[:160], event.count, event.self_device_time_total / 1e6) for event in events[:most]]
    return [{"kernel": name, "count": count, "seconds": seconds} for name, count, seconds in found if seconds]


def state_of_the_gpu() -> str:
    """Clocks, power and temperature, as nvidia-smi reports them."""
    fields = "name,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"nvidia-smi: {problem}"


def sustained(ways: Sequence[Way], place: Place, seconds: float) -> dict[str, Any]:
    """A work for some seconds: the first and the last tenth of its repetitions, and the clocks meanwhile."""
    first_s = sum(medians(ways, place))
    count = max(int(seconds / first_s), 10)
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            f"sleep {0.7 * seconds:.2f}; exec nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    found = [sum(each) for each in rounds(ways, count, place.device)]
    clocks, _ = process.communicate(timeout=10)
    tenth = max(count // 10, 3)
    return {
        "first_s": median(found[:tenth]),
        "last_s": median(found[-tenth:]),
        "rounds": count,
        "clocks": clocks.strip(),
    }


def measure(part: str, place: Place, shapes: Mapping[str, str], size: int) -> Iterator[dict[str, Any]]:
    """The figures of a part's trials, one after the other."""
    cuda = place.device.type == "cuda"
    makers = {"parts": partial(parts, size=size), "blocks": blocks, "blocking": blocking, "compiled": compiled}
    for label, name, make in makers[part](place, shapes):
        row: dict[str, Any] = {"part": part, "model": label, "name": name}
        if time.monotonic() > place.until:
            yield row | {"failed": "not measured: no time was left"}
            continue
        start = time.monotonic()
        try:
            trial = make()
            found = medians(list(trial.ways.values()), place)
            row["measured_s"] = dict(zip(trial.ways, found, strict=True))
            row["law_s"] = dict(trial.law_s)
            yield row | {"took_s": time.monotonic() - start}
            if cuda and name in ("block", "compiled block"):
                yield row | {"name": f"{name}: kernels", "kernels": kernels_of(trial.ways.values())}
            if cuda and name == f"product of {size}³":
                yield row | {
                    "name": f"{name}: sustained",
                    "sustained": sustained(list(trial.ways.values()), place, 2.0),
                }
        except Exception as problem:
            yield row | {"failed": f"{type(problem).__name__}: {problem}"[:600]}
        trial = None
        if cuda and torch.cuda.memory_allocated() > _LEFT_BYTES:
            gc.collect()  # slow: it visits all of torch's and transformers' objects
            torch.cuda.empty_cache()


# ---- all parts -----------------------------------------------------------------------------------------------------


def _place(tiny: bool, part: str) -> Place:
    until = time.monotonic() + DEADLINES_S[part] - _MARGIN_S
    kind = "H100"
    if tiny:
        device = torch.device("cpu")
        seconds = 0.001
    else:
        device = torch.device("cuda", 0)
        seconds = SECONDS[part]
        kind = "H200" if "H200" in torch.cuda.get_device_name() else "H100"
    machine = replace(load_topology(f"1x{kind}").device, memory_bytes=0.0)
    return Place(device, machine, seconds, until)


def lines_of(row: Mapping[str, Any]) -> list[str]:
    """A row for people: measured, predicted, and predicted over measured."""
    head = f"{row['model']:12}{row['name']:32}"
    if "failed" in row:
        return [f"{head}{row['failed']}"]
    if "kernels" in row:
        listed = [
            f"    {each['seconds'] * 1e3:9.3f} ms {each['count']:4} × {each['kernel']}" for each in row["kernels"]
        ]
        return [head, *listed]
    if "sustained" in row:
        return [f"{head}{row['sustained']}"]
    found = []
    for way, seconds in row["measured_s"].items():
        laws = {name: law for name, law in row["law_s"].items() if name in (way, f"{way}, counted")}
        ratios = "  ".join(f"law {law * 1e3:9.4f} ms, × {law / seconds:.3f}" for law in laws.values())
        found.append(f"{head}{way:12}{seconds * 1e3:10.4f} ms  {ratios}")
    return found


def run_part(part: str, tiny: bool) -> list[dict[str, Any]]:
    """The rows of a part, from a process of its own."""
    deadline_s = DEADLINES_S[part]
    command = [sys.executable, "-m", "benchmarks", "gpu-law", "--part", part]
    if tiny:
        command.append("--tiny")
    environment = dict(os.environ)
    if part == "blocking":
        environment[BLOCKING] = "1"
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment)
        problem = ""
        try:
            if process.wait(timeout=deadline_s):
                problem = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problem = f"not done after {deadline_s:g} s"
        output.seek(0)
        errors.seek(0)
        rows = [json.loads(line) for line in output if line.startswith("{") and line.endswith("}\n")]
        if problem:
            row = {"part": part, "model": part, "name": "", "failed": f"{problem}; {errors.read()[-1500:]}"}
            rows.append(row)
    return rows


def main(part: str = "", output: Path = Path("gpu-law.json"), only: str = "", tiny: bool = False) -> int:
    """Measures all parts, prints them, and writes them to a file.

    Args:
        part: Only this part, in this process; its rows go to standard output as JSON.
        output: File of the rows.
        only: Names of parts, separated by commas; default: parts, blocks, blocking, compiled.
        tiny: Tiny sizes on the CPU, to try this command.
    """
    if not tiny and not torch.cuda.is_available():
        print("gpu-law: needs a CUDA device, and torch sees none here; --tiny tries it on the CPU", file=sys.stderr)
        return 2
    if part:
        place = _place(tiny, part)
        shapes, size = (TINY, 64) if tiny else (SHAPES, 8192)
        for row in measure(part, place, shapes, size):
            print(json.dumps(row), flush=True)
        return 0
    rows: list[dict[str, Any]] = []
    machine = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if not tiny:
        machine["gpu"] = state_of_the_gpu()
    print(machine, flush=True)
    for name in only.split(",") if only else DEADLINES_S:
        start = time.monotonic()
        found = run_part(name, tiny)
        rows += found
        print("\n".join(line for row in found for line in lines_of(row)))
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1), encoding="utf-8")
    return int(any("failed" in row for row in rows))
