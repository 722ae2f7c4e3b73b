"""`pipefit train --disk … --resume …`: the same command goes on where a run was cut off."""

import contextlib
import io
import json
import os
import shutil
import signal

import pytest
from tests.processes import ended

from pipefit.cli import main
from pipefit.run import whole_run as run
from pipefit.spill.tier_file import TierFile

pytestmark = [pytest.mark.usefixtures("small_probes"), pytest.mark.slow]

WORDS = (
    "train --model gpt --option layers=3,hidden=32,context=16,tied=false,dropout=0.1 --batch 4 --microbatches 2 "
    "--steps 8 --optimizer adam --data {data} --ranks 1 --schedule spilled --chunks 2 --json"
).split()


def dies_in_a_write(num_commits, arguments):
    """Trains; after some steps it dies in the middle of the next one's first write."""
    commit, write, commits = TierFile.commit, os.pwritev, []

    def counted(file, *args):
        commit(file, *args)
        # Those that measure what a commit takes are of another file.
        commits.extend([args] * (file.path.stem == "rank-0"))

    def dying(handle, pieces, position):
        if len(commits) == num_commits:
            write(handle, [pieces[0][:4096]], position)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(handle, pieces, position)

    TierFile.commit, os.pwritev = counted, dying
    main(arguments)


def dies_at_its_end(arguments):
    """Trains; it dies when all steps are done, while it leaves what it has to leave."""

    def dying(ready, *_):
        ready.pipe.settle()
        os.kill(os.getpid(), signal.SIGKILL)

    run._result = dying
    main(arguments)


def words(folder, data="text", cap=False, more=()):
    chosen = WORDS[:-1] if not cap else WORDS[:-7]
    return [word.format(data=data) for word in chosen] + ["--disk", str(folder), "--json", *more]


def losses_of(capsys, *arguments):
    assert main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)["losses"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of the run on text that nothing stops."""
    folder, printed = tmp_path_factory.mktemp("whole"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(words(folder)) == 0
    assert not list(folder.iterdir())
    return json.loads(printed.getvalue())["losses"]


def killed(arguments, after=4):
    assert ended(dies_in_a_write, after, arguments) == -signal.SIGKILL


@pytest.mark.parametrize("data", ["text", "synthetic"])
def test_a_killed_run_goes_on_with_the_losses_it_would_have_had(tmp_path, capsys, data, whole):
    losses = whole if data == "text" else losses_of(capsys, *words(tmp_path / "whole", data))
    tier, out = tmp_path / "tier", tmp_path / "run"
    killed(words(tier, data, more=["-o", str(out)]))
    assert main(words(tier, data)) == 2
    told = capsys.readouterr().err
    assert f"{tier} holds step 4 of an interrupted run: resume with --resume {tier}" in told
    assert main(words(tier, data, more=["--resume", str(tier), "--lr", "0.1", "--seed", "1"])) == 2
    told = capsys.readouterr().err
    assert "--lr was 0.002, is 0.1; --seed was 0, is 1; give the same options" in told and "Traceback" not in told
    assert losses_of(capsys, *words(tier, data, more=["--resume", str(tier), "-o", str(out)])) == losses[4:]
    assert not list(tier.iterdir())
    told = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    # A loss is read while the next step runs: that of the last step before the end may be missing.
    expected = [(step, loss) for step, loss in enumerate(losses, 1) if step != 4]
    assert [(entry["step"], entry["loss"]) for entry in told] == expected


def test_a_run_partly_in_the_hosts_memory_goes_on_from_its_last_commit(tmp_path, capsys, whole):
    tier = tmp_path / "tier"
    split = ["--host-memory", "100 KiB", "--commit-every", "2"]
    killed(words(tier, more=split), after=2)
    # What lies in the host's memory, and how often it is committed, may be another.
    for later in (split, ["--host-memory", "1 MiB"]):
        copy = tmp_path / later[1]
        shutil.copytree(tier, copy)
        assert losses_of(capsys, *words(copy, more=["--resume", str(copy), *later])) == whole[4:]


def test_a_run_under_a_cap_goes_on_with_the_plan_it_had(tmp_path, capsys):
    cap = ["--device-memory", "500 KiB"]
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


def test_a_run_that_is_cut_off_after_its_last_step_does_that_again(tmp_path, capsys, whole):
    tier = tmp_path / "tier"
    assert ended(dies_at_its_end, words(tier)) == -signal.SIGKILL
    assert losses_of(capsys, *words(tier, more=["--resume", str(tier)])) == whole[-1:]
    assert not list(tier.iterdir())
