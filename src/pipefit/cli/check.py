"""`pipefit check`: the users' first question."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pipefit.cli.answer import FINDING, FINE, Answer
from pipefit.cli.models import ModelName, ModelOptions, batch_of, importable, make_model
from pipefit.cli.options import Json, count, flag, help_of, pairs, whole_numbers
from pipefit.errors import ModelError

if TYPE_CHECKING:
    from pipefit.models import ModelBundle
    from pipefit.testing import CheckResult

__all__ = ["command"]


def command(
    *,
    model: ModelName,
    ranks: Annotated[int, help_of("Of the pipeline.", "--ranks", "-n")] = 2,
    schedule: Annotated[str, help_of("Its name; `pipefit schedules` lists them.")] = "1f1b",
    microbatches: Annotated[int, help_of("Per weight update.", "--microbatches", "-m")] = 4,
    chunks: Annotated[int, help_of("Stages on each rank.", "--chunks", "-v")] = 1,
    replicas: Annotated[str | None, help_of("Copies of each stage, such as 2,1.")] = None,
    stages: Annotated[str | None, help_of("Layers of each stage, like 3,3; default: as even as can be.")] = None,
    steps: Annotated[int, help_of("Weight updates.")] = 3,
    batch: Annotated[int | None, help_of("Samples of a step; default: two for each micro-batch, and one more.")] = None,
    dtype: Annotated[
        Literal["float64", "float32"] | None,
        help_of("Of weights and data; default: float64, with --precision float32."),
    ] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"], help_of("bf16 or fp16: both sides run their layers under autocast.")
    ] = "fp32",
    loss_scale: Annotated[float | None, help_of("The first scale of the loss; default: 65536 with fp16.")] = None,
    transport: Annotated[
        Literal["local", "distributed"] | None,
        help_of("All ranks in this process, or a process for each; default: local, but for --tensor."),
    ] = None,
    recompute: Annotated[bool, flag("Replay each forward before its backward.")] = False,
    tensor: Annotated[int, help_of("Processes that share each rank by tensor parallelism.", "--tensor", "-t")] = 1,
    sequence_parallel: Annotated[bool, flag("They also divide the sequence between them.")] = False,
    clip: Annotated[float | None, help_of("Clip gradients to this global norm.")] = None,
    option: ModelOptions = None,
    schedule_option: Annotated[list[str] | None, help_of("An option of the schedule as NAME=INTEGER.")] = None,
    seed: Annotated[int, help_of("Of weights, data and dropout.")] = 0,
    device: Annotated[str, help_of("Where both sides compute.")] = "cpu",
    json: Json = False,
) -> Answer:
    """Are loss, gradients and weights of a pipeline those of one process?

    Example: pipefit check --model gpt --option layers=4 --ranks 2 --schedule 1f1b

    Trains on random data with SGD, once by a pipeline and once by one process. A schedule without a flush is held
    against its formulas of delayed gradients. Exit code 1: they differ; the first tensor that does is named.
    """
    import torch

    from pipefit.planner import ranks_of
    from pipefit.testing import check

    transport = transport or ("local" if tensor == 1 else "distributed")
    dtype = dtype or ("float64" if precision == "fp32" else "float32")
    for name, value in (
        ("--tensor", tensor),
        ("--ranks", ranks),
        ("--microbatches", microbatches),
        ("--chunks", chunks),
        ("--steps", steps),
    ):
        count(name, value)
    bundle = make_model(importable(model) if transport == "distributed" else model, option, seed=seed)
    size = count("--batch", 2 * microbatches + 1 if batch is None else batch)
    _try_once(bundle, size, seed)
    with _told_when_it_cannot_travel(model):
        result = check(
            bundle.layers,
            num_ranks=ranks_of(ranks, tensor),
            schedule=schedule,
            num_microbatches=microbatches,
            num_chunks=chunks,
            replicas=whole_numbers("--replicas", replicas),
            stages=whole_numbers("--stages", stages) or None,
            steps=steps,
            batch_size=size,
            loss=bundle.loss,
            example=lambda samples, number: batch_of(bundle, samples, number),
            dtype=getattr(torch, dtype),
            transport=transport,
            recompute=recompute,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            clip_norm=clip,
            seed=seed,
            device=device,
            options=pairs("--schedule-option", schedule_option),
            precision=precision,
            loss_scale=loss_scale,
        )
    facts = {"schedule": schedule, "num_ranks": ranks, "num_microbatches": microbatches, "dtype": dtype}
    facts |= {"precision": precision} if precision != "fp32" else {}
    facts |= {"tensor": tensor, "sequence_parallel": sequence_parallel} if tensor > 1 else {}
    data = result.as_dict() | facts | {"transport": transport, "steps": steps}
    return Answer(data, _told(result, bundle, data), FINE if result.equal else FINDING)


def _told(result: CheckResult, model: ModelBundle, data: dict[str, Any]) -> str:
    verdict = "equal" if result.equal else f"DIFFERENT, first in {result.first_difference}"
    return "\n".join(
        [
            f"{model.describe()}",
            f"{data['schedule']} on {data['num_ranks']} rank{'s' * (data['num_ranks'] > 1)}{_width(data)} "
            f"({data['transport']}), {data['num_microbatches']} micro-batches, {data['steps']} steps in "
            f"{data.get('precision', data['dtype'])}: {verdict}",
            f"largest relative differences: loss {result.loss_diff:.2g}, gradients {result.grad_diff:.2g}, "
            f"weights {result.weight_diff:.2g} (allowed {result.tolerance:.0e})",
        ]
    )


def _width(data: dict[str, Any]) -> str:
    if "tensor" not in data:
        return ""
    return f", tensor {data['tensor']}" + " and sequence" * data["sequence_parallel"]


def _try_once(model: ModelBundle, size: int, seed: int) -> None:
    """Runs a copy of the model once, so that what the user's own code raises is told as such.

    Raises:
        ModelError: the model or its loss raised.
    """
    import torch

    from pipefit.errors import PipefitError

    x, y = batch_of(model, size, seed)
    layers = copy.deepcopy(model.layers)
    try:
        with torch.no_grad():
            model.loss(layers(x), y)
    except PipefitError:
        raise
    except Exception as problem:
        raise ModelError(
            f"{model.name}: running it on its example raised {type(problem).__name__}: {problem}"
        ) from problem


@contextmanager
def _told_when_it_cannot_travel(model: str) -> Iterator[None]:
    """A model or loss goes to the ranks' processes by pickle, which knows no lambdas and no local functions."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        if "pickle" not in str(problem).lower():
            raise
        raise ModelError(
            f"{model} cannot be sent to other processes ({problem}); make its loss and layers functions and classes at "
            "the top of their module, or use --transport local"
        ) from problem
