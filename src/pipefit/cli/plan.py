"""`pipefit plan`: the best pipeline for a model and a machine, with reasons."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from msgspec.structs import replace

from pipefit.cli.answer import Answer
from pipefit.cli.options import Count, Counts, Json, Size, ending, verb
from pipefit.errors import PipefitError
from pipefit.spec.options import setting
from pipefit.units import format_seconds, wrapped

if TYPE_CHECKING:
    from pipefit.planner import Cap
    from pipefit.spec import Plan, Profile, Topology

Svg = Annotated[Path, ending(".svg")]


@dataclass(frozen=True)
class CapOptions:
    """Training within a cap on the devices' memory.

    Attributes:
        device_memory: train within so much of each device's memory, like "1.5 GiB", and spill the rest to the tiers of
            the topology.
        ranks: devices to plan for under --device-memory; default: one.
        data_parallel: copies of the pipeline among them; default: one.
        tier: tier to which --device-memory spills.
        step_on: place of the step of stages that --device-memory spills.
        keep: stages that keep their activations; auto: as many as fit.
    """

    device_memory: float | None = setting(None, typed=Size)
    ranks: int | None = setting(None, "--ranks", "-n", least=1)
    data_parallel: int | None = setting(None, "--data-parallel", "-d", least=1)
    tier: Literal["host", "disk"] | None = None
    step_on: Literal["auto", "device", "host"] | None = None
    keep: Literal["auto", "none"] | None = None

    def cap(self, chunks: Sequence[int]) -> Cap | None:
        """The cap, with the stages on each rank if they are given; None: there is none."""
        from pipefit.planner import Cap

        if self.device_memory is None:
            _refuse(asdict(self), "expected --device-memory too; without a cap nothing is spilled")
            return None
        if len(chunks) > 1:
            raise PipefitError(f"--chunks: expected one number with --device-memory, got {', '.join(map(str, chunks))}")
        return Cap(
            self.device_memory,
            tier=self.tier,
            step_on=self.step_on or "auto",
            keep=self.keep != "none",
            num_ranks=self.ranks or self.data_parallel or 1,
            copies=self.data_parallel or 1,
            num_chunks=chunks[0] if chunks else 0,
        )


@verb()
def command(
    *,
    profile: str,
    topology: str,
    method: Literal["auto", "pipedream", "gpipe", "2bw", "ptdp", "uniform"] = "auto",
    cost: Literal["ring", "paper", "pipedream-code"] = "ring",
    straight: bool = False,
    global_batch: Count | None = None,
    microbatch_size: Annotated[Counts, Parameter(alias="-b")] = (),
    microbatches: Annotated[Count | None, Parameter(alias="-m")] = None,
    schedule: str | None = None,
    depth: Counts = (),
    chunks: Annotated[Counts, Parameter(alias="-v")] = (),
    recompute: Literal["auto", "none", "stage", "layer", "selective"] = "auto",
    memory: Size | None = None,
    capped: CapOptions,
    state: float | None = None,
    tensor: Annotated[Counts, Parameter(alias="-t")] = (),
    whole_messages: Annotated[bool, Parameter(negative="")] = False,
    blocking: Annotated[bool, Parameter(negative="")] = False,
    tokens: float | None = None,
    refit: Path | None = None,
    of: Path | None = None,
    picture: Svg | None = None,
    pareto: Svg | None = None,
    depths: Svg | None = None,
    every: Annotated[bool, Parameter(name="--all")] = False,
    largest: Literal["layers", "hidden"] | None = None,
    sweep: Annotated[list[str] | None, Parameter(negative_iterable=())] = None,
    output: Annotated[Path | None, Parameter(alias="-o"), ending(".json", ".svg", ".png")] = None,
    json: Json = False,
) -> Answer:
    """Find the best pipeline for a model on a machine, and report why every other lost.

    Example: pipefit plan --profile gpt:layers=96,hidden=12288,heads=96 --topology dgx-a100-1024 --global-batch 1536

    --method pipedream plans asynchronous training with a weight update per mini-batch; auto, gpipe, ptdp and uniform
    plan synchronous training; 2bw updates with gradients one update old.

    Args:
        profile: A profile (.json), a published one (vgg16, resnet50, gnmt), or gpt:layers=96,hidden=12288,heads=96.
        topology: A TOML file, local:N, or a machine by name, like dgx-a100-1024.
        method: Planning method.
        cost: Convention of communication costs of --method pipedream.
        straight: No replicas (--method pipedream).
        global_batch: Samples per weight update.
        microbatch_size: Micro-batch sizes to choose from, like 1,2,4.
        microbatches: Numbers of micro-batches per update to choose from.
        schedule: Schedules to choose from, like 1f1b,gpipe.
        depth: Depths to choose from, like 2,4.
        chunks: Numbers of stages on each rank to choose from, like 2,3, for schedules that have several.
        recompute: What backwards replay to save memory: nothing, whole stages, layer by layer, or only attention.
        memory: Memory of every device, like "8 GiB", in place of the topology's.
        state: Optimizer bytes per weight byte: 0 SGD, 1 momentum, 2 Adam.
        tensor: Tensor widths to choose from, such as 1,2.
        whole_messages: Send whole messages between tensor-parallel stages, without scatter/gather.
        blocking: Ranks wait for each message, as in Megatron-LM of 2021; without it they compute meanwhile.
        tokens: Report the days of training a GPT on so many tokens.
        refit: Correct the profile by this measured trace; needs --of.
        of: The plan (.json) that the trace of --refit ran.
        picture: Draw the partition over the model as .svg.
        pareto: Draw the throughput of all candidates against their memory as .svg.
        depths: Draw throughput against depth and micro-batch size as .svg.
        every: Show all candidates that lost, not only the best of five families.
        largest: Plan the largest GPT that fits: with so many layers, or so large a hidden size.
        sweep: Plan for each value, such as tensor=1,2,4; again: for each pair of values. Names: tensor, depth,
            microbatch-size, microbatches, batch, schedule, layers, hidden; of the outermost level bandwidth, machines.
        output: Write the plan to this .json file, or the chart of --sweep to .svg or .png.
    """
    from pipefit.planner import plan
    from pipefit.planner.machines import load_topology, read_profile
    from pipefit.planner.transformer import is_transformer

    machine = load_topology(topology)
    if memory is not None:
        each = tuple(replace(device, memory_bytes=memory) for device in machine.devices)
        machine = replace(machine, device=replace(machine.device, memory_bytes=memory), devices=each)
    if tokens is not None and not (tokens > 0 and is_transformer(profile)):
        raise PipefitError(f"--tokens: expected more than 0, for --profile gpt:layers=…; got {tokens:g} for {profile}")
    cap = capped.cap(chunks)
    if cap is not None:
        free: dict[str, Any] = {
            "pareto": pareto,
            "depths": depths,
            "depth": depth,
            "tensor": tensor,
            "straight": straight,
        }
        free |= {"method": method != "auto", "recompute": recompute != "auto", "largest": largest}
        free |= {"cost": cost != "ring", "whole_messages": whole_messages, "blocking": blocking}
        _refuse(free, "it is for plans without --device-memory, which splits and replays as it needs")
    wishes: dict[str, Any] = {
        "method": method,
        "global_batch": global_batch,
        "microbatch_sizes": microbatch_size or None,
        "schedules": schedule.split(",") if schedule else None,
        "recompute": None if recompute == "auto" else recompute,
        "state_per_weight": state,
        "tensors": tensor or None,
        "chunks": chunks or None,
    }
    only: dict[str, Any] = {"num_microbatches": microbatches, "depths": depth or None, "cost": cost}
    only |= {"straight": straight, "cap": cap}
    only |= {"whole_messages": whole_messages, "blocking": blocking}
    if sweep:
        one = {"picture": picture, "pareto": pareto, "depths": depths, "refit": refit, "of": of, "largest": largest}
        _refuse(one, "it is for one plan; --sweep makes many")
        return _swept(profile, machine, sweep, wishes | only, output)
    if output is not None and output.suffix != ".json":
        raise PipefitError(f"-o {output}: expected .json for a plan; .svg and .png are for --sweep")
    if largest is not None:
        from pipefit.planner import sweeps

        profile = sweeps.largest(profile, machine, largest, **wishes, **only)
    figures = read_profile(profile, machine, microbatch_size[0] if microbatch_size else 1)
    if refit is not None:
        figures = _refitted(figures, refit, of)
    elif of is not None:
        raise PipefitError("--of: expected --refit too: the trace that this plan ran")
    made = plan(figures, machine, **wishes, **only)
    if picture or pareto or depths:
        _draw(made, figures, machine, wishes, (picture, pareto, depths))
    if output is not None:
        made.save(output)
    written = [path for path in (output, picture, pareto, depths) if path is not None]
    return _answer(made, figures, machine, tokens, every, written)


def _swept(
    profile: str, machine: Topology, texts: list[str], options: Mapping[str, Any], output: Path | None
) -> Answer:
    """The plans of `--sweep`: a table, JSON, and a chart where there is a path for it."""
    from pipefit.draw.save import save_bitmap
    from pipefit.planner.sweeps import sweep
    from pipefit.spec.files import write_atomically

    if output is not None and output.suffix == ".json":
        raise PipefitError(f"-o {output}: expected .svg or .png for the chart of --sweep; --json prints its figures")
    over: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        each = [value.strip() for value in values.split(",") if value.strip()]
        if not each or name in over:
            raise PipefitError(f"--sweep: expected NAME=a,b,c once for each name, got {text!r}")
        over[name] = [int(value) if value.isdecimal() else value for value in each]
    found = sweep(profile, machine, over, **options)
    if output is not None:
        picture = found.svg(f"{profile} on {machine.name}")
        save_bitmap(output, picture) if output.suffix == ".png" else write_atomically(output, picture)
    rows = [{**cell.values, **cell.figures, "why": cell.why} for cell in found.cells]
    return Answer({"swept": list(over), "rows": rows}, lambda: str(found), output=output)


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Refuses options that were given where they have no effect."""
    for name, given in options.items():
        if given:
            raise PipefitError(f"--{name.replace('_', '-')}: {why}")


