"""Trainings in which a rank is stopped while it saves; importable by name."""

import os
import signal
import time
from typing import Any

from tests.faults.recovered_jobs import train

from pipefit.checkpoint import commit
from pipefit.runtime.session import current

PLACES = [(0, "agree"), (0, "make_folder"), (0, "write_tensors"), (0, "write_file"), (1, "agree"), (1, "write_tensors")]
"""A rank, and a function of a save: it stops as it begins that. Only rank 0 makes folders, and writes the manifest."""


def train_and_stop(shape: str, place: str, rank: int, name: str, call: int, goes_on: bool) -> tuple[list[str], str]:
    """Losses and the checksum of the weights; in the first start a rank stops at some call of a function of a save.

    Args:
        shape: of the training.
        place: of its checkpoints.
        rank: that stops.
        name: of the function.
        call: number of its call, from 1.
        goes_on: whether somebody continues the rank soon.
    """
    original, calls = getattr(commit, name), []

    def stopping(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            _stop(goes_on)
        return original(*args, **options)

    if (current().start.restart, current().rank) == (0, rank):
        setattr(commit, name, stopping)
    return train(shape, place, [])


def _stop(goes_on: bool) -> None:
    stopped = os.getpid()
    if goes_on and not os.fork():
        time.sleep(0.5)
        os.kill(stopped, signal.SIGCONT)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)
