"""Ranks with a GPU each and NCCL's rules train as plain torch, save, resume, and recover."""

from typing import Any

import pytest
import torch
from tests.gpu import plain
from tests.gpu.rank_jobs import MODELS
from tests.gpu.test_several_processes import FOUR, TWO
from tests.runtime.test_recovery_ranks import (  # noqa: F401  (also on GPUs)
    test_a_killed_rank_is_started_again_and_the_run_resumes_from_the_newest_checkpoint,
    test_a_rank_that_hangs_is_found_and_started_again,
    undisturbed,
)
from tests.sham import rank_jobs

from pipefit.errors import DataError
from pipefit.runtime.launch import launch

pytestmark = [pytest.mark.gpu, pytest.mark.dist]


@pytest.mark.parametrize(("num_ranks", "tasks"), [(2, TWO), (4, FOUR)], ids=["two", "four"])
def test_each_rank_trains_on_a_gpu_of_its_own(num_ranks: int, tasks: dict) -> None:
    parts = launch(rank_jobs.all_trained, num_ranks, list(tasks.values()), threads=1, quiet=True)
    for index, (model, options) in enumerate(tasks.values()):
        make, data, loss = MODELS[model]
        wanted = plain.trained(make(), data(), clip_norm=options.get("clip_norm"), loss=loss)
        for part in parts:
            plain.assert_close(part[index], wanted)


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("network", {"schedule": "naive"}),
    ("network", {"schedule": "gpipe"}),
    ("network", {"schedule": "breadth-first", "chunks": 2}),
    ("network", {"schedule": "zb-h2"}),
    ("network", {"schedule": "pipedream", "microbatches": 1}),
    ("network", {"schedule": "pipedream-2bw"}),
    ("gpt", {"schedule": "1f1b"}),
    ("gpt", {"schedule": "1f1b", "tensor": 2}),
]


def test_no_instruction_is_the_first_use_of_a_link_or_a_group() -> None:
    """So the proof of a program, in which a send never blocks, holds with NCCL; others are in `all_trained`."""
    for places in launch(rank_jobs.places_of_first_uses, 2, OTHERS, threads=1, quiet=True):
        assert places == {"runtime/distributed.py _warm_up"}


def test_an_error_of_one_rank_ends_a_run_whose_other_rank_waits_in_a_kernel() -> None:
    """NCCL says nothing of it; the launcher ends the other rank, long before the deadline of its watchdog."""
    with pytest.raises(DataError, match="rank 1 has no third batch"):
        launch(rank_jobs.one_without_a_batch, 2, threads=1, quiet=True)


def test_a_checkpoint_of_two_ranks_resumes(tmp_path) -> None:
    wanted = plain.trained(plain.network(), plain.batches(6), plain.adamw)[0]
    for losses in launch(rank_jobs.resumed, 2, str(tmp_path / "saved"), threads=1, quiet=True):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-6, atol=0)


@pytest.mark.finds
def test_a_buffer_that_is_read_before_its_message_was_waited_for_is_a_race() -> None:
    for message in launch(rank_jobs.race, 2, threads=1, quiet=True):
        assert "race: aten::add of stream 0" in message
