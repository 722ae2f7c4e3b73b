"""SIGKILL, SIGSTOP and SIGTERM to one rank at every kind of instruction: the run ends well, and resumes to the bit."""

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tests.faults.shapes import CONTINUED, RANKS, SHAPES, WHENS, Place, found, is_there, pipeline, places, sampled
from tests.faults.test_fuzz import answer

from pipefit.runtime.progress import positions_of
from pipefit.runtime.waits import state_of

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(3600)]

SCRIPT = Path(__file__).with_name("signal_job.py")
CODES = {"SIGKILL": 1, "SIGSTOP": 1, "SIGTERM": 143}
EVERY_TRIAL = os.environ.get("PIPEFIT_TRIALS") == "all"
SAMPLED = "1f1b"
SHAPE = [pytest.param(shape, marks=pytest.mark.faults) for shape in SHAPES]


def run(shape: str, folder: Path, *fault: str, deadline_s: int = 2) -> tuple[int, str]:
    """The exit code and the standard error of the training, as its user sees them; the deadline: if a rank stops."""
    words = ["run", "-n", str(RANKS[shape]), "--threads", "1", "--json", "--logs", str(folder / "logs")]
    with pytest.MonkeyPatch.context() as patched:
        if "SIGSTOP" in fault:
            patched.setenv("PIPEFIT_DEADLINE_S", str(deadline_s))
        return answer([*words, str(SCRIPT), shape, str(folder), *fault])


def result(folder: Path):
    """The step from which a run resumed, its losses, and the checksum of its weights."""
    return json.loads((folder / "result.json").read_text())


def left_behind(folder: Path, ranks: int) -> list[str]:
    """Processes of the ranks that are still there, and temporary files of pipefit."""
    alive = [f"rank {rank}" for rank, at in positions_of(folder / "logs", ranks).items() if is_there(at.pid)]
    return alive + [path.name for path in Path(tempfile.gettempdir()).glob("pipefit*")]


def is_named(said: str, place: Place, name: str, pipe) -> bool | None:
    """Whether a message names rank, instruction and signal; a run that was asked to stop blames nobody."""
    passed, index, instruction = found(pipe, place)
    where = f"at '{instruction}' (instruction {index}, pass {passed})"
    if name == "SIGKILL":
        return f"rank {place.rank} failed {where}: the process died (SIGKILL)" in said
    return f"rank {place.rank} is stopped (by SIGSTOP or a debugger), {where}" in said if name == "SIGSTOP" else None


def planned(shape, folder):
    """The training, in this process, which only its program is taken from."""
    folder.mkdir()
    return pipeline(shape, folder)


def try_all(trial, shape, folder, trials):
    """Sends each signal at its place, resumes, and compares with the training that was never disturbed."""
    whole = folder / "whole"
    whole.mkdir()
    assert run(shape, whole)[0] == 0
    _, losses, weights = result(whole)
    pipe = planned(shape, folder / "plan")
    for number, (place, name) in enumerate(trials):
        own = folder / str(number)
        own.mkdir()
        code, said = run(shape, own, str(place.rank), place.op, place.when, name)
        # A request to stop that comes behind the last step finds a training that is done. A stopped rank goes on when
        # somebody continues it: the kernel does so where a shell ends and leaves this process group without a parent.
        was_continued = (own / CONTINUED).exists()
        expected = 0 if was_continued or (name == "SIGTERM" and (own / "result.json").exists()) else CODES[name]
        left = left_behind(own, RANKS[shape])
        again, why = run(shape, own)
        done, rest, ended = result(own) if again == 0 else (0, None, None)
        trial(
            f"{name} to a rank, {shape}",
            f"{place}: exit code {code}, left {left}, {said}; resumed at {done} with exit code {again} {why}",
            well=code == expected and "Traceback" not in said and not left,
            named=None if was_continued else is_named(said, place, name, pipe),
            resumed=(rest, ended) == (losses[done:], weights),
        )
        shutil.rmtree(own)


@pytest.mark.parametrize("shape", SHAPE)
def test_a_signal_at_any_instruction_ends_the_run_well(shape, trial, tmp_path):
    everywhere = list(places(planned(shape, tmp_path / "places")))
    try_all(trial, shape, tmp_path, sampled(everywhere, list(CODES), EVERY_TRIAL))


def test_each_signal_ends_the_run_well(trial, tmp_path):
    trials = [(Place(1, "bwd", when), name) for when, name in zip(WHENS, CODES, strict=True)]
    try_all(trial, SAMPLED, tmp_path, trials)


def test_a_rank_that_is_stopped_and_continued_goes_on(tmp_path):
    def continue_it():
        while not (tmp_path / CONTINUED).exists():
            for at in positions_of(tmp_path / "logs", RANKS[SAMPLED]).values():
                if state_of(at.pid) == "stopped":
                    os.kill(at.pid, signal.SIGCONT)
            time.sleep(0.01)

    whole = tmp_path / "whole"
    whole.mkdir()
    assert run(SAMPLED, whole)[0] == 0
    thread = threading.Thread(target=continue_it, daemon=True)
    thread.start()
    assert run(SAMPLED, tmp_path, "0", "recv", "steady", "SIGSTOP", deadline_s=60)[0] == 0
    assert result(tmp_path) == result(whole)


def test_the_sample_of_trials_has_all_pairs():
    somewhere = [(rank, op) for rank in range(2) for op in ("fwd", "bwd", "step")]
    trials = list(sampled(somewhere, list(CODES), every=False))
    assert len(trials) == 3 * len(somewhere) and len(list(sampled(somewhere, list(CODES), every=True))) == 9 * 6
    assert len({(place.rank, place.op, place.when) for place, _ in trials}) == 3 * len(somewhere)
    assert len({(place.rank, place.op, name) for place, name in trials}) == 3 * len(somewhere)
    assert len({(place.when, name) for place, name in trials}) == 9
