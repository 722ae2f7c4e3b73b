"""How long an instruction takes and how many bytes a value has."""

from pipefit.cost.build import from_profile, unit
from pipefit.cost.model import CostModel

__all__ = ["CostModel", "from_profile", "unit"]
