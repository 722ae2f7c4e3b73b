"""Any `nn.Module` as a sequence of layers."""

from pipefit.cutting.cut import Cut, as_layers, cut, shared_weights, table
from pipefit.cutting.shared_state import watch_shared
