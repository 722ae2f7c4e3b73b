"""Schedules found by search, for given costs and memory."""

from pipefit.synthesize.synthesis import Synthesis, header_of, synthesize
