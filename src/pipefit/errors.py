"""Errors that a user's mistake raises, as one family of exceptions.

The message of a `PipefitError` gives the expected input, the actual one, and a remedy. The command line prints it as
one message and exits with code 2; it never shows a traceback for one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

ABOVE_0 = math.ulp(0.0)
"""The least number that is more than 0."""


class PipefitError(ValueError):
    """The input of a user cannot be used as it is."""


class ProfileError(PipefitError):
    """A profile is malformed; the message names the path inside the file."""


class TopologyError(PipefitError):
    """A topology is malformed; the message names the path inside the file."""


class PlanError(PipefitError):
    """A plan, partition or placement contradicts itself or its model."""


class InfeasibleError(PipefitError):
    """No plan fits; the message names the missing memory and the cheapest change that would help."""


class ScheduleError(PipefitError):
    """An unknown schedule, or a shape that the schedule does not support."""


class ProgramError(PipefitError):
    """The text of a program cannot be read; the message names the line."""


class InvalidProgramError(PipefitError):
    """A program that the verifier refuses; the message holds its report."""


class DisagreementError(PipefitError):
    """The ranks of a run do not make the same pipeline, or replicas do not have the same weights."""


class ModelError(PipefitError):
    """A model cannot be built, split or run as asked."""


class DataError(PipefitError):
    """Data is missing, empty, or cannot be split into micro-batches."""


class NonFiniteLossError(PipefitError):
    """The loss became NaN or infinite: every rank raises this after the step."""


class TierError(PipefitError):
    """Host memory or a disk cannot store or return the records of a spilled run; the last committed ones stay there."""


class DamageError(TierError):
    """A record or document on a tier differs from the one written; the message names the file."""


class CommunicationError(RuntimeError):
    """A peer died, hung or sent something unexpected: not the user's mistake, but never silent."""


_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection timed out",
    "Connection was likely closed",
    "Broken pipe",
    "Socket closed",
    "Network is unreachable",
    "No route to host",
    "Timed out waiting",
    "pair closure",
    "remote process exiting",
    "communicator was aborted",
    "NCCL error",
    "remote process exited",
)
"""Words of torch's errors, and of Gloo's and NCCL's inside them, where a peer is gone."""


def is_lost_peer(problem: BaseException) -> bool:
    """Returns whether an error, or its cause, only says that another rank is gone: in a message, a collective, a store.

    Whatever makes an error of its own out of others, such as one that names a layer, lets these pass.
    """
    if isinstance(problem, CommunicationError):
        return True
    if isinstance(problem, RuntimeError) and any(words in str(problem) for words in _LOST_PEER):
        return True
    return problem.__cause__ is not None and is_lost_peer(problem.__cause__)


def check_figures(of: object, error: type[PipefitError], place: str = "", **least: float) -> None:
    """Refuses figures that are too small, and whole numbers of more than 63 bits; None is no figure.

    Args:
        of: the object whose attributes they are.
        error: the kind of error.
        place: the place of the object in the user's input, such as "levels[0].".
        least: the smallest number that each may be, by name; `ABOVE_0`: any number above 0.
    """
    for name, bound in least.items():
        value = getattr(of, name)
        if value is not None and not value >= bound:
            if bound == ABOVE_0:
                expected = "more than 0"
            else:
                expected = f"at least {bound}"
            raise error(f"{place}{name}: expected {expected}, got {value}")
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise error(f"{place}{name}: expected at most 2^{_MOST_BITS}, got a number of {value.bit_length()} bits")


_MOST_NAMED = 40
_MOST_BITS = 63


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped `name`: the nearest known names, else all of them, or the first of many."""
    known = sorted(known)
    if not known:
        return "there is none"
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if len(known) > _MOST_NAMED:
        more = f", … ({len(known)} in all)"
    else:
        more = ""
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known: {', '.join(known[:_MOST_NAMED])}{more}"


def look_up(name: object, table: Mapping[str, T], unknown: str, error: type[PipefitError] = PipefitError) -> T:
    """Looks a name up in a table.

    Args:
        name: as the user gave it.
        table: everything that there is, by name.
        unknown: begins the message, such as "unknown schedule".
        error: the kind to raise.

    Raises:
        PipefitError: or `error`: the table has no such name; the nearest are suggested.
    """
    key = str(name)
    if key not in table:
        raise error(f"{unknown} {name!r}; {nearest(key, table)}")
    return table[key]


def kind_of(name: str) -> type[Exception]:
    """The error of this module with a name, which another process has sent; any other name is of a `PipefitError`."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    return PipefitError
