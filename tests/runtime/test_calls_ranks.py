"""Ranks that call different methods are told so at once, by names; ranks that are only late are waited for."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.runtime import call_jobs as jobs
from torch.distributed import HashStore

from pipefit.errors import DisagreementError
from pipefit.runtime import watchdog
from pipefit.runtime.calls import meet_in_call
from pipefit.runtime.launch import LaunchError, launch
from pipefit.runtime.progress import CALLS, LEAVE, LOSS, OUTSIDE, Position, Progress
from pipefit.runtime.waits import missed_call

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
ORDER = "all ranks must call the same methods in the same order, none only `if pipe.rank == 0`"


def _refused(job, *args, **options) -> str:
    with pytest.raises(DisagreementError) as problem:  # the watchdog's deadline would be another error
        launch(job, 2, *args, quiet=True, **options)
    return str(problem.value)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            ["report", "leave"],
            "rank 0 waits in Pipeline.report(), which all ranks must call; rank 1 is leaving the run",
        ),
        (["leave", "save"], "rank 1 waits in Pipeline.save(), which all ranks must call; rank 0 is leaving the run"),
        (["state_dict", "report"], "rank 0 waits in Pipeline.state_dict(), which all ranks must call; rank 1 waits in"),
        (
            ["report", "step"],
            "rank 0 waits in Pipeline.report(), which all ranks must call; rank 1 trains or evaluates",
        ),
        (["step", "leave"], "rank 1 is leaving the run; rank 0 trains or evaluates, at '"),
        (["leave", "step"], "rank 0 is leaving the run; rank 1 trains or evaluates, at '"),
    ],
)
def test_methods_that_differ_are_named(methods, message, tmp_path: Path):
    said = _refused(jobs.call, str(tmp_path / "run"), methods)
    assert said.startswith(message) and said.endswith(ORDER)


@pytest.mark.slow
def test_methods_that_differ_are_named_where_ranks_share_no_folder(tmp_path: Path):
    """As on several machines; only the store of the run is common to them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = f"from tests.runtime import call_jobs; call_jobs.call({str(tmp_path)!r}, ['report', 'step'])"
    processes = []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, **own, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        words = [sys.executable, "-c", job]
        processes.append(subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=550)[1] for process in processes]
    assert [process.returncode != 0 for process in processes] == [True, True], said
    expected = "rank 0 waits in Pipeline.report(), which all ranks must call; rank 1 trains or evaluates, at '"
    assert expected in said[1] and ORDER in said[1], said


def test_calls_are_compared_also_where_processes_meet_late(monkeypatch):
    """The comparison once ended for the whole run where there was no store in its first seconds."""
    not_yet = [ValueError("Default process group has not been initialized")]
    compared = threading.Event()

    def meet(rank, here):
        if not_yet:
            raise not_yet.pop()
        compared.set()
        return {}

    monkeypatch.setattr(watchdog, "_MISSED_S", 0.01)
    monkeypatch.setattr(watchdog, "meet_in_call", meet)
    own = watchdog.Watchdog(0, 2, Progress(), None, None)
    try:
        assert compared.wait(60)
    finally:
        own.stop()


def test_a_recovered_run_does_not_try_again_what_would_come_again(tmp_path: Path):
    _refused(jobs.call, str(tmp_path / "run"), ["report", "step"], recover=3, folder=tmp_path / "logs")
    assert not (tmp_path / "logs" / "faults.jsonl").exists()


def test_a_callback_on_one_rank_only_is_named():
    said = _refused(jobs.report_in_a_callback)
    assert said.startswith("rank 0 waits in Pipeline.report(), which all ranks must call; rank 1 trains")


def test_ranks_that_are_late_are_waited_for():
    one, other = launch(jobs.train_when_others_take_their_time, 2, 1.5, quiet=True)
    assert one == other and len(one) == 4


def _at(passes, index, call="", waits=False):
    return Position(passes, index, 0, 1, 0.0, waits, 3, CALLS.index(call))


def test_a_call_is_missed_only_where_the_other_rank_will_not_come():
    """Not by a rank that has begun the pass, or that is between two passes."""
    waiting = {1: _at(2, OUTSIDE, LEAVE, waits=True)}
    assert "rank 1 is leaving the run; rank 0 trains" in missed_call(0, None, _at(3, 5), waiting)
    assert "rank 1 is leaving the run; rank 0 trains" in missed_call(0, None, _at(3, LOSS), waiting)
    assert not missed_call(0, None, _at(2, 5), waiting)
    assert not missed_call(0, None, _at(3, OUTSIDE), waiting)
    assert not missed_call(0, None, _at(3, 5), {})


def test_a_position_in_a_call_is_found_by_ranks_whose_next_call_it_is(monkeypatch):
    store = HashStore()
    monkeypatch.setattr("pipefit.runtime.calls._get_default_store", lambda: store)
    waiting = _at(2, OUTSIDE, LEAVE, waits=True)
    assert meet_in_call(1, waiting) == {}
    assert meet_in_call(0, _at(3, 5)._replace(calls=2)) == {1: waiting}
    for calls in (1, 3):
        assert meet_in_call(0, _at(3, 5)._replace(calls=calls)) == {}


@pytest.mark.parametrize("method", ["step", "fit", "evaluate", "state_dict", "save", "report"])
def test_a_rank_that_is_gone_gives_the_same_error_everywhere(method: str, tmp_path: Path):
    with pytest.raises(LaunchError, match=r"rank 1 failed .*SIGKILL"):
        launch(jobs.lose_a_peer, 2, str(tmp_path / "run"), method, quiet=True)
    # The survivor has a moment before it is ended.
    if (tmp_path / "run-kind").exists():
        assert (tmp_path / "run-kind").read_text() == "CommunicationError"
