"""The schedules of the house, registered in the order of the papers."""

from pipefit.schedules import gpipe, looped, one_f_one_b

__all__ = ["gpipe", "looped", "one_f_one_b"]
