"""`pipefit train --disk … --resume …`: the same command goes on where a run was cut off."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from pipefit.cli import main

WORDS = (
    "train --model gpt --option layers=3,hidden=32,context=16,tied=false,dropout=0.1 --batch 4 --microbatches 2 "
    "--steps 8 --optimizer adam --data {data} --ranks 1 --schedule spilled --chunks 2 --json"
).split()

# The process dies in the middle of a write of its fifth step.
_DYING = """
import os, signal, sys
from pipefit.memory import tierfile
from pipefit.cli import main
true, commits = tierfile.TierFile.commit, []
write = os.pwritev
def commit(*args):
    true(*args)
    commits.append(args)
def dying(handle, pieces, position):
    if len(commits) == 4:
        write(handle, [pieces[0][:4096]], position)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(handle, pieces, position)
tierfile.TierFile.commit, os.pwritev = commit, dying
main(sys.argv[1:])
"""

# It dies when all steps are done, while it leaves what it has to leave.
_DYING_LATE = """
import os, signal, sys
from pipefit.cli import main
from pipefit.train import run
def dying(pipe, *_):
    pipe.workers[0].spilling.settle()
    os.kill(os.getpid(), signal.SIGKILL)
run._leave = dying
main(sys.argv[1:])
"""


def words(folder, data="text", cap=False, more=()):
    chosen = WORDS[:-1] if not cap else WORDS[:-7]
    return [word.format(data=data) for word in chosen] + ["--disk", str(folder), "--json", *more]


def losses_of(capsys, *arguments):
    assert main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)["losses"]


def killed(arguments, script=_DYING):
    found = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert found.returncode == -signal.SIGKILL, found.stderr


@pytest.mark.parametrize("data", ["text", "synthetic"])
def test_a_killed_run_goes_on_with_the_losses_it_would_have_had(tmp_path, capsys, data):
    losses = losses_of(capsys, *words(tmp_path / "whole", data))
    assert not list((tmp_path / "whole").iterdir())
    tier, out = tmp_path / "tier", tmp_path / "run"
    killed(words(tier, data))
    assert main(words(tier, data)) == 2
    told = capsys.readouterr().err
    assert f"{tier} holds step 4 of a run that was cut off: go on with --resume {tier}" in told
    assert main(words(tier, data, more=["--resume", str(tier), "--lr", "0.1", "--seed", "1"])) == 2
    told = capsys.readouterr().err
    assert "--lr was 0.002, is 0.1; --seed was 0, is 1; ask for the same" in told and "Traceback" not in told
    assert losses_of(capsys, *words(tier, data, more=["--resume", str(tier), "-o", str(out)])) == losses[4:]
    assert not list(tier.iterdir())
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[0]) == {"step": 5, "loss": losses[4]}


def test_a_run_partly_in_the_hosts_memory_goes_on_from_its_last_commit(tmp_path, capsys):
    losses = losses_of(capsys, *words(tmp_path / "whole"))
    tier = tmp_path / "tier"
    split = ["--host-memory", "100 KiB", "--commit-every", "2"]
    killed(words(tier, more=split), _DYING.replace("== 4", "== 2"))
    # What lies in the host's memory, and how often it is committed, may be another.
    for later in (split, ["--host-memory", "1 MiB"]):
        copy = tmp_path / later[1]
        shutil.copytree(tier, copy)
        assert losses_of(capsys, *words(copy, more=["--resume", str(copy), *later])) == losses[4:]


def test_a_run_under_a_cap_goes_on_with_the_plan_it_had(tmp_path, capsys):
    cap = ["--device-memory", "400 KiB"]
    losses = losses_of(capsys, *words(tmp_path / "whole", cap=True, more=cap))
    tier = tmp_path / "tier"
    killed(words(tier, cap=True, more=cap))
    # --disk follows from --resume.
    again = [word for word in words(tier, cap=True, more=[*cap, "--resume", str(tier)]) if word != "--disk"]
    again.remove(str(tier))
    assert losses_of(capsys, *again) == losses[4:]


def test_records_are_gone_on_from_in_their_place(tmp_path, capsys):
    killed(words(tmp_path / "tier"))
    assert main(words(tmp_path / "other", more=["--resume", str(tmp_path / "tier")])) == 2
    assert f"give --disk {tmp_path / 'tier'} too" in capsys.readouterr().err


def test_a_run_that_is_cut_off_after_its_last_step_does_that_again(tmp_path, capsys):
    losses = losses_of(capsys, *words(tmp_path / "whole"))
    tier = tmp_path / "tier"
    killed(words(tier), _DYING_LATE)
    assert losses_of(capsys, *words(tier, more=["--resume", str(tier)])) == losses[-1:]
    assert not list(tier.iterdir())
