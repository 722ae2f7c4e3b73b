"""Modules that the fork server of a study loads before it forks a worker, which then starts at once."""

import signal

import torch

from pipefit.profiling import profile_sizes  # noqa: F401
from pipefit.study.execute import runner  # noqa: F401

# The first product of tensors on the meta device loads the modules that compute shapes. Without a backward: where there
# is a GPU it would start autograd's threads for the GPU, which no fork has.
_heads = torch.empty(1, 1, 2, 2, device="meta", requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(_heads, _heads, _heads).sum()

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the study handles it
