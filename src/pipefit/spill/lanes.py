"""Copy lanes: threads that move records between tiers while the rank computes.

A lane runs its copies one after the other, in the order in which they were submitted. A copy may wait for others of any
lane, but only for those submitted before it, so there are no cycles. The optimizer's steps on the host have their own
lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from pipefit.stage import accelerator


class Copy:
    """A copy that was started.

    Attributes:
        started_s, ended_s: its times, in seconds of `time.perf_counter`; 0: not yet.
        check: of the copied data, made once by the thread that waits for the copy, on its own cores.
    """

    def __init__(self) -> None:
        self.started_s = self.ended_s = 0.0
        self._future: Future[None] = Future()
        self.check: Callable[[], None] | None = None

    def record_times(self, starts: list[float], ends: list[float], index: int) -> None:
        """Records its times, as soon as they are known."""

        def write(_: Future[None]) -> None:
            starts[index], ends[index] = self.started_s, self.ended_s

        self._future.add_done_callback(write)

    def ended(self) -> bool:
        """Returns whether it has ended, with or without an error."""
        return self._future.done()

    def wait(self) -> None:
        """Waits for its end.

        Raises:
            TierError: it failed, or a copy that it waited for failed, or its data does not have its checksum.
        """
        self._future.result()
        check = self.check
        if check is not None:
            check()
            self.check = None

    def run(
        self, work: Callable[[], object], after: Sequence[Copy], computed: Callable[[], None] | None = None
    ) -> None:
        """Runs the work on the calling thread, once all copies of `after` have ended and `computed` returns."""
        try:
            for earlier in after:
                earlier.wait()
            if computed is not None:
                computed()
            self.started_s = time.perf_counter()
            work()
        except BaseException as problem:
            self.ended_s = time.perf_counter()
            self._future.set_exception(problem)
            return
        self.ended_s = time.perf_counter()
        self._future.set_result(None)


def _on_current_stream(work: Callable[[], object], device: torch.device) -> None:
    """Copies in the caller's thread; a copy that returns before a GPU has made it is waited for."""
    work()
    if accelerator.is_accelerator(device):
        accelerator.current_stream(device).synchronize()


class Lane:
    """One direction of copies, in order.

    Args:
        name: the name of its thread.
        device: the device of the copies; on an accelerator they get their own stream.
        threaded: whether it has a thread; else the caller makes the copy, on the current stream.
    """

    def __init__(self, name: str, device: torch.device, threaded: bool = True) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, f"pipefit-{name}") if threaded else None
        self.stream = None
        if threaded and accelerator.is_accelerator(device):
            self.stream = accelerator.new_stream(device)

    def submit(self, work: Callable[[], object], after: Sequence[Copy] = ()) -> Copy:
        """Submits a copy.

        On an accelerator it begins once the device has finished all earlier work of the caller's stream, and ends once
        the device reports its end; until then no other work may use its slots. The lane's thread sleeps during both
        waits. Work launched after the caller has waited for the copy finds its data; no stream needs to wait for
        another.
        """
        copy = Copy()
        if self._thread is None:
            copy.run(partial(_on_current_stream, work, self._device), after)
            return copy
        if self.stream is None:
            self._thread.submit(copy.run, work, after)
            return copy
        stream = self.stream
        computed = accelerator.event_on(accelerator.current_stream(self._device))

        def on_stream() -> None:
            # It also makes the stream's device this thread's.
            with accelerator.on_stream(stream):
                work()
                accelerator.event_on(stream).synchronize()

        self._thread.submit(copy.run, on_stream, after, computed.synchronize)
        return copy

    def close(self) -> None:
        """Ends the thread once its copies have ended."""
        if self._thread is not None:
            self._thread.shutdown()


class Lanes:
    """The lanes of one device; several stores may share them.

    Args:
        device: the device of the copies; None: the CPU.
        threaded: whether copies run while the rank computes; else in the caller, which is faster for small ones.

    Attributes:
        read: towards the device.
        write: away from it.
        host: the optimizer's steps on the host.
    """

    def __init__(self, device: torch.device | None = None, threaded: bool = True) -> None:
        device = device or torch.device("cpu")
        self.read, self.write = Lane("read", device, threaded), Lane("write", device, threaded)
        self.host = Lane("step", torch.device("cpu"), threaded)

    def close(self) -> None:
        """Ends the threads once their submitted work is done."""
        for lane in (self.read, self.write, self.host):
            lane.close()
