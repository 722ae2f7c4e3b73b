"""Callbacks of `fit`: what they are told, how they end a training, and those that come along."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import pipefit as pf
from pipefit.errors import DataError, PipefitError
from pipefit.pipeline.callbacks import Record
from pipefit.runtime.launch import launch


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (6, 2)]


def batches(count):
    return [tuple(batch(step)) for step in range(count)]


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def pipeline(stages=2, scheduler=halving, clip_norm=0.5, **options):
    return pf.Pipeline(
        network(),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.4),
        stages=stages,
        updates=pf.Updates(clip_norm=clip_norm, scheduler=scheduler),
        **{"microbatches": 2, **options},
    )


def reference(count):
    """Loss, learning rate, norm of the gradients and weights of each step, in one process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.4)
    scheduler = halving(optimizer)
    for x, y in batches(count):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield loss.item(), rate, norm.item(), copy.deepcopy(model)


class Listener:
    """Notes all that it is told."""

    def __init__(self):
        self.told = []

    def step(self, record):
        self.told.append(("step", record))

    def evaluation(self, record):
        self.told.append(("evaluation", record))

    def checkpoint(self, record):
        self.told.append(("checkpoint", record))

    def end(self, record):
        self.told.append(("end", record))

    @property
    def events(self):
        return [(event, record.step) for event, record in self.told]


# ---- what they are told ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"spill": pf.Spilled(step_on="host"), "stages": 4, "parallelism": pf.Parallelism(chunks=4)}]
)
def test_a_step_is_told_with_the_figures_of_one_process(options):
    pipe, records = pipeline(**options), []
    pipe.fit(batches(2))
    pipe.fit(batches(6)[2:], callbacks=[records.append])
    assert [record.step for record in records] == [3, 4, 5, 6]
    for record, (loss, rate, norm, _) in zip(records, [*reference(6)][2:], strict=True):
        assert (record.loss, record.gradient_norm) == pytest.approx((loss, norm), rel=1e-12)
        assert record.learning_rates == (rate,)
        assert record.samples_per_s > 0 and record.tokens_per_s is None and record.seconds > 0
        assert 0 <= record.bubble < 1 and record.memory_bytes[0] > 1e6


def test_tokens_are_those_that_no_mask_hides():
    records = []
    words = torch.randint(0, 9, (4, 6))
    pipe = pf.Pipeline(
        nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)),
        loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        microbatches=2,
        updates=pf.Updates(nonfinite="off"),
    )
    pipe.fit([(words, words)], callbacks=[records.append])
    assert records[0].tokens_per_s == pytest.approx(records[0].samples_per_s * 6)
    assert records[0].gradient_norm is None  # nothing needed it
    from pipefit.pipeline.batches import size_of

    mask = torch.ones_like(words)
    mask[:, 4:] = 0
    assert size_of({"input_ids": words, "attention_mask": mask}) == (4, 16)


def frozen(_=None):
    """Learning rates and norms of a run whose first stage trains nothing, on each rank."""
    torch.manual_seed(0)
    model, records = network(), []
    model[0].requires_grad_(False)
    pipe = pf.Pipeline(
        model,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.4),
        stages=[2, 3],
        microbatches=2,
        updates=pf.Updates(clip_norm=0.5, scheduler=halving),
    )
    pipe.fit(batches(3), callbacks=[records.append])
    return [(record.learning_rates, record.gradient_norm) for record in records]


@pytest.mark.dist
def test_a_process_that_trains_nothing_gets_the_figures_too():
    expected = frozen()
    assert [rates for rates, _ in expected] == [(0.4,), (0.4,), (0.2,)] and all(norm for _, norm in expected)
    assert launch(frozen, 2, None, threads=1) == [expected, expected]


