"""At which lines the host waits for the GPU in a step: a new line here is a step that the GPU waits for the host."""

import traceback
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from tests.gpu import plain
from tests.pipelines import grouped
from torch import nn

from pipefit import Pipeline, Spilled

pytestmark = pytest.mark.gpu


def waits(pipe: Pipeline, x: torch.Tensor, y: torch.Tensor) -> Counter[str]:
    """File and function of each wait of a step, from the warnings that torch gives."""
    found: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            frames = [frame for frame in traceback.extract_stack() if "/pipefit/" in frame.filename]
            own = [frame for frame in frames if not frame.name.startswith("<")]
            found[f"{own[-1].filename.split('/pipefit/')[-1]} {own[-1].name}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            pipe.step(x, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, fused=True)


CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "one stage": ({"stages": 1}, {"runtime/finite.py _read": 1}),
    "two stages": ({"stages": 2}, {"runtime/finite.py _read": 2}),
    "clipped": ({"stages": 2, "clip_norm": 0.5}, {"runtime/finite.py _read": 2}),
    "adam": ({"stages": 1, "optimizer": plain.adamw}, {"runtime/finite.py _read": 1}),
    "zb-h1": ({"stages": 2, "schedule": "zb-h1"}, {"runtime/finite.py _read": 2}),
    "replayed": ({"stages": 2, "recompute": "stage"}, {"runtime/finite.py _read": 2}),
    # No norm of all gradients is known before the first stage steps, so the host or the GPU looks at each stage's.
    "spilled, fused": (
        {"stages": 4, "chunks": 4, "spill": Spilled(), "optimizer": fused},
        {"runtime/finite.py _read": 1},
    ),
    "spilled": (
        {"stages": 4, "chunks": 4, "spill": Spilled()},
        {"runtime/finite.py may_step": 4, "pipeline/losses.py __init__": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_at_these_lines_only(name: str) -> None:
    options, expected = CASES[name]
    settings = {"optimizer": plain.sgd, "microbatches": 4, "device": "cuda:0", **options}
    pipe = Pipeline(plain.network(), loss=nn.functional.cross_entropy, **grouped(**settings))
    for x, y in plain.batches(3):
        pipe.step(x, y)
    assert waits(pipe, *plain.batches(1)[0]) == expected
