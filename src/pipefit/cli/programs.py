"""From the files a user names to a program and its costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipefit.errors import PipefitError

if TYPE_CHECKING:
    from pipefit.cost import CostModel
    from pipefit.ir import Program
    from pipefit.spec import Partition, Plan, Profile, Topology
    from pipefit.timeline import Timeline

__all__ = ["Source", "figures", "read_profile", "read_source", "save_timeline"]


@dataclass(frozen=True)
class Source:
    """What a user named: a program, and what is known of its costs.

    Attributes:
        program: of the file.
        plan: where the file is one.
        profile: seconds and bytes of the layers.
        topology: links and devices.
        layers: of each stage, where there is no plan.
    """

    program: Program
    plan: Plan | None
    profile: Profile | None
    topology: Topology | None
    layers: tuple[int, ...]

    def cost(self, forward: float = 1, backward: float | None = None, **rest: float | None) -> CostModel:
        """Costs from the profile, or unit costs where there is none, on the links of the topology.

        Raises:
            PipefitError: nothing says which layers make a stage, or they do not belong to the profile.
        """
        import msgspec

        from pipefit.cost import from_profile, unit
        from pipefit.planner.gpt import usual_state
        from pipefit.spec import Topology

        if self.profile is None:
            cost = unit(self.program.header, forward, backward, **rest)
            return replace(cost, topology=self.topology) if self.topology else cost
        figures = (
            self.profile.at(self.plan.microbatch_size) if self.plan and self.plan.microbatch_size else self.profile
        )
        num_ranks = self.program.header.num_ranks
        links = self.topology or Topology.local(num_ranks)
        partition = self._partition()
        cost = from_profile(
            figures,
            partition,
            msgspec.structs.replace(links, tiers=links.tiers_among(num_ranks)),
            placement=self.plan.placement if self.plan else None,
            loss_s=figures.loss_s,
            # Where stages are spilled the states of the optimizer matter: Adam's, as the planner takes them.
            optimizer_bytes_per_weight_byte=usual_state(figures) if self.program.header.spill else 0,
        )
        if not self.program.header.spill:
            return cost
        steps = tuple(figures.optimizer_of(stage.layers) for stage in partition.stages)
        return replace(cost, step_s=steps, host_step_s=cost.host_step_s or steps)

    def _partition(self) -> Partition:
        from pipefit.spec import Partition

        if self.plan:
            return self.plan.partition
        if len(self.layers) != self.program.header.num_stages:
            raise PipefitError(
                "a .pipe file does not say which layers make a stage; give --layers with a count for each of its "
                f"{self.program.header.num_stages} stages, got {','.join(map(str, self.layers)) or 'none'}"
            )
        assert self.profile is not None
        return Partition.from_counts(self.layers, len(self.profile))


def read_profile(name: str, machine: Topology | None, microbatch: int) -> Profile:
    """A profile from its file, of a model that was published, or computed for the machine: "gpt:layers=24,…".

    Raises:
        PipefitError: there is none, or no machine to compute it for.
    """
    from pipefit.planner.gpt import gpt_profile, gpt_settings
    from pipefit.spec.published import load_profile

    if not name.startswith("gpt:"):
        return load_profile(name)
    settings = gpt_settings(name)
    if machine is None:
        raise PipefitError(f"{name}: seconds are computed for a device; give --topology as well")
    return gpt_profile(**settings, microbatch=microbatch, device=machine.device)


def read_source(
    path: Path, num_steps: int, profile: str | None, topology: str | None, layers: tuple[int, ...]
) -> Source:
    """Reads the program of a `.pipe` file or of a plan, and what goes with it.

    Raises:
        PipefitError: with the file and the place in it.
    """
    from pipefit.ir import text
    from pipefit.planner.machines import load_topology
    from pipefit.schedules.from_plan import program_of
    from pipefit.spec import Plan

    plan = Plan.load(path) if path.suffix == ".json" else None
    if plan is None and path.is_file() and path.suffix != ".pipe":
        raise PipefitError(f"{path}: expected a program (.pipe) or a plan (.json)")
    program = program_of(plan, num_steps=num_steps) if plan else text.load(path)
    links = load_topology(topology) if topology else None
    if links and links.num_devices < program.header.num_ranks:
        raise PipefitError(
            f"{topology} has {links.num_devices} devices, but {path} needs {program.header.num_ranks} ranks"
        )
    size = plan.microbatch_size if plan else 0
    return Source(program, plan, read_profile(profile, links, size or 1) if profile else None, links, layers)


def figures(program: Program, timeline: Timeline, cost: CostModel) -> dict[str, Any]:
    """The figures of a program under a cost model; see `pipefit.simulate.figures`."""
    from pipefit.simulate import metrics

    num_ranks = program.header.num_ranks
    # Of one micro-batch on a rank, on average over the ranks: then the bubble is their average idleness.
    forward = sum(cost.forward_s) / num_ranks
    backward = (sum(cost.backward_input_s) + sum(cost.backward_weight_s)) / num_ranks
    return metrics(program, timeline, forward, backward, cost=cost)


def save_timeline(timeline: Timeline, path: Path, *, seconds: bool) -> None:
    """Writes a timeline as the ending of the path says.

    Args:
        timeline: simulated.
        path: ends in one of the suffixes of `pipefit.draw`.
        seconds: whether its times are real seconds.
    """
    from pipefit.draw import save

    is_picture = path.suffix in (".svg", ".html", ".png", ".txt")
    save(timeline, path, **({"seconds": seconds} if is_picture else {}))
