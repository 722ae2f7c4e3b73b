"""Work in a thread while the training goes on: at most one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from pipefit.runtime.progress import Progress

_LOOK_S = 0.1
_ABANDON_S = 1.0
"""Work that waits for others fails at once when their connections are shut down, or, seldom, never."""


class Background:
    """The work in the background of this process.

    Attributes:
        group: the process group of its collectives, because one group does not serve two threads; None: not made yet.
        progress: its position, in the place of which that of the rank is shown while the rank waits for it.
        cpu_s: processor seconds of the last work that has ended.
    """

    def __init__(self) -> None:
        self.group: Any = None
        self.progress = Progress()
        self.cpu_s = 0.0
        self._thread: threading.Thread | None = None
        self._finish: Callable[[], None] = lambda: None

    @property
    def is_open(self) -> bool:
        """Whether there is work that `settle` has not ended."""
        return self._thread is not None

    @property
    def is_busy(self) -> bool:
        """Whether there is work that goes on."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], Any], tell: Callable[[Any], None], must_end: bool) -> None:
        """Starts some work.

        Args:
            work: must not raise.
            tell: called with its result, by the thread that settles it.
            must_end: whether the process may only end after it.
        """
        assert self._thread is None
        results = []

        def run() -> None:
            began = time.thread_time()
            results.append(work())
            self.cpu_s = time.thread_time() - began

        self._finish = lambda: tell(results[0])
        self._thread = threading.Thread(target=run, name="pipefit-background", daemon=not must_end)
        self._thread.start()

    def settle(self, shown: Progress) -> None:
        """Waits for the work, if there is any, and tells its result.

        Args:
            shown: the rank's position, which follows that of the work, so that a hang in it is found.
        """
        thread, seen = self._thread, None
        while thread is not None and thread.is_alive():
            if (now := self.progress.position) != seen:
                seen = now
                shown.at(shown.position.index, now.waits)
            thread.join(_LOOK_S)
        if thread is not None:
            self._thread = None
            self._finish()

    def abandon(self) -> None:
        """Gives the work up whose group is broken; it may end later, and nobody is told."""
        thread, self._thread = self._thread, None
        self.group = None
        if thread is not None:
            thread.join(_ABANDON_S)
            if not thread.is_alive():
                self._finish()
