"""The state of a study, through every course a trial can take."""

import math

import pytest

from pipefit.study.board import Board
from pipefit.study.simulation import TimedTurn, lower_bound_s
from pipefit.study.stopping import Halving
from pipefit.study.trial import Figures, Progress, Trial
from pipefit.study.trial_progress import TrialProgress


def board(*steps, devices=2, policy="lrtf", stop=None):
    entries = [TrialProgress(n, Trial(steps=count), f"t{n}") for n, count in enumerate(steps)]
    return Board(entries, devices, policy, stop)


def admit(game, number, device=0, turns=1, start_s=0, end_s=1, losses=(), turn=0):
    """A worker has built a trial; one that is resumed has losses already."""
    game.book([TimedTurn(number, device, -1, 0, start_s, end_s)])
    game.admitted(number, Figures(turns, 1, 10, 100), Progress(turn, list(losses), []))


def take(game, *turns):
    """A worker has taken turns of a trial."""
    game.book([TimedTurn(*turn) for turn in turns])
    game.settle(turns[0][0])


def play(game, loss=lambda trial, step: 1.0, turns=2, seconds=1.0, limit=500):
    """Runs a board to its end with devices that are never wrong; how many jobs there were."""
    clock = [0.0] * game.num_devices
    for count in range(limit):
        order = sorted(range(game.num_devices), key=clock.__getitem__)
        jobs = [(device, job) for device in order if (job := game.next_job(device))]
        if not jobs:
            return count
        now = max(clock)
        for device, job in jobs:
            entry = game.entries[job.trial]
            if job.kind == "admit":
                admit(game, job.trial, device, turns, now, now + seconds)
                clock[device] = now + seconds
                continue
            taken = []
            for count in range(entry.turn, entry.turn + job.argument):
                step, turn = entry.steps + count // turns, count % turns
                done = loss(job.trial, step) if turn == turns - 1 else math.nan
                taken.append((job.trial, device, step, turn, now, now + seconds, done))
                now += seconds
            take(game, *taken)
            clock[device] = now
    raise AssertionError("the study does not end")


def test_every_trial_comes_to_its_end_with_one_loss_per_step():
    game = board(3, 1, 2)
    play(game, loss=lambda trial, step: 10 * trial + step)
    assert [entry.status for entry in game.entries] == ["finished"] * 3
    assert [entry.losses for entry in game.entries] == [[0, 1, 2], [10], [20, 21]]
    assert game.is_over and game.tier_bytes == 0


def test_a_failure_leaves_the_others_alone():
    game = board(2, 2)
    assert game.next_job(0).trial == 0
    game.failed(0, "it raised")
    play(game)
    assert [(e.status, e.reason) for e in game.entries] == [("failed", "it raised"), ("finished", "")]
    assert game.best.number == 1


def test_a_trial_whose_worker_died_goes_on_from_its_last_commit_and_fails_when_it_kills_again():
    game = board(3, devices=1)
    game.next_job(0)
    admit(game, 0, turns=2)
    game.next_job(0)
    game.lost(0, "signal SIGKILL", Progress(1, [], []))
    entry = game.entries[0]
    assert (entry.status, entry.steps, entry.turn) == ("ready", 0, 1) and game.next_job(0)[:2] == ("turn", 0)
    game.lost(0, "signal SIGKILL", Progress(0, [5.0], []))
    assert game.entries[0].status == "failed" and "SIGKILL" in game.entries[0].reason


def test_a_worker_that_dies_while_admitting_lets_another_try():
    game = board(1, devices=1)
    game.next_job(0)
    game.lost(0, "exit code 1", Progress(0, [], []))
    assert game.next_job(0)[:2] == ("admit", 0)


def test_a_trial_without_room_waits_until_another_has_ended():
    game = board(1, 1)
    assert [game.next_job(device)[:2] for device in (0, 1)] == [("admit", 0), ("admit", 1)]
    admit(game, 0)
    game.sent_back(1)
    job = game.next_job(0)
    assert (job.kind, job.trial) == ("turn", 0)
    take(game, (0, 0, 0, 0, 1, 2, 0.5))
    assert game.next_job(0)[:2] == ("admit", 1)


def test_trials_held_at_a_rung_do_not_wait_for_ever_for_one_that_has_no_room():
    game = board(4, 4, 4, devices=3, stop=Halving(first=2))
    jobs = [game.next_job(device) for device in range(3)]
    for device in (0, 1):
        admit(game, jobs[device].trial, device)
    game.sent_back(jobs[2].trial)
    while (job := game.next_job(0)) is not None:
        step = game.entries[job.trial].steps
        take(game, *((job.trial, 0, step + n, 0, 1, 2, 1.0 + job.trial) for n in range(job.argument)))
    assert [entry.status for entry in game.entries] == ["finished", "stopped", "failed"]
    assert "2 of the others wait for it at a rung" in game.entries[2].reason


def test_what_an_earlier_run_did_is_not_predicted_again():
    game = board(10, 10, 10, devices=1)
    game.entries[0].status, game.entries[0].losses = "finished", [1.0] * 10
    for step in (8, 0):
        admit(game, game.next_job(0).trial, end_s=0, losses=[0.5] * step)
    assert game.left_s == math.inf and game.predicted() is None
    for number, step in ((1, 8), (2, 0)):
        take(game, (number, 0, step, 0, 1, 2, 0.5))
    assert game.predicted().makespan_s == pytest.approx(12)
    assert game.left_s == pytest.approx(10)


def test_a_trial_that_never_has_room_fails_with_the_reason():
    game = board(1, devices=1)
    game.next_job(0)
    game.sent_back(0)
    assert game.entries[0].status == "failed" and "room" in game.entries[0].reason


