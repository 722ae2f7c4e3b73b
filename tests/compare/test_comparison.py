"""The figures of a comparison, from known rows."""

import pytest

from pipefit.compare.comparison import Comparison, Row
from pipefit.compare.rounds import _Time


def comparison(*rows: tuple[str, int, float, float | None]) -> Comparison:
    return Comparison("m", "d", 2, 8, 8, (1, 1), rows=[
        Row(name, num, measured, 8 / measured, predicted_step_s=predicted,
            predicted_over_measured=predicted / measured if predicted else None)
        for name, num, measured, predicted in rows
    ])  # fmt: skip


def test_the_choice_is_the_synchronous_schedule_predicted_fastest_over_the_best_measured():
    one = comparison(
        ("one-thread", 1, 0.1, 0.1),
        ("1f1b", 4, 1.0, 1.05),
        ("gpipe", 4, 1.02, 1.0),
        ("interleaved", 8, 2.0, 1.8),
        ("pipedream", 4, 0.5, 0.1),
        ("torch-1f1b", 4, 0.9, None),
    )
    assert (one.choice.chosen.strategy, one.choice.best.strategy) == ("gpipe", "1f1b")
    assert one.choice.over_best == pytest.approx(1.02)
    assert one.largest_error == pytest.approx(0.1), "asynchronous schedules do not count"
    data = one.as_dict()
    assert data["choice"] == {"chosen": ["gpipe", 4], "best": ["1f1b", 4], "over_best": pytest.approx(1.02)}


def test_without_a_prediction_there_is_no_choice():
    one = comparison(("one-thread", 1, 1.0, 1.0), ("torch-1f1b", 4, 1.0, None))
    assert one.choice is None and one.largest_error is None and "choice" not in one.as_dict()


def test_speedups_are_over_one_process_with_and_without_accumulation():
    rows = {row.strategy: row for row in comparison(
        ("one-thread", 1, 1.0, None), ("accumulate", 4, 2.0, None), ("1f1b", 4, 0.5, None),
    ).with_speedups().rows}  # fmt: skip
    assert (rows["1f1b"].speedup, rows["1f1b"].speedup_accumulated) == (2.0, 4.0)
    assert rows["accumulate"].speedup_accumulated == 1.0 and rows["one-thread"].speedup_accumulated is None


@pytest.mark.parametrize(("installed", "kinds"), [(True, ["json", "chart"]), (False, ["json"])])
def test_a_comparison_has_a_chart_where_matplotlib_is_installed(installed, kinds, tmp_path, monkeypatch):
    monkeypatch.setattr("pipefit.compare.comparison.can_plot", lambda: installed)
    made = Comparison("mlp(layers=2)", "digits", 2, 8, 8, (1, 1), rows=[Row("1f1b", 2, 0.5, 16.0)])
    assert list(made.save(tmp_path)) == kinds
    assert len(list(tmp_path.iterdir())) == len(kinds)


def test_the_limit_counts_from_the_start_of_the_command():
    assert _Time(60.0, None, -1e12).is_over(0.0)
    assert not _Time(60.0, None, 1e12).is_over(0.0)
    assert not _Time(0.0, None, -1e12).is_over(0.0), "0: no limit"
