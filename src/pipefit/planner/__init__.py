"""Search over plans: which cut, schedule, widths and micro-batch size, and why every other lost."""

from pipefit.planner.gpt import gpt_profile
from pipefit.planner.planning import METHODS, plan
from pipefit.planner.spilling import plan_spilling

__all__ = ["METHODS", "gpt_profile", "plan", "plan_spilling"]
