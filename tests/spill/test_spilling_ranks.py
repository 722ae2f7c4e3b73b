"""Processes whose stages are spilled: under a cap on each one's device, and replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.spill.spilling_jobs import killed, train
from torch import Tensor

from pipefit.cli.ranks import train_rank
from pipefit.errors import InfeasibleError
from pipefit.run.config import RunConfig
from pipefit.runtime.launch import LaunchError, launch
from pipefit.spec.options import from_flat

pytestmark = pytest.mark.dist

CAP = 6 * 2**20


def trained(num_ranks: int, spill: dict[str, Any] | None, leave: str = "", **settings: Any) -> list[Any]:
    found: list[Any] = launch(train, num_ranks, spill, settings, leave, threads=1, quiet=True)
    return found


@pytest.mark.long
@pytest.mark.parametrize("place", ["disk", "host"])
def test_processes_under_a_cap_have_the_losses_of_one_and_keep_it(place: str, tmp_path: Path) -> None:
    where = {"disk": str(tmp_path / "tier")} if place == "disk" else {}
    plan = str(tmp_path / "plan.json")
    found = trained(2, {"device_memory": CAP, **where}, plan)
    [(losses, _, _)] = trained(1, None, stages=1)
    for own, held, claimed in found:
        assert own == losses
        # What an operation takes and gives back while it runs is in no claim.
        assert held <= claimed <= CAP
        assert held == pytest.approx(claimed, rel=0.12)
    if where:
        # The plan runs as it stands.
        assert [own for own, _, _ in trained(2, where, plan=plan)] == [losses, losses]


def weights(run: Path) -> dict[str, Tensor]:
    return {k: v for file in sorted(run.glob("checkpoints/*/*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.long
def test_processes_under_a_cap_of_which_one_was_killed_go_on_to_the_very_same_end(tmp_path: Path) -> None:
    tier, end, whole = (str(tmp_path / name) for name in ("tier", "end", "whole"))
    options = "layers=4,hidden=32,context=16,tied=false,dropout=0.1"
    usual = {
        "option": options,
        "data": ("synthetic",),
        "ranks": 2,
        "schedule": "auto",
        "batch": 8,
        "steps": 5,
        "warmup": 1,
        "sample": 0,
    }
    config = from_flat(RunConfig, {**usual, "device_memory": "600 KiB", "disk": tier, "output": end})
    with pytest.raises(LaunchError, match=r"rank 1 .*SIGKILL"):
        launch(killed, 2, config, 2, threads=1, quiet=True)
    found = launch(train_rank, 2, replace(config, resume=tier), True, threads=1, quiet=True)
    assert found[0].predicted and max(found[0].predicted.peak_bytes) <= 600 * 1024
    one = train_rank(from_flat(RunConfig, {**usual, "ranks": 1, "schedule": "naive", "output": whole}), True)
    assert [result.losses for result in found] == [one.losses[2:]] * 2
    a, b = weights(Path(end)), weights(Path(whole))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    # A run that has come to its end leaves nothing on the disk.
    assert not list(Path(tier).iterdir())


def test_a_cap_too_small_is_refused_by_all_processes_in_the_words_of_the_planner() -> None:
    with pytest.raises(InfeasibleError, match="on each of 2 ranks: the smallest cap that works is"):
        trained(2, {"device_memory": "100 kB"})


@pytest.mark.parametrize(
    ("num_ranks", "settings", "place"),
    [(2, {"replicas": 2, "chunks": 5}, "disk"), (3, {"replicas": (2, 1), "chunks": 2, "clip_norm": 0.5}, "host")],
    ids=["copies", "replicas of one stage, clipped"],
)
def test_processes_that_are_replicas_spill_and_have_the_losses_of_those_that_hold_everything(
    num_ranks: int, settings: dict[str, object], place: str, tmp_path: Path
) -> None:
    spill = {"disk": str(tmp_path)} if place == "disk" else {"step_on": "host"}
    resident, spilled = (trained(num_ranks, how, schedule="breadth-first", **settings) for how in (None, spill))
    assert [losses for losses, _, _ in spilled] == [losses for losses, _, _ in resident]
    # Of two chunks of a stage both have a slot.
    if settings["chunks"] == 5:
        assert max(held for _, held, _ in spilled) < 0.7 * min(held for _, held, _ in resident)
