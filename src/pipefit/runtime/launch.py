"""Starting the ranks of a run on this machine, and ending all of them when one fails."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing as mp
import multiprocessing.util
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipefit.errors import PipefitError
from pipefit.runtime import repairs
from pipefit.runtime.faults import forget, note
from pipefit.runtime.meeting import ENTERS, FULL, MEMORY, RESTART, STORE
from pipefit.runtime.memory_folder import memory_folder
from pipefit.runtime.outcomes import FINE, GRACE_S, LaunchError, collect, outcome_of, packed
from pipefit.runtime.signals import ENDING, PASSED_ON, die_with_launcher, handling, leaving
from pipefit.runtime.survivors import Survivors

_log = logging.getLogger("pipefit.launch")
_MOST_ADDRESS = 107
_TEMPORARY = "PIPEFIT_TEMPORARY"
_DEADLINE_S = 60.0
"""After the loss of a rank the others come together in so many seconds, where no deadline is given."""

_LEFT = (f"{STORE}*", "rank-*.hang", "rank-*.progress")


def launch(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    threads: int | None = None,
    folder: Path | None = None,
    quiet: bool = False,
    deadline_s: float | None = None,
    recover: int = 0,
    min_ranks: int | None = None,
    grow: bool = False,
) -> list[Any]:
    """Runs `function(*args)` in `num_ranks` processes that share a process group; returns their results by rank.

    Processes come from a server that has torch loaded already, so they start in a fraction of a second. Only rank 0
    writes to the terminal; the others write to log files. When one rank fails, all are ended within seconds and the
    failure of the first is reported, or all are started again. The first Ctrl-C or SIGTERM is passed on to the ranks,
    which stop after their step and may save; then this raises `KeyboardInterrupt` or `SystemExit(143)`. The second ends
    them at once.

    Args:
        function: importable by name; runs in each rank.
        num_ranks: processes to start.
        args: for the function; anything that can be pickled within this machine.
        threads: CPU threads per rank; None: what `OMP_NUM_THREADS` says, else the cores shared among the ranks.
        folder: private folder of the run, for logs; None: a temporary one, removed when all ranks succeed.
        quiet: rank 0 also writes only to its log.
        deadline_s: minimum seconds that a rank may stay at one instruction before the run is ended as hung; 0: no
            limit; None: the value of PIPEFIT_DEADLINE_S, else 60 s.
        recover: number of times that the run recovers after a rank has died, hung or failed: the others go on without
            it, or all are started again and `Pipeline.fit` resumes. An error before the first pass would come again, so
            it ends the run.
        min_ranks: where a rank fails again as it starts, one rank fewer is started, but no fewer than these; only with
            `recover`. None: always `num_ranks`.
        grow: in the place of a rank without which the others go on, another process is started; it enters at the end of
            a step of the first `Pipeline.fit`. Only with `recover`.

    Raises:
        LaunchError: a rank raised, or died.
        PipefitError: a rank refused its input (the same error that the rank raised).
    """
    if min_ranks is None:
        fewest = num_ranks
    else:
        fewest = min_ranks
    if num_ranks < 1:
        raise PipefitError(f"ranks: expected at least 1, got {num_ranks}")
    if not 1 <= fewest <= num_ranks:
        raise PipefitError(f"min_ranks: expected 1 to {num_ranks}, the number of ranks, got {min_ranks}")
    if min_ranks is not None and not recover:
        raise PipefitError("min_ranks: expected with recover; without it no rank is started again")
    if grow and not recover:
        raise PipefitError("grow: expected with recover; without it the run ends when a rank is lost")
    place = folder or Path(tempfile.mkdtemp(prefix="pipefit-"))
    place.mkdir(parents=True, exist_ok=True)
    forget(place)
    environment = {"PIPEFIT_RUN": str(place), FULL: str(num_ranks)}
    if deadline_s is not None:
        environment["PIPEFIT_DEADLINE_S"] = str(deadline_s)
    kept = memory_folder() if recover else contextlib.nullcontext()
    with kept as memory, _removed_unless_logs_matter(place if folder is None else None):
        if folder is None:
            temporary = [str(place)]
        else:
            temporary = []
        if memory is not None:
            environment[MEMORY] = memory
            temporary.insert(0, memory)
        environment[_TEMPORARY] = os.pathsep.join(temporary)
        faults = 0
        while True:
            own = environment | {RESTART: str(faults), "OMP_NUM_THREADS": str(threads or _usual_threads(num_ranks))}
            try:
                return _once(function, num_ranks, args, own, place, quiet, faults, recover, grow)
            except LaunchError as problem:
                faults = max(faults, problem.faults)
                if not problem.is_noted:
                    note(place, problem.time_s or time.time(), fault=str(problem), start=faults)
                if problem.is_of_entry:
                    # What was only to make the run faster must not end it.
                    grow = False
                    recover += 1
                elif faults == recover or (problem.raised and not problem.began):
                    raise
                else:
                    num_ranks -= bool(faults and not problem.began and num_ranks > fewest)
                faults += 1
                if problem.why_not:
                    why_not = f"\n  not repaired in place: {problem.why_not}"
                else:
                    why_not = ""
                _log.warning("%s%s\n  start %d of %d: %d ranks", problem, why_not, faults + 1, recover + 1, num_ranks)


def _usual_threads(num_ranks: int) -> int:
    """Threads of a rank that nobody gave: those of a run in this process, or a share of the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) >= 1:
        return int(asked)
    return max(1, (os.cpu_count() or 1) // num_ranks)


def _once(
    function: Callable[..., Any],
    num_ranks: int,
    args: Sequence[Any],
    environment: dict[str, str],
    place: Path,
    quiet: bool,
    faults: int,
    most_faults: int,
    grow: bool,
) -> list[Any]:
    """Starts all ranks once; returns their results, without those of ranks that were lost."""
    for stale in (place / ENDING, *(path for left in _LEFT for path in place.glob(left))):
        stale.unlink(missing_ok=True)
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    environment = {**os.environ, **environment, **sizes}  # the server's own environment is that of its start
    processes: list[Any] = []
    pipes = []
    with _passing_on(processes) as asked:
        context = _server()

        def start(rank: int, hides: bool, more: dict[str, str], asked: list[int]) -> None:
            ours, theirs = context.Pipe()
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | more
            log = place / f"rank-{rank}.log"
            process = context.Process(target=_main, args=(own, log, hides, quiet, theirs, function, args))
            _start(process, asked)
            theirs.close()
            processes.append(process)
            pipes.append(ours)

        def start_again(rank: int, faults: int) -> int:
            start(rank, True, {ENTERS: "1", RESTART: str(faults)}, [])
            return len(processes) - 1

        try:
            for rank in range(num_ranks):
                start(rank, quiet or rank > 0, {}, asked)
            deadline_s = float(environment.get("PIPEFIT_DEADLINE_S") or 0) or _DEADLINE_S
            survivors = Survivors(processes, pipes, place, faults, most_faults, deadline_s)
            if grow:
                survivors.newcomers.start = start_again
            outcomes = collect(processes, pipes, place, asked, survivors)
        finally:
            _end(processes, place)
        if asked or any(kind == "stopped" for kind, _ in outcomes):
            raise leaving(asked)
    return [result for _, result in outcomes]


def _start(process: Any, asked: list[int]) -> None:
    """Starts a rank, unless the run was asked to stop meanwhile.

    Raises:
        LaunchError: the server that starts the ranks was killed.
    """
    try:
        process.start()
    except (EOFError, ConnectionError):
        if not asked:
            raise LaunchError("the process from which the ranks start was killed; start the run again") from None
    if asked:
        raise leaving(asked)


@contextlib.contextmanager
def _removed_unless_logs_matter(place: Path | None) -> Iterator[None]:
    """Removes a temporary folder at the end, unless the message of a failure names the logs in it."""
    doomed = place
    try:
        yield
    except LaunchError:
        doomed = None
        raise
    finally:
        if doomed is not None:
            shutil.rmtree(doomed, ignore_errors=True)


@contextlib.contextmanager
def _passing_on(processes: list[Any]) -> Iterator[list[int]]:
    """Passes Ctrl-C and SIGTERM on to the ranks; the list holds those that came.

    The second one of a kind ends the run at once, and so does one that comes before there is a rank. Only a main thread
    can have handlers.
    """
    asked: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if number in asked or not processes:
            raise leaving([*asked, number])
        asked.append(number)
        if len(asked) > 1:
            return  # one of a terminal or a batch system, in addition to the other
        _log.warning("stopping after this step; once more ends it at once")
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process.pid, PASSED_ON)

    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    main = threading.current_thread() is threading.main_thread()
    taken = [number for number, handler in usual.items() if main and signal.getsignal(number) is handler]
    with handling(pass_on, *taken):
        yield asked


