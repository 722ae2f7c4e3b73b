"""The folder of a run in the machine's memory: gone with the run, and at the latest when another one begins."""

import os
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.processes import server

from pipefit.runtime import memory_folder as module
from pipefit.runtime.memory_folder import memory_folder

pytestmark = pytest.mark.dist


@pytest.fixture(autouse=True)
def shared(tmp_path, monkeypatch):
    """A place of this test's own for the machine's memory."""
    monkeypatch.setattr(module, "SHARED", tmp_path)
    return tmp_path


def _hold(shared: Path, named: Connection) -> None:
    module.SHARED = shared
    with memory_folder() as folder:
        (Path(folder) / "copy").write_bytes(b"0" * 4096)
        named.send(folder)
        signal.pause()


def _held(shared: Path):
    """A process that has a folder, and its path."""
    ours, theirs = Pipe(duplex=False)
    process = server().Process(target=_hold, args=(shared, theirs))
    process.start()
    return process, Path(ours.recv())


def test_a_folder_ends_with_its_run(shared):
    with memory_folder() as folder:
        assert Path(folder).parent == shared
    assert not list(shared.iterdir())


def test_the_folder_of_a_killed_run_goes_when_another_begins_and_that_of_a_living_one_stays(shared):
    killed, left = _held(shared)
    living, kept = _held(shared)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert left.exists()
    with memory_folder() as own:
        assert sorted(shared.iterdir()) == sorted([kept, Path(own)])
    os.kill(living.pid, signal.SIGKILL)
    living.join()


def test_what_is_no_folder_of_a_run_of_this_user_stays(shared):
    elsewhere = shared / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (shared / "pipefit-memory-link").symlink_to(elsewhere)
    (shared / "pipefit-memory-file").touch()
    (shared / "pipefit-memory-begins").mkdir()  # without a lock yet: of an earlier version
    before = sorted(shared.rglob("*"))
    with memory_folder():
        pass
    assert sorted(shared.rglob("*")) == before
