"""Any `nn.Module` as a row of layers."""

from pipefit.cut.cutting import Cut, cut

__all__ = ["Cut", "cut"]