def test_whole_tasks_stay_on_their_device_and_are_admitted_as_devices_come_free():
    game = board(2, 2, 2, 2, policy="whole-task")
    play(game)
    assert all(entry.moves == 0 for entry in game.entries)
    for device in (0, 1):
        own = [turn.trial for turn in game.turns if turn.device == device]
        assert own == sorted(own)


def test_halving_holds_trials_at_the_rung_and_ends_the_worse():
    game = board(8, 8, 8, 8, stop=Halving(first=2, factor=2, smooth=1))
    play(game, loss=lambda trial, step: trial)
    assert [entry.status for entry in game.entries] == ["finished", "stopped", "stopped", "stopped"]
    assert [len(entry.losses) for entry in game.entries] == [8, 4, 2, 2]


def test_a_failure_frees_those_who_wait_for_it_at_a_rung():
    game = board(4, 4, devices=1, stop=Halving(first=1, factor=2, smooth=1))
    for _ in range(2):
        job = game.next_job(0)
        admit(game, job.trial)
    job = game.next_job(0)
    take(game, (job.trial, 0, 0, 0, 1, 2, 1.0))
    assert game.entries[job.trial].status == "held"
    other = game.next_job(0)
    game.failed(other.trial, "nan")
    assert game.entries[job.trial].status == "ready"


def test_remaining_time_is_what_turns_have_cost_and_the_first_of_each_kind_is_forgotten():
    entry = TrialProgress(0, Trial(steps=10), "t0", num_turns=2)
    assert entry.cost is None
    for turn, seconds in ((0, 9.0), (1, 9.0), (0, 1.0), (1, 2.0)):
        entry.measured(turn, seconds)
    assert entry.cost.turns_s == (1.0, 2.0)
    entry.losses, entry.turn = [1.0] * 8, 1
    assert entry.remaining_of(entry.cost) == 2.0 + 3.0


def test_the_bound_is_that_of_the_measured_turns():
    game = board(3, 1, 5)
    play(game)
    outcome = game.measured()
    totals = [sum(t.end_s - t.start_s for t in game.turns if t.trial == n) for n in range(3)]
    assert outcome.bound_s == lower_bound_s(totals, 2) and outcome.gap >= 0
    assert game.predicted().makespan_s >= outcome.bound_s - 1e-9


def test_the_best_is_the_lowest_mean_of_the_last_tenth():
    game = board(20, 20)
    play(game, loss=lambda trial, step: 5 - trial if step < 18 else trial)
    assert game.best.number == 0 and game.best.score == 0


def ready(game, seconds=0.02, turns=2):
    """Both trials admitted and measured."""
    for number in range(len(game.entries)):
        admit(game, number, turns=turns)
        for turn in range(turns):
            game.entries[number].turn_s[turn] = (seconds, 2)


def test_a_device_is_told_short_turns_ahead_and_long_ones_one_by_one():
    for seconds, count in ((0.02, 12), (0.5, 1)):
        game = board(1000, 10, devices=1)
        ready(game, seconds)
        job = game.next_job(0)
        assert (job.trial, job.argument) == (0, count)
        assert game.entries[0].status == "running"
        take(game, *((0, 0, turn // 2, turn % 2, turn, turn + seconds, 1.0) for turn in range(count)))
        assert game.entries[0].steps == count // 2
        assert game.entries[0].status == "ready"


def test_no_more_turns_are_told_than_the_policy_would_choose_or_the_rule_would_let_pass():
    equal = board(100, 100, devices=1)
    ready(equal)
    assert equal.next_job(0).argument == 8  # the slack: 2 % of all 400 turns
    judged = board(1000, 10, devices=1, stop=Halving(first=100))
    ready(judged)
    assert judged.next_job(0).argument == 2
    turns = board(1000, 10, devices=1, policy="round-robin")
    ready(turns)
    assert turns.next_job(0).argument == 1
    short = board(3, devices=1)
    ready(short)
    assert short.next_job(0).argument == 6


def test_in_hindsight_every_policy_has_the_same_turns_and_the_same_bound():
    game = board(3, 1, 5, policy="fifo")
    play(game)
    measured = game.measured()
    for policy in ("lrtf", "fifo", "whole-task"):
        found = game.in_hindsight(policy)
        assert len(found.turns) == len(measured.turns) and math.isclose(found.bound_s, measured.bound_s)
        assert found.makespan_s >= found.bound_s


def test_the_longest_trial_is_admitted_first_and_one_of_a_kind_is_measured():
    """In the order of the file a third of the time passed before the longest trial began."""
    game = board(10, 40, 20, 30, devices=1)
    play(game)
    firsts = {}
    for turn in game.turns:
        firsts.setdefault(turn.trial, turn.start_s)
    assert sorted(firsts, key=firsts.get) == [1, 3, 2, 0]
    begun = min(turn.start_s for turn in game.turns if turn.trial == 3)
    assert max(turn.step for turn in game.turns if turn.trial == 1 and turn.end_s <= begun) >= 8


def test_kinds_that_nobody_has_measured_are_measured_before_known_ones_go_on():
    entries = [TrialProgress(n, Trial(steps=10, options={"layers": n}), f"t{n}") for n in range(3)]
    game = Board(entries, 1, "lrtf")
    play(game)
    order = list(dict.fromkeys(turn.trial for turn in game.turns[:9]))
    assert order == [0, 1, 2]
    known = [TrialProgress(n, Trial(steps=10), f"t{n}") for n in range(2)]
    game = Board(known, 1, "lrtf")
    admit(game, 0, turns=1)
    assert game.left_s == math.inf
    take(game, (0, 0, 0, 0, 1, 2, 0.5))
    assert game.left_s == pytest.approx(9 + 10)
