"""Is a pipeline's training that of one process? References that share nothing with the executor, and the comparison."""

from pipefit.testing.case import Case, Outcome
from pipefit.testing.equality import CheckResult, check, compare, expected, run, tolerance_of
from pipefit.testing.pipelined import make_pipeline, run_pipeline
