"""`pipefit plan`: the best pipeline for a model and a machine, with reasons."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pipefit.cli.answer import Answer, picked
from pipefit.cli.counted import ModelSource, count_of
from pipefit.cli.options import Json, Machine, ending, verb
from pipefit.errors import PipefitError
from pipefit.planner.plan_options import PlanOptions
from pipefit.spec.arguments import NotNegative, Number
from pipefit.spec.files import JsonObject, write_atomically
from pipefit.spec.options import Checked, flag_of, refuse_unused, setting
from pipefit.units import format_seconds, terminal_width, wrapped

if TYPE_CHECKING:
    from pipefit.spec import Plan, Profile, Topology

_CAPPED = ("capped",)
_ONE = ("one plan", "capped")
_FREE = ("one plan",)
"""Ways to plan in which options have an effect: under a cap, one plan with or without a cap, one plan without."""


@dataclass(frozen=True)
class CapOptions:
    """Training within a cap on the devices' memory."""

    device_memory: float | None = setting(
        None,
        'Train within so much of each device\'s memory, like "1.5 GiB", and spill the rest to the tiers of the '
        "topology.",
        typed="bytes",
    )
    ranks: Number | None = setting(None, "Devices to plan for under --device-memory; default: one.", "-n", only=_CAPPED)
    data_parallel: Number | None = setting(None, "Copies of the pipeline among them; default: one.", "-d", only=_CAPPED)
    tier: Literal["host", "disk"] | None = setting(None, "Tier to which --device-memory spills.", only=_CAPPED)
    step_on: Literal["auto", "device", "host"] | None = setting(
        None, "Place of the step of stages that --device-memory spills.", only=_CAPPED
    )
    keep: Literal["auto", "none"] | None = setting(
        None, "Stages that keep their activations; auto: as many as fit.", only=_CAPPED
    )

    def applied(self, options: PlanOptions) -> PlanOptions:
        """The options of a plan under this cap, if there is one: `--chunks` is then the cap's."""
        from pipefit.planner import Cap

        if self.device_memory is None:
            refuse_unused(self, "one plan", "expected --device-memory too; without a cap nothing is spilled", flag_of)
            return options
        chunks = options.chunks or (0,)
        if len(chunks) > 1:
            raise PipefitError(f"--chunks: expected one number with --device-memory, got {', '.join(map(str, chunks))}")
        copies = self.data_parallel or 1
        cap = Cap(
            self.device_memory,
            tier=self.tier,
            step_on=self.step_on or "auto",
            keep=self.keep != "none",
            num_ranks=self.ranks or copies,
            copies=copies,
            num_chunks=chunks[0],
        )
        return replace(options, cap=cap, chunks=None)


@dataclass(frozen=True)
class Wanted(Checked):
    """The form of the answer, and further questions."""

    tokens: float | None = setting(None, "Report the days and device hours of training on so many tokens.", only=_ONE)
    price: NotNegative | None = setting(None, "Price of a device hour, for the costs of --tokens.", only=_ONE)
    refit: Path | None = setting(None, "Correct the profile by this measured trace; needs --of.", only=_ONE)
    of: Path | None = setting(None, "The plan (.json) that the trace of --refit ran.", only=_ONE)
    every: bool = setting(False, "Show all candidates that lost, not only the best of five families.", "--all")
    largest: Literal["layers", "hidden"] | None = setting(
        None, "Plan the largest GPT that fits: with so many layers, or so large a hidden size.", only=_FREE
    )
    sweep: Sequence[str] = setting(
        (),
        "Plan for each value, such as tensor=1,2,4; again: for each pair of values. Names: tensor, depth, "
        "microbatch-size, microbatches, batch, schedule, layers, hidden; of the outermost level bandwidth, machines.",
        typed=list[str],
    )
    output: Path | None = setting(
        None,
        "Write the plan to this .json file, or the chart of --sweep to .svg or .png.",
        typed=Annotated[Path, ending(".json", ".svg", ".png", alias="-o")],
    )


