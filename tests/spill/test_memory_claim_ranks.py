"""What a plan says of memory, held against what the ranks' tensors really take at most."""

from __future__ import annotations

import pytest

from pipefit.cli.display import report
from pipefit.cli.ranks import train_rank
from pipefit.run.config import RunConfig
from pipefit.run.whole_run import RunResult
from pipefit.runtime.launch import launch
from pipefit.spec.options import from_flat

pytestmark = pytest.mark.dist

_TOLERANCE = 0.1
"""Of the claim. What an operation takes and gives back while it runs is in neither figure."""

_GPT = {"model": "gpt", "option": "layers=4,hidden=128,heads=4,context=64", "batch": 16}
_CONVNET = {"model": "convnet", "batch": 64}


def trained(schedule: str, **settings: object) -> RunResult:
    config = from_flat(
        RunConfig,
        {
            "data": ("synthetic",),
            "ranks": 2,
            "schedule": schedule,
            "microbatches": 4,
            "steps": 2,
            "sample": 0,
            **settings,
        },
    )
    result: RunResult = launch(train_rank, 2, config, True, threads=1, quiet=True)[0]
    return result


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [("gpipe", _GPT), ("pipedream-2bw", _GPT), ("1f1b", _CONVNET), ("zb-h2", _GPT), ("zb-h1", _CONVNET)],
    ids=["gpt-gpipe", "gpt-2bw", "convnet-1f1b", "gpt-zb-h2", "convnet-zb-h1"],
)
def test_the_memory_that_a_plan_claims_is_what_its_ranks_take(schedule: str, settings: dict[str, object]) -> None:
    result = trained(schedule, **settings)
    assert result.predicted is not None
    assert result.held_bytes == pytest.approx(result.predicted.peak_bytes, rel=_TOLERANCE)
    assert "predicted  rank 1:" in report(result)
