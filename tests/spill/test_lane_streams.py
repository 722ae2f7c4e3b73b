"""The lane of a GPU, on a machine without one: in which order it waits, copies and says that it has ended."""

import threading
from contextlib import contextmanager

import pytest
import torch

from pipefit.spill.lanes import Lane


class Stream:
    def __init__(self, device, name=None):
        self.device = device
        self.name = name or str(device)


@pytest.fixture
def told(monkeypatch):
    """What streams and events of a pretended GPU were asked to do, and by whom: the caller or the lane."""
    told, caller = [], threading.current_thread()

    def tell(what):
        told.append((what, "caller" if threading.current_thread() is caller else "lane"))

    class Event:
        def __init__(self, enable_timing, blocking):
            assert blocking, "a thread that spins takes a core from a step on the host"

        def record(self, stream):
            self.of = stream.name
            tell(f"record {self.of}")

        def synchronize(self):
            tell(f"wait for {self.of}")

    @contextmanager
    def on(stream):
        tell(f"enter {stream.name}")
        yield
        tell(f"leave {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "caller"))
    return told


def test_a_copy_begins_when_the_caller_has_computed_and_ends_when_its_stream_has(told):
    lane = Lane("read", torch.device("cuda", 1))
    copy = lane.submit(lambda: told.append(("copy", "lane")))
    copy.wait()
    lane.close()
    assert told == [
        ("record caller", "caller"),
        ("wait for caller", "lane"),
        ("enter cuda:1", "lane"),
        ("copy", "lane"),
        ("record cuda:1", "lane"),
        ("wait for cuda:1", "lane"),
        ("leave cuda:1", "lane"),
    ]


def test_a_copy_that_another_waits_for_has_left_the_device_when_that_one_begins(told):
    write, read = Lane("write", torch.device("cuda", 0)), Lane("read", torch.device("cuda", 1))
    first = write.submit(lambda: told.append(("write", "lane")))
    read.submit(lambda: told.append(("read", "lane")), [first]).wait()
    write.close(), read.close()
    steps = [what for what, _ in told]
    assert steps.index("wait for cuda:0") < steps.index("read")
    assert first.ended_s > 0


def test_what_a_copy_waited_for_is_not_counted_as_its_time(told, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("pipefit.spill.lanes.time.perf_counter", lambda: told.append(("clock", "lane")) or next(clock))
    lane = Lane("read", torch.device("cuda", 0))
    lane.submit(lambda: None).wait()
    lane.close()
    steps = [what for what, _ in told]
    assert steps.index("wait for caller") < steps.index("clock") < steps.index("wait for cuda:0")
