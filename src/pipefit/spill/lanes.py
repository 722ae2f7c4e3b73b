"""Copy lanes: threads that move records between tiers while the rank computes.

A lane makes its copies one after the other, in the order in which they were submitted. A copy may wait for others of
any lane, but only for those submitted before it, so there are no cycles. Steps on the host have their own lane.

On a GPU the thread only launches copies, on a stream of their own. The device's further work is ordered after a copy by
streams, without a wait of the host (`Copy.join`). The host waits for data that it reads or overwrites (`Copy.wait`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from pipefit.stage import accelerator
from pipefit.stage.accelerator import CPU
from pipefit.stage.moments import Mark

Work = Callable[[], object]
"""A function that copies, called by the thread of a lane."""


class Copy:
    """A copy that was started.

    Attributes:
        started_s, ended_s: its times, in seconds of `time.perf_counter`; 0: not yet. On a GPU the times of its launch,
            of which a `wait` moves the end.
        check: of the copied data, made once by the thread that waits for the copy, on its own cores.
    """

    def __init__(self) -> None:
        self.started_s = self.ended_s = 0.0
        self._launched: Future[None] = Future()
        self._device = CPU
        self._moments: tuple[Mark, Mark] | None = None
        self.check: Callable[[], None] | None = None

    @property
    def times(self) -> tuple[Any, Any]:
        """Its start and end, once it is launched; on a GPU the moments of its stream."""
        return self._moments or (self.started_s, self.ended_s)

    def record_times(self, starts: list[float], ends: list[float], index: int) -> None:
        """Records its times as soon as they are known, maybe after a wait for it has returned."""

        def write(_: Future[None]) -> None:
            starts[index], ends[index] = self.times

        self._launched.add_done_callback(write)

    def is_launched(self) -> bool:
        """Returns whether the lane's thread has done its part, with or without an error; without a GPU that is all."""
        return self._launched.done()

    def launched(self) -> None:
        """Waits until the lane's thread has done its part.

        Raises:
            TierError: it failed, or a copy that it waited for failed.
        """
        self._launched.result()

    def join(self) -> None:
        """Orders what the caller does next after the copy: on a GPU on its current stream, without a wait for the copy.

        Raises:
            TierError: it failed, or a copy that it waited for failed, or its data does not have its checksum.
        """
        self.launched()
        if self._moments is not None:
            accelerator.current_stream(self._device).wait_event(self._moments[1].reached)
        self._check()

    def wait(self) -> None:
        """Waits for its end.

        Raises:
            TierError: as `join`.
        """
        self.launched()
        if self._moments is not None:
            self._moments[1].reached.synchronize()
            self.ended_s = time.perf_counter()
        self._check()

    def _check(self) -> None:
        check = self.check
        if check is not None:
            check()
            self.check = None

    def run(self, work: Work, after: Sequence[Copy]) -> None:
        """Runs the work on the calling thread, once all copies of `after` have ended."""

        def waiting() -> None:
            for earlier in after:
                earlier.wait()
            self.started_s = time.perf_counter()
            work()
            self.ended_s = time.perf_counter()

        self._try(waiting)

    def launch(self, work: Work, after: Sequence[Copy], stream: Any, computed: Any) -> None:
        """Runs the work on the calling thread; a stream makes its copies after those of `after` and after an event."""

        def ordered() -> None:
            # It also makes the stream's device this thread's.
            with accelerator.on_stream(stream):
                for earlier in after:
                    earlier.join()
                stream.wait_event(computed)
                self.started_s = time.perf_counter()
                start = Mark(self.started_s, accelerator.event_on(stream, is_timed=True))
                work()
                end = accelerator.event_on(stream, is_timed=True)
            self.ended_s = time.perf_counter()
            self._device = stream.device
            self._moments = start, Mark(self.ended_s, end)

        self._try(ordered)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as problem:
            self.ended_s = time.perf_counter()
            self._launched.set_exception(problem)
            return
        self._launched.set_result(None)


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
        self._stream = None
        if threaded and accelerator.is_accelerator(device):
            self._stream = accelerator.new_stream(device)

    def submit(self, work: Work, after: Sequence[Copy] = ()) -> Copy:
        """Submits a copy.

        On an accelerator it begins once the device has finished all earlier work of the caller's stream. Work launched
        after the caller has joined the copy finds its data.
        """
        copy = Copy()
        if accelerator.is_accelerator(self._device):
            current = accelerator.current_stream(self._device)
            run = partial(copy.launch, work, after, self._stream or current, accelerator.event_on(current))
        else:
            run = partial(copy.run, work, after)
        if self._thread is None:
            run()
        else:
            self._thread.submit(run)
        return copy

    def close(self) -> None:
        """Ends the thread once its copies have ended."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._stream is not None:
            self._stream.synchronize()


class Lanes:
    """The lanes of one device; several stores may share them.

    Args:
        device: the device of the copies.
        threaded: whether copies run while the rank computes; else in the caller, which is faster for small ones.

    Attributes:
        read: towards the device.
        write: away from it.
        host: the optimizer's steps on the host.
    """

    def __init__(self, device: torch.device = CPU, threaded: bool = True) -> None:
        self.read, self.write = Lane("read", device, threaded), Lane("write", device, threaded)
        self.host = Lane("step", CPU, threaded)

    def close(self) -> None:
        """Ends the threads once their submitted work is done."""
        for lane in (self.read, self.write, self.host):
            lane.close()