def fork_server() -> Any:
    """The context of processes that come from a fork server. The path of its socket is short enough.

    An address holds at most 107 bytes (unix(7)); a longer TMPDIR is replaced by /tmp, for the socket only.
    """
    before = tempfile.gettempdir()
    if len(os.fsencode(f"{before}/pymp-12345678/listener-12345678")) > _MOST_ADDRESS:
        tempfile.tempdir = next(place for place in ("/tmp", "/var/tmp", before) if os.access(place, os.W_OK))
    try:
        mp.util.get_temp_dir()  # made once; the server and the ranks use the same
    finally:
        tempfile.tempdir = before
    return mp.get_context("forkserver")


@functools.cache
def _server() -> Any:
    """The fork server with torch and the runtime loaded, started once per process."""
    context = fork_server()
    context.set_forkserver_preload(["pipefit.pipeline.preload"])
    return context


def _main(
    environment: dict[str, str],
    log: Path,
    hides: bool,
    quiet: bool,
    pipe: Connection,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    """Runs a rank's process; one that hides writes only to its log, and to the terminal once it is rank 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the server ignores
    mp.set_start_method(None, force=True)  # Python's own, as in a plain script
    os.register_at_fork(after_in_child=pipe.close)  # whose end tells the launcher of the end of this process alone
    die_with_launcher(*environment.pop(_TEMPORARY).split(os.pathsep), mp.util.get_temp_dir())
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if MEMORY in environment and environment.get(repairs.REPAIR) != "0":
        repairs.channel = pipe
    if hides and not quiet:
        repairs.terminal = [os.dup(standard) for standard in (1, 2)]
    if hides:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for standard in (1, 2):  # for C++ too
            os.dup2(handle, standard)
    outcome = outcome_of(function, args, log)
    with contextlib.suppress(OSError):
        pipe.send_bytes(packed(outcome))
    for child in mp.active_children():
        if child.daemon:  # which Python ends at its own end
            child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if outcome[0] in FINE else 1)


def _end(processes: Sequence[Any], place: Path) -> None:
    """Ends the running processes: by SIGTERM, then by SIGKILL."""
    alive = [process for process in processes if process.is_alive()]
    if not alive:
        return
    with contextlib.suppress(OSError):
        (place / ENDING).touch()
    for process in alive:
        process.terminate()
    wait_or_kill(alive, GRACE_S / 2)


def wait_or_kill(processes: Iterable[Any], grace_s: float) -> None:
    """Waits for the ends of processes, and kills those that are still there after some seconds."""
    deadline = time.monotonic() + grace_s
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Runs a user's script as `__main__` in this rank."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    runpy.run_path(path, run_name="__main__")
