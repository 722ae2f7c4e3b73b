"""The reference of the asynchronous schedules is the papers' formulas, and their versions are those of the programs."""

import copy
import dataclasses
import itertools

import pytest
import torch
from tests.pipelines import case_of
from tests.testing.equality_models import make, vectors
from torch import Tensor, nn
from torch.func import functional_call

from pipefit.ir.op import Op
from pipefit.schedules import Shape, generate
from pipefit.testing import Case, make_pipeline, run_pipeline
from pipefit.testing.delayed import delayed_reference, version_rule

LR = 0.3


def descend(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def gradient(model: nn.Module, weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """∇f at some weights."""
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    loss = nn.functional.cross_entropy(functional_call(model, leaves, (batch[0],)), batch[1])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def history_of(model: nn.Sequential, task: Case, delays: list[int]) -> list[dict[str, Tensor]]:
    """w(t+1) = w(t) − ν·∇f(w_1^{(t−delay_1)}, …, w_n^{(t−delay_n)}), with w of a time before 0 read as w(0)."""
    stage_of = [stage for stage, count in enumerate(task.counts) for _ in range(count)]
    weights = [{name: value.detach().clone() for name, value in model.named_parameters()}]
    for t, batch in enumerate(task.batches):
        old = {name: weights[max(t - delays[stage_of[int(name.split(".")[0])]], 0)][name] for name in weights[0]}
        slope = gradient(model, old, batch)
        weights.append({name: value - LR * slope[name] for name, value in weights[t].items()})
    return weights


def straight(schedule: str, n: int, m: int = 1) -> Case:
    model, _ = make("plain")
    counts = {2: (3, 5), 3: (3, 3, 2), 4: (2, 2, 2, 2)}[n]
    return case_of(
        model=model,
        batches=[vectors(6, step) for step in range(9)],
        num_ranks=n,
        schedule=schedule,
        num_microbatches=m,
        counts=counts,
        optimizer=descend,
    )


def assert_final_weights(task: Case, wanted: dict[str, Tensor]) -> None:
    for outcome in (delayed_reference(task), run_pipeline(task)):
        merged = {name: value for table in outcome.weights.values() for name, value in table.items()}
        assert set(merged) == set(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-13, msg=name)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_pipedream_uses_older_weights_the_nearer_a_stage_is_to_the_input(n: int) -> None:
    task = straight("pipedream", n)
    history = history_of(copy.deepcopy(task.model), task, [n - 1 - s for s in range(n)])
    assert_final_weights(task, history[-1])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_vertical_sync_uses_at_every_stage_the_weights_of_n_minus_1_updates_ago(n: int) -> None:
    task = straight("pipedream-vertical-sync", n)
    history = history_of(copy.deepcopy(task.model), task, [n - 1] * n)
    assert_final_weights(task, history[-1])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_double_buffering_is_one_update_behind_at_every_stage(n: int) -> None:
    task = straight("pipedream-2bw", n, m=3)  # of equal micro-batches, so one gradient of the batch says the same
    history = history_of(copy.deepcopy(task.model), task, [1] * n)
    assert_final_weights(task, history[-1])


def test_without_delays_the_weights_would_be_others() -> None:
    task = straight("pipedream", 3)
    history = history_of(copy.deepcopy(task.model), task, [0, 0, 0])
    with pytest.raises(AssertionError):
        assert_final_weights(task, history[-1])


STRAIGHT = [(1,) * n for n in (1, 2, 3, 5)]
REPLICATED = [(2, 1), (1, 2), (1, 2, 1), (3, 1), (4, 1), (2, 2), (3, 3, 3), (2, 3), (15, 1)]


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical-sync", "pipedream-2bw"])
@pytest.mark.parametrize(("replicas", "m"), list(itertools.product(STRAIGHT + REPLICATED, (1, 3))))
def test_versions_by_formula_are_those_of_the_program(schedule: str, replicas: tuple[int, ...], m: int) -> None:
    alike = len(set(replicas)) == 1
    if schedule == "pipedream-vertical-sync" and not alike:
        replicas = (2,) * len(replicas)
    if schedule == "pipedream-2bw":
        m = max(m, sum(replicas))
    shape = Shape(len(replicas), m, num_steps=60, replicas=replicas)
    program = generate(schedule, shape)
    version = version_rule(schedule, replicas, m)
    forwards = [i for _, _, i in program if i.op is Op.FWD]
    assert len(forwards) == len(replicas) * 60 * m
    for i in forwards:
        assert i.version == version(i.stage, i.mb), str(i)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical-sync", "pipedream-2bw"])
def test_a_second_segment_starts_from_the_drained_weights(schedule: str) -> None:
    n = 3
    task = straight(schedule, n, m=2 if schedule == "pipedream-2bw" else 1)
    delays = {"pipedream": [2, 1, 0], "pipedream-vertical-sync": [2, 2, 2], "pipedream-2bw": [1, 1, 1]}[schedule]
    model = copy.deepcopy(task.model)
    parts = task.batches[:5], task.batches[5:]
    for part in parts:
        after = history_of(model, dataclasses.replace(task, batches=part), delays)[-1]
        model.load_state_dict(after)
    pipe = make_pipeline(task)
    for part in parts:
        pipe.fit(part)
    state = pipe.state_dict()
    assert set(state) == set(after)
    for name, value in after.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-13, msg=name)
