"""Spilled runs that are killed at any call of the file system."""

import json
import os
import signal
import sys

import pytest
from tests.processes import ended
from tests.spill.resumed_runs import HALF, pipeline, trained, whole

from pipefit.checkpoint import committed

pytestmark = pytest.mark.slow


def _killed_at(call, folder, how):
    """Trains; at a call of the file system the process dies, when half of what is written has arrived."""
    count = 0

    def dying(true, is_write):
        def instead(*args, **kwargs):
            nonlocal count
            count += 1
            if count == call:
                if is_write:
                    handle, (data,), position = args
                    true(handle, [data[: len(data) // 2 // 4096 * 4096]], position)
                os.kill(os.getpid(), signal.SIGKILL)
            return true(*args, **kwargs)

        return instead

    pipe = pipeline(folder, **how)
    trained(pipe, 2)
    pipe.settle()
    for name in ("pwritev", "fdatasync", "fsync", "replace"):
        setattr(os, name, dying(getattr(os, name), name == "pwritev"))
    trained(pipe, 5)
    os._exit(0)


def _in_a_fork(work, *args):
    """What a forked process came to: −signal, or its exit code."""
    child = os.fork()
    if not child:
        try:
            work(*args)
        except BaseException as problem:
            print(problem, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _gone_on(folder, result, how):
    pipe = pipeline(folder, resume=True, **how)
    at = pipe.num_updates
    result.write_text(json.dumps([at, [loss.hex() for loss in trained(pipe)]]))
    pipe.close()


def _every_call(place, how):
    """Kills a run at every call of a commit, and of what goes before and after, each time another, and goes on.

    In a process of its own, without the threads of others, which forks do not survive.
    """
    committed._RECORD_BYTES = 1000
    results = []
    for call in range(1, 28):
        folder, result = place / f"tier-{call}", place / f"{call}.json"
        ended = _in_a_fork(_killed_at, call, folder, how)
        if not ended and call > 16:
            break  # there are no more calls
        assert ended == -signal.SIGKILL, call
        assert _in_a_fork(_gone_on, folder, result, how) == 0, call
        results.append(json.loads(result.read_text()))
    (place / "results.json").write_text(json.dumps(results))


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ({}, {2, 3, 4}),
        ({"host_memory": HALF, "commit_every": 1}, {2, 3, 4}),
        ({"host_memory": HALF, "commit_every": 2}, {2, 4}),
        ({"optim_slots": 0, "commit_every": 2}, {2, 4}),
    ],
    ids=["disk", "split", "split-seldom", "aside"],
)
@pytest.mark.long
def test_a_run_that_is_killed_at_any_call_of_the_file_system_goes_on_to_the_bit(tmp_path, how, steps):
    assert ended(_every_call, tmp_path, how) == 0
    losses = [loss.hex() for loss in whole(**{key: how[key] for key in how if key == "optim_slots"})[0]]
    results = json.loads((tmp_path / "results.json").read_text())
    assert {at for at, _ in results} == steps
    assert all(rest == losses[at:] for at, rest in results)
