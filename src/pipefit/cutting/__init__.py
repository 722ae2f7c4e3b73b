"""Any `nn.Module` as a row of layers."""

from pipefit.cutting.cut import Cut, as_layers, cut, table
