"""Schedules: one family per file, each a function from integers to a Program."""

from pipefit.schedules.catalogue import find, generate, names, program_of, shape_of
from pipefit.schedules.registry import Schedule, Task, schedule
from pipefit.schedules.shape import Shape, placement_of
