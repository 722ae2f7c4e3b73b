"""What the executor itself costs on this machine, measured by a pipeline that has next to nothing to compute."""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipefit.ir.op import Op
from pipefit.profiling import profile_layers
from pipefit.runtime.session import Session
from pipefit.spec import Profile, Topology
from pipefit.timeline import Timeline
from pipefit.train.batch import feed_of
from pipefit.train.pipeline import Pipeline
from pipefit.train.predicted import USUAL, RuntimeCosts, cost_of, per_core, predict

__all__ = ["Calibration", "runtime_costs"]

_WIDTH, _PASSES, _RUN = 8, 40, 8
_MANY = 16
_COLD = 1 << 19
_HALVINGS = 10
_BUSY, _WAITING = ("1f1b", "gpipe"), "naive"


def runtime_costs(session: Session, topology: Topology) -> RuntimeCosts:
    """Measures, in about two seconds; every rank of the run must ask, and all get the first rank's figures.

    Args:
        session: of the run.
        topology: the links between its ranks.
    """
    calibration = Calibration(session, topology)
    calibration.turn()
    return calibration.costs()


class _Pipe(NamedTuple):
    """A pipeline of tiny layers, the batches of a run of it, and the mean seconds of a pass in each run so far."""

    pipe: Pipeline
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    pass_s: list[float]
    carried_s: list[float]

    def run(self, pace: float) -> None:
        """Trains on the batches in a row, as a training does."""
        began, others = time.perf_counter(), _others_s()
        self.pipe.fit(self.batches)
        self.pass_s.append((time.perf_counter() - began) / _RUN / pace)
        received = sum(i.op is Op.RECV for i in self.pipe.program.ranks[self.pipe.rank])
        self.carried_s.append((_others_s() - others) / _RUN / received / pace)

    def foretold_s(self, costs: RuntimeCosts, alone: Profile, topology: Topology) -> float:
        """Seconds of a pass of a run, as the simulator has it."""
        cost = cost_of(alone, self.pipe.plan, topology, 0.0, costs)
        return predict(self.pipe.program, cost, _RUN).makespan_s / _RUN


