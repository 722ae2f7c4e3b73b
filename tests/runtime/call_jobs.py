"""Ranks that call different methods; importable by name."""

import os
import signal
import time
from pathlib import Path

from tests.runtime import jobs

from pipefit import Checkpoints
from pipefit.runtime.session import current

METHODS = {
    "report": "Pipeline.report()",
    "state_dict": "Pipeline.state_dict()",
    "timeline": "Pipeline.timeline()",
    "load_state_dict": "Pipeline.load_state_dict()",
    "save": "Pipeline.save()",
    "evaluate": "Pipeline.evaluate()",
    "step": "trains or evaluates",
    "leave": "leaving the run",
}
"""The last action of a rank after two steps, with the words that name it."""


def call(place: str, methods: list[str]) -> None:
    """Trains two steps; then each rank calls its own method."""
    pipe = jobs.pipeline()
    for x, y in jobs.batches()[:2]:
        pipe.step(x, y)
    mine = methods[current().rank]
    if mine == "step":
        for x, y in jobs.batches()[2:]:
            pipe.step(x, y)
    elif mine == "save":
        pipe.save(place)
    elif mine == "load_state_dict":
        pipe.load_state_dict({})
    elif mine == "evaluate":
        pipe.evaluate(jobs.batches()[:1])
    elif mine != "leave":
        getattr(pipe, mine)()


def report_in_a_callback() -> None:
    """Only rank 0 reports, in the middle of a `fit`."""
    pipe = jobs.pipeline()
    pipe.fit(jobs.batches(), callbacks=[lambda record: pipe.report() if pipe.rank == 0 and record.step == 2 else None])


def checkpoints_on_one_rank(place: str) -> None:
    """Only rank 0 has the callback."""
    pipe = jobs.pipeline()
    callbacks = []
    if pipe.rank == 0:
        callbacks.append(Checkpoints(pipe, place, 2))
    pipe.fit(jobs.batches(), callbacks=callbacks)


def train_when_others_take_their_time(seconds: float) -> list[float]:
    """Rank 1 is late at each method that all call, and at the end."""
    pipe = jobs.pipeline()
    losses = [pipe.step(x, y) for x, y in jobs.batches()]
    for method in ("report", "state_dict", "timeline"):
        time.sleep(seconds * pipe.rank)
        getattr(pipe, method)()
    time.sleep(seconds * pipe.rank)
    return losses


def lose_a_peer(place: str, method: str) -> None:
    """Rank 1 dies before a method that both call; rank 0 leaves the kind of its error in a file."""
    pipe = jobs.pipeline()
    pipe.step(*jobs.batches()[0])
    if current().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    calls = {
        "step": lambda: pipe.step(*jobs.batches()[1]),
        "fit": lambda: pipe.fit(jobs.batches()),
        "evaluate": lambda: pipe.evaluate(jobs.batches()),
        "save": lambda: pipe.save(place),
    }
    try:
        calls.get(method, getattr(pipe, method))()
    except Exception as problem:
        Path(f"{place}-kind").write_text(type(problem).__name__)
        raise