def test_an_asynchronous_segment_tells_its_steps_at_its_end():
    pipe, listener = pipeline(schedule="pipedream-2bw", clip_norm=None), Listener()
    pipe.fit(batches(4), callbacks=[listener], held_out=batches(1), evaluate_every=2)
    steps = [("step", step) for step in (1, 2, 3, 4)]
    assert listener.events == [*steps[:2], ("evaluation", 2), *steps[2:], ("evaluation", 4), ("end", 4)]
    assert [record.learning_rates for event, record in listener.told if event == "step"] == [
        (0.4,),
        (0.4,),
        (0.2,),
        (0.2,),
    ]


def test_a_checkpoint_is_told_with_its_path(tmp_path):
    pipe, listener = pipeline(), Listener()
    pipe.fit(batches(3), callbacks=[listener, pf.Checkpoints(pipe, tmp_path, every=2)])
    events = [("step", 1), ("step", 2), ("step", 3), ("end", 3), ("checkpoint", 3)]
    # The second step's is written while training goes on.
    assert listener.events.index(("checkpoint", 2)) > 1
    assert [event for event in listener.events if event != ("checkpoint", 2)] == events
    assert [record.path.name for event, record in listener.told if event == "checkpoint"] == [
        "step-000002",
        "step-000003",
    ]
    pipe.save(tmp_path)  # no training: nobody is told
    assert len(listener.events) == 6
    second = pipeline()
    second.load(tmp_path / "step-000002")
    second.fit(batches(3)[2:])
    state = pipe.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in second.state_dict().items())


# ---- ending ----------------------------------------------------------------------------------------------------------


def raising(record):
    if record.step == 2:
        raise StopIteration


def stopping(on_rank=None):
    """The number of steps, and why they ended, where a callback (of one rank only, or of all) wants to stop at 2."""
    pipe, listener = pipeline(), Listener()
    mine = [lambda record: pf.STOP if record.step == 2 else None] if on_rank in (None, pipe.rank) else []
    losses = pipe.fit(batches(9), callbacks=[listener, *mine])
    return len(losses), listener.told[-1][1].ended, len(pipe.fit(batches(2)))


@pytest.mark.dist
def test_a_callback_of_any_rank_ends_the_training_of_all_after_the_same_step():
    assert stopping() == (5, "STOP", 2)
    for rank in (None, 0, 1):
        assert launch(stopping, 2, rank, threads=1) == [stopping()] * 2
    listener = Listener()
    assert len(pipeline().fit(batches(9), callbacks=[raising, listener])) == 5
    assert listener.told[-1][1].ended == "STOP"


@pytest.mark.parametrize("steps", [None, 5])
def test_evaluations_are_those_of_the_weights_of_their_step(steps):
    pipe, listener = pipeline(), Listener()
    pipe.fit(batches(1))
    pipe.fit(batches(6)[1:], steps, callbacks=[listener], held_out=batches(1), evaluate_every=2)
    x, y = batches(1)[0]
    expected = [nn.functional.mse_loss(model(x), y).item() for *_, model in reference(6)]
    found = [(record.step, record.held_out_loss) for event, record in listener.told if event == "evaluation"]
    assert found == [(step, pytest.approx(expected[step - 1], rel=1e-12)) for step in (2, 4, 6)]
    assert listener.events[-1] == ("end", 6)


def test_one_more_evaluation_comes_at_the_end():
    pipe, listener = pipeline(), Listener()
    pipe.fit(batches(3), callbacks=[listener], held_out=batches(1), evaluate_every=2)
    assert [step for event, step in listener.events if event == "evaluation"] == [2, 3]
    pipe.fit(batches(2), callbacks=[listener], held_out=batches(1))
    assert listener.events[-2:] == [("evaluation", 5), ("end", 5)]


class Told:
    """Tells a callback other losses of evaluations than those that were found."""

    def __init__(self, callback, *losses):
        self.callback, self.losses = callback, iter(losses)
        self.end = callback.end

    def evaluation(self, record):
        return self.callback.evaluation(replace(record, held_out_loss=next(self.losses)))


