"""`pipefit train` from end to end, small."""

import json

import pytest

from pipefit.cli import main
from pipefit.timeline import load_trace

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("small_probes")]

SMALL = {"--model": "mlp", "--option": "layers=3,width=16", "--steps": "4", "--batch": "8"}
HERE = ("--transport", "local")  # where processes would show nothing more


def train(*more: str, **changes: str) -> int:
    """Runs the small training with other or further options."""
    options = SMALL | {f"--{name}": value for name, value in changes.items()}
    return main(["train", *(word for pair in options.items() for word in pair), *more])


def test_a_run_over_two_processes_leaves_what_it_names(tmp_path, capsys):
    folder = tmp_path / "run"
    assert train("--json", output=str(folder)) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["losses"]) == 4 and data["final_loss"] == data["losses"][-1]
    assert data["config"]["ranks"] == 2 and len(data["utilisation"]) == 2
    assert {"checkpoint", "trace", "report"} <= set(data["paths"])
    assert all((tmp_path / path).exists() for path in data["paths"].values())
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "-o", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(page)}
    assert page.read_text() == (folder / "report.html").read_text()


def test_a_quick_run_measures_and_predicts_nothing(tmp_path, capsys):
    assert train(*HERE, "--quick", "--json", ranks="2", output=str(tmp_path)) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["losses"]) == 4 and found["predicted"] is None and found["rows"] == []
    assert "Predicted next to measured" not in (tmp_path / "report.html").read_text()
    assert "bottleneck" not in (tmp_path / "report.html").read_text()
    assert load_trace(tmp_path / "measured.trace.json").launches == ()
    assert not (tmp_path / "profile.json").exists() and (tmp_path / "measured.svg").exists()


def test_metrics_and_logs_hold_the_figures_of_every_step(tmp_path, capsys):
    words = ["--json", "--evaluate-every", "2", "--data", "digits", "--log", "csv", "--log", "tensorboard"]
    assert train(*words, output=str(tmp_path)) == 0
    losses = json.loads(capsys.readouterr().out)["losses"]
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "loss" in entry]
    assert [entry["loss"] for entry in steps] == losses and len(entries) == len(steps) + 2
    figures = {"seconds", "learning_rates", "gradient_norm", "samples_per_s", "bubble", "memory_bytes"}
    assert all(figures <= set(entry) and len(entry["memory_bytes"]) == 2 for entry in steps)
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + len(entries)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schedule": "1f2b"}, "did you mean 1f1b?"),
        ({"ranks": "9"}, "9 stages need at least 9 layers"),
        ({"model": "gpt", "option": "layers=1,hidden=8,heads=1,context=8", "data": "none.txt"}, "none.txt"),
        ({"data": "digits.txt"}, "--data"),
        ({"plan": "none.json"}, "none.json: no such file"),
        ({"model": "gpd"}, "did you mean gpt"),
        ({"batch": "2", "microbatches": "8"}, "micro-batch"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_message(changes, told, capsys):
    assert train(*HERE, **changes) == 2
    err = capsys.readouterr().err
    assert told in err and "Traceback" not in err


def test_a_loss_that_is_no_number_is_exit_1(capsys):
    assert train(*HERE, steps="50", lr="1e30", clip="0", optimizer="sgd", warmup="1") == 1
    err = capsys.readouterr().err
    assert "loss" in err and "Traceback" not in err


def test_a_cap_on_the_device_trains_from_disk_with_the_same_losses(tmp_path, capsys):
    words = ["--model", "gpt", "--option", "layers=3,hidden=32,context=16,tied=false", "--steps", "3", "--batch", "4"]
    words += ["--microbatches", "2", "--optimizer", "adam", "--data", "synthetic", "--json"]
    found = []
    for more in (["--disk", str(tmp_path / "tier"), "-o", str(tmp_path / "run")], []):
        code = main(["train", *words, "--device-memory", "700KiB", *more])
        answer = json.loads(capsys.readouterr().out)
        assert code == 0
        found.append(answer["losses"])
    assert found[0] == found[1]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<h1>gpt over 1 rank</h1>" in page and "spilled to the disk: " in page
    assert not list((tmp_path / "tier").iterdir())  # the run has ended well: its records are not needed any more


def test_a_model_with_a_shared_weight_under_a_cap_has_the_same_losses_wherever_it_steps(capsys):
    words = ["--model", "gpt", "--option", "layers=4,hidden=32,context=16", "--device-memory", "700KiB", "--steps", "3"]
    found = []
    for where in ("auto", "host", "device"):
        assert main(["train", *words, "--batch", "4", "--data", "synthetic", "--step-on", where, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["losses"])
    assert found[0] == found[1] == found[2]


def test_a_cap_that_is_too_small_is_refused_with_the_smallest(tmp_path, capsys):
    code = main(["train", "--model", "gpt", "--option", "layers=3,hidden=32,context=16", "--device-memory", "10kB"])
    assert code == 1
    assert "the smallest cap that works is" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--tensor 2", "--stages 2,3", "--recompute stage", "--replicas 2,1"])
def test_a_cap_makes_its_own_plan_and_refuses_to_be_told_another(words, capsys):
    given = ["--model", "gpt", "--option", "layers=3,hidden=32,context=16", "--device-memory", "6 MiB", *words.split()]
    assert main(["train", *given, "--data", "synthetic", "--steps", "2"]) == 2
    err = capsys.readouterr().err
    cure = (
        "give one number of replicas" if "replicas" in words else f"leave out {words.split()[0][2:]}, or device_memory"
    )
    assert cure in err


@pytest.mark.parametrize("cap", [["--device-memory", "6 MiB"], []], ids=["capped", "by stages"])
def test_a_disk_that_is_no_folder_is_refused_in_one_message(cap, capsys):
    words = ["--model", "gpt", "--option", "layers=3,hidden=32,context=16", "--data", "synthetic", "--steps", "2"]
    assert main(["train", *words, *cap, "--disk", "/dev/null/x"]) in (1, 2)
    err = capsys.readouterr().err
    assert "/dev/null/x: cannot keep spilled records there" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--keep all --step-on host", "--step-on and --keep: nothing is spilled; give --device-memory"),
        ("--host-memory 1GiB --commit-every 2", "only records on a disk outlast the run; give --disk as well"),
        ("--disk x --step-on host", "from a disk they would all have to be read"),
    ],
)
def test_words_on_spilling_that_mean_nothing_are_refused_before_anything_is_measured(words, told, capsys, monkeypatch):
    monkeypatch.setattr("pipefit.pipeline.request.agreed_profile", None)
    assert main(["train", "--model", "mlp", "--ranks", "1", *words.split()]) == 2
    assert told in capsys.readouterr().err


def test_a_pipeline_whose_chunks_live_on_disk_has_the_losses_of_one_that_holds_them(tmp_path, capsys):
    words = ["--model", "gpt", "--option", "layers=4,hidden=32,context=16,dropout=0.1", "--steps", "3", "--batch", "8"]
    words += ["--schedule", "interleaved", "--chunks", "2", "--stages", "2,1,1,2", "--data", "synthetic", "--json"]
    found = []
    for more in (["--disk", str(tmp_path / "tier")], []):
        assert main(["train", *words, *HERE, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["losses"])
    assert found[0] == found[1]
    assert not list((tmp_path / "tier").iterdir())
