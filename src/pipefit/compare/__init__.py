"""Every strategy of training on the ranks at hand, measured side by side in one run."""

from pipefit.compare.found import Comparison, Refusal, Row
from pipefit.compare.measure import compare_on_ranks
from pipefit.compare.settings import CompareConfig
from pipefit.compare.strategies import STRATEGIES

__all__ = ["STRATEGIES", "CompareConfig", "Comparison", "Refusal", "Row", "compare_on_ranks"]
