"""What a pipeline computes is what one process computes: every schedule, every kind of model, every size."""

import itertools
from typing import Any

import pytest
import torch
from tests.pipelines import grouped
from tests.testing.equality_models import MODELS, make
from torch import nn

from pipefit.testing import check

SYNCHRONOUS = ("naive", "data-parallel", "gpipe", "1f1b", "interleaved", "breadth-first")
ASYNCHRONOUS = ("pipedream", "pipedream-vertical-sync", "pipedream-2bw")
SCHEDULES = SYNCHRONOUS + ASYNCHRONOUS
ATTENTION = "attention, batch norm and dropout"
SLOW = pytest.mark.slow
CHUNKS = {"interleaved": 2, "breadth-first": 2}


def assert_equal(model_name: str, **options: Any) -> None:
    model, example = make(model_name)
    result = check(model, **grouped(example=example, **options))
    assert result.equal, result


def sizes(schedule: str, num_ranks: int, m: int) -> dict[str, Any]:
    """Microbatches that the schedule takes, and as many steps as fill the pipeline of an asynchronous one."""
    if schedule == "pipedream-2bw":
        m = max(m, num_ranks - 1)
    if schedule == "data-parallel":
        m = max(m, num_ranks)
    steps = num_ranks + 2 if schedule in ASYNCHRONOUS and m == 1 else 3
    return {"num_ranks": num_ranks, "num_microbatches": m, "steps": steps, "num_chunks": CHUNKS.get(schedule, 1)}


PAIRS = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 1), (3, 2), (3, 4), (4, 1), (4, 3), (4, 6)]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("num_ranks", "m"), PAIRS, ids=[f"p{p}m{m}" for p, m in PAIRS])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_exact_for_any_ranks_and_microbatches(
    schedule: str, num_ranks: int, m: int, recompute: bool
) -> None:
    assert_equal("plain", schedule=schedule, recompute=recompute, **sizes(schedule, num_ranks, m))


SHAPES = itertools.cycle([(3, 4), (4, 3), (2, 5), (4, 2), (3, 1)])
CASES = [
    (schedule, model, *next(SHAPES), index % 2 == 0)
    for index, (schedule, model) in enumerate(itertools.product(SCHEDULES, MODELS))
    if model != "plain"
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "model", "num_ranks", "m", "recompute"),
    CASES,
    ids=[f"{s}-{model}-p{p}m{m}{'-recomputed' * r}".replace(" ", "_") for s, model, p, m, r in CASES],
)
def test_every_schedule_is_exact_for_every_kind_of_model(
    schedule: str, model: str, num_ranks: int, m: int, recompute: bool
) -> None:
    assert_equal(model, schedule=schedule, recompute=recompute, **sizes(schedule, num_ranks, m))


INSIDE = [
    (schedule, model, kind)
    for kind in ("layer", "selective")
    for schedule, model in itertools.product((*SYNCHRONOUS, "zb-h1", *ASYNCHRONOUS), MODELS)
    if (kind, schedule) != ("layer", "zb-h1") and (kind == "layer" or model == ATTENTION)
]


@pytest.mark.parametrize(
    ("schedule", "model", "kind"),
    [
        pytest.param(*case, marks=[] if case[0] in ("1f1b", "gpipe", "zb-h1") and case[1] == ATTENTION else SLOW)
        for case in INSIDE
    ],
)
def test_replays_inside_backwards_are_exact(schedule: str, model: str, kind: str) -> None:
    assert_equal(model, schedule=schedule, recompute=kind, **sizes(schedule, 2, 3))


@pytest.mark.parametrize("model", ["tied ends", "batch norm", "a frozen middle"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_clipping_by_the_norm_of_all_stages_is_exact(schedule: str, model: str) -> None:
    assert_equal(model, schedule=schedule, clip_norm=0.05, **sizes(schedule, 3, 3))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream-2bw"])
def test_a_norm_of_0_clips_nothing(schedule: str) -> None:
    assert_equal("batch norm", schedule=schedule, clip_norm=0.0, **sizes(schedule, 2, 3))


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def heavy(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rate_schedules_momentum_and_decay_are_exact(schedule: str) -> None:
    assert_equal("plain", schedule=schedule, scheduler=decaying, optimizer=heavy, **sizes(schedule, 3, 4))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_ragged_last_batch_keeps_the_weighting_of_the_loss(schedule: str) -> None:
    shape = sizes(schedule, 3, 4)
    ragged = [*[9] * (shape["steps"] - 1), 5]
    assert_equal("dropout", schedule=schedule, batch_size=ragged, **shape)


REPLICATED = [
    ("gpipe", (2,), 4, 3),
    ("1f1b", (2,), 4, 4),
    ("1f1b", (2, 1), 3, 3),
    ("1f1b", (1, 3), 4, 5),
    ("1f1b", (1, 2, 1), 4, 3),
    ("interleaved", (2,), 4, 5),
    ("breadth-first", (2,), 4, 4),
    ("pipedream", (2,), 4, 1),
    ("pipedream", (2, 1), 3, 1),
    ("pipedream", (3, 1), 4, 2),
    ("pipedream", (1, 2, 1), 4, 1),
    ("pipedream-vertical-sync", (2,), 4, 1),
    ("pipedream-2bw", (2,), 4, 5),
    ("pipedream-2bw", (2, 1), 3, 4),
]

# Stages that share a weight must step together, so PipeDream with unequal replicas refuses the tied models.
COPIES = [
    (*case, model)
    for case, model in itertools.product(
        REPLICATED, ("plain", "batch norm", "dropout", "tied ends", "tied neighbours", "a frozen beginning")
    )
    if not (case[0] == "pipedream" and len(case[1]) > 1 and model.startswith("tied"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "replicas", "num_ranks", "m", "model"), COPIES)
def test_every_copy_of_a_replicated_stage_is_exact(
    schedule: str, replicas: tuple[int, ...], num_ranks: int, m: int, model: str
) -> None:
    shape = sizes(schedule, num_ranks, m) | {"steps": 6, "num_microbatches": m, "replicas": replicas}
    assert_equal(model, schedule=schedule, **shape)


@pytest.mark.parametrize(
    ("schedule", "replicas", "num_ranks"), [("1f1b", (2,), 4), ("data-parallel", (), 3), ("pipedream", (2, 1), 3)]
)
def test_a_weight_that_nothing_reaches_does_not_decay_on_any_copy(
    schedule: str, replicas: tuple[int, ...], num_ranks: int
) -> None:
    shape = sizes(schedule, num_ranks, 3) | {"steps": 4, "replicas": replicas}
    assert_equal("a weight that nothing reaches", schedule=schedule, optimizer=heavy, **shape)
