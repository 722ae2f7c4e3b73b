"""The parts of `pipefit doctor --gpu`, each run alone by `python -m pipefit.testing.gpu_parts NAME cuda`.

A part returns its figures; under "problems" it says in words what is wrong. The device may be "cpu", which tries the
code of the parts but no GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipefit.cost import of_plan
from pipefit.errors import PipefitError
from pipefit.models import build
from pipefit.pipeline.pipeline import Pipeline
from pipefit.pipeline.request import decide
from pipefit.planner.simulated import update_s
from pipefit.profiling.clock import Clock, median_of
from pipefit.profiling.links import measure_links
from pipefit.profiling.machine import measure_device
from pipefit.profiling.workload import Workload
from pipefit.runtime.launch import launch
from pipefit.runtime.outcomes import LaunchError
from pipefit.runtime.session import current
from pipefit.spec.files import JsonObject
from pipefit.spec.options import Parallelism, Request
from pipefit.stage import accelerator
from pipefit.stage.accelerator import is_accelerator, settle
from pipefit.stage.device import process_device
from pipefit.stage.split import named_layers
from pipefit.testing.equality import check

Figures = JsonObject

PRODUCTS = {
    "fp32": (torch.float32, "highest"),
    "tf32": (torch.float32, "high"),
    "bf16": (torch.bfloat16, "highest"),
    "fp16": (torch.float16, "highest"),
}
"""How matrices are multiplied: the type of their numbers, and torch's precision for products of float32."""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream", "pipedream-2bw")
MODELS = {
    "small": {"layers": 8, "hidden": 512, "heads": 8, "context": 256, "vocab": 4096, "tied": False},
    "large": {"layers": 6, "hidden": 2048, "heads": 16, "context": 1024, "vocab": 8192, "tied": False},
}
"""GPTs whose steps are predicted: one whose kernels are about as short as their launch, and one of long ones."""

_TINY = {"layers": 2, "hidden": 32, "heads": 2, "context": 16, "vocab": 32, "tied": False}
_LEAST_HIDDEN = 0.5
_ALIKE = 1.25
_SLOW_LAUNCH_S = 20e-6


def devices_of(device: str) -> list[torch.device]:
    """The GPUs of this machine, or the CPU."""
    if device == "cpu":
        return [torch.device("cpu")]
    return [torch.device(device, index) for index in range(torch.accelerator.device_count())]


def rates(device: str) -> Figures:
    """Products, copies and the launch of a kernel, on each GPU."""
    figures = {}
    problems = []
    for place in devices_of(device):
        own = {}
        for name, (dtype, precision) in PRODUCTS.items():
            torch.set_float32_matmul_precision(precision)
            found = measure_device(place, dtype=dtype, repeats=3)
            own[f"{name}_flops"] = found.flops
        own["memory_bytes_per_s"] = found.memory_bandwidth_bytes_per_s
        own["launch_s"] = found.kernel_s
        own["memory_bytes"] = found.memory_bytes
        own |= _copies(place)
        figures[str(place)] = own
        if own["bf16_flops"] < own["fp32_flops"]:
            problems.append(f"{place}: bf16 is not faster than fp32 here: train with precision fp32")
        if own["launch_s"] > _SLOW_LAUNCH_S:
            microseconds = own["launch_s"] * 1e6
            problems.append(f"{place}: a kernel takes {microseconds:.0f} µs to launch: short layers wait for the host")
        if own["to_device_pinned_bytes_per_s"] < own["to_device_pageable_bytes_per_s"] and device != "cpu":
            problems.append(
                f"{place}: pinned memory is copied no faster than other memory: spilled stages will be slow"
            )
    fastest = max(own["bf16_flops"] for own in figures.values())
    slow = [name for name, own in figures.items() if own["bf16_flops"] * _ALIKE < fastest]
    if slow:
        problems.append(
            f"{', '.join(slow)}: slower than the fastest by more than a quarter: look at clocks and cooling"
        )
    return {"gpus": figures, "problems": problems}


def _copies(place: torch.device) -> Figures:
    """Bytes per second between the host and a device, from pinned and from other memory."""
    num_bytes = (1 << 28) if is_accelerator(place) else (1 << 22)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=place)
    clock = Clock(place)
    figures = {}
    for kind in ("pinned", "pageable"):
        host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned" and is_accelerator(place))
        for way, target, source in (("to_device", there, host), ("to_host", host, there)):
            copy = partial(target.copy_, source, non_blocking=True)
            seconds = [clock.seconds(copy) for _ in range(4)]
            figures[f"{way}_{kind}_bytes_per_s"] = num_bytes / median_of(seconds[1:])
    return figures


