"""Waits for messages in other threads, which are left after the loss of a process."""

import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipefit.errors import is_lost_peer
from pipefit.parallel import waiting
from pipefit.parallel.waiting import LeftError, finish, finish_collectives, leave
from pipefit.runtime.launch import launch


class Work:
    """Work that ends when it is let; then it may fail."""

    def __init__(self, *, ended: bool = False, problem: Exception | None = None) -> None:
        self.end = threading.Event()
        self.problem = problem
        if ended:
            self.end.set()

    def wait(self, limit: timedelta | None = None) -> bool:
        if limit is None:
            self.end.wait()
        elif not self.end.wait(limit.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.problem is not None:
            raise self.problem
        return True

    def is_completed(self) -> bool:
        return self.end.is_set()


@pytest.fixture(params=[finish, finish_collectives])
def finishing(request):
    return request.param


@pytest.mark.parametrize("can_leave", [False, True])
def test_a_wait_ends_with_its_work_and_has_its_error(can_leave, finishing, monkeypatch):
    monkeypatch.setattr(waiting, "can_leave", can_leave)
    finishing(Work(ended=True), Work(ended=True))
    with pytest.raises(RuntimeError, match="Connection closed"):
        finishing(Work(ended=True), Work(ended=True, problem=RuntimeError("Connection closed")))
    finishing(Work(ended=True))


def test_work_is_not_held_after_its_wait(finishing, monkeypatch):
    """A thread that holds it until its next request holds its tensors, too."""
    monkeypatch.setattr(waiting, "can_leave", True)
    work = Work(ended=True)
    known = weakref.ref(work)
    finishing(work)
    del work
    while known() is not None:
        time.sleep(0.001)


def test_a_wait_without_an_end_is_left_after_a_loss_and_others_are_made(finishing, monkeypatch):
    monkeypatch.setattr(waiting, "can_leave", True)
    never = Work()
    problems = []

    def train() -> None:
        try:
            finishing(never)
        except LeftError as problem:
            problems.append(is_lost_peer(problem))

    thread = threading.Thread(target=train)
    thread.start()
    while thread.is_alive():
        leave()
        time.sleep(0.001)
    assert problems == [True]
    # What has ended before a loss can be waited for after it.
    finishing(Work(ended=True))
    never.end.set()


def _sum_of_a_late_rank() -> tuple[float, bool]:
    """The sum over two ranks, and whether the first one has looked for it repeatedly before the second one came."""
    waiting.can_leave = True
    waiting._MOMENT = timedelta(milliseconds=1)
    looks = 0
    look = waiting._has_ended

    def counted(work) -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            dist.send(torch.zeros(1), 1)
        return look(work)

    total = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank():
        dist.recv(torch.zeros(1), 0)
    else:
        waiting._has_ended = counted
    finish_collectives(dist.all_reduce(total, async_op=True))
    return float(total), looks > 2


@pytest.mark.dist
def test_moments_in_which_a_collective_has_not_ended_do_not_end_it():
    assert launch(_sum_of_a_late_rank, 2, threads=1, quiet=True) == [(3.0, True), (3.0, False)]
