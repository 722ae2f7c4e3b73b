"""Waits for messages in other threads, which are left after the loss of a process."""

import threading
import time
import weakref

import pytest

from pipefit.errors import is_lost_peer
from pipefit.parallel import waiting
from pipefit.parallel.waiting import LeftError, finish, leave


class Work:
    """Work that ends when it is let; then it may fail."""

    def __init__(self, *, ended: bool = False, problem: Exception | None = None) -> None:
        self.end = threading.Event()
        self.problem = problem
        if ended:
            self.end.set()

    def wait(self) -> None:
        self.end.wait()
        if self.problem is not None:
            raise self.problem


@pytest.mark.parametrize("can_leave", [False, True])
def test_a_wait_ends_with_its_work_and_has_its_error(can_leave, monkeypatch):
    monkeypatch.setattr(waiting, "can_leave", can_leave)
    finish(Work(ended=True), Work(ended=True))
    with pytest.raises(RuntimeError, match="Connection closed"):
        finish(Work(ended=True), Work(ended=True, problem=RuntimeError("Connection closed")))
    finish(Work(ended=True))


def test_work_is_not_held_after_its_wait(monkeypatch):
    """A thread that holds it until its next request holds its tensors, too."""
    monkeypatch.setattr(waiting, "can_leave", True)
    work = Work(ended=True)
    known = weakref.ref(work)
    finish(work)
    del work
    while known() is not None:
        time.sleep(0.001)


def test_a_wait_without_an_end_is_left_after_a_loss_and_others_are_made(monkeypatch):
    monkeypatch.setattr(waiting, "can_leave", True)
    never = Work()
    problems = []

    def train() -> None:
        try:
            finish(never)
        except LeftError as problem:
            problems.append(is_lost_peer(problem))

    thread = threading.Thread(target=train)
    thread.start()
    while thread.is_alive():
        leave()
        time.sleep(0.001)
    assert problems == [True]
    # What has ended before a loss can be waited for after it.
    finish(Work(ended=True))
    never.end.set()
