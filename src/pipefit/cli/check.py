"""`pipefit check`: compares pipeline training with single-process training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from pipefit.cli.answer import Answer, code_of
from pipefit.cli.models import ModelName, ModelOptions, batch_of, importable, make_model
from pipefit.cli.options import Count, Json, verb
from pipefit.errors import ModelError, PipefitError
from pipefit.spec.files import JsonObject
from pipefit.spec.options import Precision, Request, Updates
from pipefit.units import counted

if TYPE_CHECKING:
    from pipefit.models import ModelBundle
    from pipefit.testing import CheckResult


@verb(
    "plan", "spill", "data_parallel", "whole_messages", "shard", "device", "no_decay",
    schedule="Its name; `pipefit schedules` lists them. Default: 1f1b.",
    ranks="Processes: data × pipeline × tensor; default: 2.",
    stages="Layers of each stage, like 3,3; default: as even as possible.",
    clip="Clip gradients to this global norm.",
    seed="Of weights, data and dropout.",
)  # fmt: skip
def command(
    *,
    model: ModelName,
    option: ModelOptions = None,
    request: Request,
    precision: Precision,
    updates: Updates,
    steps: Count = 3,
    batch: Count | None = None,
    dtype: Literal["float64", "float32"] | None = None,
    transport: Literal["local", "distributed"] | None = None,
    device: str = "cpu",
    json: Json = False,
) -> Answer:
    """Compare loss, gradients and weights of a pipeline with those of one process.

    Example: pipefit check --model gpt --option layers=4 --ranks 2 --schedule 1f1b

    Trains on random data with SGD, once by a pipeline and once by one process. A schedule without a flush is
    compared with its formulas of delayed gradients. Exit code 1: they differ; the first tensor that differs is named.

    Args:
        steps: Weight updates.
        batch: Samples of a step; default: two for each micro-batch, and one more.
        dtype: Of weights and data; default: float64, with --precision float32.
        transport: All ranks in this process, or a process for each; default: local, except with --tensor.
        device: Device of both sides.
    """
    import torch

    from pipefit.stage.device import usable_device
    from pipefit.testing import check

    usable_device(device)
    spread = replace(request.parallelism, ranks=request.parallelism.ranks or 2, device=device)
    request = replace(request, schedule=request.schedule or "1f1b", parallelism=spread)
    if transport is None:
        transport = "local"
        if spread.tensor > 1:
            transport = "distributed"
    if dtype is None:
        dtype = "float32"
        if precision.dtype == "fp32":
            dtype = "float64"
    name = model
    if transport == "distributed":
        name = importable(model)
    bundle = make_model(name, option, seed=updates.seed)
    stages = request.stages
    assert not isinstance(stages, int | str), "the option gives layer counts"
    size = batch or 2 * request.num_microbatches + 1
    _try_once(bundle, size, updates.seed)
    with _explained_when_it_cannot_travel(model):
        result = check(
            bundle.layers,
            schedule=request.schedule or "",
            microbatches=request.num_microbatches,
            stages=stages,
            parallelism=spread,
            precision=precision,
            updates=updates,
            steps=steps,
            batch_size=size,
            loss=bundle.loss,
            example=partial(batch_of, bundle),
            dtype=getattr(torch, dtype),
            transport=transport,
        )
    data = result.as_dict() | _facts(request, precision, dtype) | {"transport": transport, "steps": steps}
    lines = [bundle.describe(), *_lines(data, result)]
    return Answer(data, "\n".join(lines), code_of(result.equal))


def _facts(request: Request, precision: Precision, dtype: str) -> JsonObject:
    """The training that was compared, as JSON data; what is usual is left out."""
    spread = request.parallelism
    facts = {
        "schedule": request.schedule,
        "num_ranks": spread.ranks,
        "num_microbatches": request.num_microbatches,
        "dtype": dtype,
    }
    if precision.dtype != "fp32":
        facts["precision"] = precision.dtype
    if precision.compile:
        facts["compile"] = True
    if spread.tensor > 1:
        facts |= {"tensor": spread.tensor, "sequence_parallel": spread.sequence_parallel}
    return facts


def _lines(data: JsonObject, result: CheckResult) -> Iterator[str]:
    """The comparison for people."""
    where = counted(data["num_ranks"], "rank")
    if "tensor" in data:
        where += f", tensor {data['tensor']}"
        if data["sequence_parallel"]:
            where += " and sequence"
    computed: str = data.get("precision") or data["dtype"]
    if "compile" in data:
        computed += " with compiled layers"
    verdict = "equal"
    if not result.equal:
        verdict = f"DIFFERENT, first in {result.first_difference}"
    yield (
        f"{data['schedule']} on {where} ({data['transport']}), {data['num_microbatches']} micro-batches, "
        f"{data['steps']} steps in {computed}: {verdict}"
    )
    yield (
        f"largest relative differences: loss {result.loss_diff:.2g}, gradients {result.grad_diff:.2g}, "
        f"weights {result.weight_diff:.2g} (allowed {result.tolerance:.0e})"
    )
    if result.num_norms:
        yield (
            f"{counted(result.num_norms, 'batch norm')}, on both sides: each micro-batch by its own statistics, "
            "running averages by those of the mini-batch (GPipe)"
        )


def _try_once(model: ModelBundle, size: int, seed: int) -> None:
    """Runs a copy of the model once, so that an error of the user's own code is reported as such.

    Raises:
        ModelError: the model or its loss raised.
    """
    import torch

    from pipefit.stage.split import named_layers

    x, y = batch_of(model, size, seed)
    layers = copy.deepcopy(model.layers)
    try:
        with torch.no_grad():
            payload = x
            for layer in named_layers(layers):
                payload = layer.module(payload)
            model.loss(payload, y)
    except PipefitError:
        raise
    except Exception as problem:
        raise ModelError(
            f"{model.name}: running it on its example raised {type(problem).__name__}: {problem}"
        ) from problem


@contextmanager
def _explained_when_it_cannot_travel(model: str) -> Iterator[None]:
    """Explains a failure of pickle, which cannot send lambdas and local functions to the ranks' processes."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        if "pickle" not in str(problem).lower():
            raise
        raise ModelError(
            f"{model} cannot be sent to other processes ({problem}); make its loss and layers functions and classes at "
            "the top of their module, or use --transport local"
        ) from problem
