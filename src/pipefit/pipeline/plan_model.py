"""`pipefit.plan`: the plan of a model, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pipefit.draw.drawing import Drawing, drawing_of
from pipefit.errors import PlanError
from pipefit.parallel import widths_of
from pipefit.planner import plan as search
from pipefit.planner.explain import explain
from pipefit.planner.pictures import partition_svg
from pipefit.profiling import profile_sizes
from pipefit.runtime.microbatches import largest_part
from pipefit.schedules import program_of
from pipefit.spec import Plan, Profile, Topology
from pipefit.stage.split import named_layers


@dataclass(frozen=True)
class Planned:
    """A plan with its profile and topology; `Pipeline(plan=…)` takes it as it is.

    Attributes:
        plan: the plan found.
        profile: of the model, measured.
        topology: of the machine.
    """

    plan: Plan
    profile: Profile
    topology: Topology

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """Its stages, its prediction, and the reason why every other candidate lost."""
        return explain(self.plan, self.profile)

    def draw(self) -> Drawing:
        """The picture of its schedule, displayed in a notebook."""
        return drawing_of(program_of(self.plan))

    def svg(self) -> str:
        """The partition drawn over the model."""
        return partition_svg(self.plan, self.profile, self.topology)

    def save(self, path: str | Path) -> Path:
        """Writes the plan for `pipefit train --plan`."""
        return self.plan.save(path)


def plan(
    model: nn.Module | Sequence[nn.Module],
    *,
    example: tuple[Any, Any],
    topology: Topology | str | Path,
    global_batch: int | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    num_microbatches: Sequence[int] = (2, 4, 8, 16),
    method: str = "auto",
    **options: Any,
) -> Planned:
    """Measures a model on this machine and finds its best plan for a topology.

    Args:
        model: an `nn.Sequential` or a list of layers.
        example: (input, target) of one global batch.
        topology: a `Topology`, its file, or "local:N".
        global_batch: samples per weight update; None: those of the example.
        loss: measured too, if given.
        num_microbatches: counts per update to choose from; those that divide the batch are measured.
        method: as in `pipefit.planner.plan`, like the other options.
        options: further ones of `pipefit.planner.plan`.

    Raises:
        PlanError: no count of micro-batches divides the batch.
        InfeasibleError: nothing fits; the message names the missing memory and the cheapest change that would help.
    """
    x, y = example
    batch = global_batch or largest_part(x, 1)
    sizes = [batch // count for count in sorted(num_microbatches, reverse=True) if not batch % count]
    if not sizes:
        raise PlanError(f"num_microbatches: none of {list(num_microbatches)} divides the batch of {batch} samples")
    layers = named_layers(model)
    name = type(model).__name__
    profile = profile_sizes(layers, x, loss, y, microbatch_sizes=sizes, limit_s=5.0, model=name)
    machine = topology if isinstance(topology, Topology) else Topology.load(topology)
    if method in ("auto", "ptdp"):
        options.setdefault("tensors", widths_of([layer.module for layer in layers], machine.num_devices))
    found = search(profile, machine, method=method, global_batch=batch, microbatch_sizes=sizes, **options)
    return Planned(found, profile, machine)
