"""The GPT, its text and its pipeline that both benchmarks of spilling train."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipefit.data import TextBatches, text
from pipefit.models import ModelBundle, build
from pipefit.pipeline.pipeline import Pipeline
from pipefit.spec.options import Parallelism, Spilled

CONTEXT = 128
_PART_TOKENS = 256


def gpt_of(layers: int, hidden: int) -> ModelBundle:
    with torch.device("meta"):
        return build("gpt", layers=layers, hidden=hidden, heads=hidden // 64, context=CONTEXT, tied=False)


def state_bytes(bundle: ModelBundle) -> float:
    """Bytes of weights, gradients, and Adam's two states."""
    return 4.0 * sum(p.nbytes for p in bundle.layers.parameters())


def batches_of(tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of text without end."""
    length = min(tokens, CONTEXT)
    batches = TextBatches(text(None), max(tokens // length, 1), length, seed=0)
    while True:
        yield from batches


def pipeline_of(bundle: ModelBundle, tokens: int, spill: Spilled | None, chunks: int = 1, **more: Any) -> Pipeline:
    return Pipeline(
        bundle.layers,
        loss=bundle.loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-6),
        microbatches=max(tokens // _PART_TOKENS, 1),
        spill=spill,
        parallelism=Parallelism(chunks=chunks, device="cpu"),
        **more,
    )


@contextmanager
def folder_in(given: Path | None) -> Iterator[Path]:
    """The folder to use; a new one inside it, gone afterwards."""
    place = Path(tempfile.mkdtemp(prefix="pipefit-spill-", dir=given))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
