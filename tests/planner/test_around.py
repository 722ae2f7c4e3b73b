"""Around the search: words, pictures, refitting, machines, the verb."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.planner.cases import model
from tests.verbs import answered, refused

from pipefit.cli import main
from pipefit.cost import FREE, of_plan
from pipefit.errors import PlanError, ProfileError, TopologyError
from pipefit.planner import gpt_profile, plan
from pipefit.planner.explain import explain
from pipefit.planner.machines import load_topology, topology_names
from pipefit.planner.refit import refit
from pipefit.planner.training_figures import training
from pipefit.planner.transformer import settings_of
from pipefit.schedules import program_of
from pipefit.simulate import simulate
from pipefit.spec import Plan, Profile, Topology
from pipefit.timeline import by_kind, save_trace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def verb(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --------------------------------------------------------------------------------------------------------- words


def test_the_explanation_names_stages_winner_and_losers():
    profile = model()
    made = plan(profile, Topology.local(4), global_batch=32)
    text = explain(made, profile)
    assert f"{made.prediction.throughput:.4g} samples/s" in text
    assert len(re.findall(r"\d {1,6}\d+\.\d%  ", text)) == 5 and "more (--all" in text
    assert all(row in text for row in ("stage", "layers", "memory", "weights"))


def test_training_days_follow_from_the_predicted_throughput():
    machine = load_topology("dgx-a100-8")
    made = plan(gpt_profile(8, 2048, 16, device=machine.device), machine, global_batch=16)
    told = training(made, machine, 1e9)
    assert told["training_days"] == pytest.approx(1e9 / 2048 / made.prediction.throughput / 86400)
    assert 0.2 < told["mfu"] <= machine.device.efficiency
    assert "no replay" in told["mfu_convention"]
    assert training(plan(model(), Topology.local(2), global_batch=8), machine) == {}


@pytest.mark.parametrize("text", ["gpt:layers=2", "gpt:layers=2,hidden=x,heads=1", "gpt:layer=2,hidden=8,heads=1"])
def test_gpt_sizes_that_are_missing_or_unknown_are_refused(text):
    with pytest.raises(ProfileError, match="gpt:"):
        settings_of(text)


def test_heads_that_do_not_divide_the_hidden_size_are_refused():
    with pytest.raises(ProfileError, match="divisor"):
        gpt_profile(2, 100, 3)


# ------------------------------------------------------------------------------------------------------ machines


def test_every_shipped_machine_loads_and_has_as_many_devices_as_its_name_says():
    assert {"dgx-a100-1024", "dgx-a100-3072", "pcie-4x4"} <= set(topology_names())
    for name in topology_names():
        machine = load_topology(name)
        assert machine.name == name and machine.device.flops > 0
    assert load_topology("dgx-a100-1024").num_devices == 1024
    assert load_topology("local:3").num_devices == 3
    with pytest.raises(TopologyError, match="dgx-a100-1024"):
        load_topology("dgx-a100-1025")


# ---------------------------------------------------------------------------------------------------------- refit


def test_refit_finds_the_times_of_a_run_that_was_slower():
    profile = model()
    made = plan(profile, Topology.local(2), global_batch=16, schedules=["1f1b"], depths=[2])
    slower = tuple(
        msgspec.structs.replace(layer, forward_s=2 * layer.forward_s, backward_weight_s=3 * layer.backward_weight_s)
        for layer in profile.layers
    )
    truth = msgspec.structs.replace(profile, layers=slower, loss_s=5e-4, optimizer_s=3e-3)
    measured = simulate(program_of(made), of_plan(truth, made, Topology.local(2), runtime=FREE))
    fitted = refit(profile, made, measured)
    again = simulate(program_of(made), of_plan(fitted, made, Topology.local(2), runtime=FREE))
    for stage in made.partition.stages:
        for field in ("forward_s", "total_s"):
            found, wanted = (sum(getattr(one.layers[i], field) for i in stage.layers) for one in (fitted, truth))
            assert found == pytest.approx(wanted)
    assert (fitted.loss_s, fitted.optimizer_s) == pytest.approx((5e-4, 3e-3))
    steps = {stage: item.median_s for (op, stage), item in by_kind(measured).items() if op == "step"}
    for index, stage in enumerate(made.partition.stages):
        assert fitted.optimizer_of(stage.layers) == pytest.approx(steps[index])
    assert again.makespan_s == pytest.approx(measured.makespan_s, rel=1e-6)


def test_refit_refuses_a_trace_of_another_partition():
    profile = model()
    two, four = (plan(profile, Topology.local(n), global_batch=16, schedules=["1f1b"], depths=[n]) for n in (2, 4))
    cost = of_plan(profile, four, Topology.local(4))
    with pytest.raises(PlanError, match="belong together"):
        refit(profile, two, simulate(program_of(four), cost))


# ------------------------------------------------------------------------------------------------------- the verb


@pytest.mark.parametrize(
    "words",
    [
        ["--profile", "vgg16", "--topology", "local:4", "--schedule", "1f1b"],
        ["--profile", "CHAIN", "--topology", "local:4", "--depth", "4"],
        ["--profile", "CHAIN", "--topology", "local:2", "--method", "gpipe"],
        ["--profile", "FROZEN", "--topology", "local:4", "--schedule", "1f1b", "--depth", "4"],
        ["--profile", "CHAIN", "--topology", "one-gpu", "--device-memory", "15 MB", "-m", "4"],
        ["--profile", "gpt:layers=4,hidden=2560,heads=32", "--topology", "one-gpu", "--device-memory", "4 GiB"],
    ],
)
def test_the_simulator_says_of_a_plan_what_the_planner_predicted(words, capsys, tmp_path):
    """`pipefit simulate` once left out the optimizer's step, unless stages were spilled."""
    path = tmp_path / "plan.json"
    for name, chain in (("CHAIN", model()), ("FROZEN", model(frozen=4))):
        slow = msgspec.structs.replace(chain, optimizer_s=5e-3)
        words = [str(slow.save(tmp_path / f"{name}.json")) if word == name else word for word in words]
    predicted = verb(capsys, *words, "-o", str(path))["predicted"]
    assert main(["simulate", str(path), *words[:4], "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["period"] == pytest.approx(predicted["period_s"], rel=1e-9)
    assert simulated["makespan"] == pytest.approx(predicted["step_s"], rel=1e-9)


def test_the_verb_answers_known_times_as_json(capsys, tmp_path):
    flat = tmp_path / "t.toml"
    flat.write_text('format = "pipefit.topology/1"\n[[levels]]\nname="m"\nwidth=16\nbandwidth_bytes_per_s="1 GB/s"\n')
    said = verb(
        capsys, "--profile", "vgg16", "--topology", str(flat), "--method", "pipedream", "--cost", "pipedream-code"
    )
    assert [stage["replicas"] for stage in said["stages"]] == [13, 2, 1]
    assert said["predicted"]["minibatch_s"] == pytest.approx(0.0565, abs=5e-5)
    assert set(said) >= {"method", "stages", "schedule", "num_microbatches", "predicted", "candidates", "plan_seconds"}
    assert all("why_lost" in candidate for candidate in said["candidates"])
    predicted = {"step_s", "minibatch_s", "throughput", "peak_bytes", "speedup_over_data_parallel"}
    assert set(said["predicted"]) >= predicted


def test_the_verb_writes_a_plan_that_loads_and_is_corrected_by_its_trace(capsys, tmp_path):
    profile: Profile = model()
    profile.save(tmp_path / "m.json")
    words = ["--profile", str(tmp_path / "m.json"), "--topology", "local:2", "--global-batch", "16"]
    verb(capsys, *words, "-o", str(tmp_path / "plan.json"))
    made = Plan.load(tmp_path / "plan.json")
    assert made.placement.num_ranks == 2 and made.prediction is not None
    cost = of_plan(profile, made, Topology.local(2))
    save_trace(simulate(program_of(made), cost), tmp_path / "run.trace.json")
    again = verb(capsys, *words, "--refit", str(tmp_path / "run.trace.json"))
    assert again["predicted"]["throughput"] > 0


def test_tokens_without_a_gpt_are_refused(capsys):
    assert main(["plan", "--profile", "gnmt", "--topology", "pcie-4", "--tokens", "1e9"]) == 2
    assert "--tokens" in capsys.readouterr().err


def test_a_plan_that_ran_without_its_trace_is_refused(capsys):
    assert main(["plan", "--profile", "gnmt", "--topology", "pcie-4", "--of", "plan.json"]) == 2
    assert "--refit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--profile", "vgg61", "--topology", "local:2"], 2, "vgg16"),
        (["--profile", "vgg16", "--topology", "local:0"], 2, "local:N"),
        (["--profile", "vgg16", "--topology", "local:4", "--memory", "1 GiB"], 1, "the cheapest change"),
        (["--profile", "vgg16", "--topology", "local:4", "--global-batch", "0"], 2, "--global-batch"),
        (["--profile", "gpt:layers=2", "--topology", "pcie-4"], 2, "hidden"),
        (["--profile", "gpt:layers=2,hidden=64,heads=2", "--topology", "local:2"], 2, "flops"),
        (["--profile", "vgg16", "--topology", "local:4", "-o", "plan.txt"], 2, ".json"),
        (["--profile", "vgg16", "--topology", "local:4", "-v", "2,3", "--device-memory", "1 GiB"], 2, "one number"),
    ],
)
def test_bad_input_is_one_message(words, code, said, capsys):
    assert main(["plan", *words]) == code
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == "" and "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(("pipedream", words) for words in (["--depth", "4"], ["--schedule", "gpipe"], ["-t", "2"], ["-v", "2"])),
        *(("pipedream", words) for words in (["-m", "4"], ["--global-batch", "64"], ["--blocking"])),
        *(("auto", words) for words in (["--straight"], ["--cost", "paper"])),
        ("gpipe", ["--tensor", "2"]),
    ],
)
def test_an_option_without_effect_is_refused(method, options, capsys):
    words = ["plan", "--profile", "vgg16", "--topology", "pcie-4", "--method", method]
    assert f"method {method} does not use it" in refused(capsys, *words, *options)
    if method == "auto":
        assert "without --device-memory" in refused(capsys, *words, *options, "--device-memory", "8 GiB")


def test_chunks_to_choose_from(capsys):
    words = ["plan", "--profile", "vgg16", "--topology", "pcie-4", "--schedule", "interleaved"]
    for given, expected in (("2", {2}), ("3", {3}), ("2,4", {2, 4})):
        assert answered(capsys, *words, "--depth", "4", "-v", given)["num_chunks"] in expected


def test_planning_never_loads_torch():
    words = ["plan", "--profile", "gpt:layers=8,hidden=1024,heads=8", "--topology", "dgx-a100-8", "--json"]
    code = f"import sys; sys.modules['torch'] = None\nfrom pipefit.cli import main\nsys.exit(main({words!r}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stages"]
