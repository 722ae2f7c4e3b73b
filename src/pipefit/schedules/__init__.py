"""Schedules: one family per file, each a function from integers to a Program."""

from pipefit.schedules.registry import Schedule, Task, find, generate, names, schedule
from pipefit.schedules.shape import Shape, placement_of

__all__ = ["Schedule", "Shape", "Task", "find", "generate", "names", "placement_of", "schedule"]
