"""`pipefit.plan`: the plan of a model, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from pipefit.draw.drawing import Drawing, drawing_of
from pipefit.errors import PlanError
from pipefit.parallel import widths_of
from pipefit.parallel.loss import Loss
from pipefit.planner import PlanOptions
from pipefit.planner import plan as search
from pipefit.planner.explain import explain
from pipefit.planner.machines import load_topology, read_profile
from pipefit.planner.sweeps import Sweep, sweep
from pipefit.profiling import profile_sizes
from pipefit.runtime.microbatches import largest_part
from pipefit.schedules import program_of
from pipefit.spec import Plan, Profile, Topology
from pipefit.spec.arguments import checked
from pipefit.spec.options import with_fields
from pipefit.stage.split import named_layers


@dataclass(frozen=True)
class Planned:
    """A plan with its profile and topology; `Pipeline(plan=…)` takes it as it is.

    Attributes:
        plan: the plan found.
        profile: the profile of the model, measured.
        topology: the topology of the machine.
        options: the options of the search, for `sweep`.
    """

    plan: Plan
    profile: Profile
    topology: Topology
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.explain()

    def explain(self, width: int | None = None, every: bool = False) -> str:
        """Its stages, its prediction, and the candidates that lost; see `pipefit.planner.explain.explain`."""
        return explain(self.plan, self.profile, width, every, self.topology)

    def sweep(self, **over: Sequence[Any]) -> Sweep:
        """The plans for other options, such as `sweep(depth=[1, 2, 4])`; see `pipefit.planner.sweeps.sweep`."""
        return sweep(self.profile, self.topology, over, **self.options)

    def draw(self) -> Drawing:
        """The picture of its schedule, displayed in a notebook."""
        return drawing_of(program_of(self.plan))

    def save(self, path: str | Path) -> Path:
        """Writes the plan for `pipefit train --plan`."""
        return self.plan.save(path)


@checked()
def plan(
    model: nn.Module | Sequence[nn.Module] | Profile | str,
    *,
    example: tuple[Any, Any] | None = None,
    topology: Topology | str | Path,
    loss: Loss | None = None,
    num_microbatches: int | Sequence[int] | None = None,
    **options: Any,
) -> Planned:
    """Measures a model on this machine, unless its profile is given, and finds its best plan for a topology.

    Args:
        model: an `nn.Sequential` or a list of layers; or a profile, or the name of one, such as "gpt:layers=…".
        example: (input, target) of one global batch, to measure a model.
        topology: a `Topology`, its file, "local:N", or the name of a machine such as "dgx-a100-8".
        loss: measured too, if given.
        num_microbatches: count per update; of a model also counts to choose from, of which those that divide the batch
            are measured; None: 2, 4, 8 and 16.
        options: fields of `pipefit.planner.PlanOptions`. Of a model, `global_batch` is that of the example.

    Raises:
        PlanError: no count of micro-batches divides the batch, or a model comes without an example.
        InfeasibleError: nothing fits; the message names the missing memory and the cheapest change that would help.
    """
    asked = with_fields(PlanOptions, options)
    if not isinstance(topology, Topology):
        topology = load_topology(topology)
    machine = asked.machine(topology)
    if isinstance(model, str):
        sizes = asked.microbatch_sizes or (1,)
        model = read_profile(model, machine, sizes[0])
    if isinstance(model, Profile):
        if num_microbatches is not None and not isinstance(num_microbatches, int):
            raise PlanError(f"num_microbatches: expected one number with a profile, got {num_microbatches!r}")
        return _planned(model, machine, options | {"num_microbatches": num_microbatches})
    if example is None:
        raise PlanError("example: expected (input, target) of one batch, with which the model is measured; got none")
    x, y = example
    batch = asked.global_batch or largest_part(x, 1)
    counts = num_microbatches or (2, 4, 8, 16)
    if isinstance(counts, int):
        counts = (counts,)
    sizes = [batch // count for count in sorted(counts, reverse=True) if not batch % count]
    if not sizes:
        raise PlanError(f"num_microbatches: none of {list(counts)} divides the batch of {batch} samples")
    layers = named_layers(model)
    name = type(model).__name__
    profile = profile_sizes(layers, x, loss, y, microbatch_sizes=sizes, limit_s=5.0, model=name)
    if asked.method in ("auto", "ptdp"):
        options.setdefault("tensors", widths_of([layer.module for layer in layers], machine.num_devices))
    return _planned(profile, machine, options | {"global_batch": batch, "microbatch_sizes": sizes})


def _planned(profile: Profile, machine: Topology, options: Mapping[str, Any]) -> Planned:
    return Planned(search(profile, machine, **options), profile, machine, options)
