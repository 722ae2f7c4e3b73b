"""Runs programs over a model: builds this process's workers once, then executes pass after pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipefit.errors import InvalidProgramError, NonFiniteLossError, PipefitError
from pipefit.ir import text
from pipefit.ir.graph import collective_members, dependency_graph
from pipefit.ir.op import Op
from pipefit.ir.program import Header, Program
from pipefit.parallel.loss import Loss
from pipefit.parallel.threads import let_carriers_wait, let_go
from pipefit.passes.gathering import gathering_of
from pipefit.runtime.collectives import check_alike
from pipefit.runtime.compiled import compile_rank
from pipefit.runtime.distributed import DistributedTransport
from pipefit.runtime.executor import Execution
from pipefit.runtime.finite import check_unread
from pipefit.runtime.handlers import HANDLERS
from pipefit.runtime.local import LocalTransport, Mailbox
from pipefit.runtime.malloc import keep_freed
from pipefit.runtime.microbatches import Feed
from pipefit.runtime.outcomes import program_file
from pipefit.runtime.progress import MEETING, Progress
from pipefit.runtime.reducing import make_buckets
from pipefit.runtime.repairs import InterruptedUnitError
from pipefit.runtime.session import Session
from pipefit.runtime.transport import Ending
from pipefit.runtime.worker import Worker
from pipefit.simulate import most_unposted
from pipefit.spec.files import write_atomically
from pipefit.stage.accelerator import is_accelerator
from pipefit.stage.moments import Moments
from pipefit.stage.training import Metric


class Engine:
    """The ranks of this process, ready to run programs.

    Attributes:
        workers: one in a distributed run; all of them in a local one.
        transports: of each worker.
        mesh: the processes that share this process's rank.
        metric_names: of the metrics that the loss returns, the same on every rank; None: not known yet.
        is_lost: whether a step has failed after some of its updates.
        has_weights: whether they can be used: not once they were given back in parts, or their tiers were closed.
    """

    def __init__(self, workers: Sequence[Worker], num_stages: int, session: Session, device: torch.device) -> None:
        self.session = session
        self.device = device
        self.metric_names: tuple[str, ...] | None = None
        self.has_weights = True
        self._between: DistributedTransport | None = None
        self._moments = Moments(device) if is_accelerator(device) else None
        self.take(workers, num_stages, session)

    def take(self, workers: Sequence[Worker], num_stages: int, session: Session) -> None:
        """Takes the ranks of a plan that this process runs, in place of others.

        Process groups stay within a session. Those of another session are not used again.

        Args:
            workers: one in a distributed run; all of them in a local one.
            num_stages: of the plan.
            session: the ranks of the run.
        """
        self.workers = list(workers)
        self.mesh = workers[0].mesh
        self.is_lost = False
        self.executions: list[Execution] = []
        self._prepared: set[str] = set()
        if self._between is not None and session is self.session:
            self._between.number_stages(num_stages)
        else:
            self._between = self._meet(num_stages, session)
        self.session = session
        mailbox = Mailbox()
        self.transports = [self._between or LocalTransport(worker.rank, mailbox) for worker in self.workers]

    def _meet(self, num_stages: int, session: Session) -> DistributedTransport | None:
        """The transport to the other processes of a session; None: there are none."""
        if self._between is not None:
            if self._between.finish in session.before_leaving:
                session.before_leaving.remove(self._between.finish)
            let_go(vars(self._between))
        if not session.is_distributed:
            return None
        has_link_groups = session.folder is not None and self.mesh.tensor == 1
        rank = self.workers[0].rank
        made = DistributedTransport(rank, num_stages, self.device, self.mesh, has_link_groups)
        session.before_leaving.append(made.finish)
        return made

    @property
    def moved_bytes(self) -> tuple[float, float]:
        """Bytes that this process has sent in the last pass: to other ranks, and to processes of its own rank."""
        inside = 0.0
        if self.mesh.region is not None:
            inside = self.mesh.region.moved_bytes
        sent = sum(transport.bytes_sent for transport in self.transports)
        return float(sent), inside

    def check_weights(self) -> None:
        """Checks that the weights can be used.

        Raises:
            PipefitError: they cannot, after the pipeline was closed.
        """
        if not self.has_weights:
            raise PipefitError(
                "the Pipeline was closed, and its model (spilled, or shared by tensor parallelism or by replicas) "
                "cannot be run by it any more: make another one, and load a checkpoint"
            )

    def check(self, x: Any) -> None:
        """Checks an input before its pass; see `Mesh.check`."""
        if self.mesh.region is not None:
            with self.session.progress.waiting():
                self.mesh.check(x)

    def run(
        self,
        program: Program,
        feed: Feed,
        metric: Metric | None = None,
        look: Callable[[], None] | None = None,
        loss: Loss | None = None,
        commit: Callable[[Execution], Ending] | None = None,
    ) -> list[Execution]:
        """Executes a program once on the ranks of this process.

        Args:
            program: proved by the verifier.
            feed: its data.
            metric: computed from every output in addition to its loss.
            look: called after each instruction.
            loss: of an output and its target, in place of the training's.
            commit: begins the sum in which the ranks commit a step; returns what waits for it.

        Raises:
            InvalidProgramError: the ranks of this process wait for each other forever (a verified program never does).
            PipefitError: a step has failed before, after some of its updates or with spilled stages; or the pipeline
                was closed.
        """
        self.check_weights()
        if self.is_lost:
            raise PipefitError(
                "a step failed after some of its updates, or with gradients of spilled stages on the way: make the "
                "pipeline again, and load a checkpoint from before"
            )
        is_new = program.digest not in self._prepared
        if is_new:
            self.prepare(program)
        if self.mesh.region is not None:
            self.mesh.region.moved_bytes = 0.0
        if self._moments is not None:
            self._moments.begin()
        self.executions = []
        for worker, transport in zip(self.workers, self.transports, strict=True):
            worker.forget_halves()  # weights may have changed since, also after a pass that has failed
            worker.take_changes()
            transport.begin(feed)
            compiled = compile_rank(program, worker.rank)
            progress = Progress()
            if self.session.is_distributed:
                progress = self.session.progress
            if worker.scale is not None:
                worker.scale.begin()
            run = Execution(
                compiled,
                worker,
                transport,
                feed,
                progress,
                metric,
                loss=loss,
                look=look,
                moments=self._moments,
                commit=commit,
            )
            if self._between is not None:
                run.at_end.append(self._between.end_sends)
            self.executions.append(run)
        if self.session.watchdog is not None and self._moments is not None:
            self.session.watchdog.stands_before = weakref.WeakMethod(self.executions[0].stands_before)
        try:
            with self.session.passing(program):
                _drive(self.executions)
        except BaseException as problem:
            self.is_lost = self._is_lost_by(problem)
            for worker, transport in zip(self.workers, self.transports, strict=True):
                worker.forget_pass()
                if isinstance(transport, LocalTransport):
                    transport.forget_pass()
            raise
        for worker in self.workers:
            worker.forget_halves()
            for store in worker.stores.values():
                store.rebase()
            if worker.spilling:
                worker.spilling.end_pass()
        for run in self.executions:
            check_unread(run)
        # Settings after the first program, when all threads exist and sizes are known. Under a cap, free memory is
        # returned instead; with a GPU, activations are there.
        if is_new and self.session.is_distributed and self.device.type == "cpu":
            let_carriers_wait()
            if not any(worker.spilling for worker in self.workers):
                keep_freed()
        return self.executions

    def _is_lost_by(self, problem: BaseException) -> bool:
        """Returns whether an error leaves only some stages stepped, or gradients of spilled ones on the way."""
        if not torch.is_grad_enabled() or isinstance(problem, NonFiniteLossError | InterruptedUnitError):
            return False
        if any(worker.spilling for worker in self.workers):
            return True
        begun = [i.op for run in self.executions for i in run.compiled.instructions[: run.index + 1]]
        return Op.STEP in begun

    def gather_weights(self, header: Header) -> None:
        """Makes weights that replicas share whole on each of them, after the last program; all ranks must call it.

        A rank then holds all of its stages.

        Args:
            header: of the run's programs.
        """
        gathering = gathering_of(header)
        if any(gathering.ranks):
            self.run(gathering, {})

    def prepare(self, program: Program, is_compared: bool = False) -> None:
        """Makes the buckets and process groups of a program, before its first pass.

        Args:
            program: that all ranks have.
            is_compared: they have found that out.
        """
        self._prepared.add(program.digest)
        for worker in self.workers:
            make_buckets(worker, program)
        if self._between is None:
            return
        if not is_compared:
            _agree_on(program, self.session)
        graph = dependency_graph(program)
        sets = [collective_members(program.header, graph.instructions[group[0]]) for group in graph.collectives]
        links = [(rank, i.peer) for rank, _, i in program if i.op is Op.SEND]
        # Where each rank has one stage, receivers keep up with senders.
        unposted = 0
        if links and program.header.num_chunks > 1:
            unposted = most_unposted(program)
        with self.session.at(MEETING):
            self._between.prepare(sets, links, unposted)
        number = self.session.programs.setdefault(program.digest, len(self.session.programs))
        if self.session.folder and self.session.rank == 0:
            write_atomically(program_file(self.session.folder, number), text.dump(program), durable=False)


def _agree_on(program: Program, session: Session) -> None:
    """Checks that all ranks have derived the same program before it runs.

    Raises:
        InvalidProgramError: on every rank, when two differ.
    """
    cure = "every rank must make the same Pipeline and call its methods alike"
    check_alike(session, lambda: {"program": program.digest}, InvalidProgramError, cure)


def _drive(executions: Sequence[Execution]) -> None:
    """Steps the ranks of this process round-robin until all are done."""
    active = [(run, run.run(HANDLERS)) for run in executions]
    while active:
        moved = False
        waiting = []
        for run, steps in active:
            before = (run.index, len(run.endings))
            if next(steps, None) is None:
                moved = True
                continue
            waiting.append((run, steps))
            moved |= (run.index, len(run.endings)) != before
        if not moved:
            places = [f"rank {run.compiled.rank} at '{run.compiled.instructions[run.index]}'" for run, _ in waiting]
            raise InvalidProgramError(f"the ranks wait for each other: {'; '.join(places)}")
        active = waiting