class Calibration:
    """Pipelines of tiny layers, timed in turns with whatever the figures are for.

    Forward, backward, loss, load, send, step, and the time between passes are timed in the executor, less what the
    profiler says of the same tiny layer; a message costs the cores what the threads that carry it take. What the
    simulator then still lacks of the time of the passes is that from the arrival of a message until a rank that waits
    for it goes on. Every rank of the run must make one, and call it alike.

    Args:
        session: of the run.
        topology: the links between its ranks.

    Attributes:
        topology: the same.
    """

    def __init__(self, session: Session, topology: Topology) -> None:
        self.topology = topology
        self._is_usual = not session.is_distributed or torch.cuda.is_available()
        if self._is_usual:
            return
        self._told: list[RuntimeCosts] = []
        self._alone: list[Profile] = []
        random = torch.get_rng_state()
        self._layers = nn.Sequential(
            *(nn.Sequential(_Cold(), nn.Linear(_WIDTH, _WIDTH)) for _ in range(session.num_ranks))
        )
        self._x = torch.randn(_MANY, _WIDTH)
        self._busy = [_pipe(self._layers, self._x, schedule) for schedule in _BUSY]
        self._waiting = [_pipe(self._layers, self._x, _WAITING)]
        torch.set_rng_state(random)

    def turn(self, pace: float = 1.0, passes: int = _PASSES) -> None:
        """Measures once more.

        Args:
            pace: how much slower the machine is now than at the speed for which costs are wanted.
            passes: of each pipeline.
        """
        if self._is_usual:
            return
        x = self._x[:1]
        loss = nn.functional.mse_loss
        alone = profile_layers(list(self._layers), x, loss, x, repeats=passes, threads=None, optimizer=_sgd)
        cut_s = _cut_s(self._x)
        for one in (*self._busy, *self._waiting):
            for _ in range(-(-passes // _RUN)):
                one.run(pace)
        told = _told(alone, self._busy[0].pipe.timeline(last=_RUN), cut_s)
        # Between two passes all ranks are at work at once, and the simulation lets them share the cores.
        told = told._replace(pass_s=told.pass_s / per_core(self.topology, len(self._layers)))
        self._told.append(_each(told, lambda seconds: seconds / pace))
        self._alone.append(alone.scaled(1 / pace))

    def costs(self) -> RuntimeCosts:
        """The costs by all turns so far; all ranks get the first rank's."""
        if self._is_usual:
            return USUAL
        told = _medians(self._told)
        alone = sorted(self._alone, key=lambda one: one.step_s or 0.0)[len(self._alone) // 2]
        return _from_rank_0(self._with_rest(told, alone))

    def _with_rest(self, told: RuntimeCosts, alone: Profile) -> RuntimeCosts:
        """What the simulator lacks, as the messages'."""

        def fitted(pipes: list[_Pipe], change: Callable[[float], RuntimeCosts]) -> RuntimeCosts:
            # The median of runs, not of passes: where the threads that carry the messages have no core of their own, a
            # pass now and then stands still for a while, and so do those of a real model.
            measured = [statistics.median(one.pass_s) for one in pipes]
            low, high = 0.0, max(measured) / _MANY
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                costs = change(middle)
                foretold = [one.foretold_s(costs, alone, self.topology) for one in pipes]
                low, high = (middle, high) if sum(measured) > sum(foretold) else (low, middle)
            return change(low)

        carried_s = statistics.median(seconds for one in self._busy for seconds in one.carried_s)
        costs = told._replace(host_s={**told.host_s, Op.RECV.value: carried_s})
        return fitted([*self._busy, *self._waiting], lambda seconds: costs._replace(wake_s=seconds))


def _pipe(layers: nn.Sequential, x: torch.Tensor, schedule: str) -> _Pipe:
    pipe = Pipeline(
        copy.deepcopy(layers),
        loss=nn.functional.mse_loss,
        optimizer=_sgd,
        schedule=schedule,
        microbatches=len(x),
        stages=[1] * len(layers),
        device="cpu",
    )
    batches = [(x, x)] * _RUN
    # Shapes are agreed on, and groups meet, in the first pass.
    pipe.fit(batches)
    return _Pipe(pipe, batches, [], [])


def _others_s() -> float:
    """Processor seconds of this process's other threads, those that carry messages."""
    return time.process_time() - time.thread_time()


_PLAIN = ("overhead_s", "post_s", "pass_s", "cut_s", "taking_s", "wake_s")


def _each(costs: RuntimeCosts, change: Callable[[float], float]) -> RuntimeCosts:
    """Costs with all their seconds changed."""
    host_s = {name: change(seconds) for name, seconds in costs.host_s.items()}
    return costs._replace(host_s=host_s, **{name: change(getattr(costs, name)) for name in _PLAIN})


def _medians(turns: Sequence[RuntimeCosts]) -> RuntimeCosts:
    """Figure by figure, the median of several turns."""
    middle = statistics.median
    host_s = {name: middle(turn.host_s[name] for turn in turns) for name in turns[0].host_s}
    return turns[0]._replace(host_s=host_s, **{name: middle(getattr(turn, name) for turn in turns) for name in _PLAIN})


def _told(alone: Profile, timeline: Timeline, cut_s: float) -> RuntimeCosts:
    """The first rank's view: it loads, and its loss is another's."""
    kinds = {key: item.median_s for key, item in timeline.by_kind().items()}
    last = max(stage for _, stage in kinds)
    forward, backward = (kinds[op.value, 0] for op in (Op.FWD, Op.BWD))
    step = kinds[Op.STEP.value, 0]
    loss = next((seconds for (op, _), seconds in kinds.items() if op == Op.LOSS.value), 0.0)
    first, final = alone.layers[0], alone.layers[last]
    own = forward - first.forward_s
    host = {
        Op.FWD: own,
        Op.RECOMPUTE: own,
        Op.BWD: (backward - first.backward_s + kinds[Op.BWD.value, last] - final.backward_s) / 2,
        Op.LOSS: loss - alone.loss_s,
        Op.LOAD: kinds[Op.LOAD.value, 0],
        Op.STEP: step - alone.optimizer_of([0]),
        Op.SEND: kinds[Op.SEND.value, 0],
    }
    host_s = {op.value: max(seconds, 1e-6) for op, seconds in host.items()}
    overhead_s = max(host_s[Op.FWD], USUAL.overhead_s)
    pass_s = max(_between_s(timeline) - cut_s * _MANY, 0.0)
    # Beyond the first stage a forward takes a message: what it reads, and what it is read by, has left the caches.
    taking_s = max(kinds[Op.FWD.value, last] - final.forward_s - own, 0.0)
    return RuntimeCosts(overhead_s, host_s[Op.SEND], host_s, pass_s, cut_s, taking_s=taking_s)


def _between_s(timeline: Timeline) -> float:
    """Seconds between two passes on the first rank, the median of several."""
    mine = [[e for e in timeline.events if (e.rank, e.repeat) == (0, k)] for k in range(timeline.num_repeats)]
    turns = pairwise(mine)
    return statistics.median(min(e.start_s for e in b) - max(e.end_s for e in a) for a, b in turns)


def _cut_s(x: torch.Tensor) -> float:
    """Seconds of cutting a batch, for each micro-batch."""
    times_s = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        feed_of([(x, x)], _MANY, 0, "train")
        times_s.append(time.perf_counter() - began)
    return min(times_s) / _MANY


def _from_rank_0(costs: RuntimeCosts) -> RuntimeCosts:
    told: list[Any] = [json.dumps(costs._replace(host_s=dict(costs.host_s))._asdict())]
    dist.broadcast_object_list(told, 0)
    return RuntimeCosts(**json.loads(told[0]))


class _Sweep(torch.autograd.Function):
    """Passes a tensor on, both ways, and reads through a buffer meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.buffer = buffer
        buffer.sum()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.buffer.sum()
        return grad, None, None


class _Cold(nn.Module):
    """Nothing, but afterwards the processor's caches hold other things, as after the layers of a real model."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self._buffer = torch.ones(_COLD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sweep.apply(x, self.anchor, self._buffer)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.0)
