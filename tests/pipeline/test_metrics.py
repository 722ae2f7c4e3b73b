"""Metrics that a loss returns: averaged like the loss, the same on every rank, in records, logs and evaluations."""

import csv
import json

import pytest
import torch
from torch import nn

import pipefit as pf
from pipefit.errors import ModelError
from pipefit.runtime.launch import LaunchError, launch


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batches(count, size=7):
    """Seven samples: two micro-batches of them differ in size."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda width: torch.randn(size, width, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(6), draw(2)) for _ in range(count)]


def measured(output, target):
    """The loss with two means over the samples given, one of them a plain number."""
    error = (output - target).abs().mean()
    return nn.functional.mse_loss(output, target), {"error": error, "largest": output.detach().amax(1).mean().item()}


def plain(output, target):
    return nn.functional.mse_loss(output, target)


def pipeline(loss=measured, weigh=None, schedule="1f1b", stages=2, **options):
    return pf.Pipeline(
        network(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.2),
        **{"stages": stages, "microbatches": 2, "schedule": schedule, "updates": pf.Updates(weigh=weigh), **options},
    )


def reference(count):
    """The losses and metrics of one process, which takes whole batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    for x, y in batches(count):
        loss, metrics = measured(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield (
            loss.item(),
            {name: float(torch.as_tensor(value, dtype=torch.float64).detach()) for name, value in metrics.items()},
        )


# ---- means -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_metrics_of_a_step_are_those_of_one_process(schedule):
    records, pipe = [], pipeline(schedule=schedule)
    losses = pipe.fit(batches(4), callbacks=[records.append])
    wanted = list(reference(4))
    assert losses == pytest.approx([loss for loss, _ in wanted], rel=1e-12)
    assert losses == pipeline(plain, schedule=schedule).fit(batches(4)), "metrics change no bit of the training"
    for record, (_, metrics) in zip(records, wanted, strict=True):
        assert record.metrics == pytest.approx(metrics, rel=1e-12)
    assert pipe.metrics == records[-1].metrics


def test_replicas_and_segments_average_them_too():
    """Of an asynchronous schedule, and of replicated last stages, whose micro-batches different ranks take."""
    split = pipeline(schedule="data-parallel", stages=None, parallelism=pf.Parallelism(ranks=2))
    seen = []
    split.fit(batches(3), callbacks=[lambda record: seen.append(record.metrics)])
    assert seen == [pytest.approx(metrics, rel=1e-12) for _, metrics in reference(3)]
    first, late = [], pipeline(schedule="pipedream-2bw")
    late.fit(batches(3), steps=3, callbacks=[lambda record: first.append(record.metrics)])
    assert first[0] == pytest.approx(next(reference(1))[1], rel=1e-12) and first[2] != first[0]


def test_a_step_by_hand_and_an_evaluation_leave_them_at_the_pipeline():
    pipe = pipeline()
    assert pipe.metrics == {} and not pipe.stop_requested
    (x, y), (other, wanted) = batches(2)
    assert pipe.step(x, y) == pytest.approx(next(reference(1))[0], rel=1e-12)
    assert pipe.metrics == pytest.approx(next(reference(1))[1], rel=1e-12)
    model = nn.Sequential(*(layer.module for layer in pipe.layers))
    with torch.no_grad():
        loss, metrics = measured(model(torch.cat([x, other])), torch.cat([y, wanted]))
    halves = [(x, y), (other[:3], wanted[:3]), (other[3:], wanted[3:])]
    assert pipe.evaluate(halves) == pytest.approx(loss.item(), rel=1e-12)
    assert pipe.metrics == pytest.approx({name: float(value) for name, value in metrics.items()}, rel=1e-12)


def test_metrics_are_weighted_like_the_loss():
    """By tokens: the first micro-batch has six that count, the second one."""
    marks = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 0, 0]], dtype=torch.float64)

    def loss(output, target):
        value = (output * target).sum() / target.sum()
        return value, {"same": value.detach()}

    pipe = pf.Pipeline(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        stages=2,
        microbatches=2,
        updates=pf.Updates(weigh=lambda target: float(target.sum())),
    )
    value = pipe.step(torch.randn(4, 3, dtype=torch.float64), marks)
    assert pipe.metrics == {"same": pytest.approx(value, rel=1e-12)}


def test_an_evaluation_that_is_weighted_by_tensors_is_a_number():
    pipe = pipeline(weigh=lambda target: torch.tensor(float(len(target))))
    model = network()
    found = pipe.evaluate(batches(1))
    (x, y), *_ = batches(1)
    assert type(found) is float and type(pipe.metrics["error"]) is float
    assert found == pytest.approx(plain(model(x), y).item(), rel=1e-12)


