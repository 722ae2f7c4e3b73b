"""The protocol by which a process enters a run, without processes: nobody waits for one that has failed."""

import math
import threading

import pytest

from pipefit.errors import PipefitError
from pipefit.runtime.joining import AWAY, DOOR, OWN, READY, Door
from pipefit.runtime.launch import launch
from pipefit.runtime.newcomers import Newcomers
from pipefit.runtime.repairs import END, LOST

LEFT = [0, 1, 3]
"""The processes that are left of four; the next one has the number 4."""

FACTS = ["a model"]


class Launcher:
    """A launcher whose rank 2 is started again as process 4, and the doors of all processes."""

    def __init__(self) -> None:
        self.doors = {process: Door() for process in (*LEFT, 4)}
        self.started: list[int] = []
        self.newcomers = Newcomers(4, lambda process, word, what: self.doors[process].hears(word, what))
        self.newcomers.start = self._start
        self.newcomers.interrupt()
        self.newcomers.look(LEFT, 1)

    def _start(self, rank: int, faults: int) -> int:
        self.started.append(rank)
        return 4

    def is_known(self) -> bool:
        """Returns whether all ranks know the process, by sums over the numbers that they know."""
        numbers = [self.doors[process].known for process in LEFT]
        for process in LEFT:
            self.doors[process].agree(sum(numbers), sum(number**2 for number in numbers), len(LEFT))
        taken = {self.doors[process].take() for process in LEFT}
        assert len(taken) == 1 and self.doors[0].take() == 0
        return taken != {0}

    def at_door(self, process: int, why: str = "") -> bool:
        return self.newcomers.hears(process, DOOR, (self.doors[process].known, why), LEFT)


def test_a_process_enters_when_all_stand_at_the_door():
    run = Launcher()
    assert run.started == [2] and not run.is_known()
    run.newcomers.hears(4, READY, FACTS, LEFT)
    assert run.is_known() and run.doors[0].facts == FACTS
    assert [run.at_door(process) for process in LEFT] == [False, False, True]
    assert run.newcomers.admit(LEFT, 1) == [0, 1, 4, 3]
    entries = [run.doors[process].wait(OWN + 1) for process in (0, 1, 4, 3)]
    assert [(one.rank, one.num_ranks, one.absent, one.entered) for one in entries] == [(r, 4, [], 1) for r in range(4)]


def test_ranks_that_know_different_announcements_do_not_agree():
    run = Launcher()
    run.newcomers.hears(4, READY, FACTS, LEFT)
    run.doors[3] = Door()
    assert not run.is_known()
    run.doors[3].hears(READY, (run.doors[0].known + 1, FACTS))
    assert not run.is_known()


@pytest.mark.parametrize("word", [LOST, END, AWAY])
def test_a_wait_at_the_door_ends(word):
    door = Door()
    door.hears(READY, (2, FACTS))
    found = []
    thread = threading.Thread(target=lambda: found.append(door.wait(2)))
    thread.start()
    door.hears(word, None)
    thread.join()
    assert found == [None] and door.known == 0
    # Another announcement is another matter.
    door.hears(READY, (3, FACTS))
    assert door.wait(2) is None and door.known == 3


def test_a_process_that_fails_is_no_longer_waited_for_and_ends(caplog):
    run = Launcher()
    run.newcomers.hears(4, READY, FACTS, LEFT)
    number = run.doors[0].known
    run.at_door(0)
    run.newcomers.failed(4, "died (-9)", LEFT)
    assert [run.doors[process].wait(number) for process in LEFT] == [None] * 3 and run.doors[4].wait(OWN) is None
    # The word of a rank that has not heard of it yet.
    assert not run.newcomers.hears(1, DOOR, (number, ""), LEFT)
    run.newcomers.look(LEFT, 1)
    assert run.started == [2] and "died (-9)" in caplog.text


def test_a_rank_that_refuses_a_process_says_why(caplog):
    run = Launcher()
    run.newcomers.hears(4, READY, FACTS, LEFT)
    assert not run.at_door(1, "its model is another one")
    assert "its model is another one" in caplog.text and run.newcomers.process < 0


def test_after_a_loss_a_process_that_waits_is_announced_again():
    run = Launcher()
    run.newcomers.hears(4, READY, FACTS, LEFT)
    number = run.doors[0].known
    run.at_door(0)
    run.newcomers.interrupt()
    for process in LEFT:
        run.doors[process].hears(LOST, None)
    left = [0, 3]
    run.newcomers.look(left, 2)
    assert run.started == [2] and run.doors[0].known > number
    assert [run.newcomers.hears(p, DOOR, (run.doors[p].known, ""), left) for p in left] == [False, True]
    assert run.newcomers.admit(left, 2) == [0, 4, 3]
    entry = run.doors[4].wait(OWN)
    assert entry is not None and (entry.rank, entry.absent, entry.faults) == (1, [1], 2)


def test_growing_needs_recovery():
    with pytest.raises(PipefitError, match="grow: expected with recover"):
        launch(math.sqrt, 2, 4.0, grow=True)
