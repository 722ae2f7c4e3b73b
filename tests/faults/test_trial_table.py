"""The fixture and the table of trials: nothing that was not tried looks like something that went well."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_counted(trial):
    trial("a flip", 1, well=True, named=True)
    trial("a flip", 2, well=True)

def test_bad(trial):
    trial("a cut", 1, well=False)

def test_nothing(trial):
    for number in range(0):
        trial("a kill", number, well=True)

def test_without_a_tool(trial):
    pytest.skip("no such tool")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trials")
    (folder / "test_it.py").write_text(TESTS)
    words = ["-m", "pytest", "-q", "-p", "tests.faults.conftest", "-p", "no:cacheprovider", "-c", "/dev/null"]
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, *words, "--rootdir", folder, folder], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return ran.stdout


def test_a_test_that_counts_no_trial_fails(said):
    assert "not one trial was counted" in said
    assert "test_nothing" in said.partition("short test summary")[2]


def test_a_trial_that_ended_badly_fails_its_test(said):
    assert "1 trials failed, the first: a cut: 1: well=False" in said


def test_the_table_has_denominators(said):
    rows = {line.split("  ")[0]: line.split()[2:] for line in said.splitlines() if line.startswith("a ")}
    assert rows == {"a flip": ["2/2", "1/1", "–"], "a cut": ["0/1", "–", "–"]}


def test_what_was_not_tried_is_a_row_of_the_table(said):
    assert "NOT TRIED  test_it.py::test_without_a_tool: no such tool" in said
    assert "ERROR test_it.py::test_without_a_tool" not in said
