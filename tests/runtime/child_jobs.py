"""Ranks that start processes of their own; importable by name."""

import multiprocessing as mp
import time
from multiprocessing.connection import Connection

from tests.runtime import jobs

from pipefit.errors import PipefitError


def train_and_terminate_a_child() -> tuple[int | None, int, bool]:
    """The exit code of a child that was terminated, the steps of the training after it, whether it was stopped."""
    pipe = jobs.pipeline()
    child = mp.Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
    return child.exitcode, len(pipe.fit(jobs.batches())), pipe.stop_requested


def pipeline_in_a_child() -> str:
    """The message of a child that makes a pipeline."""
    jobs.pipeline()
    ours, theirs = mp.Pipe(duplex=False)
    child = mp.Process(target=_make_pipeline, args=(theirs,))
    child.start()
    said = str(ours.recv())
    child.join()
    return said


def _make_pipeline(answers: Connection) -> None:
    try:
        jobs.pipeline()
    except PipefitError as problem:
        answers.send(str(problem))


def leave_a_child() -> None:
    """A child that Python ends at the end of this process."""
    mp.Process(target=time.sleep, args=(600,), daemon=True).start()
