"""Any `nn.Module` as a sequence of layers."""

from pipefit.cutting.cut import as_layers, cut
from pipefit.cutting.cut_model import Cut, shared_weights, table
from pipefit.cutting.loss_inputs import FirstLoss, refuse_aside, warn_of_own_loss
from pipefit.cutting.shared_state import watch_shared
