"""The meeting of a run's processes: a process group whose names in the store belong to this start alone.

A run may be started again, by `launch(…, recover=n)` or by torchrun (`--max-restarts`, `--nnodes 1:3`). A store that
outlives a start still has the addresses of its processes, at which nobody answers. So each start has its own names:

    pipefit run, train    a new file for each start
    torchrun              a name that its processes agree on; torchrun's own count of restarts differs among its agents
                          without a store that outlives a start: the count that the machines keep in their memory
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
import uuid
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from pipefit.errors import CommunicationError, PipefitError
from pipefit.spec.files import write_atomically
from pipefit.stage import accelerator

TIMEOUT = timedelta(minutes=30)
RESTART = "PIPEFIT_RESTART"
FULL = "PIPEFIT_FULL"
MEMORY = "PIPEFIT_MEMORY"
"""Variables that the launcher sets for its ranks: the numbers of a `Start`, and a folder in the machine's memory."""

ENTERS = "PIPEFIT_ENTERS"
ENTERED = "PIPEFIT_ENTERED"
"""Variables of a process that is to enter a run, and of all ranks: the number of processes that have entered."""

SHARED, AGENT = Path("/dev/shm"), f"pipefit-agent-{os.getuid()}-"
"""The machine's memory, and the first part of the names there of folders of torchrun's agents."""

STORE = "pipefit-store-"
"""The first part of the names of files, in the run's folder, through which ranks of one machine meet."""

_INTERVAL_S = 0.01
_LOOK_S = 0.001


class Start(NamedTuple):
    """One start of a run's processes.

    Attributes:
        restart: number of earlier starts.
        full: processes of the largest start so far.
    """

    restart: int = 0
    full: int = 1


def can_restart() -> bool:
    """Returns whether this run's processes are started again after a fault."""
    return MEMORY in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


class QuickStore(dist.Store):
    """A store of torch whose waits end at once: torch looks into a file every 10 ms, for each new process group.

    Args:
        store: that has the keys.

    Attributes:
        newest: that of the default process group; torch's own reference does not keep a Python object.
        has_ended: whether nobody adds keys any more, so that waits end in an error.
    """

    newest: QuickStore | None = None

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        QuickStore.newest = self
        self.has_ended = False
        for name in ("set", "get", "check", "add", "compare_set"):
            setattr(self, name, partial(getattr(store, name)))

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        """Waits until the store has some keys.

        Raises:
            CommunicationError: nobody has added them.
        """
        until_s = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if self.has_ended or time.monotonic() > until_s:
                raise CommunicationError(f"no other rank has added {keys} to the store of the run")
            time.sleep(_LOOK_S)


