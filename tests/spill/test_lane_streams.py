"""The lane of a GPU, on a machine without one: what it orders by streams, and where a thread of the host waits."""

import threading
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.runtime.executor import Execution
from pipefit.runtime.spill_handlers import _time
from pipefit.spill.lanes import Lane


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

    class Stream:
        def __init__(self, device, name=None):
            self.device = device
            self.name = name or str(device)

        def wait_event(self, event):
            tell(f"{self.name} follows {event.of}")

        def synchronize(self):
            tell(f"wait for all of {self.name}")

    @contextmanager
    def on(stream):
        before, torch.cuda.current_stream = torch.cuda.current_stream, lambda _: stream
        yield
        torch.cuda.current_stream = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "caller"))
    return told


def test_a_copy_begins_when_the_caller_has_computed_and_nobody_waits_for_it(told):
    lane = Lane("read", torch.device("cuda", 1))
    copy = lane.submit(lambda: told.append(("copy", "lane")))
    copy.join()
    lane.close()
    assert told == [
        ("record caller", "caller"),
        ("cuda:1 follows caller", "lane"),
        ("record cuda:1", "lane"),
        ("copy", "lane"),
        ("record cuda:1", "lane"),
        ("caller follows cuda:1", "caller"),
        ("wait for all of cuda:1", "caller"),
    ]


def test_the_host_waits_for_what_it_reads_itself(told):
    lane = Lane("write", torch.device("cuda", 1))
    copy = lane.submit(lambda: None)
    copy.wait()
    assert told[-1] == ("wait for cuda:1", "caller")
    assert copy.ended_s >= copy.started_s > 0
    lane.close()


def test_a_copy_that_another_waits_for_has_left_the_device_when_that_one_begins(told):
    write, read = Lane("write", torch.device("cuda", 0)), Lane("read", torch.device("cuda", 1))
    first = write.submit(lambda: told.append(("write", "lane")))
    read.submit(lambda: told.append(("read", "lane")), [first]).join()
    write.close(), read.close()
    steps = [what for what, _ in told]
    assert steps.index("write") < steps.index("cuda:1 follows cuda:0") < steps.index("read")
    assert "wait for cuda:0" not in steps


def test_a_step_on_the_host_waits_for_the_gradients_that_it_reads(told):
    write, host = Lane("write", torch.device("cuda", 0)), Lane("step", torch.device("cpu"))
    first = write.submit(lambda: None)
    host.submit(lambda: told.append(("step", "lane")), [first]).wait()
    write.close(), host.close()
    steps = [what for what, _ in told]
    assert steps.index("wait for cuda:0") < steps.index("step")


def test_a_lane_without_a_thread_copies_on_the_stream_of_the_caller(told):
    lane = Lane("read", torch.device("cuda", 0), threaded=False)
    copy = lane.submit(lambda: told.append(("copy", "caller")))
    assert told[-2:] == [("copy", "caller"), ("record caller", "caller")]
    copy.wait()
    assert told[-1] == ("wait for caller", "caller")


def test_the_times_of_a_copy_are_read_although_its_thread_has_not_recorded_them(told, monkeypatch):
    """A wait for a copy may return before the thread of its lane does what it does at the end of the copy."""
    monkeypatch.setattr(Future, "_invoke_callbacks", lambda future: None)
    lane, began = Lane("read", torch.device("cuda", 1)), threading.Event()
    copy = lane.submit(began.wait)
    run = SimpleNamespace(
        compiled=SimpleNamespace(instructions=[Instruction(Op.FETCH, 0)]),
        moments=SimpleNamespace(seconds=lambda mark: mark.launched_s),
        copies={},
        at_end=[],
        starts=[None],
        ends=[None],
        launches=[],
        index=0,
    )
    _time(run, copy)
    for action in run.at_end:
        action()
    began.set()
    Execution.read_times(run)
    lane.close()
    assert 0 < run.starts[0] <= run.ends[0] == copy.ended_s
