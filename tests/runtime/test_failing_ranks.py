"""An error of one rank is raised by all that wait for it, also where its script catches it and stays alive."""

from pathlib import Path

import pytest
from tests.runtime import failing_jobs as jobs

from pipefit.runtime.launch import LaunchError, launch

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("how", "ranks", "place"),
    [
        ("loss", 2, "Pipeline.step(), after step 1"),
        ("optimizer", 3, "Pipeline.step(), after step 2"),
        ("replica", 2, "Pipeline.step(), after step 2"),
        ("data", 2, "Pipeline.fit(), after step 2"),
        ("callback", 2, "Pipeline.fit(), after step 4"),
        ("evaluate", 2, "Pipeline.evaluate(), after step 0"),
    ],
)
def test_an_error_that_one_rank_catches_is_raised_by_the_others_and_nobody_goes_on(how, ranks, place, tmp_path: Path):
    with pytest.raises(LaunchError) as problem:
        launch(jobs.fail, ranks, str(tmp_path / "it"), how, ranks, threads=1, quiet=True, deadline_s=60)
    said = [(tmp_path / f"it-{rank}").read_text().splitlines() for rank in range(ranks)]
    shared = f"CommunicationError: rank 1 failed in {place}: OSError: no such file"
    first = [shared] * ranks
    first[1] = "OSError: no such file"
    assert [errors[0] for errors in said] == first
    assert all(error.startswith(shared) for errors in said for error in errors[1:])
    refused = f"{shared}; after it this run cannot go on: start it again"
    assert [errors[-1] for errors in said] == [refused] * ranks
    assert shared in str(problem.value)


def test_nobody_goes_on_after_a_step_on_other_values(tmp_path: Path):
    """The weights have had a step on a mixed batch, which a script that caught the error once kept."""
    with pytest.raises(LaunchError, match="cannot go on"):
        launch(jobs.train_on_other_values, 2, str(tmp_path / "it"), "step", threads=1, quiet=True, deadline_s=60)
    for rank in range(2):
        first, then = (tmp_path / f"it-{rank}").read_text().splitlines()
        assert first.startswith("DataError: checksum of the batch: rank 0 has ")
        shared = first.removeprefix("DataError: ")
        assert then == f"CommunicationError: {shared}; after it this run cannot go on: start it again"


def test_ranks_go_on_after_an_evaluation_on_other_values(tmp_path: Path):
    launch(jobs.train_on_other_values, 2, str(tmp_path / "it"), "evaluate", threads=1, quiet=True, deadline_s=60)
    for rank in range(2):
        assert (tmp_path / f"it-{rank}").read_text().startswith("DataError: checksum of the batch: rank 0 has ")
        assert len((tmp_path / f"it-{rank}").read_text().splitlines()) == 1


def test_ranks_that_fail_alike_go_on(tmp_path: Path):
    one, other = launch(jobs.fail_alike, 2, str(tmp_path / "none"), threads=1, quiet=True, deadline_s=60)
    assert one == other and len(one) == 4


def test_a_rank_does_not_go_on_to_the_next_batch_alone():
    """Its batches were once those of other steps than on the other rank: the training went on with wrong numbers."""
    with pytest.raises(LaunchError, match="the batch has 1 samples, too few for 2 micro-batches"):
        launch(jobs.step_on_another_batch, 2, threads=1, quiet=True, deadline_s=60)
