"""The processes of a start agree on its name and number, whatever earlier starts have left in the store."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from pipefit.errors import CommunicationError
from pipefit.parallel.threads import let_go
from pipefit.runtime import meeting
from pipefit.runtime.meeting import QuickStore, Start, agree_on_start


def _agreed(store, restarts):
    found = {}

    def join(rank):
        found[rank] = agree_on_start(store, rank, len(restarts), restarts[rank])

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(restarts))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found.values())) == 1
    return found[0]


def test_each_start_has_a_name_of_its_own_and_the_next_number():
    store = dist.HashStore()
    names = []
    for number in range(3):
        name, start = _agreed(store, [0, 0, 0])
        names.append(name)
        assert start == Start(number, 3)
    assert len(set(names)) == 3


def test_agents_that_count_restarts_differently_agree_on_the_largest():
    assert _agreed(dist.HashStore(), [0, 2])[1] == Start(2, 2)


def test_a_smaller_start_knows_the_largest_one():
    store = dist.HashStore()
    _agreed(store, [0, 0, 0, 0])
    assert _agreed(store, [0, 0])[1] == Start(1, 4)
    assert _agreed(store, [0] * 4)[1] == Start(2, 4)


def test_words_of_processes_that_died_before_they_agreed_are_replaced():
    store = dist.HashStore()
    store.set("pipefit/word/1", '["an old word", 0]')
    assert _agreed(store, [0, 0])[1].restart == 0


class Clock:
    """A clock that only a sleep moves.

    Args:
        after: called after each sleep with the time.
    """

    def __init__(self, after):
        self.now_s = 0.0
        self.after = after

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        self.after(self.now_s)


def test_a_wait_ends_soon_after_the_key_is_there(monkeypatch, tmp_path):
    quick = QuickStore(dist.FileStore(str(tmp_path / "store"), 1))
    store = dist.PrefixStore("run", quick)
    clock = Clock(lambda now_s: now_s > 0.0055 and store.set("a", "1"))
    monkeypatch.setattr(meeting, "time", clock)
    store.wait(["a"])
    assert 0.0055 < clock.now_s < 0.0075


def test_a_wait_for_a_lost_rank_ends_when_its_loss_is_reported(monkeypatch, tmp_path):
    quick = QuickStore(dist.FileStore(str(tmp_path / "store"), 1))
    clock = Clock(lambda now_s: setattr(quick, "has_ended", now_s > 5))
    monkeypatch.setattr(meeting, "time", clock)
    with pytest.raises(CommunicationError, match="no other rank has added"):
        dist.PrefixStore("run", quick).wait(["a"])
    assert 5 < clock.now_s < 6


def test_a_wait_ends_after_its_time(monkeypatch, tmp_path):
    quick = QuickStore(dist.FileStore(str(tmp_path / "store"), 1))
    clock = Clock(lambda now_s: None)
    monkeypatch.setattr(meeting, "time", clock)
    with pytest.raises(CommunicationError, match="no other rank has added"):
        dist.PrefixStore("run", quick).wait(["a"], timedelta(seconds=5))
    assert 5 < clock.now_s < 6


def test_old_groups_end_in_a_thread_of_their_own():
    ended = []

    class Group:
        def __del__(self):
            ended.append(threading.current_thread())

    let_go([Group(), Group()])
    for thread in threading.enumerate():
        if thread.name == "pipefit-old-groups":
            thread.join()
    assert len(ended) == 2
    assert threading.main_thread() not in ended