def meet(rank: int, num_ranks: int, folder: Path | None) -> Start:
    """Makes the default process group, unless the user has made it.

    Args:
        rank: the rank of this process.
        num_ranks: the number of ranks of the run.
        folder: the folder of a run that pipefit itself has started, all on this machine; else None.

    Raises:
        PipefitError: the processes could not meet.
    """
    restart = int(os.environ.get(RESTART, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    start = Start(restart, int(os.environ.get(FULL, num_ranks)))
    if dist.is_initialized():
        return start
    # Without `device_id`. With it, torch 2.13 splits each later group off the default one, in a call that every process
    # of the run must make at the same time: the number of groups times the number of processes. A group of Gloo for
    # some processes, which the user's code may make, would hang the others: only they make that call. The device is not
    # known here yet, either: a run on the CPU, or with several processes on one GPU, would fail at its start. NCCL's
    # connections are made before the first instruction anyway, see `DistributedTransport._warm_up`.
    backend = accelerator.backends()
    if folder is not None:
        # Gloo would otherwise look up the host's name, which may resolve to an external address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        entered = int(os.environ.get(ENTERED, "0"))
        store: Any = dist.FileStore(str(folder / f"{STORE}{restart}-{entered}"), num_ranks)
        if backend == "gloo":  # threads of NCCL look into the store, too, and would need Python's lock
            store = QuickStore(store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        return start
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            dist.init_process_group(backend, timeout=TIMEOUT)
            if "TORCHELASTIC_RUN_ID" in os.environ:
                return _counted(start, rank, num_ranks)
            return start
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        of_agent = dist.TCPStore(*address, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
        name, start = agree_on_start(of_agent, rank, num_ranks, restart)
        store = dist.PrefixStore(f"pipefit/{name}", of_agent)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as problem:
        raise PipefitError(f"rank {rank} of {num_ranks} could not join the others: {problem}") from None
    return start


def agent_folder() -> Path | None:
    """The private folder in this machine's memory that belongs to torchrun's agent; None: there is no such memory.

    Raises:
        PipefitError: the folder is not private.
    """
    folder = SHARED / f"{AGENT}{os.getppid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    try:
        found = folder.lstat()
    except OSError:
        return None
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise PipefitError(f"{folder}: expected a private folder of this user; remove it")
    return folder


def _counted(start: Start, rank: int, num_ranks: int) -> Start:
    """The start after those that any machine remembers; torchrun counts none where only a machine came or went."""
    store, folder = dist.distributed_c10d._get_default_store(), agent_folder()
    if folder is None:
        path = None
    else:
        path = folder / "start.json"
    store.set(f"pipefit/known/{rank}", path.read_text(encoding="utf-8") if path and path.exists() else "[-1, 0]")
    known = [json.loads(store.get(f"pipefit/known/{other}")) for other in range(num_ranks)]
    restarts, sizes = zip(*known, strict=True)
    start = Start(max(start.restart, max(restarts) + 1), max(num_ranks, *sizes))
    if path is not None and os.environ.get("LOCAL_RANK") == "0":
        write_atomically(path, json.dumps(start), durable=False)
    return start


def agree_on_start(store: Any, rank: int, num_ranks: int, restart: int) -> tuple[str, Start]:
    """The name of this start, and its number, the same in all its processes; the store may have been used before.

    Every process leaves a word of its own. Rank 0 proposes a name made of these words; one of an earlier start may be
    among them. Each process answers to a proposal with its own word, and rank 0 makes another one until all have.

    Args:
        store: that all processes share, also those of earlier starts, which have ended.
        rank: the rank of this process.
        num_ranks: the number of ranks of this start.
        restart: number of earlier starts that this process knows of.
    """
    word = uuid.uuid4().hex
    store.set(f"pipefit/word/{rank}", json.dumps([word, restart]))
    if rank == 0:
        return _propose(store, num_ranks)
    return _answer(store, rank, word)


def _propose(store: Any, num_ranks: int) -> tuple[str, Start]:
    if store.check(["pipefit/start"]):
        before = json.loads(store.get("pipefit/start"))
    else:
        before = None
    while True:
        words = [json.loads(store.get(f"pipefit/word/{rank}")) for rank in range(num_ranks)]
        number = max([known for _, known in words] + ([before["restart"] + 1] if before else []))
        full = max(num_ranks, before["full"] if before else 0)
        name = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
        proposal = {"name": name, "words": [word for word, _ in words], "restart": number, "full": full}
        store.set("pipefit/start", json.dumps(proposal))
        answers = [f"pipefit/{name}/answer/{rank}" for rank in range(1, num_ranks)]
        while not all(store.check([answer]) for answer in answers):
            time.sleep(_INTERVAL_S)
            if [json.loads(store.get(f"pipefit/word/{rank}")) for rank in range(num_ranks)] != words:
                break
        else:
            store.set(f"pipefit/{name}/agreed", "1")
            return name, Start(number, full)


def _answer(store: Any, rank: int, word: str) -> tuple[str, Start]:
    answered = ""
    while True:
        proposal = json.loads(store.get("pipefit/start"))
        name, words = proposal["name"], proposal["words"]
        if rank < len(words) and words[rank] == word:
            if name != answered:
                store.set(f"pipefit/{name}/answer/{rank}", "1")
                answered = name
            if store.check([f"pipefit/{name}/agreed"]):
                return name, Start(proposal["restart"], proposal["full"])
        time.sleep(_INTERVAL_S)
