"""What the executor itself costs on this machine, measured by a pipeline that has next to nothing to compute."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pipefit.ir.op import Op
from pipefit.profiling import profile_layers
from pipefit.runtime.session import Session
from pipefit.schedules import find
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
_USUAL_SCHEDULE = "1f1b"
_SCHEDULES = ("naive", "gpipe", _USUAL_SCHEDULE, "interleaved", "breadth-first")


def runtime_costs(session: Session, topology: Topology, schedule: str = _USUAL_SCHEDULE) -> RuntimeCosts:
    """Measures, in a few seconds; every rank of the run must ask, and all get the first rank's figures.

    Args:
        session: of the run.
        topology: the links between its ranks.
        schedule: that the costs are for.
    """
    calibration = Calibration(session, topology, [schedule])
    calibration.turn()
    return calibration.costs(schedule)


class _Pipe(NamedTuple):
    """A pipeline of tiny layers, the batches of a run of it, and the mean seconds of a pass in each run so far."""

    pipe: Pipeline
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    pass_s: list[float]

    @property
    def num_layers(self) -> int:
        """One for each stage."""
        return len(self.pipe.layers)

    def run(self, pace: float) -> None:
        """Trains on the batches in a row, as a training does."""
        began = time.perf_counter()
        self.pipe.fit(self.batches)
        self.pass_s.append((time.perf_counter() - began) / _RUN / pace)

    def foretold_s(self, costs: RuntimeCosts, alone: Profile, topology: Topology) -> float:
        """Seconds of a pass of a run, as the simulator has it."""
        cost = cost_of(alone, self.pipe.plan, topology, 0.0, costs)
        return predict(self.pipe.program, cost, _RUN).makespan_s / _RUN


class Calibration:
    """Pipelines of tiny layers, timed in turns with whatever the figures are for.

    Forward, backward, loss, load, send, step, and the time between passes are timed in the executor, less what the
    profiler says of the same tiny layer. What the simulator then still lacks of the time of a pass is what messages
    cost, and differs from schedule to schedule: on few cores the threads that carry messages have none of their own,
    and how long a message lies there depends on what the ranks do meanwhile. So it is found for each schedule by a
    pipeline under the same. Every rank of the run must make a calibration, and call it alike.

    Args:
        session: of the run.
        topology: the links between its ranks.
        schedules: that costs will be asked for; those without a flush have the costs of 1F1B.

    Attributes:
        topology: the same.
    """

    def __init__(self, session: Session, topology: Topology, schedules: Sequence[str]) -> None:
        self.topology = topology
        self._is_usual = not session.is_distributed or torch.cuda.is_available()
        if self._is_usual:
            return
        self._told: list[RuntimeCosts] = []
        self._alone: dict[int, list[Profile]] = {}
        self._pipes: dict[str, _Pipe] = {}
        random = torch.get_rng_state()
        num = session.num_ranks
        # Chunks want a multiple of the ranks.
        self._x = torch.randn(-(-_MANY // num) * num, _WIDTH)
        for name in dict.fromkeys((_USUAL_SCHEDULE, *map(_standing_for, schedules))):
            self._pipes[name] = _pipe(_layers(2 * num if find(name).chunks else num), self._x, name)
        self._layers = {one.num_layers: _layers(one.num_layers) for one in self._pipes.values()}
        torch.set_rng_state(random)

    def turn(self, pace: float = 1.0, passes: int = _PASSES) -> None:
        """Measures once more.

        Args:
            pace: how much slower the machine is now than at the speed for which costs are wanted.
            passes: of each pipeline.
        """
        if self._is_usual:
            return
        loss, x = nn.functional.mse_loss, self._x[:1]
        for num, layers in self._layers.items():
            alone = profile_layers(list(layers), x, loss, x, repeats=passes, threads=None, optimizer=_sgd)
            self._alone.setdefault(num, []).append(alone.scaled(1 / pace))
        cut_s = _cut_s(self._x)
        for one in self._pipes.values():
            for _ in range(-(-passes // _RUN)):
                one.run(pace)
        usual = self._pipes[_USUAL_SCHEDULE]
        # Between two passes all ranks are at work at once, and the simulation lets them share the cores.
        crowd = per_core(self.topology, usual.num_layers)
        told = _told(usual.pipe.timeline(last=_RUN), cut_s, len(self._x)).scaled(1 / pace)
        told = _beyond(told, self._alone[usual.num_layers][-1])
        self._told.append(told._replace(pass_s=told.pass_s / crowd))

    def costs(self, schedule: str) -> RuntimeCosts:
        """The costs under a schedule by all turns so far; all ranks get the first rank's."""
        if self._is_usual:
            return USUAL
        one = self._pipes[_standing_for(schedule)]
        return _from_rank_0(self._with_messages(_medians(self._told), one))

    def _with_messages(self, told: RuntimeCosts, one: _Pipe) -> RuntimeCosts:
        """What the simulator lacks of a pipeline's passes, as the receives'."""

        def receiving(seconds: float) -> RuntimeCosts:
            return told._replace(host_s={**told.host_s, Op.RECV.value: seconds})

        turns = self._alone[one.num_layers]
        alone = sorted(turns, key=lambda turn: turn.step_s or 0.0)[len(turns) // 2]
        # The median of runs, not of passes: a message now and then stands still for a while, and so do those of a real
        # model.
        measured_s = statistics.median(one.pass_s)
        low, high = 0.0, measured_s / _MANY
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            short = one.foretold_s(receiving(middle), alone, self.topology) < measured_s
            low, high = (middle, high) if short else (low, middle)
        return receiving(low)


def _standing_for(schedule: str) -> str:
    return schedule if schedule in _SCHEDULES else _USUAL_SCHEDULE


def _layers(num: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(_Cold(), nn.Linear(_WIDTH, _WIDTH)) for _ in range(num)))


