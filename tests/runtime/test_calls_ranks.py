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
from pipefit.runtime import notes, watchdog
from pipefit.runtime.launch import LaunchError, launch
from pipefit.runtime.notes import Note, Notes
from pipefit.runtime.progress import CALLS, LEAVE, LOSS, OUTSIDE, Position, Progress

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
        (
            ["load_state_dict", "step"],
            "rank 0 waits in Pipeline.load_state_dict(), which all ranks must call; rank 1 trains or evaluates",
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


def test_notes_are_looked_for_also_where_processes_meet_late(monkeypatch):
    """The thread once ended for the whole run where there was no store in its first seconds."""
    not_yet = [ValueError("Default process group has not been initialized")]
    found = threading.Event()

    def store():
        if not_yet:
            raise not_yet.pop()
        found.set()
        return HashStore()

    monkeypatch.setattr(watchdog, "_MISSED_S", 0.01)
    monkeypatch.setattr(notes, "_get_default_store", store)
    progress = Progress()
    own = watchdog.Watchdog(0, 2, progress, None, None, Notes(progress))
    try:
        assert found.wait(60)
    finally:
        own.stop()


def test_a_recovered_run_does_not_try_again_what_would_come_again(tmp_path: Path):
    _refused(jobs.call, str(tmp_path / "run"), ["report", "step"], recover=3, folder=tmp_path / "logs")
    assert not (tmp_path / "logs" / "faults.jsonl").exists()


def test_a_callback_on_one_rank_only_is_named():
    said = _refused(jobs.report_in_a_callback)
    assert said.startswith("rank 0 waits in Pipeline.report(), which all ranks must call; rank 1 trains")


def test_checkpoints_on_one_rank_only_are_named(tmp_path: Path):
    """The other rank was in the next step, until the watchdog came."""
    said = _refused(jobs.checkpoints_on_one_rank, str(tmp_path / "run"))
    assert said.startswith("rank 0 waits in Pipeline.save(), which all ranks must call; rank 1 trains")


def test_ranks_that_are_late_are_waited_for():
    one, other = launch(jobs.train_when_others_take_their_time, 2, 1.5, quiet=True)
    assert one == other and len(one) == 4


def _at(passes, index, call="", waits=False, calls=3):
    return Position(passes, index, 0, 1, 0.0, waits, calls, CALLS.index(call))


@pytest.mark.parametrize(
    ("note", "here", "is_awaited"),
    [
        (Note(2, False, "", ""), _at(3, 5), True),
        (Note(2, False, "", ""), _at(3, LOSS), True),
        (Note(2, False, "", ""), _at(2, OUTSIDE, waits=True), True),
        # It has begun this pass, or this rank is between two passes.
        (Note(2, False, "", ""), _at(2, 5), False),
        (Note(2, False, "", ""), _at(2, LOSS), False),
        (Note(2, False, "", ""), _at(3, OUTSIDE), False),
        # It failed in this pass.
        (Note(2, True, "", ""), _at(2, 5), True),
        (Note(2, True, "", ""), _at(2, LOSS), True),
    ],
)
def test_a_rank_of_a_note_is_awaited_only_where_it_will_not_come(note, here, is_awaited):
    assert note.is_awaited(here) is is_awaited


def test_notes_are_found_by_ranks_that_have_begun_as_many_calls_and_end_their_waits_at_the_second_look(monkeypatch):
    store, ended = HashStore(), []
    monkeypatch.setattr(notes, "_get_default_store", lambda: store)
    monkeypatch.setattr(notes, "end_waits", lambda before, progress: ended.append("waits"))
    other, own, late = Notes(Progress()), Notes(Progress()), Notes(Progress())
    other.look(1, _at(2, OUTSIDE, LEAVE, waits=True, calls=4), "", ended.append)
    for _ in range(2):
        late.look(0, _at(3, 5, calls=4), "at 'fwd'", ended.append)
    assert ended == [] and late.last is None
    own.look(0, _at(3, 5), "at 'fwd'", ended.append)
    assert ended == [] and own.last is None
    own.look(0, _at(3, 6), "at 'bwd'", ended.append)
    assert ended == [] and own.last is None
    own.look(0, _at(3, 6), "at 'bwd'", ended.append)
    said = f"rank 1 is leaving the run; rank 0 trains or evaluates, at 'bwd': {ORDER}"
    assert ended == ["waits"] and own.last == Note(2, False, "DisagreementError", said)
    for _ in range(10):
        assert ended == ["waits"]
        own.look(0, _at(3, 6), "at 'bwd'", ended.append)
    assert ended == ["waits", f"rank 1 is leaving the run: {ORDER}\n"]


@pytest.mark.parametrize("method", ["step", "fit", "evaluate", "state_dict", "save", "report"])
def test_a_rank_that_is_gone_gives_the_same_error_everywhere(method: str, tmp_path: Path):
    with pytest.raises(LaunchError, match=r"rank 1 failed .*SIGKILL"):
        launch(jobs.lose_a_peer, 2, str(tmp_path / "run"), method, quiet=True)
    # The survivor has a moment before it is ended.
    if (tmp_path / "run-kind").exists():
        assert (tmp_path / "run-kind").read_text() == "CommunicationError"
