"""The verbs that start ranks: `pipefit doctor`, `links`, `run` and `check`."""

import json

import pytest
from tests.verbs import refused

from pipefit.cli import main
from pipefit.cli.run import prepare
from pipefit.spec import Topology

pytestmark = pytest.mark.dist

SCRIPT = """
import sys
from pathlib import Path
from pipefit.runtime.session import current

rank = current().rank
Path(f"rank-{rank}.txt").write_text(" ".join(sys.argv[1:]))
print("rank 0 says hello")
if "--fail" in sys.argv:
    raise ZeroDivisionError("on purpose")
if "--leave" in sys.argv:
    sys.exit(0)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def test_the_doctor_lets_two_ranks_talk(capsys):
    code = main(["doctor", "--json"])
    data = json.loads(capsys.readouterr().out)
    ranks = data["checks"][-1]
    assert (ranks["name"], data["ok"], code) == ("2 ranks", True, 0), ranks
    assert "gloo" in data["facts"]["backends"] and data["facts"]["selftest_s"] > 0
    assert {check["state"] for check in data["checks"]} <= {"good", "warn"}


def test_the_doctor_says_what_to_fix_and_leaves_with_1(capsys, monkeypatch):
    def broken(num_ranks):
        raise OSError("the loopback interface is down")

    monkeypatch.setattr("pipefit.cli.doctor._start_ranks", broken)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "x  2 ranks" in out and "the loopback interface is down" in out and "fix:" in out


def test_the_doctor_does_not_wait_for_ranks_that_hang(capsys, monkeypatch):
    import time

    monkeypatch.setattr("pipefit.cli.doctor._start_ranks", lambda num_ranks: time.sleep(60))
    assert main(["doctor", "--timeout", "1"]) == 1
    assert "no answer within 1 s" in capsys.readouterr().out


def test_links_are_measured_into_a_topology(tmp_path, capsys):
    # Times on a busy machine may not grow with the size; what is tested here is the way from ranks to a file.
    path = tmp_path / "here.toml"
    code = main(["links", "--repeats", "5", "-o", str(path), "--json"])
    shown = capsys.readouterr()
    if code == 2 and "measure larger sizes" in shown.err:
        pytest.skip("the machine is too busy to measure links")
    assert code == 0, shown.err
    assert json.loads(shown.out)["output"] == str(path)
    assert Topology.load(path).num_devices == 2


def test_a_script_runs_on_every_rank_with_its_own_arguments(script, capsys):
    assert main(["run", "-n", "2", "script.py", "--json", "-n", "5", "--", "x"]) == 0
    assert [(script / f"rank-{rank}.txt").read_text() for rank in (0, 1)] == ["--json -n 5 -- x"] * 2


def test_a_script_may_leave_by_exit(script, capsys):
    assert main(["run", "-n", "2", "--json", "script.py", "--leave"]) == 0
    assert json.loads(capsys.readouterr().out)["num_ranks"] == 2


def test_a_script_that_fails_is_exit_1_with_its_error_and_log(script, capsys):
    assert main(["run", "-n", "2", "--logs", "logs", "script.py", "--fail"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: on purpose" in err and "logs" in err and "Traceback" not in err
    assert "Traceback" in (script / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "none.py"], "none.py: no such file"),
        (["run", "."], "got a directory"),
        (["run", "-n", "0", "script.py"], "-n: expected a whole number of at least 1, got 0"),
        (["links", "--ranks", "1"], "expected a whole number of at least 2"),
        (["doctor", "--ranks", "1"], "expected a whole number of at least 2"),
    ],
)
def test_what_cannot_be_started_is_refused(arguments, told, script, capsys):
    assert told in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["run", "s.py", "-n", "3"], ["run", "--", "s.py", "-n", "3"]),
        (["run", "-n", "4", "--json", "s.py", "--json"], ["run", "-n", "4", "--json", "--", "s.py", "--json"]),
        (["run", "--ranks=4", "s.py"], ["run", "--ranks=4", "--", "s.py"]),
        (["run", "--", "s.py"], ["run", "--", "s.py"]),
        (["run", "--help"], ["run", "--help"]),
        (["run"], ["run"]),
    ],
)
def test_the_script_s_arguments_begin_after_the_script(given, expected):
    assert prepare(given) == expected
