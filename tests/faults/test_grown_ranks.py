"""Runs that lose ranks, and get them back while the others train on, with the numbers of an undisturbed run."""

from pathlib import Path
from typing import Any

import pytest
from tests.faults.dying_jobs import RANKS
from tests.faults.grown_jobs import MOVED, STEPS, Grown, are_close, is_running, losses_from, steps_in, train

from pipefit.runtime.faults import noted
from pipefit.runtime.launch import launch

pytestmark = pytest.mark.dist


def grown(place: Path, deaths: list[int], outside: str = "", recover: int = 2, shape: str = "1f1b") -> list[Grown]:
    """The results of a run; no process of it is left, and nothing in the machine's memory."""
    options: dict[str, Any] = {"folder": place / "logs", "quiet": True, "recover": recover, "deadline_s": 20}
    found = launch(train, RANKS.get(shape, 4), str(place), deaths, 100_000, outside, shape, grow=True, **options)
    for path in place.glob("*.pid"):
        assert not is_running(int(path.stem))
        assert not Path(path.read_text()).exists()
    return found


def check_numbers(found: list[Grown], place: Path, is_restarted: bool = False, shape: str = "1f1b") -> None:
    """Checks losses, weights and the log of a run against an undisturbed one in this process.

    After a restart the best evaluation begins anew.
    """
    steps = len(found[0].losses) - 1
    undisturbed = place / "undisturbed"
    undisturbed.mkdir()
    whole = train(str(undisturbed), [], steps, shape=shape)
    for one in found:
        assert one.losses == found[0].losses == pytest.approx(whole.losses, rel=1e-10, abs=1e-12)
        if not is_restarted:
            assert one.best == pytest.approx(whole.best, rel=1e-10)
        assert are_close(one.weights, whole.weights)
    assert steps_in(place / "log.csv") == list(range(1, steps + 1))


@pytest.mark.parametrize("shape", ["1f1b", "optimizer", "weights", MOVED])
def test_lost_ranks_come_back_while_the_others_train(tmp_path, caplog, shape):
    """First the rank that writes logs and begins checkpoints, then another one."""
    found = grown(tmp_path, [0, 3], shape=shape)
    check_numbers(found, tmp_path, shape=shape)
    assert len(found) == 4
    # Two processes have never ended, and two are new.
    began = [min(one.ranks) for one in found]
    assert began.count(1) == 2 and len(list(tmp_path.glob("*.pid"))) == 4 + 2
    for one in found:
        sizes = list(one.ranks.values())
        assert sizes[-STEPS:] == [4] * STEPS
    whole, *_, last = [one for one in found if min(one.ranks) == 1]
    assert set(whole.ranks.values()) == {4, 3} and whole.ranks == last.ranks
    lines = [line for line in noted(tmp_path / "logs") if "entered" in line]
    assert [line["entered"] for line in lines] == [4, 4]
    assert {line["step"] + 1 for line in lines} == set(began) - {1}
    assert "rank 0 enters: 4 ranks go on" in caplog.text and "rank 3 enters: 4 ranks go on" in caplog.text
    # After the last entry the losses are those that the same plan gives from the same state, to the bit.
    step = max(began) - 1
    losses = found[0].losses[:-1]
    assert losses_from(tmp_path / "checkpoints" / f"step-{step:06}", len(losses) - step, shape) == losses[step:]


def test_nobody_waits_for_a_process_that_hangs_before_its_fit(tmp_path, caplog):
    found = grown(tmp_path, [3], "hang", recover=1)
    check_numbers(found, tmp_path)
    assert len(found) == 3 and all(min(one.ranks) == 1 for one in found)
    assert "rank 3 is started again" in caplog.text and "enters" not in caplog.text


@pytest.mark.parametrize("shape", ["1f1b", "two"])
def test_a_process_that_dies_as_it_enters_costs_a_restart_and_no_fault(tmp_path, caplog, shape):
    """Where the one rank that was left shares nothing, it copies the training first, at its position in the data."""
    found = grown(tmp_path, [1], "die", recover=1, shape=shape)
    check_numbers(found, tmp_path, is_restarted=True, shape=shape)
    assert len(found) == RANKS[shape]
    assert f"rank 1 enters: {len(found)} ranks go on" in caplog.text
    assert "a rank was lost while the others met again" in caplog.text
    assert f"start 3 of 3: {len(found)} ranks" in caplog.text
