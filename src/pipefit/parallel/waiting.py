"""Waits for messages that end after the loss of a process.

Where a connection of Gloo ends, the waits on it end in an error, but for two: the wait for a message of which a part
has arrived, and for one that has begun to leave (`Pair::signalException` in gloo/transport/tcp/pair.cc knows neither).
They last until a timeout of half an hour, and nothing interrupts them. So in a run that can be repaired a thread waits
for messages in place of the one that trains, and a wait that outlasts a loss is left to it.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from pipefit.errors import CommunicationError

_Answer = SimpleQueue[Exception | None]
_Requests = SimpleQueue[tuple[tuple[Any, ...], _Answer] | None]


class Waiter:
    """A thread that waits for messages and collectives in place of another one, which trains."""

    def __init__(self) -> None:
        self._current: _Answer | None = None
        self._seen: _Answer | None = None
        self._requests = _serving_thread()

    def wait(self, *works: Any) -> None:
        """Waits for some work.

        Raises:
            RuntimeError: it has failed.
            CommunicationError: another rank is lost, and the wait was left.
        """
        answer: _Answer = SimpleQueue()
        self._current = answer
        self._requests.put((works, answer))
        problem = answer.get()
        self._current = None
        if problem is not None:
            raise problem

    def leave(self) -> None:
        """Leaves the wait that has lasted since the last call; a third thread calls it, repeatedly, after a loss."""
        current = self._current
        if current is not None and current is self._seen:
            self._requests.put(None)
            self._requests = _serving_thread()
            current.put(CommunicationError("another rank is lost"))
        self._seen = current


waiter: Waiter | None = None
"""Of this process, where its run can be repaired and messages go through Gloo."""


def finish(*works: Any) -> None:
    """Waits for messages and collectives, in their order. Only the thread that trains calls it."""
    if waiter is not None:
        waiter.wait(*works)
        return
    for work in works:
        work.wait()


def leave() -> None:
    """Leaves a wait that has lasted since the last call; see `Waiter`."""
    if waiter is not None:
        waiter.leave()


def _serving_thread() -> _Requests:
    """The requests of a new thread; None ends it."""
    requests: _Requests = SimpleQueue()

    def serve() -> None:
        while _serves(requests):
            pass

    threading.Thread(target=serve, name="pipefit-waiter", daemon=True).start()
    return requests


def _serves(requests: _Requests) -> bool:
    """Waits for the work of one request, which it then no longer holds; returns whether more may come."""
    request = requests.get()
    if request is None:
        return False
    works, answer = request
    problem = None
    try:
        for work in works:
            work.wait()
    except Exception as raised:  # of any kind: it is one of the thread that trains
        problem = raised.with_traceback(None)
    answer.put(problem)
    return True
