"""`pipefit profile`: seconds and bytes of each layer of a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from pipefit.cli.answer import Answer
from pipefit.cli.models import ModelName, ModelOptions, batch_of, make_model
from pipefit.cli.options import Count, Counts, Json, Seed, Threads, ending
from pipefit.errors import PipefitError
from pipefit.planner.machines import load_topology
from pipefit.spec import Layer, Profile
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
    optimizer: Literal["adamw", "sgd", "none"] = "adamw",
    seed: Seed = 0,
    analytic: bool = False,
    topology: str | None = None,
    output: Annotated[Path | None, Parameter(alias="-o"), ending(".json")] = None,
    json: Json = False,
) -> Answer:
    """Measure time and memory of each layer of a model.

    Example: pipefit profile --model gpt --option layers=4 --microbatch-size 4 -o gpt.profile.json

    Args:
        microbatch_size: Samples of a micro-batch; several sizes as 4,8,16; default: 8.
        repeats: Measured turns, of which the medians are taken.
        threads: CPU threads, as many as a rank will have.
        device: Device of the measurement, like cpu or cuda:0.
        dtype: Type of weights and floating inputs.
        optimizer: Optimizer of the measured step.
        seed: Of the random weights and inputs.
        analytic: Compute from FLOP and bytes instead, for the device of --topology.
        topology: Topology with the device to compute for: a TOML file, or a name like dgx-a100-8.
        output: Write the profile to this JSON file.
    """
    import torch

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
    if not analytic:
        usable_device(device or "cpu")
    bundle = make_model(model, option, seed=seed, device="meta" if analytic else None)
    layers = named_layers(bundle.layers)
    x, y = batch_of(bundle, 1 if analytic else max(microbatch_size), seed)
    same: dict[str, Any] = {"dtype": getattr(torch, dtype) if dtype else None, "model": bundle.name}
    if topology is not None:
        place = load_topology(topology).device
        compute = partial(analytic_profile, layers, x, place, bundle.loss, y, **same)
        first, *others = (compute(microbatch_size=size) for size in microbatch_size)
        profile = first.with_others(others)
    else:
        makers = {"adamw": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, lr=1e-3), "none": None}
        same |= {"optimizer": makers[optimizer], "repeats": repeats, "threads": threads, "device": device}
        profile = profile_sizes(layers, x, bundle.loss, y, microbatch_sizes=microbatch_size, **same)
    if output:
        profile.save(output)
    total = Layer("total", **{name: sum(getattr(layer, name) for layer in profile.layers) for name in _COLUMNS})
    data = {
        **{name: getattr(profile, name) for name in _SAME},
        "microbatch_sizes": [one.microbatch_size for one in (profile, *profile.others)],
        "num_layers": len(profile),
        **{name: getattr(total, name) for name in _COLUMNS},
        "layers": profile.layers,
    }
    return Answer(data, lambda: _table(profile, total), output=output)


_SAME = ("model", "microbatch_size", "device", "step_s", "loss_s", "optimizer_s")
"""Fields of a profile that the JSON object contains unchanged."""

_COLUMNS = {
    "forward_s": "forward",
    "backward_input_s": "b input",
    "backward_weight_s": "b weight",
    "output_bytes": "output",
    "saved_bytes": "saved",
    "weight_bytes": "weights",
}


def _table(profile: Profile, total: Layer) -> str:
    rows = [["layer", *_COLUMNS.values()]]
    for layer in (*profile.layers, total):
        show = {name: format_seconds if name.endswith("_s") else format_bytes for name in _COLUMNS}
        rows.append([layer.name, *(show[name](getattr(layer, name)) for name in _COLUMNS)])
    lines = [f"{profile.model}, micro-batch of {profile.microbatch_size}, {profile.device}", ""]
    lines += columns(rows, right=True)
    whole = [("whole step", profile.step_s), ("loss", profile.loss_s), ("optimizer", profile.optimizer_s)]
    lines += ["", "  ".join(f"{name} {format_seconds(value)}" for name, value in whole if value)]
    if profile.others:
        lines.append(f"also at micro-batches of {', '.join(str(other.microbatch_size) for other in profile.others)}")
    return "\n".join(lines)
