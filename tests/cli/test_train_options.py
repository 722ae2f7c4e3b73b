"""The pure side of `pipefit train`: options from a file, and what people see of a run."""

import importlib.util
import io
from types import SimpleNamespace

import pytest
from tests.verbs import refused

from pipefit.cli import main, train
from pipefit.cli.answer import Answer
from pipefit.cli.display import Watcher, printable, report
from pipefit.cli.options import Starts
from pipefit.cli.train import _remove_if_only_logs
from pipefit.pipeline.callbacks import Record
from pipefit.run.config import RunConfig, with_defaults
from pipefit.run.result import Sample
from pipefit.spec import Layer, Partition, Placement, Plan, Prediction, Profile
from pipefit.spec.options import Request, as_flat
from pipefit.timeline.compare import Row


@pytest.fixture
def settings(monkeypatch):
    """What `pipefit train` would run with, in place of running it."""
    seen = []

    def remember(config, transport, threads, quiet):
        seen.append((config, transport, threads))
        return SimpleNamespace()

    monkeypatch.setattr(train, "_run", remember)
    monkeypatch.setattr(train, "_data", lambda settings, result: {})
    monkeypatch.setattr(train, "report", lambda result: "")
    return seen


def test_without_options_a_run_is_the_default_run(settings):
    assert main(["train"]) == 0
    starts = Starts(threads=None, recover=0, min_ranks=None, grow=False)
    assert settings == [(with_defaults(RunConfig()), "distributed", starts)]


def test_a_plan_says_how_many_processes_there_are_where_nobody_does(settings, tmp_path):
    stages, ranks = [2, 1, 1], tuple((rank,) for rank in range(3))
    path = tmp_path / "plan.json"
    Plan(Partition.from_counts(stages, 4), Placement(ranks), "1f1b", 4).save(path)
    assert main(["train", "--plan", str(path)]) == main(["train", "--plan", str(path), "--ranks", "2"]) == 0
    assert [config.request.parallelism.ranks for config, *_ in settings] == [3, 2]


def test_every_setting_of_a_run_has_an_option(settings):
    words = (
        "model=. option=layers=3 data=a.txt ranks=3 schedule=gpipe microbatches=5 chunks=2 replicas=2,1 stages=1,2 "
        "recompute=layer plan=p.json batch=7 steps=9 optimizer=sgd lr=0.5 warmup=4 weight_decay=0.2 betas=0.8,0.9 "
        "lr_schedule=linear learn=all eval_data=b.txt clip=0 seed=6 output=runs/x "
        "resume=runs/y shares=3,2 "
        "checkpoint_every=8 checkpoint_share=0.1 keep_checkpoints=5 "
        "sample=11 device=cpu data_parallel=2 tensor=2 sequence_parallel whole_messages "
        "precision=bf16 shard=weights loss_scale=2 device_memory=1GiB host_memory=2GiB disk=tier step_on=host "
        "commit_every=3 keep=all activations schedule_option=warmup=2 lora=r=4 context=64 pack evaluate_every=2 "
        "patience=3 measure=again log=csv compile no_decay=bias,norm nonfinite=skip verify_replicas=12 rebalance"
    )
    arguments = {name: value for name, _, value in (word.partition("=") for word in words.split())}
    # A setting that is not here has no option yet; epochs come in place of steps, and a cap needs measurements.
    usual = as_flat(RunConfig())
    del usual["epochs"], usual["quick"]
    assert set(arguments) == set(usual)
    typed = ["train"]
    for name, value in arguments.items():
        typed += [f"--{name.replace('_', '-')}", *([value] if value else [])]
    assert main(typed) == 0
    config = as_flat(settings[0][0])
    assert [name for name in usual if config[name] == usual[name]] == []
    assert (config["data"], config["replicas"], config["lr"]) == (["a.txt"], (2, 1), 0.5)


