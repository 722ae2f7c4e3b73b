"""Runs programs over a model: builds this process's workers once, then executes pass after pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipefit.errors import InvalidProgramError
from pipefit.ir import text
from pipefit.ir.graph import collective_members, dependency_graph
from pipefit.ir.op import Op
from pipefit.ir.program import Program
from pipefit.parallel.mesh import Mesh
from pipefit.runtime.collectives import exchange
from pipefit.runtime.compiled import compile_rank
from pipefit.runtime.distributed import DistributedTransport
from pipefit.runtime.executor import Execution, Feed
from pipefit.runtime.handlers import HANDLERS
from pipefit.runtime.launch import program_file
from pipefit.runtime.local import LocalTransport, Mailbox
from pipefit.runtime.malloc import keep_freed
from pipefit.runtime.progress import Progress
from pipefit.runtime.reducing import early_reductions, make_buckets
from pipefit.runtime.session import Session
from pipefit.runtime.widened import TensorTransport
from pipefit.runtime.worker import Worker
from pipefit.simulate import most_unposted
from pipefit.timeline import Event


@dataclass(frozen=True)
class PassResult:
    """The results of one pass over a program, for the ranks of this process.

    Attributes:
        losses: weighted losses by micro-batch, of those computed here.
        executions: of the ranks of this process, with their times.
        moved_bytes: to other ranks, and to the processes that share this one's rank.
    """

    losses: dict[int, Tensor]
    executions: list[Execution]
    moved_bytes: tuple[float, float] = (0.0, 0.0)

    @property
    def metric(self) -> float:
        """The weighted sum of the metric over the micro-batches whose loss was computed here."""
        return sum(value for run in self.executions for value in run.metrics)

    def events(self, repeat: int = 0, origin_s: float = 0.0) -> list[Event]:
        """When each instruction ran, in seconds since `origin_s`."""
        return [
            Event(run.compiled.rank, position, repeat, start - origin_s, end - origin_s)
            for run in self.executions
            for position, (start, end) in enumerate(zip(run.starts, run.ends, strict=True))
        ]


class Engine:
    """The ranks of this process, ready to run programs.

    Attributes:
        workers: one in a distributed run; all of them in a local one.
    """

    def __init__(self, workers: Sequence[Worker], num_stages: int, session: Session, device: torch.device) -> None:
        self.session = session
        self.device = device
        self.workers = list(workers)
        self._mailbox = Mailbox()
        self._flags: list[dict[tuple[int, object], list[bool]]] = [{} for _ in workers]
        self._prepared: set[str] = set()
        self.transports: list[LocalTransport | DistributedTransport] = [
            TensorTransport(worker.rank, num_stages, worker.device, worker.mesh)
            if worker.mesh.tensor > 1
            else DistributedTransport(worker.rank, num_stages, worker.device, session.on_one_machine)
            if session.is_distributed
            else LocalTransport(worker.rank, self._mailbox)
            for worker in self.workers
        ]
        session.before_leaving.extend(t.finish for t in self.transports if isinstance(t, DistributedTransport))

    @property
    def mesh(self) -> Mesh:
        """The processes that share this process's rank."""
        return self.workers[0].mesh

    def run(
        self,
        program: Program,
        feed: Feed,
        metric: Callable[[Any, Any], float] | None = None,
        look: Callable[[], None] | None = None,
    ) -> PassResult:
        """Executes a program once on the ranks of this process.

        Args:
            program: proven.
            feed: its data.
            metric: taken of every output in addition to its loss.
            look: called after each instruction.

        Raises:
            InvalidProgramError: the ranks of this process wait for each other forever (a verified program never does).
        """
        is_new = program.digest not in self._prepared
        self._prepare(program)
        sent, inside = self._moved_bytes()
        executions = []
        for worker, transport, flags in zip(self.workers, self.transports, self._flags, strict=True):
            transport.begin(feed.signatures)
            compiled = compile_rank(program, worker.rank)
            progress = self.session.progress if self.session.is_distributed else Progress()
            if worker.scale is not None:
                worker.scale.begin()
            run = Execution(compiled, worker, transport, feed, flags, progress, metric)
            run.look = look
            run.early = early_reductions(program, worker.rank) if worker.buckets else {}
            executions.append(run)
        self.executions = executions
        with self.session.passing(program):
            _drive(executions)
        for worker in self.workers:
            for store in worker.stores.values():
                store.rebase()
            if worker.spilling:
                worker.spilling.end_pass()
        if is_new and self.session.is_distributed:
            self._settle_in()
        now_sent, now_inside = self._moved_bytes()
        losses = {mb: loss for run in executions for mb, loss in run.losses}
        return PassResult(losses, executions, (now_sent - sent, now_inside - inside))

    def _settle_in(self) -> None:
        """Settings that wait until a program has run: all threads are there, and sizes have been seen."""
        for transport in self.transports:
            if isinstance(transport, DistributedTransport):
                transport.let_work_finish()
        # Under a cap, what is free is rather given back; with a GPU, activations are there.
        if self.device.type == "cpu" and not any(worker.spilling for worker in self.workers):
            keep_freed()

    def _moved_bytes(self) -> tuple[float, float]:
        """Bytes that this process has sent so far: to other ranks, and to those it shares its rank with."""
        inside = self.mesh.region.moved_bytes if self.mesh.region is not None else 0.0
        gathered = sum(t.gathered_bytes for t in self.transports if isinstance(t, TensorTransport))
        return float(sum(transport.bytes_sent for transport in self.transports)), inside + gathered

    def _prepare(self, program: Program) -> None:
        if program.digest in self._prepared:
            return
        self._prepared.add(program.digest)
        if self.session.is_distributed:
            _agree_on(program, self.session)
        for worker in self.workers:
            make_buckets(worker, program)
        graph = dependency_graph(program)
        sets = [collective_members(program.header, graph.instructions[group[0]]) for group in graph.collectives]
        links = [(rank, i.peer) for rank, _, i in program if i.op is Op.SEND]
        # Where each rank has one stage, receivers keep up with what is sent.
        unposted = most_unposted(program) if links and program.header.num_chunks > 1 else 0
        with self.session.meeting():
            for transport in self.transports:
                if isinstance(transport, DistributedTransport):
                    transport.allow_sends(unposted)
                    transport.prepare(sets, links)
        number = self.session.programs.setdefault(program.digest, len(self.session.programs))
        if self.session.folder and self.session.rank == 0:
            text.save(program, program_file(self.session.folder, number))


def _agree_on(program: Program, session: Session) -> None:
    """Checks that all ranks have derived the same program before it runs.

    Raises:
        InvalidProgramError: on every rank, when two differ.
    """
    digests = exchange(session, program.digest)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise InvalidProgramError(
                f"rank {rank} is about to run another program than rank 0: every rank must make the same Pipeline "
                "(model, stages, schedule, microbatches, version of pipefit) and call its methods alike"
            )


def _drive(executions: Sequence[Execution]) -> None:
    """Steps the ranks of this process round-robin until all are done."""
    active = [(run, run.run(HANDLERS)) for run in executions]
    while active:
        moved, waiting = False, []
        for run, steps in active:
            before = (run.index, len(run.handles))
            stopped = next(steps, None)
            if stopped is not None:
                waiting.append((run, steps))
            moved |= stopped is None or (run.index, len(run.handles)) != before
        if not moved:
            raise InvalidProgramError(
                "the ranks wait for each other: "
                + "; ".join(
                    f"rank {run.compiled.rank} at '{run.compiled.instructions[run.index]}'" for run, _ in waiting
                )
            )
        active = waiting
