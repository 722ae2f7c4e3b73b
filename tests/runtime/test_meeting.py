"""The processes of a start agree on its name and number, whatever earlier starts have left in the store."""

import threading

import torch.distributed as dist

from pipefit.runtime.meeting import Start, agree_on_start


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
