"""A rank in its namespace: profiles, plans, trains by every strategy, and counts bytes."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from benchmarks.devices import Devices
from benchmarks.network.choices import choices, planned
from benchmarks.network.contestants import Contestant, Subject, contestant, sgd, turn
from benchmarks.network.lab import PAYLOAD, Lab
from benchmarks.network.spec import (
    ModelResult,
    NetworkConfig,
    NetworkRow,
    Report,
    Task,
    bandwidth_for,
    compute_s,
    paper_ratio,
    reduction_ratio,
    scaled_speedup,
    weight_bytes,
)
from pipefit.errors import CommunicationError
from pipefit.models import build, parse_options
from pipefit.profiling import profile_sizes
from pipefit.runtime.session import Session, current, leave
from pipefit.runtime.signals import die_with_parent
from pipefit.spec import Level, Profile, Topology

_WIRE_SPEED = 5e9
_PROFILED, _TIMED = 3, 4

Say = Callable[[str], None]


def main(path: str) -> None:
    """Joins the others and measures every model that the task names."""
    die_with_parent()
    task = msgspec.json.decode(Path(path).read_bytes(), type=Task)
    session = current()
    torch.set_num_threads(1)
    devices = Devices(task.cores, task.share)
    devices.take(session.rank)
    say = (lambda line: _send(Report(line=line))) if session.rank == 0 else (lambda line: None)
    subjects = {name: _subject(name, task, session, say) for name in task.models}
    lab = Lab(task.lab, session.num_ranks)
    for name, subject in subjects.items():
        result = _measure(name, subject, task.config, lab, session, say)
        if session.rank == 0:
            _send(Report(result=result))
    leave()


def _send(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


def _subject(name: str, task: Task, session: Session, say: Say) -> Subject:
    """Builds a model and profiles it, on as many ranks at once as there are cores."""
    torch.manual_seed(task.config.seed)
    scaled = task.models[name]
    bundle = build(scaled.model, **parse_options(scaled.options, scaled.model))
    say(f"{name}: profiling {bundle.describe()}, mini-batches of {scaled.microbatch}")
    x, y = bundle.example(scaled.microbatch, 0)
    place = Path(task.folder) / f"{name}.profile.json"
    if session.rank < len(set(task.cores)):
        profile = profile_sizes(
            bundle.layers,
            x, bundle.loss, y,
            microbatch_sizes=[scaled.microbatch], repeats=_PROFILED,
            warmup=1, limit_s=8.0, optimizer=sgd,
        )  # fmt: skip
        if session.rank == 0:
            profile.save(place)
    dist.barrier()
    return Subject(scaled, bundle, Profile.load(place))


def _measure(name: str, subject: Subject, config: NetworkConfig, lab: Lab, session: Session, say: Say) -> ModelResult:
    """All strategies on one model."""
    if session.rank == 0:
        lab.shape(_WIRE_SPEED)
    profile = _as_devices_are(subject)
    weights, seconds = weight_bytes(profile), compute_s(profile)
    ratio = paper_ratio(subject.scaled.published)
    bandwidth = config.bandwidth_bytes_per_s or bandwidth_for(ratio, weights, seconds, session.num_ranks)
    here = reduction_ratio(weights, seconds, session.num_ranks, bandwidth)
    links = Level("lab", session.num_ranks, bandwidth * PAYLOAD, config.latency_s, one_port=True)
    topology = Topology((links,), name="lab")
    say(
        f"{name}: {weights / 1e6:.2f} MB of weights, {seconds * 1e3:.0f} ms per mini-batch on a device; links of "
        f"{bandwidth / 1e6:.2f} MB/s: reducing takes {here:.2f} "
        f"times as long as computing (paper: {ratio:.2f})"
    )
    subject = Subject(subject.scaled, subject.bundle, profile)
    wanted = choices(profile, topology)
    size = math.lcm(*(choice.minibatches for choice in wanted))
    contestants = [contestant(choice, subject, topology, size, config.steps) for choice in wanted]
    gc.collect()
    gc.freeze()
    say(f"{name}: warming up; {size * config.steps} mini-batches per strategy and turn")
    for one in contestants:
        one.run(1)
    if session.rank == 0:
        lab.shape(bandwidth, config.latency_s)
    for number in range(config.repeats):
        for one in contestants:
            turn(one, config.steps, session)
            rate = size * config.steps * subject.scaled.microbatch / one.seconds[-1]
            result = f"{one.choice.describe():44} {rate:8.1f} samples/s"
            say(f"{name}: repetition {number + 1} of {config.repeats}: {result}")
    gc.unfreeze()
    return ModelResult(
        name=name,
        model=subject.bundle.describe(),
        microbatch=subject.scaled.microbatch,
        weight_bytes=weights,
        compute_s=seconds,
        bandwidth_bytes_per_s=bandwidth,
        ratio=here,
        paper_ratio=ratio,
        reported=(subject.scaled.stages, subject.scaled.speedup),
        expected=scaled_speedup(subject.scaled.speedup, session.num_ranks),
        planned=planned(profile, topology),
        rows=_rows(contestants, size * config.steps * subject.scaled.microbatch, bandwidth),
    )


def _as_devices_are(subject: Subject) -> Profile:
    """The profile in seconds of a device: scaled by how long whole mini-batches take when all ranks compute at once."""
    layers, (x, y) = copy.deepcopy(subject.bundle.layers), subject.batch(1)
    optimizer = sgd(list(layers.parameters()))
    began = 0.0
    for index in range(_TIMED + 1):
        if index == 1:  # the first one is the warm-up
            dist.barrier()
            began = time.perf_counter()
        subject.bundle.loss(layers(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = torch.tensor((time.perf_counter() - began) / _TIMED, dtype=torch.float64)
    dist.all_reduce(mean)
    profile = subject.profile
    factor = float(mean) / dist.get_world_size() / (compute_s(profile) + profile.optimizer_s)
    return _slower(profile, factor)


def _slower(profile: Profile, factor: float) -> Profile:
    """All seconds of a profile times a factor."""

    def seconds(item: Any) -> dict[str, float]:
        found = {name: getattr(item, name) for name in item.__struct_fields__ if name.endswith("_s")}
        return {name: value * factor for name, value in found.items() if value is not None}

    layers = tuple(msgspec.structs.replace(layer, **seconds(layer)) for layer in profile.layers)
    return msgspec.structs.replace(profile, layers=layers, others=(), **seconds(profile))


def _rows(contestants: list[Contestant], samples: int, bandwidth: float) -> tuple[NetworkRow, ...]:
    base = {
        one.choice.minibatches: statistics.median(one.seconds) for one in contestants if one.choice.schedule == "ddp"
    }
    rows = []
    for one in contestants:
        choice, seconds = one.choice, statistics.median(one.seconds)
        hosts = [statistics.median(sent) for sent in zip(*one.counted, strict=True)]
        if sum(hosts) < one.sends:
            raise CommunicationError(
                f"{choice.describe()}: the program sends {one.sends:.0f} bytes, but {sum(hosts):.0f} left the hosts: "
                "messages did not all go over the laboratory's links, so it measures something else"
            )
        rows.append(
            NetworkRow(
                strategy=choice.strategy,
                schedule=choice.schedule,
                replicas=choice.configuration,
                layers=tuple(len(stage.layers) for stage in choice.partition.stages),
                minibatches=choice.minibatches,
                against=choice.against,
                samples_per_s=samples / seconds,
                speedup=base[choice.against] / seconds,
                predicted_samples_per_s=samples / one.predicted_s,
                counted_bytes=sum(hosts) / samples,
                program_bytes=one.sends / samples,
                busiest_link=max(hosts) / (bandwidth * seconds),
            )
        )
    return tuple(rows)


if __name__ == "__main__":
    main(sys.argv[1])