def test_a_file_gives_options_and_what_is_typed_wins(settings, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'format = "pipefit.run/1"\nmodel = "mlp"\nsteps = 20\ndata = ["a.txt", "b.txt"]\nstages = [3, 5]\n'
        "checkpoint_every = 4\nrecompute = 'selective'\nlr = 0.25\n"
    )
    assert main(["train", "--config", str(path), "--steps", "10"]) == 0
    config = SimpleNamespace(**as_flat(settings[0][0]))
    assert (config.model, config.steps, config.data, config.stages) == ("mlp", 10, ["a.txt", "b.txt"], (3, 5))
    assert (config.checkpoint_every, config.recompute, config.lr) == (4, "selective", 0.25)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stepz = 3", "did you mean steps"),
        ("steps = 'many'", "expected a whole number, got 'many'"),
        ("steps = 1.5", "expected a whole number, got '1.5'"),
        ("[model]\nname = 'gpt'", "got a table"),
        ("steps =", "not TOML"),
        ('format = "pipefit.plan/1"', "is this another kind of file?"),
    ],
)
def test_a_file_with_something_else_is_refused(text, told, settings, tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert told in refused(capsys, "train", "--config", str(path))
    assert settings == []


def test_a_missing_file_or_a_directory_is_named(settings, tmp_path, capsys):
    assert "no such file" in refused(capsys, "train", "--config", str(tmp_path / "none.toml"))
    assert "got a directory" in refused(capsys, "train", "--config", str(tmp_path))
    (tmp_path / "file").touch()
    assert "expected a folder" in refused(capsys, "train", "-o", str(tmp_path / "file"))


@pytest.mark.parametrize("option", ["ranks", "microbatches", "batch", "steps", "chunks"])
def test_counts_below_one_are_refused(option, settings, capsys):
    assert f"--{option}: expected a whole number of at least 1, got 0" in refused(capsys, "train", f"--{option}", "0")


def test_logging_needs_a_folder_and_the_package(settings, capsys, monkeypatch):
    assert "give -o FOLDER too" in refused(capsys, "train", "--log", "csv")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install wandb" in refused(capsys, "train", "-o", "x", "--log", "csv", "--log", "wandb")
    assert "wandb" in refused(capsys, "train", "-o", "x", "--log", "wand")
    assert settings == []


def test_a_script_s_own_config_is_not_read(tmp_path, capsys, monkeypatch):
    from pipefit.cli import run

    seen = []

    def command(*tokens: str, json: bool = False) -> Answer:
        seen.append(tokens)
        return Answer({}, "")

    monkeypatch.setattr(run, "command", command)
    assert main(["run", "s.py", "--config", "none.toml"]) == 0
    assert seen == [("s.py", "--config", "none.toml")]


def a_plan() -> tuple[Plan, Profile]:
    layers = tuple(Layer(name, 1e-3, 1e-3, 1e-3, 10, 20, 1024) for name in ("first", "middle", "last"))
    prediction = Prediction(0.012, 0.011, 0.011, 90.9, (2048.0, 4096.0))
    plan = Plan(Partition.from_counts([2, 1]), Placement(((0,), (1,))), "1f1b", 4, prediction=prediction)
    return plan, Profile("toy", 1, layers)


def test_the_plan_is_a_row_for_each_stage():
    stream = io.StringIO()
    bundle, source = (
        SimpleNamespace(name="toy", layers=[1] * 3, num_parameters=9),
        SimpleNamespace(name="digits", tokens_per_sample=0),
    )
    Watcher(1, 1, stream).planned(*a_plan(), bundle, source)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "toy: 3 layers, 9 parameters; data: digits"
    assert [line.split()[:3] for line in lines[4:6]] == [["0", "0…1", "0"], ["1", "2", "1"]]
    assert lines[-1] == "predicted: 11 ms per update, 90.9 samples/s"


def test_a_file_gets_ten_lines_and_a_terminal_one_that_moves():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, moving = io.StringIO(), Terminal()
    for stream in (plain, moving):
        watcher = Watcher(100, 16, stream)
        for step in range(1, 101):
            watcher.step(Record(step, 2.0, 0.0625 * step))
    assert len(plain.getvalue().splitlines()) == 10
    assert plain.getvalue().splitlines()[-1] == "step 100/100  loss 2.0000  256.0 samples/s"
    assert moving.getvalue().count("\r") == 50 and moving.getvalue().count("\n") == 1
    assert "left" in moving.getvalue()


def test_what_takes_long_is_named_once_and_then_every_five_seconds():
    stream = io.StringIO()
    watcher = Watcher(100, 16, stream)
    watcher.doing("measuring the layers")
    began = watcher._since_s
    for after in (0.5, 1.5, 3.0, 6.4, 7.0, 12.0):
        watcher.beat(began + after)
    assert stream.getvalue().splitlines() == [
        "measuring the layers …", "measuring the layers: 7 s so far", "measuring the layers: 12 s so far",
    ]  # fmt: skip


def test_a_long_step_says_so_and_a_slow_run_has_a_line_every_five_seconds():
    stream = io.StringIO()
    watcher = Watcher(1000, 16, stream)
    for step in range(1, 13):
        watcher.step(Record(step, 2.0, 1.0 * step, metrics={"accuracy": 0.25}))
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 5/1000", "step 10/1000"]
    assert "loss 2.0000  accuracy 0.25  16.0 samples/s" in stream.getvalue()
    watcher.beat(max(watcher._since_s, watcher._said_s) + 4.9)
    assert len(stream.getvalue().splitlines()) == 2
    watcher.beat(max(watcher._since_s, watcher._said_s) + 5.1)
    assert stream.getvalue().splitlines()[2] == "step 13: 5 s so far"


def test_a_sample_that_is_no_text_is_escaped():
    assert printable("Ünd\n\x1b[31m\x00\t") == "Ünd\n\\x1b[31m\\x00\\t"


def test_a_run_says_what_it_chose_before_anything_is_loaded(settings, monkeypatch, capsys):
    monkeypatch.setattr("pipefit.run.config.num_gpus", lambda: 0)
    monkeypatch.setattr("pipefit.run.config.num_cores", lambda: 8)
    words = "--ranks 3 --schedule gpipe -m 8 -o x --lr 0.5 --warmup 0 --lr-schedule constant"
    assert main(["train"]) == main(["train", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ranks          4, on a machine of 8 cores (--ranks)",
        "schedule       the fastest by measurements of the layers (--schedule)",
        "micro-batches  chosen with the schedule (--microbatches)",
        "learning rate  0.002, usual for new weights (--lr); 10 steps of warm-up (--warmup), then cosine down to 5 % "
        "(--lr-schedule)",
        "checkpoints    none without -o FOLDER",
        "loading torch …",
        "learning rate  0.5 (--lr); 0 steps of warm-up (--warmup), then constant (--lr-schedule)",
        "checkpoints    by time, in at most 3 % of it, and at the end, in x; the newest 3 stay (--checkpoint-every)",
        "loading torch …",
    ]
    first, second = (config.request for config, *_ in settings)
    assert (first.schedule, first.parallelism.ranks) == ("auto", 4)
    assert (second.schedule, second.parallelism.ranks) == ("gpipe", 3)


@pytest.mark.parametrize(
    ("words", "lr", "steps", "warmup"),
    [
        ("", 2e-3, 100, 10),
        ("--steps 4", 2e-3, 4, 1),
        ("--model FOLDER --steps 40", 5e-5, 40, 4),
        ("--model FOLDER --lora r=4 --steps 1000", 2e-4, 1000, 100),
        ("--model FOLDER --lr 0.5 --warmup 7", 0.5, 100, 7),
        ("--model FOLDER --epochs 3", 5e-5, None, None),
    ],
)
def test_the_usual_learning_rate_follows_from_what_is_trained(words, lr, steps, warmup, settings, tmp_path):
    assert main(["train", *words.replace("FOLDER", str(tmp_path)).split()]) == 0
    config = settings[0][0]
    assert (config.lr, config.steps, config.warmup) == (lr, steps, warmup)


def test_a_quick_run_takes_no_plan_that_needs_measurements(settings, capsys):
    for words in (["--schedule", "auto"], ["--device-memory", "1GiB"]):
        assert "--quick: a plan by measurements" in refused(capsys, "train", "--quick", *words)
    assert main(["train", "--quick"]) == 0
    assert settings[0][0].request.schedule == "1f1b"


def test_a_quiet_run_prints_nothing_before_its_result(settings, capsys):
    assert main(["train", "--quiet"]) == 0
    assert capsys.readouterr().out.strip() == ""


def test_epochs_and_steps_exclude_each_other(settings, capsys):
    assert "give one of them" in refused(capsys, "train", "--steps", "3", "--epochs", "2")
    assert "give --steps" in refused(capsys, "train", "--disk", "x", "--epochs", "2")
    assert settings == []


def test_a_number_of_microbatches_that_is_given_is_obeyed_even_if_it_is_the_usual_one(settings, capsys):
    assert main(["train", "-m", "4"]) == main(["train", "-m", "4", "--schedule", "auto"]) == main(["train"]) == 0
    assert capsys.readouterr().out.count("micro-batches  ") == 1  # of the run without options
    found = [(config.request.schedule, config.request.microbatches) for config, *_ in settings]
    assert found == [("1f1b", 4), ("auto", 4), ("auto", None)]


def test_without_options_a_run_takes_the_ranks_that_a_launcher_started(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert with_defaults(RunConfig()).request.parallelism.ranks == 3
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr("pipefit.run.config.num_gpus", lambda: 6)
    assert with_defaults(RunConfig()).request.parallelism.ranks == 6
    shaped = with_defaults(RunConfig(request=Request(stages=(2, 2)))).request
    assert (shaped.parallelism.ranks, shaped.schedule) == (2, "1f1b")


def test_a_run_that_goes_on_counts_steps_from_where_it_stood_and_time_from_now():
    plain = io.StringIO()
    watcher = Watcher(100, 16, plain)
    for step in range(61, 101):
        watcher.step(Record(step, 2.0, 0.5 * (step - 60)))
    lines = plain.getvalue().splitlines()
    assert lines[0] == "step 70/100  loss 2.0000  32.0 samples/s  15 s left" and lines[-1].startswith("step 100/100")


def test_a_reader_that_leaves_does_not_stop_the_training():
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Watcher(1, 1, Gone()).step(Record(1, 1.0, 1.0))


def test_the_end_says_how_it_went_beside_what_was_predicted():
    result = SimpleNamespace(
        losses=[3.0, 1.5],
        seconds=2.0,
        samples_per_s=16.0,
        tokens_per_s=2048.0,
        baseline=("unigram entropy", 2.9),
        held_out_loss=1.6,
        held_out_accuracy=None,
        held_out_before=None,
        held_out_metrics={},
        predicted=None,
        measured_period_s=1.0,
        bubble=0.25,
        utilisation=[0.8, 0.7],
        peak_memory_bytes=[2**20, 2**21],
        held_bytes=(),
        compile_s=[2.0, 3.5],
        traffic=([2**16, 2**15], [0.0, 0.0]),
        rows=[Row("period", 0.9, 1.0, 1 / 9, 2), Row("bubble", 0.2, 0.25, 0.05, 2), Row("load s0", 0.0, 0.1, 0.1, 2)],
        notes=["best held-out loss 1.5000 at step 1"],
        samples=[Sample("Once upon", "a time", "a\ntree")],
        faults=[],
        paths={"trace": "runs/a/measured.trace.json"},
    )
    text = report(result)
    assert "loss 3.0000 → 1.5000   (unigram entropy: 2.9000)" in text
    assert "best held-out loss 1.5000 at step 1" in text
    assert "held-out loss 1.6000" in text and "accuracy" not in text
    assert "layers compiled in 3.5 s" in text
    assert ["period", "900", "ms", "1", "s", "+11.1%"] in [line.split() for line in text.splitlines()]
    assert ["bubble", "20.0%", "25.0%", "+5.0", "points"] in [line.split() for line in text.splitlines()]
    assert "rank 1: 70%" in text and "rank 1: 2 MiB" in text
    assert "sent    rank 0: 64 KiB  rank 1: 32 KiB in a pass" in text and "inside" not in text
    assert "prompt  Once upon\ntarget  a time\nanswer  a\n        tree\n" in text
    assert "runs/a/measured.trace.json" in text


def test_a_run_that_was_refused_leaves_no_folder_and_one_that_began_keeps_it(tmp_path):
    for name, others in (("refused", []), ("began", ["metrics.jsonl"])):
        logs = tmp_path / name / "logs"
        logs.mkdir(parents=True)
        (logs / "rank-0.log").write_text("")
        for other in others:
            (tmp_path / name / other).write_text("{}")
        _remove_if_only_logs(logs)
    assert [path.name for path in tmp_path.iterdir()] == ["began"]
    assert (tmp_path / "began" / "logs" / "rank-0.log").is_file()


@pytest.mark.parametrize("name", ["checkpoint-every", "evaluate-every", "patience", "sample", "context", "warmup"])
def test_a_negative_number_is_refused_before_anything_is_trained(name, capsys):
    said = refused(capsys, "train", "--model", "mlp", "--ranks", "1", f"--{name}", "-2")
    assert said.startswith(f"pipefit train: --{name}: expected a whole number of at least 0, got -2")


def test_adapters_need_a_folder_whose_weights_they_change(capsys):
    assert "weights of a folder; gpt has none" in refused(capsys, "train", "--model", "gpt", "--lora", "r=4")