@verb()
def command(
    *,
    topology: Machine,
    profile: str | None = None,
    source: ModelSource,
    options: PlanOptions,
    capped: CapOptions,
    wanted: Wanted,
    json: Json = False,
) -> Answer:
    """Find the best pipeline for a model on a machine, and report why every other lost.

    Example: pipefit plan --profile gpt:layers=96,hidden=12288,heads=96 --topology dgx-a100-1024 --global-batch 1536

    --method pipedream plans asynchronous training with a weight update per mini-batch; auto, gpipe, ptdp and uniform
    plan synchronous training; 2bw updates with gradients one update old.

    Args:
        profile: A profile (.json), a published one (vgg16, resnet50, gnmt), or a transformer by its sizes, such as
            gpt:layers=96,hidden=12288,heads=96 or llama:layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336; or give
            --model.
        topology: A TOML file, local:N, GPUs such as 8xH100:16 (16 servers of 8), or a machine by name.
    """
    from pipefit.planner import plan
    from pipefit.planner.machines import load_topology
    from pipefit.planner.sweeps import Question

    machine = options.machine(load_topology(topology))
    _check_question(profile, source, wanted)
    options = capped.applied(options)
    _refuse_unused(options, wanted)
    model, line = _model(profile, source, machine, options)
    if wanted.sweep:
        return _swept(model, machine, options, wanted)
    output = wanted.output
    if output is not None and output.suffix != ".json":
        raise PipefitError(f"-o {output}: expected .json for a plan; .svg and .png are for --sweep")
    if wanted.largest is not None:
        from pipefit.planner.sweeps import largest

        model = largest(_name_of(model), machine, wanted.largest, **vars(options))
    figures = Question(model, machine, vars(options)).profile
    if wanted.refit is not None:
        figures = _refitted(figures, wanted.refit, wanted.of)
    elif wanted.of is not None:
        raise PipefitError("--of: expected --refit too: the trace that this plan ran")
    made = plan(figures, machine, **vars(options))
    if output is not None:
        made.save(output)
    return _answer(made, figures, machine, wanted, line)


def _check_question(profile: str | None, source: ModelSource, wanted: Wanted) -> None:
    """Refuses a question without one model, and about a training that nothing can answer."""
    from pipefit.planner.transformer import is_transformer

    if (profile is None) == (source.model is None):
        raise PipefitError(
            "expected --profile or --model: a profile (.json) or a transformer by its sizes (gpt:layers=…); or a "
            "folder with a config.json, such a file, or transformers:CLASS"
        )
    tokens = wanted.tokens
    is_known = source.model is not None or is_transformer(profile or "")
    if tokens is not None and not (0 < tokens < math.inf and is_known):
        known = "--model, or --profile gpt:layers=… or llama:layers=…"
        raise PipefitError(
            f"--tokens: expected a number above 0, for {known}; got {tokens:g} for {profile or source.model}"
        )
    if wanted.price is not None and tokens is None:
        raise PipefitError("--price: expected --tokens too: the training that is paid for")


def _model(
    profile: str | None, source: ModelSource, machine: Topology, options: PlanOptions
) -> tuple[Profile | str, str]:
    """The model to plan: a profile, or its name; and a line about its count."""
    from pipefit.planner.computed_profile import counted_profile

    if profile is not None:
        given = [name for name, value in vars(source).items() if value != getattr(ModelSource(), name)]
        if given:
            raise PipefitError(f"--{given[0]}: it is for --model; leave it out")
        return profile, ""
    counted, line = count_of(source, machine, options.tensors)
    sizes = options.microbatch_sizes or (1,)
    return counted_profile(counted, source.model or "", sizes[0], machine.device, topology=machine), line


