"""Trials in processes of their own, two at a time, each with a deadline and a limit of memory."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.zoo.outcome import EXACT, RAW, SLOW, Result, line, read, worst
from tests.zoo.specimen import Specimen
from tests.zoo.trial import tried, tried_as_rank

AT_ONCE = 2
CPU_S = 90
DEADLINE_S = 600.0
"""Only a hang takes so long: what a model needs is counted by the processor's time, however busy the machine is."""
MEMORY_BYTES = 8 * 2**30

for loaded_once in (
    "torch._dynamo",
    "torch.export._trace",
    "torch._export.serde",
    "torch._export.passes.replace_with_hop_pass_util",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch._inductor.sizevars",
    "torch._subclasses.schema_check_mode",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.validator",
    "sympy.combinatorics",
    "sympy.tensor.tensor",
    "pipefit.pipeline.preload",
):
    # Otherwise each process would load them anew, which takes longer than most trials. One may be absent in a torch.
    with contextlib.suppress(ImportError):
        importlib.import_module(loaded_once)


@dataclass
class Child:
    """A process that is trying a model.

    Attributes:
        pid: of the process.
        specimen: the model.
        folder: its private folder, which gets its results.
        begun: when it began.
    """

    pid: int
    specimen: Specimen
    folder: Path
    begun: float = field(default_factory=time.perf_counter)


def results(specimens: Sequence[Specimen]) -> Iterator[Result]:
    """The outcomes of models, each as soon as it is known."""
    waiting = list(specimens)
    running: list[Child] = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(_begin(waiting.pop(0)))
        time.sleep(0.02)
        for child in list(running):
            found = _ended(child)
            if found is not None:
                running.remove(child)
                yield found


def _begin(specimen: Specimen) -> Child:
    folder = Path(tempfile.mkdtemp(prefix="zoo-"))
    return Child(_forked(lambda: _try(specimen, folder), folder / "words"), specimen, folder)


def _try(specimen: Specimen, folder: Path) -> None:
    """One model, over two processes first: nothing has been computed here yet, so that they can be forked."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
    result = _as_two(specimen, folder) if specimen.group == "hand" else Result(specimen.name, EXACT)
    if result.outcome == EXACT:
        result = tried(specimen)
    (folder / "result").write_text(line(result))


def _as_two(specimen: Specimen, folder: Path) -> Result:
    meeting = folder / "run"
    meeting.mkdir(mode=0o700)
    pids = [
        _forked(lambda: _as_rank(specimen, folder, rank), folder / f"words{rank}")  # noqa: B023
        for rank in (0, 1)
    ]
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if not all((folder / f"result{rank}").exists() for rank, one in enumerate(pids) if one in codes):
            break
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    found = [read((folder / f"result{rank}").read_text()) for rank in (0, 1) if (folder / f"result{rank}").exists()]
    if len(found) < 2:
        words = " ".join((folder / f"words{rank}").read_text()[-300:] for rank in (0, 1))
        found.append(Result(specimen.name, RAW, f"a rank of two ended without a result: {words}"))
    # The rank that failed says why; the other one only that it is gone.
    told = [one for one in found if "Connection closed by peer" not in one.detail]
    return worst(told or found)


def _as_rank(specimen: Specimen, folder: Path, rank: int) -> None:
    result = tried_as_rank(specimen, folder / "run", rank)
    (folder / f"result{rank}").write_text(line(result))


def _ended(child: Child) -> Result | None:
    """The outcome of a child that has ended, or has used up its time."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    seconds = time.perf_counter() - child.begun
    if not pid and seconds < DEADLINE_S:
        return None
    specimen = child.specimen
    if not pid:
        os.killpg(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        found = Result(specimen.name, SLOW, f"hangs: more than {DEADLINE_S:.0f} s", seconds=seconds)
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        found = Result(specimen.name, SLOW, f"more than {CPU_S} s of one core", seconds=seconds)
    elif (child.folder / "result").exists():
        found = read((child.folder / "result").read_text())
    else:
        code = os.waitstatus_to_exitcode(status)
        words = (child.folder / "words").read_text()[-300:]
        found = Result(specimen.name, RAW, f"its process ended with {code}: {words}", seconds=seconds)
    found.by_hand, found.why = specimen.by_hand, specimen.why
    shutil.rmtree(child.folder, ignore_errors=True)
    return found


def _forked(function: Callable[[], Any], words: Path) -> int:
    """The number of a new process that runs a function; what it prints goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with words.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        _die_with_parent()
        faulthandler.register(signal.SIGUSR1)
        torch.set_num_threads(1)
        function()
        code = 0
    except BaseException as problem:
        sys.stderr.write(f"{type(problem).__name__}: {problem}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """Ends this process when the one that forked it ends, even if that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
