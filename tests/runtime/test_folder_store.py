"""The store in which processes of one machine exchange addresses."""

import threading
from datetime import timedelta

import pytest

from pipefit.errors import is_lost_peer
from pipefit.runtime.folder_store import FolderStore, end_waits
from pipefit.runtime.meeting import forget_addresses, store_folder


def test_a_process_waits_for_what_another_one_sets(tmp_path):
    own = FolderStore(tmp_path / "store")
    other = FolderStore(tmp_path / "store")
    found: list[bytes] = []
    waits = threading.Thread(target=lambda: found.append(own.get("0//cpu//0/1")))
    waits.start()
    assert not own.check(["0//cpu//0/1"])
    other.set("0//cpu//0/1", b"\x00address\xff")
    waits.join()
    assert found == [b"\x00address\xff"]
    other.set("0//cpu//0/1", "another one")
    assert own.get("0//cpu//0/1") == b"another one"
    assert own.check(["0//cpu//0/1"]) and not own.check(["0//cpu//0/1", "0//cpu//0/2"])


def test_processes_count_together(tmp_path):
    stores = [FolderStore(tmp_path / "store") for _ in range(4)]
    threads = [threading.Thread(target=lambda one=one: [one.add("n", 2) for _ in range(20)]) for one in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].add("n", -1) == 159


def test_a_wait_ends_where_a_process_is_lost(tmp_path):
    """One that is there is still read."""
    place = tmp_path / "store"
    own = FolderStore(place)
    own.set("there", b"1")
    problems: list[RuntimeError] = []

    def wait() -> None:
        with pytest.raises(RuntimeError) as problem:
            own.wait(["there", "absent"])
        problems.append(problem.value)

    waits = threading.Thread(target=wait)
    waits.start()
    end_waits(place)
    waits.join()
    assert is_lost_peer(problems[0]) and "absent" in str(problems[0])
    assert own.get("there") == b"1"
    # Also for a process that comes later, and where no process was there before.
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        FolderStore(place).get("absent")
    end_waits(tmp_path / "another")
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        FolderStore(tmp_path / "another").wait(["absent"])


def test_a_wait_ends_after_its_time(tmp_path):
    with pytest.raises(RuntimeError, match="Timed out waiting"):
        FolderStore(tmp_path / "store").wait(["absent"], timedelta(0))


def test_the_addresses_of_a_run_go_with_its_processes(tmp_path):
    for start in range(2):
        FolderStore(store_folder(tmp_path, start)).set("a/b", b"1")
    (tmp_path / "rank-1.log").touch()
    forget_addresses(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.log"]
