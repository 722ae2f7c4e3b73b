"""Predicted and measured seconds of tensor, pipeline and data parallelism on two processes, and of 2-1 on three.

    (2, 1, 1)   tensor parallelism: every layer sharded          messages inside layers, two all-reduces per block
    (1, 2, 1)   a pipeline of two stages                         an activation and its gradient per micro-batch
    (1, 1, 2)   data parallelism                                 one reduction of all gradients
    2-1         three processes, the first stage on two of them

Each is (t, p, d): tensor width, pipeline depth, data width. Contestants alternate inside the same processes, and
medians are taken. Predictions use the measured layers (whole or sharded), links, cores and reductions, and every sum
inside the layers as measured among busy processes.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from cyclopts import Parameter

from benchmarks.devices import own_core
from pipefit.calibrate.overhead import runtime_costs
from pipefit.calibrate.tensor_shard import profile_on_ranks
from pipefit.cost import RuntimeCosts, of_plan
from pipefit.models import ModelBundle, build, parse_options
from pipefit.pipeline.pipeline import Pipeline
from pipefit.planner import by_hand
from pipefit.profiling.agreed import agreed_profile
from pipefit.profiling.links import links_of
from pipefit.profiling.workload import Workload
from pipefit.run.optimizers import STATE_PER_WEIGHT, make_optimizer
from pipefit.runtime.launch import launch
from pipefit.runtime.microbatches import largest_part
from pipefit.runtime.session import Session, current
from pipefit.simulate import simulate
from pipefit.spec import Profile, Topology
from pipefit.spec.options import Parallelism
from pipefit.stage.split import named_layers
from pipefit.units import format_bytes, format_seconds


@dataclass(frozen=True)
class HybridConfig:
    """The model and the measurement.

    Attributes:
        options: of the GPT.
        batch: samples per update.
        microbatches: per update.
        steps: updates of a turn.
        repeats: turns.
    """

    options: str = "layers=8,hidden=256,heads=8,context=128"
    batch: int = 32
    microbatches: int = 8
    steps: int = 2
    repeats: int = 7


CONFIG = HybridConfig()


class HybridRow(NamedTuple):
    """One way to share the work.

    Attributes:
        name: of the way.
        shape: (t, p, d); of uneven replicas d is 0.
        processes: how many take part.
        predicted_s: seconds per update.
        measured_s: median over the turns.
        sent_bytes: that a process sends to other ranks in an update, the most among them.
        inside_bytes: to those it shares its rank with.
        reduced_bytes: of gradients that it sums with its replicas, the most among the ranks.
    """

    name: str
    shape: tuple[int, int, int]
    processes: int
    predicted_s: float
    measured_s: float
    sent_bytes: float
    inside_bytes: float
    reduced_bytes: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s


_TWO: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "tensor": ((2, 1, 1), {"tensor": 2, "num_ranks": 1}),
    "tensor and sequence": ((2, 1, 1), {"tensor": 2, "num_ranks": 1, "sequence_parallel": True}),
    "pipeline": ((1, 2, 1), {"num_ranks": 2}),
    "data": ((1, 1, 2), {"num_ranks": 2, "schedule": "data-parallel"}),
}
_THREE = {"2-1": ((1, 2, 0), {"num_ranks": 3, "replicas": (2, 1)})}


def hybrid(config: HybridConfig = CONFIG) -> list[HybridRow]:
    """Measures on two and on three processes of this machine."""
    rows: list[HybridRow] = []
    for count in (2, 3):
        rows += launch(hybrid_rank, count, config, threads=1, quiet=True)[0]
    return rows


def hybrid_rank(config: HybridConfig) -> list[HybridRow]:
    """The contest on this process, which stays on a core of its own where there are enough."""
    session = current()
    own_core(session.rank, session.num_ranks)
    ways = _TWO if session.num_ranks == 2 else _THREE
    bundle = _bundle(config)
    example = bundle.example(config.batch, 0)
    sizes = [largest_part(example[0], config.microbatches)]
    optimizer = make_optimizer("adamw", 1e-3)
    work = Workload(named_layers(bundle.layers), bundle.loss, optimizer, torch.device("cpu"), example)
    profile = agreed_profile(work, sizes, session)
    topology = links_of(session, session.num_ranks)
    contest = _Contest(config, session, profile, work, topology, runtime_costs(session))
    pipes = {name: contest.pipeline(settings) for name, (_, settings) in ways.items()}
    seconds = contest.run(pipes, [bundle.example(config.batch, step) for step in range(config.steps)])
    return [contest.row(name, ways[name][0], pipe, seconds[name]) for name, pipe in pipes.items()]


def _bundle(config: HybridConfig) -> ModelBundle:
    torch.manual_seed(0)
    return build("gpt", **parse_options(config.options, "gpt"))


@dataclass(frozen=True)
class _Contest:
    config: HybridConfig
    session: Session
    profile: Profile
    work: Workload
    topology: Topology
    runtime: RuntimeCosts

    def pipeline(self, settings: dict[str, Any]) -> Pipeline:
        """One way's pipeline, over weights of its own."""
        bundle = _bundle(self.config)
        given = {"schedule": "1f1b", "num_microbatches": self.config.microbatches, "profile": self.profile} | settings
        if given.get("replicas"):
            given["stages"] = _cut(self.profile, given["replicas"])
        plan = by_hand(len(named_layers(bundle.layers)), **given)
        return Pipeline(
            bundle.layers,
            loss=bundle.loss,
            optimizer=make_optimizer("adamw", 1e-3),
            plan=plan,
            parallelism=Parallelism(device="cpu"),
        )

    def run(self, pipes: dict[str, Pipeline], batches: Sequence[Any]) -> dict[str, list[float]]:
        """Seconds per update of every turn but the first two."""
        seconds: dict[str, list[float]] = {name: [] for name in pipes}
        gc.collect()
        gc.freeze()
        for turn in range(self.config.repeats + 2):
            for name, pipe in pipes.items():
                dist.barrier()
                began = time.perf_counter()
                pipe.fit(batches, steps=len(batches))
                dist.barrier()
                if turn >= 2:
                    seconds[name].append((time.perf_counter() - began) / len(batches))
        gc.unfreeze()
        return seconds

    def row(self, name: str, shape: tuple[int, int, int], pipe: Pipeline, seconds: list[float]) -> HybridRow:
        """Predicted and measured figures of one way."""
        profile = profile_on_ranks(pipe.plan, self.profile, self.topology, self.session, self.work)
        state = STATE_PER_WEIGHT["adamw"]
        cost = of_plan(profile, pipe.plan, self.topology, state_per_weight=state, runtime=self.runtime)
        steps = self.config.steps
        predicted_s = simulate(pipe.program, cost, repeats=steps).makespan_s / steps
        moved = pipe.report().traffic
        reduced = max(
            (cost.weight_bytes[s] for s, ranks in enumerate(pipe.plan.placement.ranks) if len(ranks) > 1), default=0.0
        )
        return HybridRow(
            name,
            shape,
            self.session.num_ranks,
            predicted_s,
            statistics.median(seconds),
            max(moved.sent_bytes),
            max(moved.inside_bytes),
            reduced,
        )


