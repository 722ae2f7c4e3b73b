"""Search over plans: which cut, schedule, widths and micro-batch size, and why every other lost."""

from pipefit.planner.gpt import gpt_profile
from pipefit.planner.manual import by_hand, ranks_of
from pipefit.planner.planning import METHODS, plan
from pipefit.planner.spilling import plan_spilling

__all__ = ["METHODS", "by_hand", "gpt_profile", "plan", "plan_spilling", "ranks_of"]