def _pipe(layers: nn.Sequential, x: torch.Tensor, schedule: str) -> _Pipe:
    pipe = Pipeline(
        layers,
        loss=nn.functional.mse_loss,
        optimizer=_sgd,
        schedule=schedule,
        microbatches=len(x),
        stages=[1] * len(layers),
        chunks=2 if find(schedule).chunks else 1,
        device="cpu",
    )
    batches = [(x, x)] * _RUN
    # Shapes are agreed on, and groups meet, in the first pass.
    pipe.fit(batches)
    return _Pipe(pipe, batches, [])


_PLAIN = ("overhead_s", "post_s", "pass_s", "cut_s", "taking_s")


def _medians(turns: Sequence[RuntimeCosts]) -> RuntimeCosts:
    """Figure by figure, the median of several turns."""
    middle = statistics.median
    host_s = {name: middle(turn.host_s[name] for turn in turns) for name in turns[0].host_s}
    return turns[0]._replace(host_s=host_s, **{name: middle(getattr(turn, name) for turn in turns) for name in _PLAIN})


def _told(timeline: Timeline, cut_s: float, num_microbatches: int) -> RuntimeCosts:
    """What instructions take in all, in the first rank's view: it loads, and its loss is another's."""
    kinds = {key: item.median_s for key, item in timeline.by_kind().items()}
    last = max(stage for _, stage in kinds)
    loss = next((seconds for (op, _), seconds in kinds.items() if op == Op.LOSS.value), 0.0)
    forward_s = kinds[Op.FWD.value, 0]
    host_s = {op.value: kinds[op.value, 0] for op in (Op.FWD, Op.LOAD, Op.STEP, Op.SEND)}
    host_s[Op.BWD.value] = (kinds[Op.BWD.value, 0] + kinds[Op.BWD.value, last]) / 2
    host_s[Op.LOSS.value] = loss
    pass_s = max(_between_s(timeline) - cut_s * num_microbatches, 0.0)
    # Beyond the first stage a forward takes a message: what it reads, and what it is read by, has left the caches.
    taking_s = kinds[Op.FWD.value, last] - forward_s
    return RuntimeCosts(forward_s, host_s[Op.SEND.value], host_s, pass_s, cut_s, taking_s=taking_s)


def _beyond(told: RuntimeCosts, alone: Profile) -> RuntimeCosts:
    """The same less what the layers take by themselves."""
    first, final = alone.layers[0], alone.layers[-1]
    layers_s = {
        Op.FWD.value: first.forward_s,
        Op.BWD.value: (first.backward_s + final.backward_s) / 2,
        Op.LOSS.value: alone.loss_s,
        Op.STEP.value: alone.optimizer_of([0]),
    }
    host_s = {name: max(seconds - layers_s.get(name, 0.0), 1e-6) for name, seconds in told.host_s.items()}
    host_s[Op.RECOMPUTE.value] = host_s[Op.FWD.value]
    host_s |= dict.fromkeys((Op.BWD_INPUT.value, Op.BWD_WEIGHT.value), host_s[Op.BWD.value])
    taking_s = max(told.taking_s + first.forward_s - final.forward_s, 0.0)
    return told._replace(overhead_s=max(host_s[Op.FWD.value], USUAL.overhead_s), host_s=host_s, taking_s=taking_s)


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


class _Work:
    """A little of what a model does, forward and backward; afterwards the processor's caches hold that."""

    def __init__(self) -> None:
        self._buffer = torch.ones(_COLD)
        self._image = torch.randn(1, 16, 8, 8)
        self._layers = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())

    def __call__(self) -> None:
        self._buffer.sum()
        with torch.enable_grad():
            self._layers(self._image).sum().backward()


class _WorksBetween(torch.autograd.Function):
    """Passes a tensor on, both ways, and works meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, work: _Work) -> torch.Tensor:
        ctx.work = work
        work()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.work()
        return grad, None, None


class _Cold(nn.Module):
    """Nothing, but afterwards the caches hold other data and other code, as after the layers of a real model."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self._work = _Work()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _WorksBetween.apply(x, self.anchor, self._work)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.0)
