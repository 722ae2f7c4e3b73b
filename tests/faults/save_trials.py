"""Kills processes at each of their calls that write while they save; `python -m tests.faults.save_trials FOLDER`.

It runs under the shim of `dies.c`, and prints each trial as a line of JSON: [kind, what, well, named, resumed].
"""

import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tests.faults.shapes import SPILLED, batches, pipeline
from tests.study.cases import CPU, MLP, SMALL, alone

from pipefit.errors import PipefitError
from pipefit.run.kept_measurements import KeptMeasurements
from pipefit.runtime.launch import LaunchError, launch
from pipefit.runtime.progress import Progress
from pipefit.runtime.session import Session, current
from pipefit.spec import Partition, Placement, Plan
from pipefit.spec.sealed import read_sealed, write_sealed
from pipefit.study.execute.open_trial import OpenTrial
from pipefit.study.execute.runner import take_turn
from pipefit.study.execute.trial_files import read_losses
from pipefit.study.trial import Trial

Row = tuple[str, str, bool, bool | None, bool | None]
_MOST_CALLS = 1000


def die_at(call: int, half: int = 0) -> None:
    """Arms the shim in this process; 0: disarms it."""
    ctypes.CDLL(None).pipefit_die_at(call, half)


def in_a_fork(work: Callable[..., object], *args: object) -> int:
    """The end of a forked process: −signal, or its exit code."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work(*args)
            code = 0
        except BaseException as problem:
            print(repr(problem), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_every_call(folder: Path, kill: Callable[[Path, int, int], bool]) -> Iterator[tuple[str, Path]]:
    """Each call with a new folder, after `kill` was in it; the last one is that at which nothing is killed any more."""
    for half in (0, 1):
        for call in range(1, _MOST_CALLS):
            place = folder / f"{call}-{half}"
            was_killed = kill(place, call, half)
            yield f"call {call}{', half of it' * half}", place
            shutil.rmtree(place, ignore_errors=True)
            if not was_killed:
                break
        else:
            raise AssertionError("the calls do not end")


def killed(work: Callable[..., object], *args: object) -> bool:
    """Whether a fork was killed by the shim; any other end is a mistake."""
    code = in_a_fork(work, *args)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def is_gone_on(place: Path, losses: list[float]) -> tuple[bool, bool]:
    """Whether a checkpoint of step 1 or 2 is loaded and swept up, and whether the rest of the training is the same."""
    again = pipeline("1f1b", place)
    try:
        found = again.load(place)
    except PipefitError as problem:
        print(problem, file=sys.stderr)
        return False, False
    rest = again.fit(batches()[found.step :])
    again.save(place, keep=1)
    is_clean = [path.name.partition("-")[0] for path in place.iterdir()] == ["step"]
    return found.step in (1, 2) and not found.skipped and is_clean, rest == losses[found.step :]


def save(pipe, place: Path, call: int, half: int) -> None:
    """Saves the second step in place of the first."""
    die_at(call, half)
    pipe.save(place, keep=1)
    die_at(0)


def checkpoints(folder: Path) -> Iterator[Row]:
    losses = pipeline("1f1b", folder).fit(batches())
    pipe, before = pipeline("1f1b", folder), folder / "before"
    pipe.fit(batches()[:1])
    pipe.save(before)
    pipe.fit(batches()[1:2])

    def kill(place: Path, call: int, half: int) -> bool:
        shutil.copytree(before, place)
        return killed(save, pipe, place, call, half)

    for what, place in at_every_call(folder, kill):
        yield "killed in a save, one process", what, *_with_name(is_gone_on(place, losses), None)


def save_among_ranks(place: str, rank: int, call: int, half: int) -> None:
    """Two ranks save twice; one of them is killed in the second save."""
    pipe = pipeline("1f1b", Path(place))
    pipe.fit(batches()[:1])
    pipe.save(place)
    pipe.fit(batches()[1:2])
    mine = current().rank == rank
    save(pipe, Path(place), call if mine else 0, half)


def ranks(folder: Path) -> Iterator[Row]:
    losses = pipeline("1f1b", folder).fit(batches())
    for rank in (0, 1):
        said: list[str] = []

        def kill(place: Path, call: int, half: int, rank: int = rank, said: list[str] = said) -> bool:
            said.append("")
            try:
                launch(save_among_ranks, 2, str(place), rank, call, half, threads=1, quiet=True, folder=folder / "logs")
            except LaunchError as problem:
                said[-1] = str(problem)
            return bool(said[-1])

        for what, place in at_every_call(folder, kill):
            named = f"rank {rank} failed saving" in said[-1] and "SIGKILL" in said[-1] if said[-1] else None
            yield (
                "killed in a save, one of two ranks",
                f"{what}: {said[-1]}",
                *_with_name(is_gone_on(place, losses), named),
            )


def _with_name(ended: tuple[bool, bool], named: bool | None) -> tuple[bool, bool | None, bool]:
    return ended[0], named, ended[1]


# ---- a disk tier, a study, a file ------------------------------------------------------------------------------------


def train_on_disk(place: Path, call: int, half: int) -> None:
    """Two steps are committed; the process is killed in the third."""
    pipe = pipeline(SPILLED, place)
    pipe.fit(batches()[:2])
    for worker in pipe.workers:
        worker.spilling.settle()
    die_at(call, half)
    pipe.fit(batches()[2:3])
    for worker in pipe.workers:
        worker.spilling.settle()
    die_at(0)


def go_on_from_disk(place: Path) -> None:
    pipe = pipeline(SPILLED, place)
    (place / "result").write_text(json.dumps([pipe.num_updates, pipe.fit(batches()[pipe.num_updates :])]))


def tiers(folder: Path) -> Iterator[Row]:
    assert in_a_fork(go_on_from_disk, made(folder / "whole")) == 0
    _, losses = json.loads((folder / "whole" / "result").read_text())
    for what, place in at_every_call(folder, lambda *at: killed(train_on_disk, made(at[0]), *at[1:])):
        ended = in_a_fork(go_on_from_disk, place)
        step, rest = json.loads((place / "result").read_text()) if ended == 0 else (-1, None)
        yield "killed in a commit of a disk tier", f"{what}: {step}", step in (2, 3), None, rest == losses[step:]


def made(place: Path) -> Path:
    place.mkdir(parents=True)
    return place


def take_turns(place: Path, call: int, half: int) -> None:
    """A step of a trial is taken; the process is killed in the turns of the second one."""
    opened = OpenTrial(0, Trial(**SMALL, **MLP), place, CPU)
    for armed in (0, call):
        die_at(armed, half)
        for _ in range(opened.state.figures.num_turns):
            take_turn(opened)
    die_at(0)


def take_rest(place: Path) -> None:
    opened = OpenTrial(0, Trial(**SMALL, **MLP), place, CPU)
    while opened.step < opened.trial.steps:
        take_turn(opened)


def studies(folder: Path) -> Iterator[Row]:
    losses = alone(Trial(**SMALL, **MLP))[0]
    for what, place in at_every_call(folder, lambda *at: killed(take_turns, made(at[0]), *at[1:])):
        ended = in_a_fork(take_rest, place)
        found = read_losses(place, len(losses))[0] if ended == 0 else None
        yield "killed in a turn of a study", what, ended == 0, None, found == losses


def files(folder: Path) -> Iterator[Row]:
    old, new = (Plan(Partition.from_counts([2, 1]), Placement(((0,), (1,))), "1f1b", count) for count in (4, 8))

    def kill(place: Path, call: int, half: int) -> bool:
        old.save(made(place) / "plan.json")
        return killed(lambda: (die_at(call, half), new.save(place / "plan.json")))

    for what, place in at_every_call(folder, kill):
        yield "killed as it replaces a plan", what, Plan.load(place / "plan.json") in (old, new), None, None


def exchanges(folder: Path) -> Iterator[Row]:
    """A file that takes the name of another one, which takes its own and goes: see `write_atomically`."""
    old, new = {"format": "trial/1", "number": 1}, {"format": "trial/1", "number": 2, "more": "x" * 10_000}
    found = []

    def kill(place: Path, call: int, half: int) -> bool:
        write_sealed(made(place) / "it.json", old)
        return killed(lambda: (die_at(call, half), write_sealed(place / "it.json", new, durable=False)))

    for what, place in at_every_call(folder, kill):
        there = read_sealed(place / "it.json", "trial/1")
        left = len(list(place.iterdir())) - 1
        found.append((there == new, left))
        yield "killed as two files exchange names", what, there in (old, new) and left <= 1, None, None
    was_between = (True, 1) in found
    yield "killed as two files exchange names", "between the exchange and the removal", was_between, None, None


FACTS = {"model": "mlp"}


def kept_at(place: Path, again: bool = False) -> KeptMeasurements:
    return KeptMeasurements(FACTS, Session(0, 1, None, Progress()), place / "kept.json", again)


def keep(place: Path, seconds: float, call: int, half: int) -> None:
    """A run keeps what it has measured."""
    kept = kept_at(place, again=True)
    kept.add("seconds", seconds)
    die_at(call, half)
    kept.save()
    die_at(0)


def measurements(folder: Path) -> Iterator[Row]:
    """Two runs keep their measurement at the same time in place of an earlier one; the second is killed."""

    def kill(place: Path, call: int, half: int) -> bool:
        keep(made(place), 1.0, 0, 0)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(in_a_fork, keep, place, 2.0, 0, 0)
            was_killed = killed(keep, place, 3.0, call, half)
            assert first.result() == 0
        return was_killed

    for what, place in at_every_call(folder, kill):
        seconds = kept_at(place).find("seconds", float)
        left = len(list(place.iterdir())) - 1
        fault = "killed as it keeps a measurement, next to another run"
        yield fault, f"{what}: {seconds}, {left} files left", seconds in (2.0, 3.0) and left <= 1, None, None


KINDS = {
    "exchanges": exchanges,
    "measurements": measurements,
    "checkpoints": checkpoints,
    "ranks": ranks,
    "tiers": tiers,
    "studies": studies,
    "files": files,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in KINDS[sys.argv[1]](made(Path(sys.argv[2]))):
        print(json.dumps(row), flush=True)