def _refitted(profile: Profile, trace: Path, of: Path | None) -> Profile:
    from pipefit.planner.refit import refit
    from pipefit.spec import Plan
    from pipefit.timeline import load_trace

    of = of or trace.parent / "plan.json"
    if not of.is_file():
        raise PipefitError(f"--refit {trace}: give the plan that it ran with --of; there is no {of}")
    return refit(profile, Plan.load(of), load_trace(trace))


def _draw(
    made: Plan,
    profile: Profile,
    machine: Topology,
    wishes: Mapping[str, Any],
    paths: tuple[Path | None, Path | None, Path | None],
) -> None:
    """Draws the plan, and the charts over all candidates, each where there is a path for it."""
    from pipefit.planner.pictures import depth_svg, explore, pareto_svg, partition_svg
    from pipefit.spec.files import write_atomically

    picture, pareto, depths = paths
    if pareto or depths:
        points = explore(profile, machine, **wishes)
    else:
        points = ()
    for path, draw in ((pareto, pareto_svg), (depths, depth_svg)):
        if path is not None:
            write_atomically(path, draw(points, f"{profile.model} on {machine.name}"))
    if picture is not None:
        write_atomically(picture, partition_svg(made, profile, machine))


_SAME = (
    "method", "model", "schedule", "num_microbatches", "microbatch_size", "num_chunks", "data", "sharded_optimizer",
    "spill", "candidates", "plan_seconds",
)  # fmt: skip
"""Fields of a plan that the JSON object contains unchanged."""