def _refuse_unused(options: PlanOptions, wanted: Wanted) -> None:
    """Refuses options without an effect: under a cap, in a sweep, and by the method."""
    why = f"method {options.method} does not use it; leave it out"
    if options.cap is not None:
        why = "it is for plans without --device-memory, which splits and replays as it needs"
        refuse_unused(wanted, "capped", why, flag_of)
    if wanted.sweep:
        refuse_unused(wanted, "sweep", "it is for one plan; --sweep makes many", flag_of)
    refuse_unused(options, options.way, why, flag_of)


def _swept(model: Profile | str, machine: Topology, options: PlanOptions, wanted: Wanted) -> Answer:
    """The plans of `--sweep`: a table, JSON, and a chart where there is a path for it."""
    from pipefit.draw.save import save_bitmap
    from pipefit.planner.sweeps import sweep

    output = wanted.output
    if output is not None and output.suffix == ".json":
        raise PipefitError(f"-o {output}: expected .svg or .png for the chart of --sweep; --json prints its figures")
    over = {}
    for text in wanted.sweep:
        name, _, values = text.partition("=")
        each = [value.strip() for value in values.split(",") if value.strip()]
        if not each or name in over:
            raise PipefitError(f"--sweep: expected NAME=a,b,c once for each name, got {text!r}")
        over[name] = [int(value) if value.isdecimal() else value for value in each]
    found = sweep(model, machine, over, **vars(options))
    if output is not None:
        picture = found.svg(f"{_name_of(model)} on {machine.name}")
        if output.suffix == ".png":
            save_bitmap(output, picture)
        else:
            write_atomically(output, picture)
    rows = [{**cell.values, **cell.figures, "why": cell.why} for cell in found.cells]
    return Answer({"swept": list(over), "rows": rows}, lambda: str(found), output=output)


def _name_of(model: Profile | str) -> str:
    if isinstance(model, str):
        return model
    return model.model


def _refitted(profile: Profile, trace: Path, of: Path | None) -> Profile:
    from pipefit.planner.refit import refit
    from pipefit.spec import Plan
    from pipefit.timeline import load_trace

    of = of or trace.parent / "plan.json"
    if not of.is_file():
        raise PipefitError(f"--refit {trace}: give the plan that it ran with --of; there is no {of}")
    return refit(profile, Plan.load(of), load_trace(trace))


_SAME = (
    "method", "model", "schedule", "num_microbatches", "microbatch_size", "num_chunks", "data", "shard",
    "spill", "candidates", "plan_seconds",
)  # fmt: skip
"""Fields of a plan that the JSON object contains unchanged."""


def _answer(made: Plan, profile: Profile, machine: Topology, wanted: Wanted, line: str) -> Answer:
    from pipefit.planner.explain import explain, run_command
    from pipefit.planner.training_figures import training, training_lines

    found = training(made, machine, wanted.tokens, counted=profile.counted, price=wanted.price)
    data = picked(made, *_SAME)
    data |= {"stages": _stages(made), "predicted": made.prediction, "training": found}
    lines = ["", *training_lines(found)]
    if line:
        lines.append(line)
    lines.append(f"planned in {format_seconds(round(made.plan_seconds, 2))}")
    path = "plan.json"
    hint = "; -o plan.json writes the plan"
    if wanted.output is not None:
        path = str(wanted.output)
        hint = ""
    command = run_command(made, machine, shlex.quote(path))
    if command:
        data["run"] = command
        width = terminal_width()
        lines += ["", f"to run it, on each machine (HOST is one of them{hint}):"]
        lines.append(" \\\n".join(wrapped(f"  {command}", width - 2, "    ")))

    def text() -> str:
        return "\n".join([explain(made, profile, every=wanted.every, topology=machine), *lines])

    return Answer(data, text, output=wanted.output)


def _stages(made: Plan) -> list[JsonObject]:
    found = []
    for stage in made.partition.stages:
        layers: Sequence[int] = stage.layers
        if len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1)):
            layers = [layers[0], layers[-1]]
        facts = picked(stage, "tensor", "recompute")
        found.append(facts | {"layers": layers, "replicas": stage.replicas * made.data})
    return found