def overlap(device: str) -> Figures:
    """Products while copies go both ways, next to each of the two alone."""
    place = devices_of(device)[0]
    is_gpu = is_accelerator(place)
    size = 8192 if is_gpu else 256
    num_bytes = (1 << 28) if is_gpu else (1 << 20)
    matrix = torch.ones(size, size, device=place)
    there = torch.zeros(2, num_bytes, dtype=torch.uint8, device=place)
    host = torch.zeros(2, num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
    streams = [accelerator.new_stream(place) for _ in range(2)] if is_gpu else []

    def products() -> None:
        for _ in range(4):
            torch.mm(matrix, matrix)

    def copies() -> None:
        pairs = ((there[0], host[0]), (host[1], there[1]))
        for index, (target, source) in enumerate(pairs):
            if is_gpu:
                with accelerator.on_stream(streams[index]):
                    target.copy_(source, non_blocking=True)
            else:
                target.copy_(source)

    def both() -> None:
        copies()
        products()

    seconds = {
        name: _settled_s(place, work) for name, work in (("products", products), ("copies", copies), ("both", both))
    }
    hidden = (seconds["products"] + seconds["copies"] - seconds["both"]) / min(seconds["products"], seconds["copies"])
    problems = []
    if is_gpu and hidden < _LEAST_HIDDEN:
        problems.append(
            f"copies run during computation for {hidden:.0%} of their time only: spilled stages will be slow"
        )
    return {f"{name}_s": value for name, value in seconds.items()} | {"hidden": hidden, "problems": problems}


def _settled_s(place: torch.device, work: Callable[[], object]) -> float:
    """The median of the seconds from an idle device to an idle device."""
    found = []
    for _ in range(6):
        settle(place)
        start = time.perf_counter()
        work()
        settle(place)
        found.append(time.perf_counter() - start)
    return median_of(found[1:])


def schedules(device: str) -> Figures:
    """Training by each schedule equals that of one process in float64: in one process, and with a GPU for each rank."""
    figures = {}
    problems = []
    transports = ["local"]
    if len(devices_of(device)) > 1:
        transports.append("distributed")
    for transport in transports:
        for name in SCHEDULES:
            parallelism = Parallelism(ranks=2, chunks=2 if name in ("interleaved", "zb-v") else 1, device=device)
            found = check(
                build("gpt", **_TINY | {"layers": 4}), schedule=name, parallelism=parallelism, transport=transport
            )
            figures[f"{name}, {transport}"] = found.equal
            if not found.equal:
                problems.append(
                    f"{name}, {transport}: training differs from one process, first in {found.first_difference}"
                )
    return {"equal": figures, "problems": problems}


def prediction(device: str) -> Figures:
    """Seconds of a step that a profile and the simulator give, and those of the step."""
    place = process_device(device)
    figures = {}
    problems = []
    models = MODELS if is_accelerator(place) else {"small": _TINY}
    for name, sizes in models.items():
        with place:
            bundle = build("gpt", **sizes)
        x, y = bundle.example(8, 0)
        half = torch.bfloat16 if is_accelerator(place) else None
        request = Request("1f1b", 4, 1, parallelism=Parallelism(device=device))
        work = Workload(named_layers(bundle.layers), bundle.loss, _adam, place, (x, y), half=half, model=name)
        made = decide(request, work, current(), measure=True)
        assert made.profile is not None and made.topology is not None
        costs = of_plan(made.profile.at(2), made.plan, made.topology)
        predicted_s = update_s(made.plan, costs)[1]
        pipe = Pipeline(
            bundle.layers,
            loss=bundle.loss,
            optimizer=_adam,
            microbatches=4,
            stages=1,
            precision="bf16" if half else "fp32",
            parallelism=Parallelism(device=device),
        )
        pipe.step(x, y)
        measured_s = _settled_s(place, partial(pipe.step, x, y))
        pipe.close()
        figures[name] = {"predicted_s": predicted_s, "measured_s": measured_s, "profile": made.profile.device}
        if is_accelerator(place) and not 0.7 < predicted_s / measured_s < 1.4:
            problems.append(f"a step of the {name} model takes {measured_s / predicted_s:.2f} × the predicted time")
    return {"models": figures, "problems": problems}


def _adam(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.AdamW(parameters, 1e-4, fused=is_accelerator(parameters[0].device))


# ---- with a GPU for each rank --------------------------------------------------------------------------------------


def num_ranks(device: str) -> int:
    """Ranks of the parts that have several: one for each GPU; two on a CPU."""
    if device == "cpu":
        return 2
    return torch.accelerator.device_count()


def links(device: str) -> Figures:
    """The first messages, and latency and bandwidth of each link."""
    return launch(_links_of_rank, num_ranks(device), device, threads=1, quiet=True)[0]


def _links_of_rank(device: str) -> Figures:
    place = process_device(device)
    start = time.perf_counter()
    current()
    group_s = time.perf_counter() - start
    total = torch.ones(1, device=place)
    dist.all_reduce(total)
    settle(place)
    first_s = time.perf_counter() - start - group_s
    sizes = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28) if is_accelerator(place) else (1 << 10, 1 << 20, 1 << 24)
    found = measure_links(sizes=sizes, repeats=8, device=place)
    levels = [
        {"level": level.name, "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s, "latency_s": level.latency_s}
        for level in found.levels
    ]
    return {"group_s": group_s, "first_message_s": first_s, "links": levels, "problems": []}


def ahead(device: str) -> Figures:
    """Products of a rank that has posted receives ahead; the messages come later, and must not slow it."""
    found = launch(_ahead_of_rank, 2, device, threads=1, quiet=True)[1]
    alone_s = found["0"]
    problems = [
        f"products take {seconds / alone_s:.2f} × the time while {count} receives wait"
        for count, seconds in found.items()
        if seconds > _ALIKE * alone_s and device != "cpu"
    ]
    return {"products_s": found, "problems": problems}


def _ahead_of_rank(device: str) -> dict[str, float]:
    place = process_device(device)
    session = current()
    matrix = torch.ones(4096 if is_accelerator(place) else 64, 64, device=place)
    ready, *buffers = (torch.zeros(1 << 20, device=place) for _ in range(9))
    found = {}
    for count in (0, 0, 1, 2, 4, 8):
        dist.barrier()
        if session.rank == 1:
            posted = [dist.irecv(buffer, 0) for buffer in buffers[:count]]
            start = time.perf_counter()
            for _ in range(200):
                torch.mm(matrix, matrix.T)
            settle(place)
            found[str(count)] = time.perf_counter() - start
            dist.send(ready, 0)
            for work in posted:
                assert work is not None
                work.wait()
        elif session.rank == 0:
            dist.recv(ready, 1)
            for buffer in buffers[:count]:
                dist.send(buffer, 1)
        settle(place)
    return found


def deaths(device: str) -> Figures:
    """Seconds until a run ends in which one rank dies, or stands still for longer than the deadline of 5 s."""
    figures = {}
    problems = []
    for fault in ("dies", "stands still"):
        start = time.monotonic()
        try:
            launch(_faulty_rank, 2, device, fault, threads=1, quiet=True, deadline_s=5)
        except (LaunchError, PipefitError) as error:
            figures[fault] = {"seconds": time.monotonic() - start, "message": str(error).splitlines()[0]}
        else:
            problems.append(f"a run went on in which a rank {fault}")
    return {"faults": figures, "problems": problems}


def _faulty_rank(device: str, fault: str) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = Pipeline(
        layers,
        loss=nn.functional.mse_loss,
        optimizer=_adam,
        microbatches=2,
        stages=2,
        parallelism=Parallelism(device=device),
    )
    x = torch.ones(4, 8)
    for step in range(1000):
        if step == 3 and current().rank == 1:
            if fault == "dies":
                os._exit(9)
            time.sleep(600)
        pipe.step(x, x)


@dataclass(frozen=True)
class Part:
    """A part of the examination.

    Attributes:
        run: from a kind of device, such as "cuda" or "cpu", to figures.
        tries: what it tries, in words.
        deadline_s: seconds after which it is ended: that it hangs is a result.
        least_gpus: it needs.
    """

    run: Callable[[str], Figures]
    tries: str
    deadline_s: float
    least_gpus: int = 1


PARTS = {
    "rates": Part(rates, "products, copies and launches of each GPU", 40),
    "overlap": Part(overlap, "copies during computation", 25),
    "schedules": Part(schedules, "training equals that of one process", 80),
    "prediction": Part(prediction, "predicted and measured steps", 55),
    "links": Part(links, "messages between GPUs", 40, 2),
    "ahead": Part(ahead, "receives posted ahead", 25, 2),
    "deaths": Part(deaths, "a rank that dies or stands still", 35, 2),
}


def main(arguments: Sequence[str]) -> None:
    """Runs a part and writes its figures as the last line of standard output."""
    name, device = arguments
    print(json.dumps(PARTS[name].run(device)))


if __name__ == "__main__":
    main(sys.argv[1:])