def _answer(
    made: Plan, profile: Profile, machine: Topology, tokens: float | None, every: bool, written: list[Path]
) -> Answer:
    from pipefit.planner.explain import explain, run_command, training, training_lines

    found = training(made, machine, tokens)
    stages = [
        {
            "layers": [stage.layers[0], stage.layers[-1]] if _runs(stage.layers) else stage.layers,
            "replicas": stage.replicas * made.data,
            "tensor": stage.tensor,
            "recompute": stage.recompute,
        }
        for stage in made.partition.stages
    ]
    data = {name: getattr(made, name) for name in _SAME}
    data |= {"stages": stages, "predicted": made.prediction, "training": found}
    path = next((path for path in written if path.suffix == ".json"), None)
    command = run_command(made, machine, shlex.quote(str(path or "plan.json")))
    if command:
        data |= {"run": command}
    lines = [*training_lines(found), f"planned in {format_seconds(round(made.plan_seconds, 2))}"]
    if command:
        width = shutil.get_terminal_size((100, 24)).columns
        hint = "" if path else "; -o plan.json writes the plan"
        lines += ["", f"to run it, on each machine (HOST is one of them{hint}):"]
        lines.append(" \\\n".join(wrapped(f"  {command}", width - 2, "    ")))
    return Answer(
        data, lambda: "\n".join([explain(made, profile, every=every, topology=machine), "", *lines]), output=written
    )


def _runs(layers: tuple[int, ...]) -> bool:
    return len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1))
