"""A process that is killed at any call that writes, while it saves: the state before or after it is whole."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.save_trials import KINDS

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)]
HERE = Path(__file__)


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """The library that counts calls of the file system."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler; tests/checkpoint does the same at the calls of Python")
    library = tmp_path_factory.mktemp("shim") / "dies.so"
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE.with_name("dies.c")), "-ldl"]
    subprocess.run(words, check=True)
    return library


@pytest.mark.parametrize(
    "kind", [kind if kind == "checkpoints" else pytest.param(kind, marks=pytest.mark.faults) for kind in KINDS]
)
def test_a_save_that_is_killed_at_any_call_that_writes_loses_nothing(kind, trial, shim, tmp_path):
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    words = [sys.executable, "-m", "tests.faults.save_trials", kind, str(tmp_path / kind)]
    done = subprocess.run(words, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for fault, what, well, named, resumed in rows:
        trial(fault, f"{what} {done.stderr[-500:]}", well=well, named=named, resumed=resumed)
    assert len(rows) > 8
