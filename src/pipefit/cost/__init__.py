"""Seconds of instructions and bytes of values."""

from pipefit.cost.layer_bytes import LayerBytes, ModelBytes
from pipefit.cost.model import CostModel
from pipefit.cost.plan_costs import FREE, USUAL, RuntimeCosts, of_plan, speeds_of, usual_state
from pipefit.cost.unit_costs import unit, weighted
