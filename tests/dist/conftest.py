"""The server that ranks are forked from is started once, and every test here has a short deadline."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(60))


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    """Loading torch takes seconds on a busy machine; no test should pay for it."""
    from tests.dist import jobs

    from pipefit.runtime.launch import launch

    launch(jobs.nothing, 1, quiet=True)


@pytest.fixture(autouse=True)
def _no_rank_is_left_behind() -> Iterator[None]:
    """Every rank that a test starts has ended with it."""
    import multiprocessing

    yield
    left = multiprocessing.active_children()
    for process in left:
        with contextlib.suppress(OSError):
            os.kill(process.pid, 9)
    assert not left
