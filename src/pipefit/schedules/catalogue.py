"""Finding a schedule by name: those of the house, a user's own, and other packages'."""

from __future__ import annotations

from importlib.metadata import entry_points

from pipefit.errors import ScheduleError, nearest
from pipefit.ir.program import Program
from pipefit.schedules import gpipe, looped, one_f_one_b, spilled, zero_bubble
from pipefit.schedules.registry import REGISTRY, Schedule
from pipefit.schedules.shape import Shape
from pipefit.schedules.written import SUFFIX, from_file

HOUSE = (gpipe, one_f_one_b, looped, zero_bubble, spilled)
"""The families of the house, one file each; importing a family registers its schedules."""


def names() -> list[str]:
    """The schedules of the house, then any others that have been registered."""
    return list(REGISTRY)


def find(name: str) -> Schedule:
    """A schedule by its name, or by the path of a `.pipe` file; entry points of the group `pipefit.schedules` count.

    Raises:
        ScheduleError: there is none; the message suggests the nearest.
    """
    if name.endswith(SUFFIX):
        return from_file(name)
    if name not in REGISTRY:
        for point in entry_points(group="pipefit.schedules"):
            if point.name == name:
                point.load()
    if name not in REGISTRY:
        raise ScheduleError(f"unknown schedule {name!r}; {nearest(name, REGISTRY)}")
    return REGISTRY[name]


def generate(name: str, shape: Shape) -> Program:
    """The program of a schedule by name."""
    return find(name)(shape)
