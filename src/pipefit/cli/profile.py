"""`pipefit profile`: seconds and bytes of each layer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from pipefit.cli.answer import Answer, picked
from pipefit.cli.counted import ModelSource, count_of
from pipefit.cli.models import ModelName, ModelOptions, batch_of, make_model
from pipefit.cli.options import Count, Counts, Json, Machine, Seed, Threads, ending
from pipefit.errors import PipefitError
from pipefit.planner.computed_profile import counted_profile
from pipefit.planner.machines import load_topology
from pipefit.spec import Layer, Profile, Topology
from pipefit.units import columns, format_bytes, format_seconds


def command(
    *,
    model: ModelName,
    microbatch_size: Annotated[Counts, Parameter(alias="-b")] = (8,),
    option: ModelOptions = None,
    repeats: Count = 15,
    threads: Threads = 1,
    device: str | None = None,
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None,
    sequence: Count | None = None,
    optimizer: Literal["adamw", "sgd", "none"] = "adamw",
    seed: Seed = 0,
    analytic: bool = False,
    topology: Machine | None = None,
    output: Annotated[Path | None, ending(".json", alias="-o")] = None,
    json: Json = False,
) -> Answer:
    """Measure time and memory of each layer of a model.

    Example: pipefit profile --model gpt --option layers=4 --microbatch-size 4 -o gpt.profile.json

    Args:
        microbatch_size: Samples of a micro-batch; several sizes as 4,8,16; default: 8.
        repeats: Measured turns, of which the medians are taken.
        threads: CPU threads, as many as a rank will have.
        device: Device of the measurement, like cpu or cuda:0.
        dtype: Type of weights and floating inputs; default: their own, and of a counted model bfloat16.
        sequence: Tokens of a sample of a model of transformers; default: 12 measured, computed as many as its
            configuration allows, at most 8192.
        optimizer: Optimizer of the measured step.
        seed: Of the random weights and inputs.
        analytic: Compute from FLOP and bytes instead, for the device of --topology; a model of transformers needs no
            weights.
        topology: Topology with the device to compute for: a TOML file, or GPUs such as 8xH100.
        output: Write the profile to this JSON file.
    """
    import torch

    from pipefit.cutting.own import random_batch
    from pipefit.models.hub import has_configuration
    from pipefit.profiling import analytic_profile, profile_sizes
    from pipefit.stage.device import usable_device
    from pipefit.stage.split import named_layers

    if not microbatch_size or len(set(microbatch_size)) != len(microbatch_size):
        given = ",".join(map(str, microbatch_size))
        raise PipefitError(f"--microbatch-size: expected one or more different sizes, got {given!r}")
    if analytic and topology is None:
        raise PipefitError("--analytic needs --topology: a TOML file whose [device] has flops, or dgx-a100-8")
    if topology is not None and not analytic:
        raise PipefitError("--topology is for computed profiles: add --analytic, or leave it out to measure here")
    if sequence is not None and not has_configuration(model):
        raise PipefitError("--sequence is for models of transformers; other models have an option or example of theirs")
    if topology is not None and has_configuration(model):
        source = ModelSource(model, tuple(option or ()), sequence, dtype or "bfloat16")
        return _counted(source, load_topology(topology), microbatch_size, output)
    kind = None
    if dtype is not None:
        kind = getattr(torch, dtype)
    if topology is not None:
        bundle = make_model(model, option, seed=seed, device="meta")
        layers = named_layers(bundle.layers)
        x, y = batch_of(bundle, 1, seed)
        machine = load_topology(topology).device
        compute = partial(analytic_profile, layers, x, machine, bundle.loss, y, dtype=kind, model=bundle.name)
        first, *others = [compute(microbatch_size=size) for size in microbatch_size]
        return _answer(first.with_others(others), output)
    usable_device(device or "cpu")
    bundle = make_model(model, option, seed=seed)
    most = max(microbatch_size)
    x, y = batch_of(bundle, most, seed)
    if sequence is not None:
        cut: Any = bundle.layers
        x = y = random_batch(cut.model, most, seed, sequence)
    makers = {"adamw": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, lr=1e-3), "none": None}
    profile = profile_sizes(
        named_layers(bundle.layers),
        x,
        bundle.loss,
        y,
        microbatch_sizes=microbatch_size,
        optimizer=makers[optimizer],
        repeats=repeats,
        threads=threads,
        device=device,
        dtype=kind,
        model=bundle.name,
    )
    return _answer(profile, output)


def _counted(source: ModelSource, machine: Topology, sizes: Sequence[int], output: Path | None) -> Answer:
    """The profile of a model of transformers whose layers are counted."""
    counted, line = count_of(source, machine, None)
    name = source.model or ""
    first, *others = [counted_profile(counted, name, size, machine.device, topology=machine) for size in sizes]
    return _answer(first.with_others(others), output, line)


def _answer(profile: Profile, output: Path | None, line: str = "") -> Answer:
    if output:
        profile.save(output)
    sums = {name: sum(getattr(layer, name) for layer in profile.layers) for name in _COLUMNS}
    data = picked(profile, "model", "microbatch_size", "device", "step_s", "loss_s", "optimizer_s", "layers")
    data |= {"num_layers": len(profile), **sums}
    data["microbatch_sizes"] = [one.microbatch_size for one in (profile, *profile.others)]
    return Answer(data, lambda: _table(profile, Layer("total", **sums), line), output=output)


_COLUMNS = {
    "forward_s": "forward",
    "backward_input_s": "b input",
    "backward_weight_s": "b weight",
    "output_bytes": "output",
    "saved_bytes": "saved",
    "weight_bytes": "weights",
}


def _table(profile: Profile, total: Layer, line: str) -> str:
    rows = [["layer", *_COLUMNS.values()]]
    for layer in (*profile.layers, total):
        rows.append([layer.name, *(_shown(layer, name) for name in _COLUMNS)])
    lines = [f"{profile.model}, micro-batch of {profile.microbatch_size}, {profile.device}"]
    if line:
        lines.append(line)
    lines.append("")
    lines += columns(rows, right=True)
    whole = {"whole step": profile.step_s, "loss": profile.loss_s, "optimizer": profile.optimizer_s}
    lines += ["", "  ".join(f"{name} {format_seconds(value)}" for name, value in whole.items() if value)]
    if profile.others:
        sizes = [str(other.microbatch_size) for other in profile.others]
        lines.append(f"also at micro-batches of {', '.join(sizes)}")
    return "\n".join(lines)


def _shown(layer: Layer, name: str) -> str:
    if name.endswith("_s"):
        return format_seconds(getattr(layer, name))
    return format_bytes(getattr(layer, name))
