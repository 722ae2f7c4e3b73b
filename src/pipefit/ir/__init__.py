"""Schedules as programs: operations, instructions, programs, their text, dependencies and liveness. No torch here."""

from pipefit.ir.instruction import Instruction, bwd, bwd_input, bwd_weight, fwd
from pipefit.ir.op import COMPUTE_OPS, OP_SPEC, Kind, Lane, Op, Reduction
from pipefit.ir.program import Header, Program, WeightRule
from pipefit.ir.spill import Spill
