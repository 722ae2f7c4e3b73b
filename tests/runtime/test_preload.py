"""A fork server loads nothing that opens the GPU or runs a backward: its forks could not use the GPU then."""

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, sys, torch
used = []
torch.cuda._is_compiled = torch.backends.cuda.is_built = lambda: True
torch._C._cuda_getCurrentRawStream = lambda device: 0
torch._C._cuda_getDeviceCount = lambda: used.append("asked for GPUs") or 1
torch.cuda._device_count_nvml = lambda: -1
torch.autograd._engine_run_backward = lambda *a, **k: used.append("ran a backward")
torch.Tensor.backward = lambda *a, **k: used.append("ran a backward")
importlib.import_module(sys.argv[1])
print(used)
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["pipefit.pipeline.preload", "pipefit.study.execute.fork_server"])
def test_what_is_loaded_before_a_fork_neither_asks_for_gpus_nor_starts_threads_of_autograd(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, module], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
