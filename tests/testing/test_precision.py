"""`check` under autocast: what a pipeline computes in bf16 or fp16 is what one process computes in it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.pipelines import case_of, grouped
from tests.stage.test_precision import float_model

from pipefit.errors import PipefitError
from pipefit.models import build
from pipefit.spec.options import Precision
from pipefit.testing import check
from pipefit.testing.equality import compare, expected, run

SHAPES: dict[str, dict[str, Any]] = {
    "1f1b": {"num_ranks": 3},
    "recomputed": {"num_ranks": 2, "schedule": "gpipe", "recompute": True},
    "interleaved": {"num_ranks": 2, "schedule": "interleaved", "num_chunks": 2},
    "pipedream": {"num_ranks": 3, "schedule": "pipedream", "num_microbatches": 1, "loss_scale": 64.0, "steps": 6},
    "2bw": {"num_ranks": 2, "schedule": "pipedream-2bw", "loss_scale": 64.0, "steps": 5},
    "halves": {"num_ranks": 3, "schedule": "zb-h1"},
    "halves in a V": {"num_ranks": 2, "schedule": "zb-v", "num_chunks": 2, "recompute": True},
    "with a running average": {"name": "batch norm", "num_ranks": 2},
    "tied ends": {"name": "tied ends", "num_ranks": 2},
}
ADDED: dict[str, dict[str, Any]] = {
    "clipped": {"num_ranks": 2, "clip_norm": 0.1},
    "2 × 2": {"num_ranks": 4, "replicas": (2,), "clip_norm": 0.1},
    "2-1": {"num_ranks": 3, "replicas": (2, 1)},
    "data-parallel": {"name": "batch norm", "num_ranks": 2, "schedule": "data-parallel"},
}


def checked(precision: str, name: str = "wide", **options: Any) -> Any:
    model, example = float_model(name)
    return check(model, **grouped(example=example, dtype=torch.float32, precision=precision, **options))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_without_replicas_a_pipeline_is_one_process_to_the_bit(shape: str, precision: str) -> None:
    result = checked(precision, **SHAPES[shape])
    assert result.equal
    assert (result.loss_diff, result.grad_diff) == (0, 0)
    # A running average takes the statistics of micro-batches; the reference's, of their samples together.
    assert result.weight_diff <= (1e-6 if result.num_norms else 0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", ADDED)
def test_replicas_and_norms_add_up_in_another_order_and_no_more(shape: str, precision: str) -> None:
    result = checked(precision, **ADDED[shape])
    assert result.equal and result.tolerance == 1e-4
    assert max(result.loss_diff, result.grad_diff, result.weight_diff) < 1e-5


def test_updates_that_overflow_are_skipped_on_both_sides() -> None:
    assert checked("fp16", num_ranks=2, loss_scale=2.0**26, steps=5).equal


def test_what_computes_in_another_type_or_rounds_elsewhere_is_found() -> None:
    gpt = build("gpt", layers=4, hidden=16, heads=2, context=8)
    task = case_of(
        model=gpt.layers,
        batches=[gpt.example(8, 0)],
        num_ranks=2,
        schedule="1f1b",
        num_microbatches=4,
        counts=(3, 3),
        loss=gpt.loss,
        precision="bf16",
    )
    got = run(task)
    assert compare(got, expected(task), 1e-4).equal
    for other in (
        replace(task, precision=Precision("fp32")),
        replace(task, precision=Precision("fp16")),
        replace(task, counts=(2, 4)),
    ):
        found = compare(got, expected(other), 1e-4)
        assert not found.equal and found.grad_diff > 1e-4


def test_a_skipped_update_of_a_schedule_without_a_flush_is_refused() -> None:
    with pytest.raises(PipefitError, match="give a smaller loss scale"):
        checked("fp16", num_ranks=2, schedule="pipedream-2bw", loss_scale=2.0**30)


def test_a_model_that_autocast_leaves_alone_is_refused() -> None:
    model, example = float_model()
    with pytest.raises(PipefitError, match=r"autocast takes float32 only, but weights and data are torch\.float64"):
        check(model, **grouped(example=example, num_ranks=2, precision="bf16"))
