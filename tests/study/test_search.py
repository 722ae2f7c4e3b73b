"""Searches that choose trials while a study runs, and go on after it was cut off."""

import gc
import os
import signal

import pytest
import torch
import torch.distributed as dist
from tests.study.cases import MLP, SMALL, Listed

import pipefit as pf
from pipefit.study.trial import StudyError, Trial
from pipefit.study.trial_search import OptunaSearch

pytestmark = pytest.mark.slow

# Forks inherit what is loaded: the first optimizer of a process otherwise takes seconds.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()


def define(values):
    return Trial(**{**SMALL, **MLP, **values})


def test_trials_chosen_long_after_the_workers_began_are_known_to_them(tmp_path):
    values = [{"lr": lr, "steps": 2, "name": "same"} for lr in (1e-1, 1e-2, 1e-1, 1e-3, 1e-1)]
    search = Listed([*values[:3], {"lr": "fast"}, *values[3:]])
    result = pf.study([], define=define, search=search, output=tmp_path / "s", threads=1, workers=1)
    assert [row.status for row in result.trials] == ["finished"] * 3 + ["failed"] + ["finished"] * 2
    assert "lr: expected a number" in result.trials[3].reason
    assert len({row.name for row in result.trials}) == 6
    assert result.trials[0].losses == result.trials[2].losses == result.trials[5].losses
    assert len(search.scores) == 6 and ({"lr": "fast"}, None) in search.scores


def test_a_chosen_trial_must_be_judged_as_the_others_are(tmp_path):
    search = Listed([{"steps": 2}, {"steps": 2, "evaluate": 1, "data": ("digits",), "options": {"layers": 2}}, {}])
    result = pf.study(
        [], define=lambda values: define(values) if values else 17, search=search, output=tmp_path / "s", workers=1
    )
    assert [row.status for row in result.trials] == ["finished", "failed", "failed"]
    assert "set it for all" in result.trials[1].reason
    assert result.trials[2].reason == "define must give a Trial, got int"


def test_workers_compute_with_threads_though_they_are_forks_of_a_program_that_has(tmp_path):
    """The threads of OpenMP do not survive a fork; whoever waits for them waits for ever."""
    trial = {"options": {**MLP["options"], "width": 512}, "batch": 256, "steps": 2}
    torch.set_num_threads(2)
    try:
        torch.randn(1 << 20).exp()
        search = Listed([trial])
        result = pf.study([], define=define, search=search, output=tmp_path / "s", threads=2, workers=1)
    finally:
        torch.set_num_threads(1)
    assert [row.status for row in result.trials] == ["finished"]


def test_what_a_program_had_thrown_away_is_not_deleted_in_the_forks_of_it(tmp_path):
    """A group of processes has threads, which are not there in a fork; deleting it waits for them."""
    program = os.getpid()

    def define_in_a_worker(values):
        if os.getpid() != program:
            gc.collect()
        return define(values)

    gc.disable()
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.barrier()
        thrown_away = [dist.group.WORLD]
        thrown_away.append(thrown_away)
        dist.destroy_process_group()
        del thrown_away
        result = pf.study(
            [], define=define_in_a_worker, search=Listed([{"steps": 1}] * 3), output=tmp_path / "s", workers=1
        )
    finally:
        gc.enable()
    # The third is chosen, and defined in the worker, after the workers began.
    assert [row.status for row in result.trials] == ["finished"] * 3
    assert not (tmp_path / "s" / "logs" / "worker-0.log").read_text()


@pytest.mark.parametrize("own", ["listed", "optuna", "optuna that has lasted"])
def test_a_search_that_was_cut_off_goes_on_and_is_told_of_all(own, tmp_path):
    kept = []
    values = [{"lr": lr, "steps": 3} for lr in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)]

    def search():
        if own == "listed":
            return Listed(values)
        optuna = pytest.importorskip("optuna")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        if not kept or own == "optuna":
            kept.append(optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)))
        return OptunaSearch(kept[-1], lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1)}, 5)

    def stop(board):
        if sum(entry.has_ended for entry in board.entries) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    how = {"define": define, "output": tmp_path / "s", "threads": 1, "workers": 1, "policy": "fifo"}
    first = pf.Study([], search=search(), **how).run(observer=stop)
    assert first.interrupted and 2 <= sum(row.status == "finished" for row in first.trials) < 5
    second = search()
    result = pf.Study([], search=second, **how).run(resume=True)
    assert [row.status for row in result.trials] == ["finished"] * 5
    asked = [row.values["lr"] for row in first.trials]
    assert [row.values["lr"] for row in result.trials][: len(asked)] == asked
    told = second.scores if own == "listed" else [(t.params, t.value) for t in kept[-1].trials]
    assert len(told) == 5
    assert {given["lr"]: score for given, score in told} == {row.values["lr"]: row.score for row in result.trials}


def test_a_search_is_asked_and_told(tmp_path):
    search = Listed([{"lr": lr, "steps": 2} for lr in (1e-1, 1e-2, 1e-3)] + [{"lr": 1e-2, "model": "none"}])
    result = pf.study([], define=define, search=search, output=tmp_path / "s", threads=1)
    assert len(result.trials) == 4 and len(search.scores) == 4
    told = {values.get("model", values["lr"]): score for values, score in search.scores}
    assert told["none"] is None
    assert told[1e-2] == pytest.approx(result.trials[1].score)


def test_optuna_drives_a_study(tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with pytest.raises(StudyError, match="expected an Optuna study that minimises"):
        OptunaSearch(optuna.create_study(direction="maximize"), dict, num_trials=4)
    chooser = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    search = OptunaSearch(chooser, lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}, num_trials=4)
    result = pf.study([], define=define, search=search, output=tmp_path / "s", threads=1)
    assert len(chooser.trials) == 4 and {row.status for row in result.trials} == {"finished"}
    assert chooser.best_value == pytest.approx(min(row.score for row in result.trials))
    assert result[result.best].values["lr"] == chooser.best_params["lr"]
