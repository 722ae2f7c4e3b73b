"""Times of all instructions of a program under a cost model, without running it."""

from pipefit.simulate.figures import metrics, steady_period_s
from pipefit.simulate.simulate import simulate
from pipefit.simulate.unposted import most_unposted
