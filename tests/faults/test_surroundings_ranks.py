"""Clocks that jump, memory that ends on one rank or in its control group, two runs into one folder."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

import pytest
from tests.faults import jobs
from tests.faults.shapes import batches, digest
from tests.runtime import jobs as trainings

from pipefit.cli import main
from pipefit.errors import PipefitError
from pipefit.run.claim import LOCK
from pipefit.runtime.faults import events_of, noted
from pipefit.runtime.launch import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_a_clock_that_jumps_changes_no_number_and_no_duration(killed, trial, tmp_path):
    pipe = trainings.pipeline()
    expected = pipe.fit(batches()), digest(pipe)
    found = launch(
        jobs.train_by_a_jumping_clock,
        2,
        str(tmp_path / "run"),
        killed,
        folder=tmp_path,
        quiet=True,
        recover=int(killed),
    )
    done = [event.done for event in events_of(noted(tmp_path))]
    trial(
        "a clock that jumps by hours",
        done,
        well=len(done) == killed and not any("-" in what.partition("; ")[2] for what in done),
        named="rank 1" in noted(tmp_path)[0]["fault"] if killed else None,
        resumed=found == [expected] * 2,
    )


def test_the_launchers_clock_may_jump_too(trial, tmp_path, monkeypatch):
    true, calls = time.time, []

    def jumping():
        calls.append(1)
        return true() + 3600 * (-1) ** len(calls)

    monkeypatch.setattr(time, "time", jumping)
    with pytest.raises(PipefitError) as failure:
        launch(trainings.die_at, 2, 1, 3, quiet=True, folder=tmp_path)
    trial("a clock that jumps by hours", str(failure.value), well=True, named="rank 1" in str(failure.value))


@pytest.mark.parametrize(
    "site", [pytest.param(site, marks=[pytest.mark.faults] * (site != "forward")) for site in jobs.MEMORY_SITES]
)
def test_a_rank_whose_memory_ends_is_named(site, trial, tmp_path):
    place = str(tmp_path / "run")
    _, losses, weights = launch(jobs.train_in_memory, 2, str(tmp_path / "whole"), site, False, quiet=True)[0]
    said = ""
    try:
        launch(jobs.train_in_memory, 2, place, site, True, quiet=True, folder=tmp_path / "logs")
    except PipefitError as problem:
        said = str(problem)
    done, rest, ended = launch(jobs.train_in_memory, 2, place, site, False, quiet=True)[0]
    trial(
        "no memory left on a rank",
        (site, said),
        well="memory" in said and "Traceback" not in said,
        named="rank 1" in said or "stage 1" in said,
        resumed=(done, rest, ended) == (2, losses[2:], weights),
    )


LIMIT_BYTES = 64 << 20


@pytest.fixture
def members(tmp_path):
    """The file that lists the processes of a control group with little memory, of version 1 or 2."""
    root = Path("/sys/fs/cgroup")
    kinds = {root / "memory": "memory.limit_in_bytes", root: "memory.max"}
    group = None
    for above, name in kinds.items():
        if not (above / "cgroup.procs").exists():
            continue
        made = above / f"pipefit-{os.getpid()}"
        with contextlib.suppress(OSError):
            if name == "memory.max":
                (above / "cgroup.subtree_control").write_text("+memory")
            made.mkdir()
            group = made
            (made / name).write_text(str(LIMIT_BYTES))
            break
    else:
        if group is not None:
            group.rmdir()
        pytest.skip("this machine lets nobody make a control group with a limit")
    yield group / "cgroup.procs"
    while (group / "cgroup.procs").read_text():
        time.sleep(0.05)  # what was killed leaves it in a moment
    group.rmdir()


@pytest.mark.faults
@pytest.mark.parametrize("starts", [1, 3])
def test_a_rank_that_is_killed_by_the_limit_of_its_group_is_named(starts, members, trial, tmp_path):
    """It resumes where memory is enough, and ends clearly where it never is."""
    whole = launch(jobs.train_in_a_group, 2, str(tmp_path / "whole"), None, 0, quiet=True)
    place, logs = str(tmp_path / "run"), tmp_path / "logs"
    found, said = None, ""
    try:
        found = launch(jobs.train_in_a_group, 2, place, str(members), starts, folder=logs, quiet=True, recover=2)
    except PipefitError as problem:
        said = str(problem)
    faults = [line["fault"] for line in noted(logs) if "fault" in line]
    trial(
        "killed by the limit of a control group",
        (faults, said),
        well=len(faults) == starts and "Traceback" not in said and (found is None) == (starts == 3),
        named=all("rank 1 failed" in fault and "SIGKILL" in fault for fault in faults),
        resumed=found == whole if starts == 1 else None,
    )


@pytest.mark.faults
def test_the_memory_of_a_rank_is_that_of_its_group(members, trial):
    found = launch(jobs.usable_in_a_group, 1, str(members), quiet=True)
    trial("killed by the limit of a control group", found, well=found == [LIMIT_BYTES])


def test_a_second_run_in_a_folder_is_refused(trial, tmp_path, capsys):
    with (tmp_path / LOCK).open("w") as held:
        held.write("node-7 4711 x")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        code = main(["train", "--model", "mlp", "--steps", "1", "--transport", "local", "-o", str(tmp_path)])
    said = capsys.readouterr().err
    named = str(tmp_path) in said and "process 4711 on node-7" in said
    trial("two runs in one folder", said, well=code == 2 and not list(tmp_path.glob("*.json*")), named=named)
