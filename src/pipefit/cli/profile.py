"""`pipefit profile`: what each layer of a model costs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from pipefit.cli.answer import Answer
from pipefit.cli.models import ModelName, ModelOptions, batch_of, make_model
from pipefit.cli.options import Count, Counts, Json, ending
from pipefit.errors import PipefitError

if TYPE_CHECKING:
    from pipefit.spec import Device, Layer, Profile


def command(
    *,
    model: ModelName,
    microbatch_size: Annotated[Counts, Parameter(alias="-b")] = (8,),
    option: ModelOptions = None,
    repeats: Count = 15,
    threads: Count = 1,
    device: str | None = None,
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None,
    optimizer: Literal["adamw", "sgd", "none"] = "adamw",
    seed: int = 0,
    analytic: bool = False,
    topology: str | None = None,
    output: Annotated[Path | None, Parameter(alias="-o"), ending(".json")] = None,
    json: Json = False,
) -> Answer:
    """Measure what each layer of a model costs.

    Example: pipefit profile --model gpt --option layers=4 --microbatch-size 4 -o gpt.profile.json

    Args:
        microbatch_size: Samples of a micro-batch; several sizes as 4,8,16; default: 8.
        repeats: Measured turns, of which the medians are taken.
        threads: CPU threads, as many as a rank will have.
        device: Where to measure, like cpu or cuda:0.
        dtype: Type of weights and floating inputs.
        optimizer: Whose step to measure.
        seed: Of the random weights and inputs.
        analytic: Compute from FLOP and bytes instead, for the device of --topology.
        topology: Whose device to compute for: a TOML file, or a name like dgx-a100-8.
        output: Write the profile to this JSON file.
    """
    import torch

    from pipefit.profiling import analytic_profile, profile_sizes

    if not microbatch_size or len(set(microbatch_size)) != len(microbatch_size):
        given = ",".join(map(str, microbatch_size))
        raise PipefitError(f"--microbatch-size: expected one or more different sizes, got {given!r}")
    kind = getattr(torch, dtype) if dtype else None
    if analytic:
        computed_for = _device(topology)
        bundle = make_model(model, option, seed=seed, device="meta")
        x, y = batch_of(bundle, 1, seed)
        compute = partial(
            analytic_profile, bundle.layers, x, computed_for, bundle.loss, y, dtype=kind, model=bundle.name
        )
        first, *others = (compute(microbatch_size=size) for size in microbatch_size)
        profile = first.with_others(others) if others else first
    elif topology is not None:
        raise PipefitError("--topology is for computed profiles: add --analytic, or leave it out to measure here")
    else:
        bundle = make_model(model, option, seed=seed)
        x, y = batch_of(bundle, max(microbatch_size), seed)
        makers = {"adamw": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, lr=1e-3), "none": None}
        _check_device(device)
        profile = profile_sizes(
            bundle.layers,
            x,
            bundle.loss,
            y,
            microbatch_sizes=microbatch_size,
            dtype=kind,
            optimizer=makers[optimizer],
            model=bundle.name,
            repeats=repeats,
            threads=threads,
            device=device,
        )
    if output:
        profile.save(output)
    return Answer(_figures(profile), lambda: _table(profile), output=output)


def _device(topology: str | None) -> Device:
    from pipefit.planner.machines import load_topology

    if topology is None:
        raise PipefitError("--analytic needs --topology: a TOML file whose [device] has flops, or dgx-a100-8")
    return load_topology(topology).device


def _check_device(name: str | None) -> None:
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as problem:
        raise PipefitError(f"--device {name}: cannot be used here: {str(problem).splitlines()[0]}") from None


def _figures(profile: Profile) -> dict[str, Any]:
    total = _total(profile)
    return {
        "model": profile.model,
        "microbatch_size": profile.microbatch_size,
        "microbatch_sizes": [profile.microbatch_size, *(other.microbatch_size for other in profile.others)],
        "num_layers": len(profile),
        "device": profile.device,
        "step_s": profile.step_s,
        "loss_s": profile.loss_s,
        "optimizer_s": profile.optimizer_s,
        **{name: getattr(total, name) for name in _COLUMNS},
        "layers": profile.layers,
    }


_COLUMNS = {
    "forward_s": "forward",
    "backward_input_s": "b input",
    "backward_weight_s": "b weight",
    "output_bytes": "output",
    "saved_bytes": "saved",
    "weight_bytes": "weights",
}


def _total(profile: Profile) -> Layer:
    from pipefit.spec import Layer

    return Layer("total", **{name: sum(getattr(layer, name) for layer in profile.layers) for name in _COLUMNS})


def _table(profile: Profile) -> str:
    from pipefit.units import columns, format_bytes, format_seconds

    rows = [["layer", *_COLUMNS.values()]]
    for layer in (*profile.layers, _total(profile)):
        show = {name: format_seconds if name.endswith("_s") else format_bytes for name in _COLUMNS}
        rows.append([layer.name, *(show[name](getattr(layer, name)) for name in _COLUMNS)])
    lines = [f"{profile.model}, micro-batch of {profile.microbatch_size}, {profile.device}", ""]
    lines += columns(rows, right=True)
    whole = [("whole step", profile.step_s), ("loss", profile.loss_s), ("optimizer", profile.optimizer_s)]
    lines += ["", "  ".join(f"{name} {format_seconds(value)}" for name, value in whole if value)]
    lines += [f"also at micro-batches of {', '.join(str(o.microbatch_size) for o in profile.others)}"] * bool(
        profile.others
    )
    return "\n".join(lines)
