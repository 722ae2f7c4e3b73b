"""Ranks with a GPU each and NCCL's rules train as plain torch, save, resume, and recover."""

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


def test_a_checkpoint_of_two_ranks_resumes(tmp_path) -> None:
    wanted = plain.trained(plain.network(), plain.batches(6), plain.adamw)[0]
    for losses in launch(rank_jobs.resumed, 2, str(tmp_path / "saved"), threads=1, quiet=True):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-6, atol=0)


@pytest.mark.finds
def test_a_buffer_that_is_read_before_its_message_was_waited_for_is_a_race() -> None:
    for message in launch(rank_jobs.race, 2, threads=1, quiet=True):
        assert "race: aten::add of stream 0" in message
