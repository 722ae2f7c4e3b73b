"""A program and its costs from the files that a user names."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.cost.unit_costs import UnitCosts
from pipefit.errors import PipefitError
from pipefit.ir.instruction import Indices
from pipefit.spec.arguments import Number
from pipefit.spec.options import setting
from pipefit.units import format_seconds

if TYPE_CHECKING:
    from pipefit.cost import CostModel
    from pipefit.ir import Program
    from pipefit.spec import Plan, Profile, Topology
    from pipefit.timeline import Timeline


@dataclass(frozen=True)
class SourceOptions:
    """The origin of the costs of a program."""

    profile: str | None = setting(None, "Profile of the model: seconds, bytes; or gpt:layers=24,…, llama:layers=32,….")
    topology: str | None = setting(
        None, "Links and devices: a TOML file, local:N, GPUs such as 8xH100:16, or a name.", "--topology", "--machine"
    )
    layers: Indices = setting(
        (), "Layers of each stage, like 3,3, which a .pipe file does not contain.", typed="numbers"
    )
    steps: Number = setting(1, "Weight updates of a plan's program.")


@dataclass(frozen=True)
class Source:
    """A program from a user's file, with its known costs.

    Attributes:
        program: of the file.
        plan: the plan, where the file is one.
        profile: seconds and bytes of the layers.
        topology: links and devices.
        layers: of each stage, where there is no plan.
    """

    program: Program
    plan: Plan | None
    profile: Profile | None
    topology: Topology | None
    layers: Indices

    def cost(self, given: UnitCosts) -> CostModel:
        """Costs from the profile, or the unit costs given where there is none, on the links of the topology.

        Raises:
            PipefitError: both are given, or the layers of stages are not known, or do not belong to the profile.
        """
        from pipefit.planner.plan_figures import plan_costs
        from pipefit.spec import Topology

        if self.profile is None:
            cost = given.model(self.program.header)
            if self.topology:
                return replace(cost, topology=self.topology)
            return cost
        if given != UnitCosts():
            raise PipefitError("--forward, --backward and the like: --profile has the costs; leave them out")
        plan = self.plan or self._plan(len(self.profile))
        return plan_costs(plan, self.profile, self.topology or Topology.local(plan.num_processes))

    def _plan(self, num_layers: int) -> Plan:
        """The plan of a program from a `.pipe` file, which specifies everything but the layers."""
        from pipefit.spec import Partition, Placement, Plan, StageSpec

        header = self.program.header
        if len(self.layers) != header.num_stages:
            given = ",".join(map(str, self.layers)) or "none"
            raise PipefitError(
                "a .pipe file does not contain the layers of its stages; give --layers with a count for each of its "
                f"{header.num_stages} stages, got {given}"
            )
        even = Partition.from_counts(self.layers, num_layers)
        stages = []
        for stage, ranks in zip(even.stages, header.placement, strict=True):
            stages.append(StageSpec(stage.layers, len(ranks), header.tensor))
        return Plan(
            Partition(tuple(stages)),
            Placement(header.placement),
            header.schedule,
            header.num_microbatches,
            shard=header.shard,
            shard_slots=header.shard_slots,
        )


def check_forwards(*counts: int) -> None:
    """Refuses stages × micro-batches × steps that are too many for an answer in time.

    Raises:
        PipefitError: with the limit.
    """
    from pipefit.ir.program import MOST_FORWARDS

    forwards = math.prod(counts)
    if forwards > MOST_FORWARDS:
        raise PipefitError(
            f"{forwards:,} forwards are too many: stages × micro-batches × steps may reach {MOST_FORWARDS:,}"
        )


def read_source(path: Path, given: SourceOptions) -> Source:
    """Reads the program of a `.pipe` file or of a plan, with its profile and topology.

    Raises:
        PipefitError: with the file and the place in it.
    """
    from pipefit.ir import text
    from pipefit.schedules.catalogue import program_of
    from pipefit.spec import Plan

    if path.suffix == ".json":
        plan = Plan.load(path)
        check_forwards(len(plan.partition.stages), plan.num_microbatches, given.steps)
        return source_of(program_of(plan, num_steps=given.steps), plan, given)
    if path.is_file() and path.suffix != ".pipe":
        raise PipefitError(f"{path}: expected a program (.pipe) or a plan (.json)")
    if given.steps > 1:
        raise PipefitError("--steps: a .pipe file has its own number of steps; leave it out")
    return source_of(text.load(path), None, given)


def source_of(program: Program, plan: Plan | None, given: SourceOptions) -> Source:
    """The program with profile and topology, by the names that the user gave.

    Raises:
        PipefitError: a missing or malformed file, or too few devices.
    """
    from pipefit.planner.machines import load_topology, read_profile

    links = None
    if given.topology:
        links = load_topology(given.topology)
        num_ranks = program.header.num_ranks
        if links.num_devices < num_ranks:
            raise PipefitError(
                f"{given.topology} has {links.num_devices} devices, but the program needs {num_ranks} ranks"
            )
    if given.layers and (plan or not given.profile):
        raise PipefitError("--layers: expected together with --profile, and with a program that is not a plan")
    profile = None
    if given.profile:
        size = 1
        if plan is not None:
            size = plan.microbatch_size or 1
        profile = read_profile(given.profile, links, size)
    return Source(program, plan, profile, links, given.layers)


def save_timeline(timeline: Timeline, path: Path | None, *, cost: CostModel, seconds: bool) -> None:
    """Writes a timeline in the format of the path's suffix, if there is a path.

    Args:
        timeline: simulated.
        path: ends in one of the suffixes of `pipefit.draw`, or in .pickle; None: nothing is written.
        cost: of the simulation.
        seconds: whether its times are real seconds, and its sizes bytes.

    Raises:
        PipefitError: a snapshot of memory without bytes, or a path that cannot be written.
    """
    from pipefit.draw import save

    if path is None:
        return
    if path.suffix == ".pickle":
        from pipefit.simulate.snapshot import save_snapshot

        if not seconds:
            raise PipefitError(f"{path}: a snapshot of memory needs bytes: give --profile and --topology")
        save_snapshot(timeline, cost, path)
        return
    options = {}
    if path.suffix in (".svg", ".html", ".png", ".txt"):
        options["seconds"] = seconds
    save(timeline, path, **options)


def time_text(time: float, in_seconds: bool) -> str:
    """A time for people, in seconds or in the unit of `--forward`."""
    if in_seconds:
        return format_seconds(time)
    return f"{time:.6g}"
