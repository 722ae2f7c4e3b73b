"""Proof that a program computes what its header claims, without a hang and within memory. No torch here."""

from pipefit.verify.check import verify
from pipefit.verify.report import RULES, Report, Violation

__all__ = ["RULES", "Report", "Violation", "verify"]
