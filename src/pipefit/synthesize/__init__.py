"""Schedules found by search, for given costs and memory."""

from pipefit.synthesize.search import Synthesis, synthesize

__all__ = ["Synthesis", "synthesize"]