def in_processes(_):
    records, pipe = [], pipeline()
    losses = pipe.fit(batches(3), callbacks=[records.append], held_out=batches(1), evaluate_every=3)
    return losses, [dict(record.metrics) for record in records], pipe.metrics


@pytest.mark.dist
def test_every_rank_has_the_metrics():
    expected = in_processes(None)
    assert launch(in_processes, 2, None, threads=1) == [expected, expected]


# ---- logs ------------------------------------------------------------------------------------------------------------


def test_logs_hold_the_metrics_of_steps_and_evaluations(tmp_path):
    logs = [pf.json_log(tmp_path / "metrics.jsonl"), pf.csv_log(tmp_path / "metrics.csv")]
    records = []

    class Evaluations:
        def evaluation(self, record):
            records.append(record)

    pipeline().fit(batches(2), callbacks=[*logs, Evaluations()], held_out=batches(1), evaluate_every=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines[:2]] == pytest.approx([metrics["error"] for _, metrics in reference(2)])
    assert lines[2]["held_out_error"] == records[0].held_out_metrics["error"] != lines[1]["error"]
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [(row["error"], row["held_out_largest"]) for row in rows] == [
        (str(lines[0]["error"]), ""),
        (str(lines[1]["error"]), ""),
        ("", str(lines[2]["held_out_largest"])),
    ]


def test_a_table_that_grows_metrics_keeps_its_rows(tmp_path):
    path = tmp_path / "metrics.csv"
    pipeline(plain).fit(batches(2), callbacks=[pf.csv_log(path)])
    later = pipeline()
    later.state.num_updates = 2
    later.fit(batches(1), callbacks=[pf.csv_log(path)])
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["step"], bool(row["error"]), bool(row["loss"])) for row in rows] == [
        ("1", False, True), ("2", False, True), ("3", True, True),
    ]  # fmt: skip


def test_a_micro_batch_without_a_weight_counts_in_no_metric():
    def loss(output, target):
        counted = target != -100
        hits = (output.argmax(1) == target)[counted].double().mean()  # not a number where none counts
        return nn.functional.cross_entropy(output, target), {"hits": hits}

    x, y = torch.randn(8, 4), torch.arange(8) % 4
    y[:2] = -100
    pipe = pf.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        loss=loss,
        optimizer=lambda weights: torch.optim.SGD(weights, 0.0),
        stages=2,
        microbatches=4,
        updates=pf.Updates(weigh=lambda target: (target != -100).sum()),
    )
    whole = loss(pipe.model(x), y)[1]["hits"]
    pipe.step(x, y)
    assert pipe.metrics["hits"] == pytest.approx(whole.item())
    _, measured = pipe.evaluate([(x, y)], lambda output, target: loss(output, target)[1]["hits"])
    assert measured == pipe.metrics["hits"] == pytest.approx(whole.item())


# ---- messages --------------------------------------------------------------------------------------------------------


def fickle():
    """A loss that names its metric for small outputs only."""
    return lambda output, target: (plain(output, target), {"few": 1.0} if len(output) < 4 else {})


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (fickle(), "metrics few for micro-batch 1, but none for an earlier one"),
        (lambda o, y: (plain(o, y), {"loss": 1.0}), "a metric named loss, which records have already: rename it"),
        (lambda o, y: (plain(o, y), {"all": o}), r"the metric 'all', which must be one number, got a tensor of shape"),
        (lambda o, y: (plain(o, y), {"word": "x"}), "the metric 'word', which must be one number, got 'x'"),
        (lambda o, y: (plain(o, y), 1.0), "the loss must be one number .* got tuple"),
    ],
)
def test_metrics_that_cannot_be_averaged_are_refused(loss, message):
    with pytest.raises(ModelError, match=message):
        pipeline(loss).fit(batches(1))


@pytest.mark.parametrize("value", [{"a": 1}, None, "x", torch.ones(3)])
def test_a_metric_of_an_evaluation_that_is_not_a_number_is_refused(value):
    with pytest.raises(ModelError, match="metric: expected a function that returns one number, got "):
        pipeline(plain).evaluate(batches(1), lambda output, target: value)


def refused(_):
    pipeline(fickle()).fit(batches(1))


@pytest.mark.dist
def test_metrics_that_change_end_a_run_of_processes():
    with pytest.raises((LaunchError, ModelError), match="metrics few for micro-batch 1"):
        launch(refused, 2, None, threads=1)
