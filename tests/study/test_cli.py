"""`pipefit study` on input it refuses: one message, exit code 2, no torch."""

import math

import pytest

from pipefit.cli import main


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wrkers = 2", "unknown key 'wrkers'; did you mean workers?"),
        ('policy = "lrtff"', "unknown policy 'lrtff'; did you mean lrtf?"),
        ("[stop]\nrule = 3", "unknown rule 3"),
        ("this is not toml", "not TOML"),
    ],
)
def test_a_bad_file_is_one_message(text, words, tmp_path, capsys):
    path = tmp_path / "s.toml"
    path.write_text(text)
    assert main(["study", str(path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("pipefit study: ") and words in said.err and said.err.count("\n") == 1
    assert said.out == ""


def test_a_missing_file_and_a_missing_argument_are_said(tmp_path, capsys):
    assert main(["study", str(tmp_path / "none.toml")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["study"]) == 2


@pytest.mark.parametrize(
    ("words", "said"), [(["--policy", "fast"], "unknown policy"), (["--workers", "0"], "--workers")]
)
def test_options_are_checked_like_the_file(words, said, tmp_path, capsys):
    path = tmp_path / "s.toml"
    path.write_text("lr = 1e-3")
    assert main(["study", str(path), *words]) == 2
    assert said in capsys.readouterr().err


def test_an_output_that_is_a_file_is_refused(tmp_path, capsys):
    path = tmp_path / "s.toml"
    path.write_text("lr = 1e-3")
    (tmp_path / "out").write_text("")
    assert main(["study", str(path), "-o", str(tmp_path / "out")]) == 2
    assert "expected a folder" in capsys.readouterr().err


def test_the_table_that_moves_has_a_row_for_every_trial():
    from io import StringIO

    from rich.console import Console

    from pipefit.cli.study import _Table
    from pipefit.study.board import Board
    from pipefit.study.simulation import StudyTimeline
    from pipefit.study.trial import Trial
    from pipefit.study.trial_progress import TrialProgress

    entries = [TrialProgress(n, Trial(steps=9), f"trial-{n}", losses=[0.5] * n) for n in range(3)]
    entries[1].status, entries[1].device = "running", 1
    entries[2].status = "failed"
    shown = []
    console = Console(width=100, height=50)
    live = type("Live", (), {"update": lambda self, table: shown.append(table), "console": console})()
    board = Board(entries, 2, "lrtf")
    board.prediction = StudyTimeline((), 12.0, 11.0)
    _Table(live)(board)
    text = StringIO()
    Console(file=text, width=100).print(shown[0])
    assert "predicted: 12 s in all, lower bound 11 s" in text.getvalue()
    assert all(words in text.getvalue() for words in ("trial-0", "trial-1", "2/9", "FAILED", "0.5000"))
    assert "37% of the steps  1 of 3 trials over  lowest trial-1 0.5000" in text.getvalue()


def test_of_many_trials_a_low_terminal_shows_those_that_something_happens_to():
    from io import StringIO

    from rich.console import Console

    from pipefit.cli.study import _Table
    from pipefit.study.board import Board
    from pipefit.study.trial import Trial
    from pipefit.study.trial_progress import TrialProgress

    entries = [TrialProgress(n, Trial(steps=9), f"trial-{n:02d}", "stopped", losses=[0.5]) for n in range(40)]
    entries[37].status = "running"
    entries[38].status = "failed"
    shown = []
    console = Console(width=100, height=12)
    live = type("Live", (), {"update": lambda self, table: shown.append(table), "console": console})()
    _Table(live)(Board(entries, 2, "lrtf"))
    text = StringIO()
    Console(file=text, width=100).print(shown[0])
    assert text.getvalue().count("\n") <= 12
    assert "trial-37" in text.getvalue() and "trial-38" in text.getvalue() and "35 trials more" in text.getvalue()


def test_lines_tell_every_tenth_of_the_steps_and_every_end(capsys, monkeypatch):
    from pipefit.cli.study import _Lines
    from pipefit.study.board import Board
    from pipefit.study.trial import Trial
    from pipefit.study.trial_progress import TrialProgress

    entries = [TrialProgress(n, Trial(steps=50), f"trial-{n}") for n in range(2)]
    monkeypatch.setattr("pipefit.cli.study.NEXT_S", math.inf)
    board, lines = Board(entries, 2, "lrtf"), _Lines()
    for _ in range(50):
        entries[0].losses.append(0.25)
        lines(board)
    entries[0].status = "finished"
    lines(board)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 6 and said[0] == "10% of the steps  0 of 2 trials over  lowest trial-0 0.2500"
    assert said[-1] == "trial-0 finished after 50 steps, loss 0.2500"
    monkeypatch.setattr("pipefit.cli.study.NEXT_S", 0.0)  # the time has come at every turn
    for _ in range(2):
        lines(board)
    assert capsys.readouterr().out.splitlines() == ["50% of the steps  1 of 2 trials over  lowest trial-0 0.2500"] * 2
