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
