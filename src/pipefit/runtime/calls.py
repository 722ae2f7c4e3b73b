"""Roll calls: a method that all ranks must call begins with one, so that ranks in different methods find out.

    rank 0   report() ─► "Pipeline.report()" ─┐
                                              ├─► the names differ: the same error on both
    rank 1   the script ends ─► "leaving" ────┘

They have a process group of their own, in which nothing else is sent. A rank that is in a pass meanwhile, because only
the first `step` has a roll call, finds a note about the call in which the others wait (`pipefit.runtime.notes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from pipefit.parallel.alike import ranks_in_words
from pipefit.runtime.progress import LEAVE
from pipefit.runtime.worker import follow_model

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
    """Makes a method of a pipeline begin with a roll call under its name, which is one of `CALLS`.

    In one process the copies of layers then follow the user's own.
    """
    name = f"Pipeline.{method.__name__}()"

    @functools.wraps(method)
    def called(pipe: Any, *args: Any, **options: Any) -> Any:
        pipe.session.roll_call(name)
        follow_model(pipe.workers, pipe.layers)
        return method(pipe, *args, **options)

    return among_ranks(cast(F, called))


def among_ranks(method: F) -> F:
    """Makes a method of a pipeline raise the error of another rank, and compares the next batch after an error."""

    @functools.wraps(method)
    def called(pipe: Any, *args: Any, **options: Any) -> Any:
        with pipe.session.sharing_errors(lambda: f"Pipeline.{method.__name__}(), after step {pipe.num_updates}"):
            try:
                pipe.repair.take_over()
                return method(pipe, *args, **options)
            except BaseException:
                pipe.comparison.is_due = pipe.session.is_distributed
                raise

    return cast(F, called)


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
