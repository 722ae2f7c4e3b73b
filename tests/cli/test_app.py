"""What every verb shares: exit codes, one clear message, JSON alone on stdout, a fast start."""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.verbs import refused

from pipefit.cli import app as cli_app
from pipefit.cli import main
from pipefit.cli.answer import Answer, as_json
from pipefit.errors import InfeasibleError, NonFiniteLossError, PipefitError

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def pipefit(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pipefit", *arguments], capture_output=True, text=True, env=ENV, timeout=60, **options
    )


@pytest.fixture
def a_verb_that(monkeypatch):
    """Replaces what `pipefit schedules` does."""

    def replace(action):
        from pipefit.cli import schedules

        def command(*, json: bool = False) -> Answer:
            return action()

        monkeypatch.setattr(schedules, "command", command)

    return replace


def raising(problem):
    def action():
        raise problem

    return action


def test_without_arguments_the_help_names_every_verb(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f" {verb} " in out for verb in cli_app.VERBS)


@pytest.mark.parametrize("verb", cli_app.VERBS)
def test_the_help_of_every_verb_has_an_example_that_calls_it(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert f"Example: pipefit {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", cli_app.VERBS)
def test_a_line_of_help_ends_only_where_the_terminal_does(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([verb, "--help"]) == 0
    prose = capsys.readouterr().out.partition("╭")[0]
    for paragraph in prose.split("\n\n"):
        lines = paragraph.splitlines()
        for line, below in itertools.pairwise(lines):
            assert len(line.rstrip()) + 1 + len(below.split()[0]) > 80, line


def test_the_version_names_package_commit_torch_and_devices(capsys):
    import importlib.metadata

    import pipefit as package

    assert main(["--version"]) == 0
    first, versions, devices = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"pipefit {package.__version__} \((commit \w+( with changes)?|no commit known)\)", first)
    assert versions.endswith(f"torch {importlib.metadata.version('torch')}")
    assert re.fullmatch(r"\d+ cores?, (no|\d+) GPUs?", devices)


def test_the_version_is_known_without_torch():
    code = "import sys; from pipefit.cli import main; main(['--version']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


@pytest.mark.slow
def test_a_verb_that_takes_long_says_what_it_does(a_verb_that, monkeypatch, capsys):
    said = threading.Event()
    monkeypatch.setattr(
        "pipefit.cli.heartbeat.Heartbeat._write", lambda self, text: said.set() if text == "x …\n" else 0
    )
    monkeypatch.setitem(cli_app._WORK, "schedules", "x")
    monkeypatch.setattr(sys, "argv", ["pipefit", "schedules"])
    a_verb_that(lambda: Answer({}, str(said.wait(300))))
    assert main() == 0
    assert capsys.readouterr().out == "True\n"


def test_more_slots_than_stages_take_no_memory():
    assert main(["draw", "spilled", "-p", "2", "-m", "2", "--slots", str(2**31)]) == 0


def test_more_replicas_than_any_memory_holds_are_refused(capsys):
    assert main(["draw", "1f1b", "-p", "2", "-m", "2", "--replicas", str(2**31)]) == 2
    assert "replicas: expected counts from 1 to 4096" in capsys.readouterr().err


@pytest.mark.parametrize("counts", [("-p", "2147483648", "-m", "2"), ("-p", "2", "-m", "2147483648")])
def test_a_search_over_too_many_forwards_is_refused(counts, capsys):
    assert main(["synthesize", *counts]) == 2
    assert "forwards are too many" in capsys.readouterr().err


def test_a_time_that_no_float_can_hold_is_a_users_mistake(capsys):
    assert main(["draw", "pipedream", "-p", "2", "-m", "2", "--backward", "1" * 320]) == 2
    assert "--backward: expected a number of at least 0 and below 1e+30" in capsys.readouterr().err


def test_a_file_name_that_is_too_long_is_a_users_mistake(capsys):
    assert main(["draw", "1f1b", "-p", "2", "-m", "2", "-o", "1" * 300 + ".svg"]) == 2
    said = capsys.readouterr().err
    assert "the file name is too long" in said or "File name too long" in said


