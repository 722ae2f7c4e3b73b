"""Strategies as they run on a rank: torch's data parallelism, and programs of pipefit."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network.choices import Choice, plan_for
from benchmarks.network.lab import sent_bytes
from benchmarks.network.spec import Scaled, compute_s, weight_bytes
from benchmarks.network.traffic import program_bytes, ring_bytes
from pipefit.cost import of_plan
from pipefit.models import ModelBundle
from pipefit.pipeline.pipeline import Pipeline
from pipefit.runtime.session import Session
from pipefit.schedules import program_of
from pipefit.simulate import simulate
from pipefit.spec import Profile, Topology
from pipefit.spec.options import Parallelism

# Torch's buckets are 25 MB of the 553 MB of VGG-16's weights; here they are as large a part of the model's.
_BUCKET_PART = 25 / 553
_LR = 1e-4
# Running averages stay with their rank; torch 2.13 calls by another name what earlier ones call `broadcast_buffers`.
_NAMES = inspect.signature(DistributedDataParallel).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


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


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of every strategy."""
    return torch.optim.SGD(parameters, _LR)


def contestant(choice: Choice, subject: Subject, topology: Topology, size: int, rounds: int) -> Contestant:
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
        copy.deepcopy(subject.bundle.layers),
        loss=subject.bundle.loss,
        optimizer=sgd,
        plan=plan,
        parallelism=Parallelism(device="cpu"),
    )
    batches = [subject.batch(plan.num_microbatches)] * (size // plan.num_microbatches)
    steps = len(batches) * rounds
    passes = steps if pipe.schedule.is_synchronous else 1
    program = program_of(plan, num_steps=steps // passes)
    cost = of_plan(profile, plan, topology, state_per_weight=0.0)
    return Contestant(
        choice,
        lambda rounds: pipe.fit(batches * rounds, steps=len(batches) * rounds),
        simulate(program, cost, repeats=passes).makespan_s,
        sum(program_bytes(program, cost)) * passes,
    )


def _data_parallel(subject: Subject, updates: int, each: int) -> Callable[[int], None]:
    """Torch's data parallelism: `each` mini-batches of every rank per update, reduced while the last backward runs."""
    bucket = weight_bytes(subject.profile) * _BUCKET_PART / 2**20
    model = DistributedDataParallel(
        copy.deepcopy(subject.bundle.layers),
        bucket_cap_mb=bucket,
        gradient_as_bucket_view=True,
        **{_BUFFERS: False},
    )
    optimizer, (x, y) = sgd(list(model.parameters())), subject.batch(1)

    def run(rounds: int) -> None:
        for _ in range(updates * rounds):
            for index in range(each):
                with model.no_sync() if index < each - 1 else contextlib.nullcontext():
                    (subject.bundle.loss(model(x), y) / each).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def turn(one: Contestant, rounds: int, session: Session) -> None:
    """One turn between two barriers; what each host sent is known to all."""
    gc.disable()
    dist.barrier()
    before, began = sent_bytes(), time.perf_counter()
    one.run(rounds)
    dist.barrier()
    seconds = time.perf_counter() - began
    sent = torch.zeros(session.num_ranks, dtype=torch.int64)
    sent[session.rank] = sent_bytes() - before
    gc.enable()
    dist.all_reduce(sent)
    one.seconds.append(seconds)
    one.counted.append(sent.tolist())
