"""Rules that stop trials early."""

from pipefit.study.stopping import WAIT, Halving, Median, Patience

GO, STOP = None, "stopped"


def judged(rule, *about):
    """The verdict, whatever the reason."""
    verdict = rule.judge(*about)
    return verdict if verdict in (GO, WAIT) else STOP


def test_patience_stops_a_plateau_and_not_a_descent():
    rule = Patience(patience=4, smooth=2)
    falling = [1.0 - 0.01 * step for step in range(20)]
    flat = [1.0, 0.9, 0.8] + [0.8] * 17
    assert judged(rule, 0, {0: falling}, {0}) is GO
    assert judged(rule, 0, {0: flat}, {0}) is STOP
    assert judged(rule, 0, {0: flat[:5]}, {0}) is GO
    assert judged(Patience(patience=4, smooth=2, min_steps=30), 0, {0: flat}, {0}) is GO


def test_patience_asks_for_as_much_improvement_as_it_was_told():
    falling = [1.0 - 0.01 * step for step in range(20)]
    assert judged(Patience(patience=4, smooth=2, least=0.1), 0, {0: falling}, {0}) is STOP


def test_the_median_rule_compares_the_best_so_far_with_averages_up_to_the_same_step():
    rule = Median(min_steps=4, every=2, min_trials=2)
    others = {1: [1.0] * 4, 2: [2.0] * 4, 3: [3.0] * 9}
    assert judged(rule, 0, {0: [2.5] * 4, **others}, {0}) is STOP
    assert judged(rule, 0, {0: [2.5, 1.9, 2.5, 2.5], **others}, {0}) is GO
    assert judged(rule, 0, {0: [9.0] * 3, **others}, {0}) is GO  # too early
    assert judged(rule, 0, {0: [9.0] * 5, **others}, {0}) is GO  # not a step that is judged
    assert judged(rule, 0, {0: [9.0] * 6, **others}, {0}) is GO  # only one other has come as far
    assert "median of the others 2" in rule.judge(0, {0: [2.5] * 4, **others}, {0})


def test_halving_waits_for_those_who_may_still_come_and_keeps_the_better_half():
    rule = Halving(first=2, factor=2, smooth=1)
    losses = {0: [3, 3], 1: [1, 1], 2: [2]}
    assert judged(rule, 0, losses, {0, 1, 2}) is WAIT
    losses[2] = [2, 2]
    assert [judged(rule, trial, losses, {0, 1, 2}) for trial in range(3)] == [STOP, GO, GO]
    # One that will never come is not waited for.
    assert [judged(rule, trial, {0: [3, 3], 1: [1, 1], 2: [2]}, {0, 1}) for trial in (0, 1)] == [STOP, GO]


def test_halving_judges_at_its_rungs_only_and_again_alike():
    rule = Halving(first=2, factor=3)
    assert [step for step in range(1, 30) if rule._is_rung(step)] == [2, 6, 18]
    losses = {0: [3, 3], 1: [1, 1, 0.5]}
    assert judged(rule, 0, losses, {0, 1}) is STOP  # the other has gone on meanwhile
