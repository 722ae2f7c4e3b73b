"""Every strategy of training on the ranks at hand, measured side by side in one run."""

from pipefit.compare.comparison import Choice, Comparison, Refusal, Row
from pipefit.compare.rounds import compare_on_ranks
from pipefit.compare.settings import CompareConfig
from pipefit.compare.strategies import STRATEGIES

__all__ = ["STRATEGIES", "Choice", "CompareConfig", "Comparison", "Refusal", "Row", "compare_on_ranks"]
