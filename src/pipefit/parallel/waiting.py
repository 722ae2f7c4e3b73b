"""Waits for messages that end after the loss of a process.

Where a connection of Gloo ends, the waits on it end in an error, but for two: the wait for a message of which a part
has arrived, and for one that has begun to leave (`Pair::signalException` in gloo/transport/tcp/pair.cc knows neither).
They last until a timeout of half an hour, and nothing interrupts them. So in a run that can be repaired another thread
waits for messages in place of the one that needs them, and a wait that outlasts a loss is left to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from pipefit.errors import CommunicationError

_Answer = SimpleQueue[Exception | None]

can_leave = False
"""Whether waits are made in other threads: where the run can be repaired, and messages go through Gloo."""

_free: list[SimpleQueue[Any]] = []
"""The requests of threads that have nothing to wait for."""

_lasting: set[_Answer] = set()
_seen: set[_Answer] = set()
"""Answers that are awaited: now, and when `leave` was called last."""


class LeftError(CommunicationError):
    """A wait was left, because another rank is lost."""


def finish(*works: Any) -> None:
    """Waits for messages and collectives, in their order.

    Raises:
        RuntimeError: one has failed.
        LeftError: another rank is lost, and the wait has no end.
    """
    if not can_leave:
        problem = _wait_for(works)
    elif _free:
        problem = _answer_of(_free.pop(), works)
    else:
        requests: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_serve, args=[requests], name="pipefit-waits", daemon=True).start()
        problem = _answer_of(requests, works)
    if problem is not None:
        raise problem


def collective(call: Callable[..., Any], *args: Any, group: Any) -> None:
    """Makes a collective call of torch, and waits for it."""
    work = call(*args, group=group, async_op=can_leave)
    if work is not None:
        finish(work)


def leave() -> None:
    """Leaves the waits that have lasted since the last call; called repeatedly after a loss."""
    lasting = set(_lasting)
    for answer in lasting & _seen:
        answer.put(LeftError("another rank is lost"))
    _seen.clear()
    _seen.update(lasting)


def _answer_of(requests: SimpleQueue[Any], works: Sequence[Any]) -> Exception | None:
    """Lets a thread wait; returns the problem. A thread whose wait was left is not asked again."""
    answer: _Answer = SimpleQueue()
    _lasting.add(answer)
    requests.put((works, answer))
    problem = answer.get()
    _lasting.discard(answer)
    if not isinstance(problem, LeftError):
        _free.append(requests)
    return problem


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
