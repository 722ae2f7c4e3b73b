"""Search over plans: cut, schedule, widths, micro-batch size and slots, and the reason why every other plan lost."""

from pipefit.planner.computed_profile import gpt_profile
from pipefit.planner.lost_rank import plan_without
from pipefit.planner.manual import by_hand, ranks_of
from pipefit.planner.plan_options import METHODS, PlanOptions
from pipefit.planner.planning import plan
from pipefit.planner.space import NOT_FROM_DISK, Cap
