"""What a rank of `pipefit bench network` does in its namespace: profile, plan, train by every strategy, count."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipefit.compare.bench.devices import Devices
from pipefit.compare.bench.netlab import PAYLOAD, Lab, sent_bytes
from pipefit.compare.bench.network_plan import Choice, choices, plan_for, planned
from pipefit.compare.bench.network_spec import (
    SCALED,
    ModelResult,
    NetworkConfig,
    NetworkRow,
    Scaled,
    Task,
    Told,
    bandwidth_for,
    compute_s,
    paper_ratio,
    reduction_ratio,
    scaled_speedup,
    weight_bytes,
)
from pipefit.compare.bench.traffic import program_bytes, ring_bytes
from pipefit.errors import CommunicationError
from pipefit.models import ModelBundle, build, parse_options
from pipefit.profiling import profile_sizes
from pipefit.runtime.session import Session, current, leave
from pipefit.runtime.signals import die_with_parent
from pipefit.schedules import program_of
from pipefit.spec import Level, Profile, Topology
from pipefit.stage.split import named_layers
from pipefit.train.pipeline import Pipeline
from pipefit.train.predicted import cost_of, predict

_WIRE_SPEED = 5e9
_PROFILED, _TIMED = 3, 4
# Torch's buckets are 25 MB beside the 553 MB of VGG-16's weights; here they are as large a part of the model's.
_BUCKET_PART = 25 / 553
_LR = 1e-4

Say = Callable[[str], None]


@dataclass
class Subject:
    """A scaled model with its data and profile, as every strategy trains it."""

    scaled: Scaled
    bundle: ModelBundle
    profile: Profile

    def batch(self, minibatches: int) -> tuple[Any, Any]:
        """Random data of so many mini-batches, the same on every rank."""
        return self.bundle.example(self.scaled.microbatch * minibatches, 0)


@dataclass
class Contestant:
    """One strategy, ready to run, and what has been measured of it.

    Attributes:
        choice: what it is.
        run: trains on so many rounds; a round is as many mini-batches for every strategy.
        predicted_s: of a turn, some rounds.
        sends: bytes of all ranks in a turn, by its program.
    """

    choice: Choice
    run: Callable[[int], object]
    predicted_s: float
    sends: float
    seconds: list[float] = field(default_factory=list)
    counted: list[list[int]] = field(default_factory=list)


def main(path: str) -> None:
    """Joins the others and measures every model that the task names."""
    die_with_parent()
    task = msgspec.json.decode(Path(path).read_bytes(), type=Task)
    session = current()
    torch.set_num_threads(1)
    devices = Devices(task.cores, task.share)
    devices.take(session.rank)
    say = (lambda line: _tell(Told(line=line))) if session.rank == 0 else (lambda line: None)
    subjects = {name: _subject(name, task, session, say) for name in task.config.models}
    lab = Lab(task.lab, session.num_ranks)
    for name, subject in subjects.items():
        result = _measure(name, subject, task.config, lab, session, say)
        if session.rank == 0:
            _tell(Told(result=result))
    leave()


def _tell(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


def _subject(name: str, task: Task, session: Session, say: Say) -> Subject:
    """Builds a model and profiles it, on as many ranks at once as there are cores."""
    torch.manual_seed(task.config.seed)
    scaled = SCALED[name]
    bundle = build(scaled.model, **parse_options(scaled.options, scaled.model))
    say(f"{name}: profiling {bundle.describe()}, mini-batches of {scaled.microbatch}")
    x, y = bundle.example(scaled.microbatch, 0)
    place = Path(task.folder) / f"{name}.profile.json"
    if session.rank < len(set(task.cores)):
        profile = profile_sizes(
            [(layer.prefix, layer.module) for layer in named_layers(bundle.layers)],
            x, bundle.loss, y,
            microbatch_sizes=[scaled.microbatch], repeats=_PROFILED,
            warmup=1, limit_s=8.0, optimizer=_sgd,
        )  # fmt: skip
        if session.rank == 0:
            profile.save(place)
    dist.barrier()
    return Subject(scaled, bundle, Profile.load(place))


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, _LR)


def _measure(name: str, subject: Subject, config: NetworkConfig, lab: Lab, session: Session, say: Say) -> ModelResult:
    """All strategies on one model."""
    if session.rank == 0:
        lab.shape(_WIRE_SPEED)
    profile = _as_devices_are(subject)
    weights, seconds = weight_bytes(profile), compute_s(profile)
    ratio = paper_ratio(subject.scaled.published)
    bandwidth = config.bandwidth_bytes_per_s or bandwidth_for(ratio, weights, seconds, session.num_ranks)
    here = reduction_ratio(weights, seconds, session.num_ranks, bandwidth)
    links = Level("lab", session.num_ranks, bandwidth * PAYLOAD, config.latency_s)
    topology = Topology((links,), name="lab")
    say(
        f"{name}: {weights / 1e6:.2f} MB of weights, {seconds * 1e3:.0f} ms per mini-batch on a device; links of "
        f"{bandwidth / 1e6:.2f} MB/s: reducing takes {here:.2f} "
        f"times as long as computing (paper: {ratio:.2f})"
    )
    subject = Subject(subject.scaled, subject.bundle, profile)
    wanted = choices(profile, topology)
    size = math.lcm(*(choice.minibatches for choice in wanted))
    contestants = [_contestant(choice, subject, topology, size, config.steps) for choice in wanted]
    gc.collect()
    gc.freeze()
    say(f"{name}: warming up; {size * config.steps} mini-batches per strategy and turn")
    for contestant in contestants:
        contestant.run(1)
    if session.rank == 0:
        lab.shape(bandwidth, config.latency_s)
    for number in range(config.repeats):
        for contestant in contestants:
            _turn(contestant, config.steps, session)
            rate = size * config.steps * subject.scaled.microbatch / contestant.seconds[-1]
            told = f"{contestant.choice.describe():44} {rate:8.1f} samples/s"
            say(f"{name}: turn {number + 1} of {config.repeats}: {told}")
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
    optimizer = _sgd(list(layers.parameters()))
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


def _contestant(choice: Choice, subject: Subject, topology: Topology, size: int, rounds: int) -> Contestant:
    """A strategy with weights of its own; a round has `size` mini-batches, a turn some rounds."""
    profile = subject.profile
    if choice.schedule == "ddp":
        num = topology.num_devices
        updates, each = size // choice.minibatches, choice.minibatches // num
        reduce_s = ring_bytes(weight_bytes(profile), num) / topology.levels[0].bandwidth_bytes_per_s
        # Reduced while the last backward runs: what goes beyond it is waited for.
        backward_s = sum(layer.backward_s for layer in profile.layers)
        return Contestant(
            choice,
            _data_parallel(subject, updates, each),
            rounds * updates * (each * compute_s(profile) + max(0.0, reduce_s - backward_s)),
            rounds * updates * num * ring_bytes(weight_bytes(profile), num),
        )
    plan = plan_for(choice, topology.num_devices, subject.scaled.microbatch)
    pipe = Pipeline(
        copy.deepcopy(subject.bundle.layers), loss=subject.bundle.loss, optimizer=_sgd, plan=plan, device="cpu"
    )
    batches = [subject.batch(plan.num_microbatches)] * (size // plan.num_microbatches)
    steps = len(batches) * rounds
    passes = steps if pipe.schedule.is_synchronous else 1
    program = program_of(plan, num_steps=steps // passes)
    cost = cost_of(profile, plan, topology, 0.0)
    return Contestant(
        choice,
        lambda rounds: pipe.fit(batches * rounds, steps=len(batches) * rounds),
        predict(program, cost, repeats=passes).makespan_s,
        sum(program_bytes(program, cost)) * passes,
    )


def _data_parallel(subject: Subject, updates: int, each: int) -> Callable[[int], None]:
    """Torch's data parallelism: `each` mini-batches of every rank per update, reduced while the last backward runs."""
    bucket = weight_bytes(subject.profile) * _BUCKET_PART / 2**20
    model = DistributedDataParallel(
        copy.deepcopy(subject.bundle.layers),
        bucket_cap_mb=bucket,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    optimizer, (x, y) = _sgd(list(model.parameters())), subject.batch(1)

    def run(rounds: int) -> None:
        for _ in range(updates * rounds):
            for index in range(each):
                with model.no_sync() if index < each - 1 else contextlib.nullcontext():
                    (subject.bundle.loss(model(x), y) / each).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def _turn(contestant: Contestant, rounds: int, session: Session) -> None:
    """One turn between two barriers; what each host sent is known to all."""
    gc.disable()
    dist.barrier()
    before, began = sent_bytes(), time.perf_counter()
    contestant.run(rounds)
    dist.barrier()
    seconds = time.perf_counter() - began
    sent = torch.zeros(session.num_ranks, dtype=torch.int64)
    sent[session.rank] = sent_bytes() - before
    gc.enable()
    dist.all_reduce(sent)
    contestant.seconds.append(seconds)
    contestant.counted.append(sent.tolist())


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
                f"{choice.describe()}: the program sends {one.sends:.0f} bytes, but only {sum(hosts):.0f} left the hosts: "
                "messages did not go over the laboratory's links, so nothing was measured"
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
