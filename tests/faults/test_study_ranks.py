"""SIGKILL, SIGSTOP and SIGTERM to a worker of a study, and to the study itself: no trial loses a committed step."""

import multiprocessing
import os
import signal

import pytest
import torch
from tests.processes import server
from tests.study.cases import MLP, SMALL, alone
from torch import nn

import pipefit as pf
from pipefit.study.trial import Trial

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 3
SITES = ("forward", "backward", "step")
# Two micro-batches of a step.
TIMES = {"first": 1, "steady": STEPS, "last": 2 * STEPS}
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")


class Signalled(torch.autograd.Function):
    """Passes a tensor on, and calls a function in its forward or its backward."""

    @staticmethod
    def forward(ctx, x, act, site):
        ctx.act, ctx.site = act, site
        if site == "forward":
            act()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.site == "backward":
            ctx.act()
        return gradient.clone(), None, None


class Signalling(nn.Linear):
    """A layer in which something happens."""

    def __init__(self, act, site):
        super().__init__(4, 4)
        self.act, self.site = act, site

    def forward(self, x):
        return Signalled.apply(super().forward(x), self.act, self.site if torch.is_grad_enabled() else "")


def once(mark, at, name):
    """A function that sends its process a signal when it is called for the n-th time in all processes."""

    def act():
        handle = os.open(mark, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, b".")
        size = os.fstat(handle).st_size
        os.close(handle)
        if size == at:
            os.kill(os.getpid(), signal.Signals[name])

    return act


class Stepping(torch.optim.SGD):
    """An optimizer in whose step something happens."""

    def __init__(self, params, act):
        super().__init__(params, 0.1, momentum=0.9)
        self._act = act

    def step(self, closure=None):
        self._act()
        return super().step(closure)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)


def signalled(act, site):
    """A trial of two shards, in which something happens at a site."""

    def model():
        torch.manual_seed(0)
        return [nn.Linear(4, 4), Signalling(act if site != "step" else lambda: None, site)]

    def optimizer(params):
        return Stepping(params, act if site == "step" else lambda: None)

    own = {"loss": nn.functional.mse_loss, "data": batch, "optimizer": optimizer}
    return Trial("signalled", model, **own, steps=STEPS, microbatches=2, shards=2)


def study(given, folder):
    return pf.Study(given, output=folder, threads=1)


TRIALS = [
    pytest.param(site, when, SIGNALS[(row + column) % 3], marks=[pytest.mark.faults] * (site != "forward"))
    for row, site in enumerate(SITES)
    for column, when in enumerate(TIMES)
]


@pytest.mark.parametrize(("site", "when", "name"), TRIALS)
def test_a_worker_that_gets_a_signal_loses_nothing(site, when, name, trial, tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEFIT_DEADLINE_S", "1.5")
    expected = alone(signalled(lambda: None, site))[0]
    other = Trial(**SMALL, **MLP)
    at = TIMES[when] if site != "step" else {"first": 1, "steady": 3, "last": 2 * STEPS}[when]
    own = signalled(once(tmp_path / "mark", at, name), site)
    result = study([own, other], tmp_path / "study").run()
    rows = {row.name: row for row in result.trials}
    trial(
        f"{name} to a worker, study",
        (site, when, [(row.name, row.status, row.reason) for row in result.trials]),
        well=[row.status for row in result.trials] == ["finished"] * 2 and not multiprocessing.active_children(),
        resumed=rows["signalled"].losses == expected and result.trials[1].losses == alone(other)[0],
    )


def begun(folder, after, name):
    """A study whose own process gets a signal after some events."""
    events = []

    def observe(board):
        events.append(board)
        if len(events) == after:
            os.kill(os.getpid(), signal.Signals[name])

    made = study([Trial(**SMALL, **MLP), Trial(**SMALL, **MLP, seed=1)], folder)
    result = made.run(observer=observe)
    os._exit(128 + made.stopped_by if made.stopped_by else result.num_failed)


@pytest.mark.parametrize(
    "after", [1, pytest.param(4, marks=pytest.mark.faults), pytest.param(8, marks=pytest.mark.faults)]
)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_study_that_gets_a_signal_resumes_to_the_bit(after, name, trial, tmp_path):
    process = server().Process(target=begun, args=(tmp_path / "study", after, name))
    process.start()
    process.join()
    given = [Trial(**SMALL, **MLP), Trial(**SMALL, **MLP, seed=1)]
    result = study(given, tmp_path / "study").run(resume=True)
    trial(
        f"{name} to a study",
        (after, process.exitcode),
        well=process.exitcode == {"SIGKILL": -signal.SIGKILL, "SIGTERM": 128 + signal.SIGTERM}[name],
        resumed=[row.losses for row in result.trials] == [alone(one)[0] for one in given],
    )
