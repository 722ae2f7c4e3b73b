"""A private folder in the memory of each machine, which outlives the processes of a start.

It holds copies of the training (`checkpoint.memory`), and what the first start has measured and decided: a restarted
run measures nothing again, because other figures could give another plan, and so other rounding.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from pipefit.errors import PipefitError
from pipefit.runtime.collectives import exchange
from pipefit.runtime.meeting import AGENT, MEMORY, SHARED, agent_folder
from pipefit.runtime.session import Session
from pipefit.spec.files import write_atomically

T = TypeVar("T")


def processes_here(session: Session) -> range:
    """The processes of this machine."""
    first = session.rank - int(os.environ.get("LOCAL_RANK", session.rank))
    count = int(os.environ.get("LOCAL_WORLD_SIZE", session.num_ranks))
    return range(first, first + count)


def outliving_folder(session: Session) -> Path | None:
    """The private folder in this machine's memory that outlives its ranks; None: nobody would start them again.

    Under torchrun it belongs to the agent. It goes when the run ends well (see `session.join`); that of a killed agent,
    when another begins.

    Raises:
        PipefitError: the folder is not private.
    """
    if MEMORY in os.environ:
        return Path(os.environ[MEMORY])
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    for other in SHARED.glob(f"{AGENT}*"):
        if not Path(f"/proc/{other.name.removeprefix(AGENT)}").exists():
            shutil.rmtree(other, ignore_errors=True)
    folder = agent_folder()
    if folder is None:
        return None
    os.environ[MEMORY] = str(folder)
    return folder


def kept(session: Session, name: str, kind: type[T], make: Callable[[], T]) -> T:
    """The value that an earlier start with as many processes has made, or a new one. Every rank must call it.

    Args:
        session: of the run.
        name: of the value in this run.
        kind: of the value; JSON data by msgspec.
        make: returns it, the same on every rank.
    """
    found = earlier(session, name, kind, session.num_ranks)
    if found is not None:
        return found
    value, folder = make(), outliving_folder(session)
    if folder is not None and session.rank == processes_here(session)[0]:
        with contextlib.suppress(PipefitError):  # a full memory
            data = msgspec.to_builtins(value, enc_hook=dict)  # the hook is for read-only mappings
            text = json.dumps(data)  # unlike msgspec's own JSON it has infinities
            write_atomically(folder / _file(name, session.num_ranks), text, durable=False)
    return value


def earlier(session: Session, name: str, kind: type[T], num_ranks: int) -> T | None:
    """The value that an earlier start with some number of processes has made; None: there is none."""
    if not session.start.restart:
        return None
    folder = outliving_folder(session)
    text = None
    if folder is not None:
        with contextlib.suppress(FileNotFoundError):
            text = (folder / _file(name, num_ranks)).read_text(encoding="utf-8")
    for found in exchange(session, text):
        if found is not None:
            return msgspec.convert(json.loads(found), kind)
    return None


def _file(name: str, num_ranks: int) -> str:
    return f"{name}-of-{num_ranks}.json"
