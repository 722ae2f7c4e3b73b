"""Roll calls: a method that all ranks must call begins with one, so that ranks in different methods find out.

    rank 0   report() ─► "Pipeline.report()" ─┐
                                              ├─► the names differ: the same error on both
    rank 1   the script ends ─► "leaving" ────┘

They have a process group of their own, in which nothing else is sent. A rank that is in a pass meanwhile, because only
the first `step` has a roll call, reads in the store of the run in which call the others wait
(`pipefit.runtime.waits.missed_call`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch.distributed.distributed_c10d import _get_default_store

from pipefit.errors import CommunicationError, is_lost_peer
from pipefit.parallel.alike import ranks_in_words
from pipefit.runtime.progress import LEAVE, Position

ORDER = ": all ranks must call the same methods in the same order, none only `if pipe.rank == 0`"
"""The end of a message about calls that differ."""

F = TypeVar("F", bound=Callable[..., Any])


def collective(method: F) -> F:
    """Makes a method of a pipeline begin with a roll call, and a unit of what all ranks do; see `runtime.repairs`."""

    @functools.wraps(method)
    def whole(pipe: Any, *args: Any, **options: Any) -> Any:
        return pipe.session.unit(functools.partial(method, pipe, *args, **options))

    return rolled(cast(F, whole))


def rolled(method: F) -> F:
    """Makes a method of a pipeline begin with a roll call under its name, which is one of `CALLS`."""
    name = f"Pipeline.{method.__name__}()"

    @functools.wraps(method)
    def called(pipe: Any, *args: Any, **options: Any) -> Any:
        pipe.session.roll_call(name)
        return method(pipe, *args, **options)

    return among_ranks(cast(F, called))


def among_ranks(method: F) -> F:
    """Makes a method of a pipeline raise the same error wherever another rank is gone."""

    @functools.wraps(method)
    def called(pipe: Any, *args: Any, **options: Any) -> Any:
        try:
            pipe.repair.take_over()
            return method(pipe, *args, **options)
        except RuntimeError as problem:
            if isinstance(problem, CommunicationError) or not is_lost_peer(problem):
                raise
            pipe.session.refuse_repair(f"it was in {method.__name__}")
            raise lost_peer(pipe.session.rank, problem) from None

    return cast(F, called)


def lost_peer(rank: int, problem: Exception) -> CommunicationError:
    """The error of a rank that lost another one."""
    return CommunicationError(f"rank {rank} lost a dead or unreachable peer: {problem}")


def different_calls(called: Mapping[int, str]) -> str:
    """The message about ranks that call different methods, each with its name."""
    ranks: dict[str, list[int]] = {}
    for rank, name in called.items():
        ranks.setdefault(name, []).append(rank)
    said = [_said(name, own) for name, own in sorted(ranks.items(), key=lambda item: item[0] == LEAVE)]
    return "; ".join(said) + ORDER


def _said(name: str, ranks: Sequence[int]) -> str:
    one = len(ranks) == 1
    if name == LEAVE:
        return f"{ranks_in_words(ranks)} {'is' if one else 'are'} leaving the run"
    return f"{ranks_in_words(ranks)} {'waits' if one else 'wait'} in {name}, which all ranks must call"


def meet_in_call(rank: int, here: Position) -> dict[int, Position]:
    """Leaves the position of a rank that waits in a roll call in the store of the run, for all its machines.

    Of a rank that does not wait in one: returns the last position that was left so in the next roll call.
    """
    store = _get_default_store()
    if here.call:
        store.set(f"pipefit/call/{here.calls}", json.dumps([rank, *here]))
        return {}
    key = f"pipefit/call/{here.calls + 1}"
    if not store.check([key]):
        return {}
    other, *there = json.loads(store.get(key))
    return {other: Position(*there)}
