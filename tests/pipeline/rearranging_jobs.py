"""Trainings that go on by other plans; functions that a rank can import by name."""

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from msgspec.structs import replace as changed
from tests.testing.equality_models import make
from torch import Tensor, nn

import pipefit as pf
from pipefit.checkpoint.memory import EVERY
from pipefit.errors import ModelError, PipefitError
from pipefit.pipeline.rearrange import rearrange
from pipefit.planner import by_hand
from pipefit.runtime import session as sessions
from pipefit.runtime.outliving import processes_here
from pipefit.spec import Placement, Plan

MICROBATCHES, SAMPLES, LAYERS = 4, 9, 8
EACH = 2
"""Steps by each plan."""

Trained = tuple[list[float], dict[str, Tensor]]


def decaying(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW with two groups, of which only one decays."""
    groups = [
        {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for n, p in named if "weight" not in n], "weight_decay": 0.0, "lr": 0.01},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def momentum(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True)


def optimizer_for(name: str) -> Any:
    """Adam divides by the size of gradients: those before a batch norm are only rounding."""
    return momentum if "norm" in name else decaying


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def pipeline(model: nn.Module, plan: Plan, **options: Any) -> pf.Pipeline:
    updates = pf.Updates(seed=7, scheduler=falling)
    return pf.Pipeline(model, plan=plan, updates=updates, loss=loss, **options)


def plan_of(counts: Sequence[int], ranks: int, schedule: str = "1f1b", **options: Any) -> Plan:
    return by_hand(LAYERS, num_ranks=ranks, schedule=schedule, num_microbatches=MICROBATCHES, stages=counts, **options)


def placed(plan: Plan, *ranks: tuple[int, ...]) -> Plan:
    return changed(plan, placement=Placement(ranks))


def trained(name: str, plans: Sequence[Plan], **options: Any) -> Trained:
    """Losses and weights of a training by several plans, one after the other."""
    torch.manual_seed(0)
    model, example = make(name)
    pipe = pipeline(model, plans[0], **{"optimizer": optimizer_for(name)} | options)
    losses = []
    for number, plan in enumerate(plans):
        if number:
            rearrange(pipe, plan)
        for step in range(number * EACH, (number + 1) * EACH):
            losses.append(pipe.step(*example(SAMPLES, step)))
            assert pipe.num_updates == step + 1
        losses.append(pipe.evaluate([example(SAMPLES, 99)]))
    return losses, pipe.state_dict()


# ---- processes that leave --------------------------------------------------------------------------------------------


def leave(old: sessions.Session, left: Sequence[int], place: str) -> sessions.Session | None:
    """The session of the processes that are left, in a group of their own; None: this one is not among them."""
    dist.destroy_process_group()
    if old.rank not in left:
        return None
    number = left.index(old.rank)
    os.environ |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(len(left))}
    store = dist.FileStore(place, len(left))
    dist.init_process_group("gloo", store=store, rank=number, world_size=len(left))
    new = replace(old, rank=number, num_ranks=len(left), calls=None)
    sessions._session = new
    return new


def lose_a_copy(
    name: str, gone: int, ranks: Sequence[Sequence[int]], place: str
) -> tuple[Trained, int, list[bool]] | None:
    """Two copies of two stages; process `gone` leaves after some steps."""
    torch.manual_seed(0)
    model, example = make(name)
    pipe = pipeline(model, plan_of([4, 4], 4, replicas=(2,)), optimizer=optimizer_for(name))
    losses = [pipe.step(*example(SAMPLES, step)) for step in range(EACH)]
    losses.append(pipe.evaluate([example(SAMPLES, 99)]))
    worker = pipe.workers[0]
    (before,) = worker.optimizers.values()
    state = {id(value) for values in before.state.values() for value in values.values()}
    session = leave(pipe.session, [rank for rank in range(4) if rank != gone], place)
    if session is None:
        return None
    for own in worker.owned.values():  # as a pass leaves them that was interrupted
        for _, parameter, _ in own:
            parameter.grad = torch.ones_like(parameter)
    plan = placed(plan_of([4, 4], 3, replicas=tuple(map(len, ranks))), *map(tuple, ranks))
    with sending() as sent:
        rearrange(pipe, plan, session)
    (after,) = pipe.workers[0].optimizers.values()
    same = [before is after, state == {id(value) for values in after.state.values() for value in values.values()}]
    losses += [pipe.step(*example(SAMPLES, step)) for step in range(EACH, 2 * EACH)]
    losses.append(pipe.evaluate([example(SAMPLES, 99)]))
    return (losses, pipe.state_dict()), sum(sent), same


# ---- layers that move ------------------------------------------------------------------------------------------------

MOVED = ["attention, batch norm and dropout", "tied ends", "tied neighbours", "a frozen middle", "a layer used twice"]


NUM_PLANS = 5


def all_moves() -> dict[str, Trained]:
    """Every model by several plans of three processes."""
    plans = [
        plan_of([3, 3, 2], 3),
        plan_of([4, 3, 1], 3, "gpipe"),
        plan_of([1, 2, 1, 2, 1, 1], 3, "interleaved", num_chunks=2),
        placed(plan_of([5, 3], 3, replicas=(1, 2)), (1,), (2, 0)),
        placed(plan_of([2, 2, 4], 3), (2,), (0,), (1,)),
    ]
    return {name: trained(name, plans) for name in MOVED}


@contextlib.contextmanager
def sending() -> Iterator[list[int]]:
    """The context in which the bytes of each message to another process are noted."""
    sent: list[int] = []
    original = dist.isend

    def isend(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return original(tensor, *args, **options)

    with mock.patch.object(dist, "isend", isend):
        yield sent


class Moving:
    """A callback that moves a layer after the second of four steps."""

    every = 2

    def __init__(self, pipe: pf.Pipeline, plan: Plan) -> None:
        self._pipe = pipe
        self._plan = plan
        self._states: list[weakref.ref[Tensor]] = []
        self.sent_bytes = self.num_freed = 0

    def step(self, record: Any) -> None:
        if record.step == 4:
            self.num_freed = sum(reference() is None for reference in self._states)
        if record.step != 2:
            return
        for worker in self._pipe.workers:
            for optimizer in worker.optimizers.values():
                self._states += [weakref.ref(value) for own in optimizer.state.values() for value in own.values()]
        with sending() as sent:
            rearrange(self._pipe, self._plan)
        self.sent_bytes = sum(sent)


def with_average(plans: Sequence[Plan]) -> tuple[Trained, dict[str, Tensor], dict[str, Any]]:
    """Four steps of a model with a hook on a weight, with its averages, which moves a layer if there are two plans."""
    torch.manual_seed(0)
    model, example = make("plain")
    model[2][0].weight.register_hook(lambda gradient: 3 * gradient)
    pipe = pipeline(model, plans[0], optimizer=decaying)
    average, moving = pf.EMA(pipe, 0.5), Moving(pipe, plans[-1])
    data = [example(SAMPLES, step) for step in range(4)]
    losses = pipe.fit(data, callbacks=[moving, average] if len(plans) > 1 else [average])
    with average.evaluating():
        averages = pipe.state_dict()
    del moving._pipe
    facts = {"held": [not layer.weight.is_meta for layer in model.modules() if isinstance(layer, nn.Linear)]}
    return (losses, pipe.state_dict()), averages, facts | vars(moving) | {"_states": None, "_plan": None}


def saved(place: str) -> None:
    """A checkpoint of four steps, of which the last two are by another plan."""
    torch.manual_seed(0)
    model, example = make("tied neighbours")
    pipe = pipeline(model, plan_of([4, 2, 2], 3), optimizer=decaying)
    for step in range(4):
        if step == 2:
            refused_in_one_process(pipe)
            rearrange(pipe, plan_of([2, 2, 4], 3, "gpipe"))
        pipe.step(*example(SAMPLES, step))
    pipe.save(place)


def refused_in_one_process(pipe: pf.Pipeline) -> None:
    """Process 1 cannot join two groups of an optimizer: nothing has changed on any process."""
    held = [any(weight.is_meta for weight in layer.module.parameters()) for layer in pipe.layers]
    before = pipe.engine, pipe.plan, pipe.workers, pipe.session.rank
    groups = [group for optimizer in pipe.workers[0].optimizers.values() for group in optimizer.param_groups]
    for group in groups:
        group["eps"] = 1e-8 * (1 + pipe.session.rank)
    try:
        rearrange(pipe, plan_of([2, 4, 2], 3))
        raise AssertionError("it was not refused")
    except ModelError as problem:
        assert "rank 1: eps of the optimizer was" in str(problem)
    for group in groups:
        group["eps"] = 1e-8
    assert before == (pipe.engine, pipe.plan, pipe.workers, pipe.session.rank)
    assert held == [any(weight.is_meta for weight in layer.module.parameters()) for layer in pipe.layers]


def several_moves(place: str) -> tuple[dict[str, Trained], Any]:
    saved(place)
    return all_moves(), with_average([plan_of([3, 3, 2], 3), plan_of([2, 4, 2], 3)])


# ---- stages without a copy -------------------------------------------------------------------------------------------


def lose_a_stage(name: str, place: str, every: int) -> tuple[Trained, str, range] | None:
    """Two copies of the first stage; the process of the second leaves, whose state the memory of the machine has."""
    os.environ[EVERY] = str(every)
    torch.manual_seed(0)
    model, example = make(name)
    pipe = pipeline(model, plan_of([4, 4], 3, replicas=(2, 1)), optimizer=optimizer_for(name))
    losses = pipe.fit([example(SAMPLES, step) for step in range(3)])
    session = leave(pipe.session, [0, 1], place)
    if session is None:
        return None
    try:
        rearrange(pipe, placed(plan_of([5, 3], 2), (1,), (0,)), session)
    except PipefitError as problem:
        return (losses, {}), str(problem), range(0)
    losses += pipe.fit([example(SAMPLES, step) for step in range(3, 5)])
    return (losses, pipe.state_dict()), "", processes_here(session)