def _cut(profile: Profile, replicas: tuple[int, int]) -> list[int]:
    """Layer counts of two stages such that the slower one, its work shared by its replicas, is as fast as can be."""
    times = [layer.total_s for layer in profile.layers]

    def slower(first: int) -> float:
        return max(sum(times[:first]) / replicas[0], sum(times[first:]) / replicas[1])

    best = min(range(1, len(times)), key=slower)
    return [best, len(times) - best]


def main(*, config: Annotated[HybridConfig, Parameter(name="*")] = CONFIG) -> None:
    """Prints predicted and measured seconds, and bytes, of every way."""
    print(f"GPT {config.options}, batch {config.batch} in {config.microbatches} micro-batches; all figures per update")
    print(
        f"{'':<20}{'t,p,d':>7}{'ranks':>7}{'predicted':>11}{'measured':>11}{'ratio':>7}"
        f"{'sent':>12}{'inside':>12}{'reduced':>12}"
    )
    for row in hybrid(config):
        shape = ",".join(str(width) for width in row.shape) if all(row.shape) else row.name
        print(
            f"{row.name:<20}{shape:>7}{row.processes:>7}{format_seconds(row.predicted_s):>11}"
            f"{format_seconds(row.measured_s):>11}{row.ratio:>7.2f}{format_bytes(row.sent_bytes):>12}"
            f"{format_bytes(row.inside_bytes):>12}{format_bytes(row.reduced_bytes):>12}"
        )
