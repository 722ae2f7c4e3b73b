"""Modules that the fork server loads before the first rank is forked, so that ranks start at once."""

# ruff: noqa: E402  (signals are the launcher's to answer, also while this is loading)
import gc
import importlib
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
# A terminal or batch system may send it to the whole process group; the ranks would die with this server.
signal.signal(signal.SIGTERM, signal.SIG_IGN)

import torch
import torch.distributed
import torch.optim

importlib.import_module("pipefit.pipeline.pipeline")

# Forked ranks must not inherit a thread pool: its threads do not survive the fork.
torch.set_num_threads(1)

# The first optimizer of a process imports torch's compiler, which takes seconds.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()

# Ranks keep all of this: their garbage collections need not traverse it.
gc.freeze()
