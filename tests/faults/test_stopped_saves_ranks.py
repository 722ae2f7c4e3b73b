"""A rank that is stopped while it saves: it is named and the run resumes; or it is continued, and nothing is lost."""

from pathlib import Path

import pytest
from tests.faults.recovered_jobs import RANKS, train
from tests.faults.stopped_saves import PLACES, train_and_stop

from pipefit.runtime.faults import noted
from pipefit.runtime.launch import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("shape", ["1f1b", "zb-v", "adapters", "tensor"])
def test_a_rank_that_is_stopped_in_a_save(shape: str, trial, tmp_path: Path):
    num_ranks = RANKS[shape]
    undisturbed = launch(train, num_ranks, shape, str(tmp_path / "whole"), [], quiet=True)
    for number, (rank, name) in enumerate(PLACES):
        if rank and shape == "tensor" and name == "write_tensors":
            continue  # the first process of a rank writes
        for call in (1, 2):
            folder = tmp_path / f"{number}-{call}"
            where = (shape, str(folder / "run"), rank, name, call)
            options = {"folder": folder / "logs", "quiet": True, "recover": 1, "deadline_s": 2.0}
            found = launch(train_and_stop, num_ranks, *where, False, **options)
            faults = [line["fault"] for line in noted(folder / "logs") if "fault" in line]
            trial(
                f"SIGSTOP in a save, {shape}",
                f"{where}: {faults}",
                well=len(faults) == 1,
                named=any(f"rank {rank} is stopped" in fault for fault in faults),
                resumed=found == undisturbed,
            )
        folder = tmp_path / f"{number}-continued"
        found = launch(
            train_and_stop, num_ranks, shape, str(folder), rank, name, 2, True, quiet=True, folder=folder / "logs"
        )
        trial(f"SIGSTOP in a save, continued, {shape}", (rank, name), well=True, resumed=found == undisturbed)
