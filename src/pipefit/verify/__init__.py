"""Proof that a program computes what its header claims, without a hang and within memory. No torch here."""

from pipefit.verify.report import RULES, Report, Violation
from pipefit.verify.verifier import verify
