"""The server that ranks are forked from is started once, and every test here has a short deadline."""

import contextlib
import os
import tempfile
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
def _logs_of_failed_runs_go_with_the_test(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a run that failed is kept for its user; here nobody would take it away."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("runs")))


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
