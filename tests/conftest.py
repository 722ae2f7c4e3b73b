"""What every test may count on: one thread, repeatable numbers, a deadline, and markers that follow from the folder.

The tiers are folders: `pure` (no torch), `torch` (one process), `dist` (several processes), `gpu` (a CUDA device).
"""

import os
import random
import signal
import sys
import warnings
from pathlib import Path

# Before torch is loaded anywhere, here or in a process a test starts: ranks share few cores, and one thread per rank is
# both faster there and the same to the bit from run to run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import pytest

TESTS = Path(__file__).parent

# A shell starts what runs behind it without Ctrl-C, and a process hands that on: tests send it to those they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
# The same cases on every run: what fails there must fail at the desk too.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, database=None)
# For a night: HYPOTHESIS_PROFILE=long make test
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def _has_cuda() -> bool:
    import torch

    with warnings.catch_warnings():  # a driver that is too old warns; for us it is simply no device
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder, and skip what needs a CUDA device where there is none."""
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if tier in ("dist", "gpu"):
            item.add_marker(getattr(pytest.mark, tier))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none here"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Undo what an earlier test may have left in torch's global state; a test that needs no torch does not load it."""
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
