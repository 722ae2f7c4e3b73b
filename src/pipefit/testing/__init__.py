"""The comparison of pipeline with single-process training: references that share nothing with the executor."""

from pipefit.testing.case import Case, Outcome
from pipefit.testing.equality import CheckResult, check, compare, expected, run, tolerance_of
from pipefit.testing.pipelined import make_pipeline, run_pipeline
