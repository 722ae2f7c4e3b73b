"""The schedules of the house, registered in the order of the papers."""

from pipefit.schedules import gpipe, looped, one_f_one_b

# Named here so that no tool takes the imports for unused: importing a family is what registers it.
__all__ = ["gpipe", "looped", "one_f_one_b"]
