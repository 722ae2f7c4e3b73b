"""What the executor itself costs on this machine, measured by a pipeline that has next to nothing to compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from pipefit.calibrate.prediction import predict
from pipefit.calibrate.spread import Spread
from pipefit.cost import USUAL, RuntimeCosts, of_plan
from pipefit.ir.op import Op
from pipefit.pipeline.pipeline import Pipeline
from pipefit.profiling import profile_layers
from pipefit.profiling.links import per_core
from pipefit.runtime.collectives import exchange
from pipefit.runtime.microbatches import feed_of
from pipefit.runtime.session import Session
from pipefit.schedules import find
from pipefit.spec import Profile, Topology
from pipefit.timeline import Timeline

__all__ = ["Calibration", "runtime_costs"]

_WIDTH, _PASSES, _RUN = 8, 40, 8
_MANY = 16
_COLD = 1 << 19
_HALVINGS = 8
_USUAL_SCHEDULE, _WAITING = "1f1b", "naive"
_SCHEDULES = (_WAITING, "gpipe", _USUAL_SCHEDULE, "interleaved", "breadth-first")


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


class _Run(NamedTuple):
    """Some passes in a row.

    Attributes:
        pass_s: mean seconds of one.
        beside_s: of the call that ran them, beyond the passes.
        kinds_s: mean seconds of each (operation, stage); where ranks share cores, medians.
    """

    pass_s: float
    beside_s: float
    kinds_s: dict[tuple[str, int], float]


class _Pipe(NamedTuple):
    """A pipeline of tiny layers, the batches of a run of it, its runs so far, and how much work on layers varied."""

    pipe: Pipeline
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    runs: list[_Run]
    spread: Spread

    @property
    def num_layers(self) -> int:
        """One for each stage."""
        return len(self.pipe.layers)

    def run(self, pace: float, crowded: bool) -> Timeline:
        """Trains on the batches in a row, as a training does; what was measured of it.

        Args:
            pace: how much slower the machine is now than at the speed for which costs are wanted.
            crowded: ranks share cores.
        """
        began = time.perf_counter()
        self.pipe.fit(self.batches)
        took_s = time.perf_counter() - began
        timeline = self.pipe.timeline(last=_RUN)
        makespan_s, kinds = timeline.makespan_s, timeline.by_kind()
        if crowded:
            # Means and their scatter hold what ranks wait for each other's turns; the simulation adds that.
            kinds_s = {key: item.median_s / pace for key, item in kinds.items()}
        else:
            kinds_s = {key: item.total_s / item.num_times / pace for key, item in kinds.items()}
            self._note_spread(timeline)
        self.runs.append(_Run(makespan_s / _RUN / pace, (took_s - makespan_s) / pace, kinds_s))
        return timeline

    def _note_spread(self, timeline: Timeline) -> None:
        times: dict[tuple[Op, int], list[float]] = {}
        for event in timeline.events:
            i = timeline.instruction(event)
            if i.op in (Op.FWD, Op.BWD):
                times.setdefault((i.op, i.stage), []).append(event.end_s - event.start_s)
        for found in times.values():
            self.spread.add(found)

    def arrival_s(self, number: int, told: RuntimeCosts, alone: Profile, topology: Topology) -> float:
        """Seconds that each message must have cost once it had come, for the simulator to have a run as it was.

        The simulator is given what instructions took in the same run.
        """
        run, stages = self.runs[number], range(self.num_layers)

        def every(op: Op) -> tuple[float, ...]:
            return tuple(run.kinds_s[op.value, stage] for stage in stages)

        cost = replace(
            of_plan(alone, self.pipe.plan, topology, state_per_weight=0.0, runtime=told),
            forward_s=every(Op.FWD),
            backward_input_s=every(Op.BWD),
            backward_weight_s=(0.0,) * len(stages),
            step_s=every(Op.STEP),
            loss_s=run.kinds_s[Op.LOSS.value, -1],
            load_s=run.kinds_s[Op.LOAD.value, 0],
            overhead_s=0.0,
            host_s={},
        )
        low, high = 0.0, run.pass_s / _MANY
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            whole = predict(self.pipe.program, replace(cost, arrival_s=middle), _RUN, vary=self.spread.draws(number))
            low, high = (middle, high) if whole.makespan_s < run.pass_s * _RUN else (low, middle)
        return low


class Calibration:
    """Pipelines of tiny layers, timed in turns with whatever the figures are for.

    Forward, backward, loss, load, send, step, and the time between passes are timed in the executor, less what the
    profiler says of the same tiny layer. What the simulator, given what instructions took, still lacks of the time of a
    pass is what messages cost: on few cores the threads that carry them have none of their own, and how long a message
    lies there depends on whether the ranks are at work meanwhile. So it is found by pipelines under several schedules,
    and apart under the one whose ranks only wait. Every rank of the run must make a calibration, and call it alike.

    Args:
        session: of the run.
        topology: the links between its ranks.
        schedules: that costs will be asked for.

    Attributes:
        topology: the same.
    """

    def __init__(self, session: Session, topology: Topology, schedules: Sequence[str]) -> None:
        self.topology, self._session = topology, session
        self._is_usual = not session.is_distributed or torch.cuda.is_available()
        if self._is_usual:
            return
        self._told: list[RuntimeCosts] = []
        self._arrivals_s: dict[str, float] = {}
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
        self._arrivals_s.clear()
        loss, x = nn.functional.mse_loss, self._x[:1]
        for num, layers in self._layers.items():
            alone = profile_layers(list(layers), x, loss, x, repeats=passes, threads=None, optimizer=_sgd)
            self._alone.setdefault(num, []).append(alone.scaled(1 / pace))
        cut_s = _cut_s(self._x)
        usual = self._pipes[_USUAL_SCHEDULE]
        # Between two passes all ranks are at work at once, and the simulation lets them share the cores.
        crowd = per_core(self.topology, usual.num_layers)
        timelines = {
            name: [one.run(pace, crowd > 1) for _ in range(-(-passes // _RUN))] for name, one in self._pipes.items()
        }
        told = _told(timelines[_USUAL_SCHEDULE][-1], cut_s, len(self._x)).scaled(1 / pace)
        told = _beyond(told, self._alone[usual.num_layers][-1])
        self._told.append(told._replace(pass_s=told.pass_s / crowd))

    def costs(self, schedule: str) -> RuntimeCosts:
        """The costs under a schedule by all turns so far; all ranks get the first rank's."""
        if self._is_usual:
            return USUAL
        told, waiting = _medians(self._told), schedule == _WAITING
        # A message to a rank that is at work costs as much under every schedule; the mean of several is the surer.
        names = [name for name in self._pipes if (name == _WAITING) == waiting]
        fit_s = statistics.median(run.beside_s for run in self._pipes[_USUAL_SCHEDULE].runs)
        arrival_s = statistics.fmean(self._arrival_s(name, told) for name in names)
        found = _from_rank_0(self._session, told._replace(arrival_s=arrival_s, fit_s=fit_s))
        return found if find(schedule).is_synchronous else found.in_one_pass()

    def _arrival_s(self, name: str, told: RuntimeCosts) -> float:
        """What the simulator lacks of a pipeline's passes, as what messages cost that have come; median of the runs."""
        if name not in self._arrivals_s:
            one = self._pipes[name]
            alone = self._alone[one.num_layers][-1]
            found = [one.arrival_s(number, told, alone, self.topology) for number in range(len(one.runs))]
            self._arrivals_s[name] = statistics.median(found)
        return self._arrivals_s[name]


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
    return _Pipe(pipe, batches, [], Spread())


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


def _from_rank_0(session: Session, costs: RuntimeCosts) -> RuntimeCosts:
    figures = costs._replace(host_s=dict(costs.host_s))._asdict()
    return RuntimeCosts(**exchange(session, figures)[0])


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