def early(place):
    pipe = pipeline()
    stopping = Told(pf.EarlyStopping(pipe, patience=2, folder=place), 3.0, 2.0, 2.5, 2.0, 1.0)
    kept = []
    losses = pipe.fit(
        batches(9),
        callbacks=[stopping, lambda record: kept.append(record.step)],
        held_out=batches(1),
        evaluate_every=1,
    )
    return len(losses), kept, pipe.state_dict()


@pytest.mark.dist
def test_early_stopping_ends_at_once_and_goes_back_to_the_best_weights(tmp_path):
    *_, best = [*reference(2)][1]
    expected = best.state_dict()
    results = [early(tmp_path / "a"), *launch(early, 2, str(tmp_path / "b"), threads=1)]
    for count, kept, state in results:
        assert (count, kept) == (4, [1, 2, 3, 4])
        assert all(torch.allclose(value, state[name], rtol=1e-12) for name, value in expected.items())


# ---- the average of the weights --------------------------------------------------------------------------------------


def averaged(_=None):
    """Held-out losses and saved weights under an average, then the weights themselves."""
    pipe = pipeline()
    average, listener = pf.EMA(pipe, 0.9), Listener()
    losses = pipe.fit(batches(5), callbacks=[average, listener], held_out=batches(1), evaluate_every=5)
    with average.evaluating():
        state = pipe.state_dict()
    return losses, listener.told[-1][1].held_out_loss, state, pipe.state_dict()


@pytest.mark.dist
def test_the_average_is_that_of_one_process_and_the_training_does_not_notice_it():
    expected = {name: value.clone() for name, value in network().state_dict().items()}
    for *_, model in reference(5):
        for name, value in model.state_dict().items():
            expected[name] = 0.9 * expected[name] + 0.1 * value
    plain = pipeline()
    losses, weights = plain.fit(batches(5)), plain.state_dict()
    model = network()
    model.load_state_dict(expected)
    x, y = batches(1)[0]
    held_out = nn.functional.mse_loss(model(x), y).item()
    for found in (averaged(), *launch(averaged, 2, None, threads=1)):
        assert found[0] == losses and found[1] == pytest.approx(held_out, rel=1e-12)
        assert all(torch.allclose(found[2][name], value, rtol=1e-12) for name, value in expected.items())
        assert all(torch.equal(found[3][name], value) for name, value in weights.items())


def test_a_process_that_trains_nothing_averages_nothing():
    model = network().requires_grad_(False)
    pipe = pf.Pipeline(model, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD, stages=2)
    assert len(pipe.fit(batches(2), callbacks=[pf.EMA(pipe)])) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "pipedream", "clip_norm": None},
        {"spill": pf.Spilled(), "parallelism": pf.Parallelism(chunks=2)},
        {"schedule": "data-parallel", "parallelism": pf.Parallelism(ranks=2, shard="weights")},
    ],
)
def test_an_average_that_cannot_be_kept_is_refused(options):
    with pytest.raises(PipefitError, match="expected a synchronous schedule and stages that stay"):
        pf.EMA(pipeline(**options))


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    with pytest.raises(PipefitError, match=r"callbacks: expected a function, or an object with some of .* got str"):
        pipeline().fit(batches(1), callbacks=["print"])
    with pytest.raises(DataError, match="evaluate_every=3: give held_out"):
        pipeline().fit(batches(1), evaluate_every=3)


def only_first(_=None):
    """A callback of the first rank alone, which needs nothing of the others."""
    pipe, listener = pipeline(), Listener()
    mine = [listener] if pipe.rank == 0 else []
    pipe.fit(batches(3), callbacks=mine, held_out=batches(1))
    return listener.events


@pytest.mark.dist
def test_one_rank_may_listen_alone():
    events = [("step", 1), ("step", 2), ("step", 3), ("evaluation", 3), ("end", 3)]
    assert launch(only_first, 2, None, threads=1) == [events, []]


def test_a_record_cannot_be_changed():
    with pytest.raises(AttributeError):
        Record(1, 2.0).loss = 0.0
