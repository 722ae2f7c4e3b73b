"""Guarantees for every test: one thread, repeatable numbers, a deadline.

The folders are those of the package. Tests of several processes are marked `dist`, those that need a GPU `gpu`.
"""

import contextlib
import gc
import itertools
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator

# Before torch is loaded anywhere, here or in a process a test starts: ranks share few cores, and one thread per rank is
# both faster there and the same to the bit from run to run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import pytest

# A shell starts what runs behind it without Ctrl-C, and a process hands that on: tests send it to those they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
# The same cases on every run: what fails there must fail at the desk too.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, database=None)
# For a night: HYPOTHESIS_PROFILE=long make test
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


_caches = itertools.count()


def _has_cuda() -> bool:
    import torch

    with warnings.catch_warnings():  # a driver that is too old warns; for us it is simply no device
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    """Workers get the files in the order of collection, not those with the most tests first."""
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Torch and thousands of tests are millions of objects, none of them garbage: it is not looked for meanwhile."""
    gc.disable()
    found = yield
    gc.enable()
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with long tests first, so that no worker ends late.

    Skips tests that need a CUDA device where there is none.
    """
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)
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
    devices = sys.modules.get("torch.utils._device")
    if devices is not None:
        # It notes once which functions `with torch.device(…)` changes. If that is while transformers has replaced
        # torch.linspace by its own, as in a first from_pretrained, the real one is missing in every later test.
        devices._device_constructors.cache_clear()


@pytest.fixture(scope="session")
def rank_server() -> None:
    """Starts the server that ranks are forked from: loading torch takes seconds, and no test should pay for it."""
    from pipefit.runtime.launch import launch
    from tests.processes import server
    from tests.runtime import jobs

    server()
    launch(jobs.nothing, 1, quiet=True)


@pytest.fixture(scope="module", autouse=True)
def _loaded_modules_are_no_garbage() -> None:
    """What is there when a file begins is not looked through for garbage any more.

    A pipeline collects garbage before it measures its memory; all of torch and of pytest takes longer than to train it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is measured in a moment; ranks in processes of their own always do so."""
    from tests.small_probes import shrink

    shrink(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds the measurements of another one, or of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{next(_caches)}"))


@pytest.fixture(autouse=True)
def _ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Around a test of several processes: its runs' folders go with it, and every rank that it started has ended."""
    if request.node.get_closest_marker("dist") is None:
        yield
        return
    import multiprocessing

    request.getfixturevalue("rank_server")
    # The folder of a run that failed is kept for its user; here nobody would take it away.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("runs")))
    yield
    left = multiprocessing.active_children()
    for process in left:
        with contextlib.suppress(OSError):
            os.kill(process.pid, 9)
    assert not left
