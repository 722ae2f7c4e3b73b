"""What the fork server loads before the first rank is forked, so that ranks start at once."""

import torch
import torch.distributed
import torch.optim

import pipefit.runtime.distributed
import pipefit.runtime.engine
import pipefit.runtime.handlers  # noqa: F401

# Forked ranks must not inherit a thread pool: its threads do not survive the fork.
torch.set_num_threads(1)
