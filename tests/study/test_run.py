"""Studies of real processes: neighbours, failures, deaths, signals, and who comes after."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.study.cases import MLP, SMALL, Listed, alone

import pipefit as pf
from pipefit.errors import PipefitError, TierError
from pipefit.study.execute.admission import recipe_of
from pipefit.study.trial import StudyError, Trial
from pipefit.units import format_seconds

pytestmark = pytest.mark.slow

# Forks inherit what is loaded: the first optimizer of a process otherwise takes seconds.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()


def trials(count, **more):
    return [Trial(**{**SMALL, **MLP, "seed": n, "steps": 2 + n, "shards": 1 + n % 3, **more}) for n in range(count)]


def study(given, folder, **options):
    return pf.Study(given, output=folder, threads=1, **options)


@pytest.mark.parametrize("policy", ["lrtf", "round-robin", "whole-task"])
def test_no_trial_notices_its_neighbours(policy, tmp_path):
    given = trials(4)
    result = study(given, tmp_path / "s", policy=policy).run()
    assert [row.status for row in result.trials] == ["finished"] * 4
    assert [row.losses for row in result.trials] == [alone(trial)[0] for trial in given]
    assert result.makespan_s >= result.bound_s * (1 - 1e-9)
    assert result.best == min(result.trials, key=lambda row: row.score).name
    kept = json.loads((tmp_path / "s/results.json").read_text())
    assert kept["best"] == result.best and len(kept["trials"]) == 4
    assert not (tmp_path / "s/state").exists()


def test_the_best_weights_load_into_the_model_under_its_own_names(tmp_path):
    given = trials(2)
    result = study(given, tmp_path / "s").run()
    best = next(trial for n, trial in enumerate(given) if result.trials[n].name == result.best)
    model = torch.nn.Sequential()
    for layer in recipe_of(best).layers:
        model.add_module(layer.prefix, layer.module)
    model.load_state_dict(load_file(result.paths["best"]))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), alone(best)[1], strict=True))


def raises(*_):
    raise RuntimeError("this layer is not for rent")


def test_trials_that_diverge_raise_or_ask_for_too_much_fail_alone_with_their_reasons(tmp_path):
    class Bad(torch.nn.Linear):
        def forward(self, x):
            raises()

    def data(step):
        x = torch.full((4, 4), float("nan") if step == 1 else 1.0)
        return x, torch.ones(4, 4)

    own = {"loss": torch.nn.functional.mse_loss, "data": data, "steps": 3, "microbatches": 1}
    given = [
        trials(1, name="good")[0],
        Trial("diverges", lambda: [torch.nn.Linear(4, 4)], **own),
        Trial("raises", lambda: [Bad(4, 4)], **own),
        Trial("broken", raises, **own),
        Trial("huge", "mlp", {"layers": 2, "width": 2048}, batch=4, microbatches=1, steps=1, data=("synthetic",)),
        Trial("nonsense", "mlp", {"widht": 3}, steps=1),
    ]
    result = study(given, tmp_path / "s", device_memory="2 MiB").run()
    assert {row.name: row.status for row in result.trials} == {
        "good": "finished",
        "diverges": "failed",
        "raises": "failed",
        "broken": "failed",
        "huge": "failed",
        "nonsense": "failed",
    }
    assert "step 2: a gradient" in result["diverges"].reason and result["diverges"].steps == 1
    assert "not for rent" in result["raises"].reason
    assert "not for rent" in result["broken"].reason
    assert "smallest capacity that works" in result["huge"].reason
    assert "no option 'widht'" in result["nonsense"].reason
    assert result["good"].losses == alone(given[0])[0] and result.num_failed == 5


def test_a_killed_worker_loses_nothing_that_was_committed(tmp_path):
    given = trials(3, steps=12)
    killed = []

    def kill(board):
        if not killed and len(board.turns) >= 9:
            killed.append(True)
            pids = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and is_child(p)]
            os.kill(max(pids), signal.SIGKILL)

    result = study(given, tmp_path / "s").run(observer=kill)
    assert killed and [row.status for row in result.trials] == ["finished"] * 3
    assert [row.losses for row in result.trials] == [alone(trial)[0] for trial in given]


def is_child(place):
    try:
        return int((place / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
    except (OSError, ValueError):
        return False


def suicidal():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trial_that_kills_its_workers_fails_and_the_others_finish(tmp_path):
    own = {"loss": torch.nn.functional.mse_loss, "data": lambda step: None}
    result = study([Trial("killer", suicidal, **own), trials(1, name="good")[0]], tmp_path / "s").run()
    assert result["killer"].status == "failed" and "SIGKILL" in result["killer"].reason
    assert result["good"].status == "finished"


FILE = """
workers = 2
threads = 1
model = "mlp"
options = {layers = 4, width = 16}
data = "synthetic"
batch = 6
microbatches = 2
steps = 120
shards = 2
[grid]
lr = [1e-2, 1e-3, 1e-4]
"""


def command(*words, cwd):
    return [sys.executable, "-m", "pipefit", "study", *words], {"cwd": cwd, "text": True}


@pytest.mark.long
def test_a_study_stopped_by_one_signal_and_then_another_goes_on_where_it_stood(tmp_path):
    (tmp_path / "s.toml").write_text(FILE)
    words, options = command("s.toml", "-o", "out", cwd=tmp_path)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    state = tmp_path / "out/state"

    def steps_done():
        return sum(path.stat().st_size // 28 for path in state.glob("*/losses"))

    for number, more in ((signal.SIGTERM, []), (signal.SIGINT, ["--resume"])):
        steps = steps_done() + 10
        running = subprocess.Popen([*words, *more], start_new_session=True, **pipes, **options)
        while running.poll() is None and steps_done() < steps:
            time.sleep(0.02)
        os.killpg(running.pid, number)  # as a terminal and batch systems do: to all processes
        _, said = running.communicate()
        assert running.returncode == 128 + number, said
        assert "resume with: pipefit study s.toml --resume -o out" in said
        assert steps_done() >= steps
    again = subprocess.run([*words, "--resume", "--json"], capture_output=True, **options)
    assert again.returncode == 0, again.stderr
    result = json.loads(again.stdout)
    assert [row["status"] for row in result["trials"]] == ["finished"] * 3
    assert [row["steps"] for row in result["trials"]] == [120] * 3
    base = {"options": {"layers": 4, "width": 16}, "data": ("synthetic",), "batch": 6, "microbatches": 2, "steps": 120}
    assert result["trials"][0]["losses"] == alone(Trial(model="mlp", lr=1e-2, shards=2, **base))[0]


def test_a_folder_is_never_taken_for_another_study(tmp_path):
    given = trials(2)
    first = study(given, tmp_path / "s").run()
    drawn = (tmp_path / "s/timeline.svg").read_text()
    with pytest.raises(StudyError, match="holds a study already"):
        study(given, tmp_path / "s").run()
    with pytest.raises(StudyError, match="holds another study: its trials differ"):
        study(trials(3), tmp_path / "s").run(resume=True)
    with pytest.raises(StudyError, match="were split without a limit on device memory, 1 MiB are less"):
        study(given, tmp_path / "s", device_memory="1 MiB").run(resume=True)
    with pytest.raises(StudyError, match="holds no study to resume"):
        study(given, tmp_path / "none").run(resume=True)
    again = study(given, tmp_path / "s").run(resume=True)
    assert [row.status for row in again.trials] == ["finished"] * 2 and not again.interrupted
    assert (again.makespan_s, again.policies, str(again)) == (first.makespan_s, first.policies, str(first))
    assert (
        tmp_path / "s/timeline.svg"
    ).read_text() == drawn and f"makespan {format_seconds(first.makespan_s)}," in str(first)
    with pytest.raises(KeyError):
        again["nobody"]


def test_a_folder_that_is_in_use_or_is_the_users_is_left_alone(tmp_path, monkeypatch):
    from pipefit.study.execute import folder

    monkeypatch.setattr(folder, "_PATIENCE_S", 0.1)

    def run_again(board):
        with pytest.raises(StudyError, match="another process is running this study"):
            study(given, tmp_path / "s").run(resume=True)

    given = trials(1)
    assert study(given, tmp_path / "s").run(observer=run_again).trials[0].status == "finished"
    mine = tmp_path / "u/state/mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    with pytest.raises(StudyError, match="belongs to no study"):
        study(given, tmp_path / "u").run()
    assert mine.read_text() == "years of work"


def test_the_best_weights_outlast_a_worker_that_dies_over_them_and_a_disk_that_does_not_take_them(
    tmp_path, monkeypatch
):
    from pipefit.study.execute import runner

    real, given = runner.export, trials(2)

    def dies_once(opened, path):
        if (flag := tmp_path / "died").exists():
            return real(opened, path)
        flag.touch()
        suicidal()

    monkeypatch.setattr(runner, "export", dies_once)
    assert Path(study(given, tmp_path / "s").run().paths["best"]).exists()

    def full(opened, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner, "export", full)
    with pytest.raises(TierError, match=r"weights could not be written.*No space left.*resume"):
        study(given, tmp_path / "f").run()
    assert len(json.loads((tmp_path / "f/results.json").read_text())["trials"]) == 2
    monkeypatch.setattr(runner, "export", real)
    again = study(given, tmp_path / "f").run(resume=True)
    assert load_file(again.paths["best"]).keys() == load_file(tmp_path / "s/best/model.safetensors").keys()
    assert not (tmp_path / "f/state").exists()


def test_a_full_tier_ends_the_study_in_one_message_and_loses_nothing(tmp_path, monkeypatch):
    from pipefit.spill.tier_file import TierFile

    given = trials(3, steps=6)
    real = TierFile.write
    full, count = tmp_path / "full", tmp_path / "count"

    def write(file, data, position):
        with count.open("a") as counted:
            counted.write(".")
        if count.stat().st_size > 200:
            full.touch()
        if full.exists():
            raise TierError(f"{file.path}: No space left on device")
        return real(file, data, position)

    monkeypatch.setattr(TierFile, "write", write)
    with pytest.raises(TierError, match="all committed state is kept: repair that, and resume the study"):
        study(given, tmp_path / "s").run()
    monkeypatch.setattr(TierFile, "write", real)
    result = study(given, tmp_path / "s").run(resume=True)
    assert [row.losses for row in result.trials] == [alone(trial)[0] for trial in given]


def test_the_host_tier_leaves_nothing_in_shared_memory(tmp_path):
    result = study(trials(2), tmp_path / "s", tier="host").run()
    place = Path(json.loads((tmp_path / "s/study.json").read_text())["state"])
    assert place.is_relative_to("/dev/shm") and not place.exists()
    assert [row.losses for row in result.trials] == [alone(trial)[0] for trial in trials(2)]


def test_a_folder_in_shared_memory_that_is_not_the_users_own_is_refused(tmp_path, monkeypatch):
    from pipefit.study.execute import folder

    place = tmp_path / "guessed"
    monkeypatch.setattr(folder, "_state_folder", lambda spec, path: place)
    place.symlink_to(tmp_path)
    with pytest.raises(StudyError, match="not a folder that only this user can write to"):
        study(trials(1), tmp_path / "s", tier="host").run()


def test_a_damaged_list_of_chosen_trials_names_the_file_when_the_study_is_resumed(tmp_path):
    def resumed(resume=True):
        search = Listed([{**SMALL, **MLP, "steps": 1}])
        made = pf.Study([], define=lambda values: Trial(**values), search=search, output=tmp_path / "s", workers=1)
        return made.run(resume=resume)

    assert resumed(resume=False).trials[0].status == "finished"
    path = tmp_path / "s/chosen.json"
    path.write_text(path.read_text().replace('"steps": 1', '"steps": 2'))
    with pytest.raises(StudyError, match=r"chosen\.json: damaged.*another output"):
        resumed()
    path.write_text("{")
    with pytest.raises(StudyError, match=r"chosen\.json: damaged.*another output"):
        resumed()


@pytest.mark.parametrize("kind", ["folder of an earlier version", "study", "ended trial", "results", "running trial"])
def test_a_study_that_was_damaged_names_the_file_when_it_is_resumed(kind, tmp_path):
    given = trials(2, steps=4)

    def stop(board):
        if board.entries[1].steps:
            os.kill(os.getpid(), signal.SIGTERM)

    first = study(given, tmp_path / "s", workers=1, policy="fifo").run(observer=stop)
    assert first.interrupted and first.trials[0].status == "finished"

    def change(name, old, new):
        (path,) = (tmp_path / "s").glob(name)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    def resumed():
        return study(given, tmp_path / "s", workers=1, policy="fifo").run(resume=True)

    if kind == "running trial":
        change("state/t01/trial.commit", '"turn": ', '"turn":  ')
        rows = resumed().trials
        assert rows[0].losses == alone(given[0])[0] and rows[1].status == "failed"
        assert "trial.commit: damaged" in rows[1].reason and "train it again" in rows[1].reason
        return
    if kind == "results":
        resumed()
        change("results.json", '"gap": ', '"gap": 1')
    elif kind == "folder of an earlier version":
        change("study.json", "pipefit.study/5", "pipefit.study/4")
    else:
        change("study.json" if kind == "study" else "trials/t00/trial.json", "0", "1")
    with pytest.raises(StudyError, match=r"json: (damaged|has format pipefit.study/4, this version.*another output)"):
        resumed()


def test_trials_wait_for_room_on_the_tier(tmp_path):
    given = trials(3, shards=1)
    result = study(given, tmp_path / "s", memory="120 KiB").run()
    assert [row.status for row in result.trials] == ["finished"] * 3
    small = study(given[:1], tmp_path / "t", memory="4 KiB").run()
    assert small.trials[0].status == "failed" and "room" in small.trials[0].reason


def test_halving_stops_the_same_trials_under_every_policy(tmp_path):
    given = trials(4, steps=6)
    rule = {"rule": "halving", "first": 2, "smooth": 1}
    steps = set()
    for policy in ("lrtf", "fifo"):
        result = study(given, tmp_path / policy, policy=policy, stop=rule).run()
        steps.add(tuple(row.steps for row in result.trials))
    assert len(steps) == 1 and sorted(steps.pop()) == [2, 2, 4, 6]


def test_what_workers_cannot_do_is_said_in_one_message(tmp_path):
    with pytest.raises(PipefitError, match="device: 'gpu9' cannot be used: Invalid device"):
        study(trials(1), tmp_path / "a", device="gpu9", workers=1).run()
    own = Trial("own", lambda: [], loss=torch.nn.functional.mse_loss, data=lambda step: None)
    with pytest.raises(PipefitError, match="need trials that can be pickled"):
        study([own], tmp_path / "b", workers=1).run(forked=False)


def test_the_verb_prints_one_json_object_and_leaves_with_1_when_a_trial_failed(tmp_path, capsys):
    from pipefit.cli import main

    path = tmp_path / "s.toml"
    path.write_text(FILE.replace("steps = 120", "steps = 2").replace("[grid]", '[grid]\nmodel = ["mlp", "none"]'))
    assert main(["study", str(path), "-o", str(tmp_path / "out"), "--workers", "1", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["num_devices"] == 1 and len(result["trials"]) == 6
    assert [row["status"] for row in result["trials"]] == ["finished"] * 3 + ["failed"] * 3
    assert "unknown model 'none'" in result["trials"][3]["reason"]
    assert main(["study", str(path), "-o", str(tmp_path / "out")]) == 2
    assert "holds a study already" in capsys.readouterr().err


def test_the_verb_tells_people_what_came_of_it(tmp_path, capsys, monkeypatch):
    from pipefit.cli import main

    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.toml"
    path.write_text(FILE.replace("steps = 120", "steps = 3"))
    assert main(["study", str(path), "-o", "out", "--policy", "fifo"]) == 0
    said = capsys.readouterr().out
    assert "fifo on 2 devices: makespan" in said and "lower bound" in said and "* t0" in said
    assert "simulated with the measured turns, without any wait: lrtf" in said
    assert "\nbest      out/best/model.safetensors\n" in said and Path("out/best/model.safetensors").exists()
