"""`pipefit plan`: from a model and a machine to the best pipeline, with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pipefit.cli.answer import Answer
from pipefit.cli.options import Count, Counts, Json, ending, verb
from pipefit.cli.programs import read_profile
from pipefit.errors import PipefitError

if TYPE_CHECKING:
    from pipefit.spec import Plan, Profile, Topology

Svg = Annotated[Path, ending(".svg")]


@verb()
def command(
    *,
    profile: str,
    topology: str,
    method: Literal["auto", "pipedream", "gpipe", "2bw", "ptdp", "uniform"] = "auto",
    cost: Literal["ring", "paper", "pipedream-code"] = "ring",
    straight: bool = False,
    global_batch: Count | None = None,
    microbatch_size: Annotated[Counts, "-b"] = (),
    microbatches: Annotated[Count | None, "-m"] = None,
    schedule: str | None = None,
    depth: Counts = (),
    recompute: Literal["auto", "always", "never"] = "auto",
    memory: str | None = None,
    device_memory: str | None = None,
    ranks: Annotated[Count | None, "-n"] = None,
    chunks: Annotated[Count | None, "-v"] = None,
    data_parallel: Annotated[Count | None, "-d"] = None,
    tier: Literal["host", "disk"] | None = None,
    step_on: Literal["auto", "device", "host"] | None = None,
    keep: Literal["auto", "none"] | None = None,
    state: float | None = None,
    tensor: Annotated[Counts, "-t"] = (),
    tokens: float | None = None,
    refit: Path | None = None,
    of: Path | None = None,
    picture: Svg | None = None,
    pareto: Svg | None = None,
    depths: Svg | None = None,
    output: Annotated[Path | None, "-o", ending(".json")] = None,
    json: Json = False,
) -> Answer:
    """Find the best pipeline for a model on a machine, and say why every other lost.

    Example: pipefit plan --profile gpt:layers=96,hidden=12288,heads=96 --topology dgx-a100-1024 --global-batch 1536

    --method pipedream plans asynchronous training with a weight update per mini-batch; auto, gpipe, ptdp and uniform
    plan synchronous training; 2bw updates with gradients one update old.

    Args:
        profile: A profile (.json), a published one (vgg16, resnet50, gnmt), or gpt:layers=96,hidden=12288,heads=96.
        topology: A TOML file, local:N, or a machine by name, like dgx-a100-1024.
        method: Whose rules to plan by.
        cost: How --method pipedream counts communication.
        straight: No replicas (--method pipedream).
        global_batch: Samples per weight update.
        microbatch_size: Micro-batch sizes to choose from, like 1,2,4.
        microbatches: Micro-batches per update, when they are given.
        schedule: Schedules to choose from, like 1f1b,gpipe.
        depth: Depths to choose from, like 2,4.
        recompute: Replay forwards to save memory?
        memory: Memory of every device, like "8 GiB", in place of the topology's.
        device_memory: Train within so much of each device's memory, like "1.5 GiB", and spill the rest to the tiers of
            the topology.
        ranks: Devices to plan for under --device-memory; default: one.
        chunks: Stages on each of them; default: the best.
        data_parallel: Copies of the pipeline among them; default: one.
        tier: Where --device-memory spills to.
        step_on: Where what --device-memory spills steps.
        keep: Stages that keep their activations; auto: as there is room for.
        state: Optimizer bytes per weight byte: 0 SGD, 1 momentum, 2 Adam.
        tensor: Tensor widths to choose from, such as 1,2.
        tokens: Say how long training a GPT on so many tokens takes.
        refit: Correct the profile by this measured trace; needs --of.
        of: The plan (.json) that the trace of --refit ran.
        picture: Draw the partition over the model as .svg.
        pareto: Draw the throughput of all candidates against their memory as .svg.
        depths: Draw throughput against depth and micro-batch size as .svg.
        output: Write the plan to this JSON file.
    """
    from pipefit.planner import Cap, plan
    from pipefit.units import parse_quantity

    machine = _machine(topology, memory)
    figures = read_profile(profile, machine, microbatch_size[0] if microbatch_size else 1)
    if refit is not None:
        figures = _refitted(figures, refit, of)
    elif of is not None:
        raise PipefitError("--of: expected --refit too: the trace that this plan ran")
    _check_tokens(tokens, figures.model, profile)
    capped = {"tier": tier, "step_on": step_on, "keep": keep}
    capped |= {"ranks": ranks, "chunks": chunks, "data_parallel": data_parallel}
    cap = None
    if device_memory is None:
        _refuse(capped, "expected --device-memory too; without a cap nothing is spilled")
    else:
        free = {"pareto": pareto, "depths": depths, "depth": depth, "tensor": tensor, "straight": straight}
        free |= {"method": method != "auto", "recompute": recompute != "auto"}
        _refuse(free, "it is for plans without --device-memory, which splits and replays as it needs")
        cap = Cap(
            device_bytes=parse_quantity(device_memory, "bytes", "--device-memory"),
            tier=tier,
            step_on=step_on or "auto",
            keep=keep != "none",
            num_ranks=ranks or data_parallel or 1,
            copies=data_parallel or 1,
            num_chunks=chunks or 0,
        )
    wishes: dict[str, Any] = {
        "method": method,
        "global_batch": global_batch,
        "microbatch_sizes": microbatch_size or None,
        "schedules": schedule.split(",") if schedule else None,
        "recompute": {"auto": None, "always": True, "never": False}[recompute],
        "state_per_weight": state,
        "tensors": tensor or None,
    }
    made = plan(
        figures,
        machine,
        **wishes,
        num_microbatches=microbatches,
        depths=depth or None,
        cost=cost,
        straight=straight,
        cap=cap,
    )
    return _answer(made, figures, machine, tokens, picture, output, _charts(figures, machine, wishes, pareto, depths))


def _refuse(options: dict[str, Any], why: str) -> None:
    """Refuses options that were given where they have no meaning."""
    for name, given in options.items():
        if given:
            raise PipefitError(f"--{name.replace('_', '-')}: {why}")


def _check_tokens(tokens: float | None, model: str, profile: str) -> None:
    if tokens is None:
        return
    if not tokens > 0:
        raise PipefitError(f"--tokens: expected more than 0, got {tokens:g}")
    if not model.startswith("gpt:"):
        raise PipefitError(f"--tokens: expected --profile gpt:layers=…; {model or profile} has no tokens to count")


def _charts(
    profile: Profile, machine: Topology, wishes: dict[str, Any], pareto: Path | None, depths: Path | None
) -> dict[Path, str]:
    """The charts of --pareto and --depths, over all candidates."""
    if pareto is None and depths is None:
        return {}
    from pipefit.planner.pictures import depth_svg, explore, pareto_svg

    points = explore(profile, machine, **wishes)
    charts = ((pareto, pareto_svg), (depths, depth_svg))
    return {path: draw(points, f"{profile.model} on {machine.name}") for path, draw in charts if path is not None}


def _machine(name: str, memory: str | None) -> Topology:
    import msgspec

    from pipefit.planner.machines import load_topology
    from pipefit.units import parse_quantity

    machine = load_topology(name)
    if memory is None:
        return machine
    size = parse_quantity(memory, "bytes", "--memory")
    if not size > 0:
        raise PipefitError(f"--memory: expected more than 0, got {memory!r}")
    every = tuple(msgspec.structs.replace(device, memory_bytes=size) for device in machine.devices)
    return msgspec.structs.replace(
        machine, device=msgspec.structs.replace(machine.device, memory_bytes=size), devices=every
    )


def _refitted(profile: Profile, trace: Path, of: Path | None) -> Profile:
    from pipefit.planner.refit import refit
    from pipefit.spec import Plan
    from pipefit.timeline import load_trace

    if of is None:
        of = trace.parent / "plan.json"
        if not of.is_file():
            raise PipefitError(f"--refit {trace}: say with --of which plan it ran; there is no {of}")
    return refit(profile, Plan.load(of), load_trace(trace))


def _answer(
    made: Plan,
    profile: Profile,
    machine: Topology,
    tokens: float | None,
    picture: Path | None,
    output: Path | None,
    charts: dict[Path, str],
) -> Answer:
    from pipefit.planner.explain import explain, training
    from pipefit.spec.files import write_atomically

    data = _figures(made) | {"training": training(made, machine, tokens)}
    written = []
    if output is not None:
        made.save(output)
        written.append(output)
    if picture is not None:
        from pipefit.planner.pictures import partition_svg

        write_atomically(picture, partition_svg(made, profile, machine))
        written.append(picture)
    for path, text in charts.items():
        write_atomically(path, text)
        written.append(path)
    data |= {"output": [str(path) for path in written]} if written else {}
    lines = [
        f"{name}: {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in data["training"].items()
    ]
    lines += [f"wrote {path}" for path in written]
    return Answer(data, lambda: "\n".join([explain(made, profile), "", *lines, f"({made.plan_seconds:.2f} s)"]))


_SAME = (
    "method", "model", "schedule", "num_microbatches", "microbatch_size", "num_chunks", "data", "sharded_optimizer",
    "spill", "candidates", "plan_seconds",
)  # fmt: skip
"""Fields of a plan that the JSON object has as they are."""


def _figures(made: Plan) -> dict[str, Any]:
    stages = [
        {
            "layers": [stage.layers[0], stage.layers[-1]] if _runs(stage.layers) else list(stage.layers),
            "replicas": stage.replicas * made.data,
            "tensor": stage.tensor,
            "recompute": stage.recompute,
        }
        for stage in made.partition.stages
    ]
    return {"stages": stages, "predicted": made.prediction} | {name: getattr(made, name) for name in _SAME}


def _runs(layers: tuple[int, ...]) -> bool:
    return len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1))