def test_an_unknown_verb_gets_the_nearest_one_and_exit_2(capsys):
    assert main(["drwa"]) == 2
    shown = capsys.readouterr()
    assert 'Did you mean "draw"' in shown.err and shown.out == ""


def test_an_unknown_option_gets_the_nearest_one_and_exit_2(capsys):
    assert main(["draw", "1f1b", "-p", "2", "-m", "2", "--latncy", "1"]) == 2
    shown = capsys.readouterr()
    assert "--latency" in shown.err and "pipefit draw --help" in shown.err and shown.out == ""


def test_what_a_user_got_wrong_is_one_message_without_a_traceback_and_exit_2(a_verb_that, capsys):
    a_verb_that(raising(PipefitError("expected this, got that")))
    assert main(["schedules"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "pipefit schedules: expected this, got that\n")


@pytest.mark.parametrize("problem", [NonFiniteLossError("loss is nan"), InfeasibleError("too large")])
def test_what_a_run_finds_out_is_exit_1(a_verb_that, capsys, problem):
    a_verb_that(raising(problem))
    assert main(["schedules"]) == 1
    assert str(problem) in capsys.readouterr().err


def test_an_interrupt_that_says_how_to_go_on_is_heard(a_verb_that, capsys):
    a_verb_that(raising(KeyboardInterrupt("step 7 is committed")))
    assert main(["schedules"]) == 130
    assert capsys.readouterr().err == "pipefit schedules: interrupted; step 7 is committed\n"


def test_an_interrupt_is_exit_130(a_verb_that, capsys):
    a_verb_that(raising(KeyboardInterrupt()))
    assert main(["schedules"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_mistake_of_ours_is_short_and_leaves_a_file_with_the_traceback(a_verb_that, capsys):
    a_verb_that(raising(KeyError("lost")))
    assert main(["schedules"]) == 70
    err = capsys.readouterr().err
    path = Path(err.split()[-1])
    evidence = path.read_text()
    path.unlink()
    assert "KeyError: 'lost'" in err and "report" in err and "Traceback" not in err
    assert "Traceback" in evidence and "KeyError" in evidence and "command: pipefit schedules" in evidence


def test_with_json_nothing_else_is_on_stdout(a_verb_that, capsys):
    def chatty():
        print("a library says something")
        return Answer({"a": 1}, "for people", 1)

    a_verb_that(chatty)
    assert main(["schedules", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"a": 1} and "a library says" in shown.err


def test_json_has_no_infinities_or_nan():
    assert json.loads(as_json({"a": float("inf"), "b": [float("nan"), 1.5], "c": None})) == {
        "a": None,
        "b": [None, 1.5],
        "c": None,
    }


def test_the_text_is_not_made_when_json_is_wanted(a_verb_that, capsys):
    a_verb_that(lambda: Answer({}, raising(AssertionError("text was made"))))
    assert main(["schedules", "--json"]) == 0
    assert capsys.readouterr().out == "{}\n"


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m pipefit draw gpipe -p 4 -m 1500 --json | head -c 5"],
        capture_output=True,
        text=True,
        env=ENV,
        timeout=60,
    )
    assert (len(done.stdout), done.stderr.replace("drawing …\n", "")) == (5, "")


def test_a_reader_of_the_help_that_leaves_early_is_no_error():
    command = [sys.executable, "-m", "pipefit", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=ENV, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_said_plainly():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pipefit", "schedules"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENV,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr == "pipefit schedules: cannot write to standard output: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("words", "how", "code", "said"),
    [
        ("--help", "> /dev/full", 2, "standard output: cannot be written: No space left on device"),
        ("synthesize -p 2 -m 2", "> /dev/full", 2, "cannot write to standard output: No space left on device"),
        ("synthesize -p 2 -m 2", ">&-", 0, ""),
        ("synthesize -p 2 -m 2", "2>&-", 0, ""),
    ],
)
def test_where_nothing_can_be_printed_there_is_one_message_or_none(words, how, code, said):
    command = f"TERM=dumb COLUMNS=20 PYTHONIOENCODING=ascii {sys.executable} -m pipefit {words} {how}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=ENV, timeout=60)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and "mistake" not in done.stderr


def test_a_terminal_without_a_character_shows_another_one():
    done = subprocess.run(
        [sys.executable, "-m", "pipefit", "draw", "1f1b", "-p", "2", "-m", "2"],
        capture_output=True,
        text=True,
        env=ENV | {"PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert (done.returncode, "F" in done.stdout, "mistake" in done.stderr) == (0, True, False)


def test_an_interrupt_while_the_commands_load_is_one_line(monkeypatch, capsys):
    class Interrupted:
        def find_spec(self, name, *_):
            if name == "pipefit.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "pipefit.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert main(["schedules"]) == 130
    assert capsys.readouterr().err == "pipefit: interrupted\n"


def test_no_verb_loads_torch_before_it_runs():
    code = f"""
import sys; sys.modules["torch"] = None
import importlib
for verb in {cli_app.VERBS!r}:
    importlib.import_module("pipefit.cli." + verb.replace("-", "_"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_mistyped_schedule_is_named_before_the_options_that_are_missing(capsys):
    assert main(["draw", "1f1c"]) == 2
    assert "unknown schedule '1f1c'; did you mean 1f1b?" in capsys.readouterr().err
    assert main(["draw", "1f1b"]) == 2
    assert "--stages" in capsys.readouterr().err


def test_completion_is_installed_for_a_shell(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--install-completion", "--shell", "bash"]) == 0
    (script,) = (path for path in tmp_path.rglob("*") if path.name == "pipefit")
    assert str(script) in capsys.readouterr().out and str(script) in (tmp_path / ".bashrc").read_text()
    assert all(word in script.read_text() for word in (*cli_app.VERBS, "--lr-schedule"))


ESCAPE = "\x1b]0;title\x07\x1b[2J"


def test_escape_sequences_of_a_file_do_not_reach_the_terminal(tmp_path, capsys, a_verb_that):
    program = tmp_path / "small.pipe"
    assert main(["draw", "1f1b", "-p", "2", "-m", "2", "-o", str(program)]) == 0
    program.write_text(program.read_text().replace("schedule 1f1b", f"schedule {ESCAPE}"))
    assert main(["verify", str(program)]) == 2
    (tmp_path / "run.toml").write_text('"\\u001b[2J" = 3')
    assert main(["train", "--config", str(tmp_path / "run.toml")]) == 2
    (tmp_path / "links.toml").write_text('"\\u001b[2J" = 3')
    assert main(["plan", "--profile", "gpt", "--topology", str(tmp_path / "links.toml")]) == 2
    a_verb_that(raising(PipefitError(ESCAPE)))
    assert main(["schedules"]) == 2
    a_verb_that(lambda: Answer({}, f"\x1b[32mgreen\x1b[0m {ESCAPE}"))
    assert main(["schedules"]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.err and "\\x1b]0;title" in shown.err
    assert shown.out.splitlines()[-1] == "\x1b[32mgreen\x1b[0m \\x1b]0;title\\x07\\x1b[2J"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["plan", "--profile", "none.json", "--topology", "none.toml"], "plan.json"),
        (["synthesize", "--profile", "none.json", "-p", "2", "-m", "2"], "best.pipe"),
        (["draw", "none", "-p", "2", "-m", "2"], "picture.svg"),
        (["profile", "--model", "none"], "profile.json"),
        (["compare", "--model", "none"], "folder"),
        (["site", "--only", "none"], "pages"),
        (["study", "none.toml"], "study"),
    ],
)
def test_a_result_that_could_not_be_written_is_refused_before_anything_is_done(
    words, name, tmp_path, capsys, monkeypatch
):
    """Otherwise its work is lost. Each command has another mistake, too, which it reports when its work begins."""
    file = tmp_path / "file"
    file.touch()
    assert f"{file} is a file; expected a folder" in refused(capsys, *words, "-o", str(file / "below" / name))
    assert "none" in refused(capsys, *words, "-o", str(tmp_path / "new" / name))
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    assert f"nothing can be written in {tmp_path}" in refused(capsys, *words, "-o", str(tmp_path / "new" / name))
