"""Processes under a cap on each one's device: the losses of one process, and memory as it was claimed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipefit.cli.ranks import train_rank
from pipefit.errors import InfeasibleError
from pipefit.runtime.launch import launch
from pipefit.train.config import RunConfig
from pipefit.train.run import RunResult
from tests.dist.spilling_jobs import train

CAP = 6 * 2**20
OPTIONS = "layers=8,hidden=128,heads=4,context=64,tied=false,dropout=0.1"


def trained(num_ranks: int, **settings: object) -> RunResult:
    wanted = {"data": ("synthetic",), "steps": 4, "sample": 0, "microbatches": 4, "batch": 4, "clip": 0.0}
    config = RunConfig(model="gpt", options=OPTIONS, ranks=num_ranks, **{**wanted, **settings})  # type: ignore[arg-type]
    result: RunResult = launch(train_rank, num_ranks, config, True, threads=1, quiet=True)[0]
    return result


@pytest.mark.parametrize("place", ["disk", "host"])
def test_processes_under_a_cap_have_the_losses_of_one_and_keep_it(place: str, tmp_path: Path) -> None:
    where = {"disk": str(tmp_path / "tier")} if place == "disk" else {}
    result = trained(2, device_memory="6 MiB", schedule="auto", output=str(tmp_path / "run"), **where)
    assert result.losses == trained(1, stages=(10,)).losses
    assert result.predicted is not None
    assert max(result.held_bytes) <= CAP and max(result.predicted.peak_bytes) <= CAP
    assert result.held_bytes == pytest.approx(result.predicted.peak_bytes, rel=0.1)
    if where:
        again = trained(2, plan=str(tmp_path / "run" / "plan.json"), **where)
        assert again.losses == result.losses


def test_a_cap_too_small_is_refused_by_all_processes_in_the_words_of_the_planner() -> None:
    with pytest.raises(InfeasibleError, match="on each of 2 ranks: the smallest cap that works is"):
        trained(2, device_memory="100 kB", schedule="auto")


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [(2, {"replicas": 2, "chunks": 5}), (3, {"replicas": (2, 1), "chunks": 2, "clip_norm": 0.5})],
    ids=["copies", "replicas of one stage, clipped"],
)
@pytest.mark.parametrize("place", ["disk", "host"])
def test_processes_that_are_replicas_spill_and_have_the_losses_of_those_that_hold_everything(
    num_ranks: int, settings: dict[str, object], place: str, tmp_path: Path
) -> None:
    spill = {"disk": str(tmp_path)} if place == "disk" else {"step_on": "host"}
    resident, spilled = (
        launch(train, num_ranks, how, settings, threads=1, quiet=True) for how in (None, spill)
    )
    assert [losses for losses, _ in spilled] == [losses for losses, _ in resident]
    # Of two chunks of a stage both have a slot.
    if settings["chunks"] == 5:
        assert max(held for _, held in spilled) < 0.7 * min(held for _, held in resident)
