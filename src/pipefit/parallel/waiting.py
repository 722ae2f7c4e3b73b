"""Waits for messages and collectives that end after the loss of a process.

Where a connection of Gloo ends, the waits on it end in an error, but for two: the wait for a message of which a part
has arrived, and for one that has begun to leave (`Pair::signalException` in gloo/transport/tcp/pair.cc knows neither).
They last until a timeout of half an hour, and nothing interrupts them. In a run that can be repaired they are left:

    collective   it goes on in a thread of Gloo; who needs it waits for moments, and looks between them
    message      a wait that takes too long breaks its connection, so another thread waits, and is left with it
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from pipefit.errors import CommunicationError

can_leave = False
"""Whether waits can be left: where the run can be repaired, and messages go through Gloo."""

_MOMENT = timedelta(seconds=0.2)

_free: SimpleQueue[SimpleQueue[Any]] = SimpleQueue()
"""The requests of threads that have nothing to wait for."""

_calls = 0
"""Calls of `leave`. A wait that has lasted through two of them is left."""


class LeftError(CommunicationError):
    """A wait was left, because another rank is lost."""


def finish(*works: Any) -> None:
    """Waits for messages, in their order. A thread whose wait was left is not asked again.

    Raises:
        RuntimeError: one has failed.
        LeftError: another rank is lost, and the wait has no end.
    """
    if not can_leave:
        for work in works:
            work.wait()
        return
    began = _calls
    requests = _requests()
    answer: SimpleQueue[Exception | None] = SimpleQueue()
    requests.put((works, answer))
    while True:
        with contextlib.suppress(Empty):
            problem = answer.get(timeout=_MOMENT.total_seconds())
            break
        _check(began)
    _free.put(requests)
    if problem is not None:
        raise problem


def finish_collectives(*works: Any) -> None:
    """Waits for collectives, in their order; raises what `finish` does."""
    began = _calls
    for work in works:
        while can_leave and not _has_ended(work):
            _check(began)
        work.wait()


def collective(call: Callable[..., Any], *args: Any, group: Any) -> None:
    """Makes a collective call of torch, and waits for it."""
    work = call(*args, group=group, async_op=can_leave)
    if work is not None:
        finish_collectives(work)


def leave() -> None:
    """Leaves the waits that have lasted since the call before the last; called repeatedly after a loss."""
    global _calls
    _calls += 1


def _check(began: int) -> None:
    """Leaves a wait that began after so many calls of `leave`, if it has lasted long enough."""
    if _calls - began > 1:
        raise LeftError("another rank is lost")


def _has_ended(work: Any) -> bool:
    """Waits for a collective for a moment; returns whether it has ended, in an error perhaps."""
    with contextlib.suppress(RuntimeError):
        return bool(work.wait(_MOMENT))
    return bool(work.is_completed())


def _requests() -> SimpleQueue[Any]:
    """The requests of a thread that waits; of a new one, where none is free."""
    with contextlib.suppress(Empty):
        return _free.get_nowait()
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_serve, args=[requests], name="pipefit-waits", daemon=True).start()
    return requests


def _serve(requests: SimpleQueue[Any]) -> None:
    while True:
        works, answer = requests.get()
        answer.put(_wait_for(works))
        # Their tensors are not held until the next request.
        del works, answer


def _wait_for(works: Sequence[Any]) -> Exception | None:
    try:
        for work in works:
            work.wait()
    except Exception as problem:  # of any kind: it is one of the thread that needs the work
        return problem.with_traceback(None)
    return None
