"""The small trainings that faults are tried on, and the places in them where a fault can come."""

import gc
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.runtime import jobs

from pipefit import Pipeline
from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Op
from pipefit.pipeline.resume import committed_step
from pipefit.runtime.collectives import exchange
from pipefit.runtime.session import current
from pipefit.runtime.waits import state_of
from pipefit.spec.options import Spilled

STEPS, EVERY = 6, 2
SPILLED, CONTINUED = "spilled", "continued"
SHAPES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "pipedream": {"schedule": "pipedream"},
    "pipedream-2bw": {"schedule": "pipedream-2bw"},
    "zb-h1": {"schedule": "zb-h1"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "replicas": {"replicas": (2, 1), "microbatches": 4},
    SPILLED: {"schedule": "breadth-first", "chunks": 2},
}
"""Options of each; all have six layers, batch norm, dropout, momentum and a learning-rate schedule."""

RANKS = {shape: 3 if shape == "replicas" else 2 for shape in SHAPES}
WHENS = ("first", "steady", "last")


class Place(NamedTuple):
    """A kind of instruction of a rank: the first one of the training, one in its middle, or its last."""

    rank: int
    op: str
    when: str


def pipeline(shape: str, folder: Path, **more: Any) -> Pipeline:
    """The training of a shape; a spilled one resumes from its disk where all ranks have committed a step."""
    options = {"stages": RANKS[shape], **SHAPES[shape], **more}
    if shape == SPILLED:
        tier = folder / "tier"
        resume = None not in exchange(current(), committed_step(tier))  # asked by all: another rank may have made it
        options |= {"stages": 4, "spill": Spilled(disk=tier, resume=resume)}
    elif "chunks" in options:
        options["stages"] = RANKS[shape] * options["chunks"]
    elif "replicas" in options:
        options["stages"] = len(options["replicas"])
    return jobs.pipeline(**options)


def batches() -> jobs.Batches:
    """The batches of all steps."""
    return jobs.batches(STEPS)


def passes(pipe: Pipeline) -> tuple[int, Sequence[Sequence[Instruction]]]:
    """The number of passes of the training, and the list of each rank in a pass."""
    each = 1 if pipe.schedule.is_synchronous else EVERY
    return STEPS // each, pipe.loop._program_of(each).ranks


def places(pipe: Pipeline) -> Iterator[tuple[int, str]]:
    """Each rank with each kind of its instructions."""
    for rank, instructions in enumerate(passes(pipe)[1]):
        yield from ((rank, op.value) for op in dict.fromkeys(i.op for i in instructions))


def found(pipe: Pipeline, place: Place) -> tuple[int, int, Instruction]:
    """The pass, the index in its list, and the instruction of a place."""
    count, ranks = passes(pipe)
    own = ranks[place.rank]
    listed = [(n, index) for n in range(1, count + 1) for index, i in enumerate(own) if i.op is Op(place.op)]
    number, index = listed[{"first": 0, "steady": len(listed) // 2, "last": -1}[place.when]]
    return number, index, own[index]


def signal_at(pipe: Pipeline, place: Place, number: int, continued: Path) -> None:
    """Lets the rank of a place send itself a signal when it is about to run the instruction there.

    A rank that was stopped, and that somebody has continued, makes the file `continued`.
    """
    passed, index, _ = found(pipe, place)
    progress, sent = current().progress, []
    original = progress.at

    def at(here: int, waits: bool = False) -> None:
        original(here, waits)
        if (progress.passes, here) == (passed, index) and not waits and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
            if number == signal.SIGSTOP:
                continued.touch()

    if current().rank == place.rank:
        progress.at = at


def digest(pipe: Pipeline) -> str:
    """The checksum of all weights and buffers; every rank must call it."""
    state = pipe.state_dict()
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def is_there(pid: int) -> bool:
    """Whether a process is there, and has not ended."""
    return state_of(pid) != "ended"


def left_by(folder: Path) -> list[str]:
    """Processes of a run that are still there, and its folder in the memory of the machine."""
    found = [str(child.pid) for child in multiprocessing.active_children()]
    for path in folder.glob("*.pid"):
        found += [path.stem] * is_there(int(path.stem))
        memory = path.read_text()
        found += [memory] * Path(memory).exists()
    return found


def descriptors() -> int:
    """Open ones of this process, once the objects of earlier runs are gone."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def sampled(all_places: Sequence[tuple[int, str]], signals: Sequence[str], every: bool) -> Iterator[tuple[Place, str]]:
    """Trials at all places: each with every signal and every time, or a Latin square of them.

    In the square each place meets each time and each signal once, and over the places every signal meets every time:
    all pairs, with a third of the trials.
    """
    for number, (rank, op) in enumerate(all_places):
        for column, when in enumerate(WHENS):
            for row, name in enumerate(signals):
                if every or (row - column - number) % len(signals) == 0:
                    yield Place(rank, op, when), name
