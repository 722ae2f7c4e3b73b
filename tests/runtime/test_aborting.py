"""Process groups of GPUs are aborted once, all at a time; sockets are shut down everywhere."""

import threading
from multiprocessing import Pipe

import pytest

from pipefit.runtime import aborting
from pipefit.runtime import notes as module
from pipefit.runtime.progress import MEETING, Progress
from pipefit.runtime.repairs import Repairs


class Group:
    """A process group whose abort waits until another one is aborted too, as it may on one GPU."""

    def __init__(self, all_begin: threading.Barrier) -> None:
        self._all_begin = all_begin
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1
        self._all_begin.wait(60)


def test_no_group_waits_for_the_abort_of_another_one(monkeypatch):
    both = threading.Barrier(2)
    groups = [Group(both), Group(both)]
    monkeypatch.setattr(aborting, "_world", type("World", (), {"pg_map": dict.fromkeys(groups)}))
    aborting.abort_groups()
    assert not both.broken
    aborting.abort_groups()
    assert [group.aborts for group in groups] == [1, 1]


@pytest.mark.parametrize(
    ("kind", "place", "expected"),
    [
        ("cpu", 0, ["shut down"]),
        ("cuda", 0, ["shut down", "abort"]),
        # A group that is being made would not end its abort.
        ("cuda", MEETING, ["shut down"]),
    ],
)
def test_waits_end_by_the_way_of_the_backend(kind, place, expected, monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(module, "shut_down", lambda before: done.append("shut down"))
    monkeypatch.setattr(module, "abort_groups", lambda: done.append("abort"))
    monkeypatch.setattr(module, "default_kind", lambda: kind)
    progress = Progress()
    progress.at(place)
    Repairs(Pipe()[0], 0, progress).end_waits()
    assert done == expected
