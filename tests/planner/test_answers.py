"""Answers of a plan: the table, idle devices, bytes that travel, sweeps, the largest model, the command for it."""

import re
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.cases import model
from tests.verbs import answered, refused

from pipefit.cli import main
from pipefit.cost import FREE, of_plan
from pipefit.errors import InfeasibleError, PlanError
from pipefit.ir.op import OP_SPEC, Lane, Op, Reduction
from pipefit.ir.values import Value
from pipefit.planner import plan
from pipefit.planner.explain import explain, run_command
from pipefit.planner.machines import load_topology, read_profile
from pipefit.planner.plan_figures import idle_share, sent_bytes
from pipefit.planner.sweeps import largest, sweep
from pipefit.schedules import program_of
from pipefit.spec import Device, Level, Partition, Placement, Plan, Topology
from pipefit.units import table

pytestmark = pytest.mark.slow

SMALL = "gpt:layers=4,hidden=256,heads=4"

# ---------------------------------------------------------------------------------------------------------- the table


@given(
    st.lists(
        st.tuples(st.text("ab ×", max_size=30), st.text("0123.%", max_size=9), st.text("GiB ", max_size=8)),
        min_size=1,
        max_size=5,
    ),
    st.integers(8, 90),
)
def test_a_table_fits_its_width_and_cuts_no_word(body, width):
    lines = table([("plan", "slower", "memory"), *body], width)
    words = [word for row in body for cell in row for word in cell.split()]
    printed = " ".join(lines).replace(",", " ").split()
    assert all(printed.count(word) >= words.count(word) for word in words)
    # Below its first cell, a figure is indented and stays with its name and unit.
    longest = max(
        len(name) + 1 + len(cell) for row in body for name, cell in zip(("", "slower", "memory"), row, strict=True)
    )
    assert max(map(len, lines), default=0) <= max(width, longest + 3, *map(len, words), 6)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("every", [False, True])
def test_an_explanation_fits_the_terminal(width, every):
    made = plan(model(), Topology.local(4), global_batch=32)
    text = explain(made, model(), width, every)
    assert max(map(len, text.splitlines())) <= width
    assert "recompute, cut for the links" not in text or width > 40
    shown = sum(text.count(f" {count} micro-batches") for count in (1, 2, 4, 8, 16, 32)) if width > 100 else None
    assert shown is None or every or shown == 7  # the title, the winner and five others


def test_slower_has_one_meaning():
    made = plan(model(), Topology.local(4), global_batch=32)
    best = made.prediction.throughput
    lost = [each for each in made.candidates if each.throughput is not None]
    assert len(lost) > 6 and {each.basis for each in lost} == {"simulated", "at best"}
    for each in lost:
        assert each.slower == pytest.approx(1 - each.throughput / best)
        assert f"{each.slower:.1%} slower" in each.why_lost or each.slower < 5e-4 or each.basis == "at best"


def test_those_that_lost_least_come_first_each_of_another_family():
    made = plan(model(), Topology.local(4), global_batch=32)
    text = explain(made, width=200)
    shares = [float(share) for share in re.findall(r"\d {1,6}(\d+\.\d)%  ", text)]
    assert shares == sorted(shares) and len(shares) == 5


def test_data_parallelism_that_does_not_fit_is_no_baseline(capsys):
    """A plan was once called 0.55 × data parallelism where data parallelism did not fit."""
    assert main(["plan", "--profile", "vgg16", "--topology", "pcie-4x4", "--method", "pipedream"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "plain data parallelism does not fit: a device needs 15.22 GiB of 14.9 GiB" in text
    assert "× plain data parallelism" not in text
    said = answered(capsys, "plan", "--profile", "vgg16", "--topology", "pcie-4x4", "--method", "pipedream")
    assert said["predicted"]["speedup_over_data_parallel"] is None
    (plain,) = [each for each in said["candidates"] if each["family"] == "data parallel"]
    assert plain["throughput"] is None and plain["slower"] is None and plain["sent_bytes"] > 0


def test_data_parallelism_is_examined_even_where_it_is_hopeless():
    profile = model(8, weights=4e8, cut=1e3)
    slow = Topology((Level("m", 4, 1e6),), Device(memory_bytes=1e12))
    made = plan(profile, slow, global_batch=32)
    (plain,) = {each.basis for each in made.candidates if each.family == "data parallel"}
    assert plain in ("simulated", "estimated") and made.prediction.speedup_over_data_parallel > 2


def test_data_parallelism_that_was_no_candidate_is_named_where_it_does_not_fit():
    machine = Topology((Level("server", 4, 12e9),), Device(memory_bytes=1.4e8, flops=100e12))
    profile = read_profile("gpt:layers=8,hidden=512,heads=8,vocab=1024,sequence=128", machine, 1)
    made = plan(profile, machine, global_batch=6, depths=[4], tensors=[1])
    (plain,) = [each for each in made.candidates if each.family == "data parallel"]
    table = 2 * 1024 * 512  # of embedding and head, once
    weights = sum(layer.weight_bytes for layer in profile.layers) - table
    assert plain.throughput is None and plain.sent_bytes == pytest.approx(2 * 3 * weights / 4)
    assert "plain data parallelism does not fit: some rank needs at least" in " ".join(explain(made).split())


# ------------------------------------------------------------------------------------- idle devices, travelling bytes


def made_by(schedule: str, chunks: int = 1, **options) -> Plan:
    found = plan(
        model(12), Topology.local(4), global_batch=32, schedules=[schedule], depths=[4 // chunks, 4], **options
    )
    assert found.schedule == schedule
    return found


CASES = {
    "1f1b": {},
    "gpipe": {"recompute": True},
    "interleaved": {},
    "zb-v": {},
    "breadth-first": {"recompute": True},
}


@pytest.mark.parametrize("schedule", CASES)
def test_figures_are_those_of_the_program(schedule):
    made = made_by(schedule, **CASES[schedule])
    topology, program = Topology.local(4), program_of(made)
    cost = of_plan(model(12), made, topology, runtime=FREE)
    sent = busy_s = 0.0
    for rank, instructions in enumerate(program.ranks):
        for each in instructions:
            if each.op is Op.SEND:
                sent += cost.size_bytes(Value(each.kind, each.stage, each.mb))
            elif each.op is Op.REDUCE and each.kind != Reduction.NORM:
                copies = made.data
                sent += 2 * (copies - 1) / copies * cost.wgrad_bytes[each.stage]
            if OP_SPEC[each.op].lane is Lane.COMPUTE:
                busy_s += cost.duration_s(each, rank)
    period_s = made.prediction.period_s
    assert sent_bytes(made, model(12), topology) == pytest.approx(sent / 32)
    assert idle_share(made, model(12), topology, period_s) == pytest.approx(1 - busy_s / (4 * period_s))


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "weights"])
def test_data_parallelism_sends_a_ring_of_the_weights(shard):
    """At every level that copies share; gradients and weights that were shared once counted as sending nothing."""
    profile = model(3)
    made = Plan(Partition.even(3, 1), Placement(((0, 1, 2, 3),)), "data-parallel", 8, 2, data=4, shard=shard)
    weights = sum(layer.weight_bytes for layer in profile.layers)
    assert sent_bytes(made, profile, Topology.local(4)) == pytest.approx(2 * 3 * weights / 16)


def test_data_parallelism_can_be_requested():
    """A pipeline of that name was once cut too, and its ranks were not found."""
    found = plan(model(12), Topology.local(4), global_batch=8, schedules=["data-parallel"])
    assert (found.schedule, len(found.partition.stages)) == ("data-parallel", 1)


def test_tensor_width_sends_four_sums_per_block():
    machine = load_topology("dgx-a100-8")
    profile = read_profile(SMALL.replace("heads=4", "heads=8"), machine, 1)
    one, replays = (
        plan(profile, machine, global_batch=4, tensors=[8], depths=[1], recompute=again) for again in (False, True)
    )
    block = profile.layers[1].output_bytes
    assert sent_bytes(one, profile, machine) == pytest.approx(4 * 4 * 2 * 7 * block)
    assert sent_bytes(replays, profile, machine) >= sent_bytes(one, profile, machine)


def test_a_slower_device_is_busy_for_longer():
    fast, slow = Device(flops=2e12), Device(flops=1e12)
    made = Plan(Partition.even(8, 2), Placement(((0,), (1,))), "1f1b", 4, 2)
    uneven = Topology((Level("machine", 2, 1e12),), fast, (fast, slow))
    both = [idle_share(made, model(8), machine, 1.0) for machine in (uneven, Topology.local(2))]
    assert both[0] < both[1]


# ------------------------------------------------------------------------------------------------ sweeps, largest


def test_a_sweep_holds_the_plans_of_its_values_and_why_there_is_none():
    topology = Topology.local(4)
    found = sweep(model(), topology, {"depth": [1, 2, 3], "batch": [16, 32]})
    assert found.names == ("depth", "batch") and len(found.cells) == 6
    for cell in found.cells:
        if cell.values["depth"] == 3:
            assert cell.plan is None and "a depth divides the 4 devices" in cell.why
            continue
        single = plan(model(), topology, depths=[cell.values["depth"]], global_batch=cell.values["batch"])
        assert msgspec.structs.replace(cell.plan, plan_seconds=0) == msgspec.structs.replace(single, plan_seconds=0)
        assert cell.figures["samples_per_s"] == single.prediction.throughput
    assert "depth 3, batch 16: depths: got 3" in " ".join(" ".join(found.lines(300)).split())
    ElementTree.fromstring(found.svg())


def test_a_sweep_changes_machine_and_model():
    machine = load_topology("dgx-a100-64")
    links = sweep(model(), load_topology("pcie-4x4"), {"bandwidth": ["0.01 GB/s", 1e12]}, global_batch=32)
    slow, fast = (cell.figures["samples_per_s"] for cell in links.cells)
    assert slow < fast
    rows = sweep(SMALL, machine, {"layers": [2, 8], "machines": [1, 2]}, global_batch=64, tensors=[1], depths=[1])
    counts = [(cell.plan.num_processes, cell.plan.partition.num_layers) for cell in rows.cells]
    assert counts == [(8, 4), (16, 4), (8, 10), (16, 10)]
    assert all(cell.figures["flops_per_device"] > 0 for cell in rows.cells)


def test_a_sweep_of_the_command_line_is_that_of_python(capsys, tmp_path):
    words = (
        "plan",
        "--profile",
        "vgg16",
        "--topology",
        "pcie-4",
        "--global-batch",
        "1024",
        "--sweep",
        "depth=1,2",
        "--shard",
        "none",
    )
    said = answered(capsys, *words, "-o", str(tmp_path / "chart.svg"))
    found = sweep(
        read_profile("vgg16", None, 1), load_topology("pcie-4"), {"depth": [1, 2]}, global_batch=1024, shard="none"
    )
    assert said["swept"] == ["depth"] and said["output"] == str(tmp_path / "chart.svg")
    assert said["rows"] == [{**cell.values, **cell.figures, "why": cell.why} for cell in found.cells]
    assert "the cheapest change" in found.cells[0].why and found.cells[1].figures["samples_per_s"] > 0
    assert "depth" in (tmp_path / "chart.svg").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sweep", "dept=1"], "did you mean depth?"),
        (["--sweep", "depth=0"], "whole numbers of at least 1"),
        (["--sweep", "depth"], "NAME=a,b,c"),
        (["--sweep", "depth=1", "--sweep", "depth=2"], "NAME=a,b,c once"),
        (["--sweep", "layers=4"], "a model by arithmetic"),
        (["--sweep", "depth=1", "-o", "plan.json"], ".svg or .png"),
        (["--sweep", "depth=1", "--largest", "layers"], "--largest"),
        (["--sweep", "bandwidth=fast"], "bytes/s"),
        (["-o", "plan.svg"], "for --sweep"),
        (["--largest", "layers"], "a model by arithmetic"),
    ],
)
def test_sweeps_that_make_no_sense_are_refused(words, said, capsys):
    assert said in refused(capsys, "plan", "--profile", "vgg16", "--topology", "pcie-4", *words)


@pytest.mark.parametrize(("by", "options"), [("layers", {}), ("hidden", {"depths": [2]}), ("layers", {"depths": [4]})])
def test_the_largest_model_fits_and_the_next_does_not(by, options):
    machine = Topology((Level("server", 4, 12e9),), Device(memory_bytes=2e9, flops=100e12))
    options = {"tensors": [1], "schedules": ["1f1b"], "global_batch": 8, "microbatch_sizes": [1], **options}
    found = largest("gpt:layers=2,hidden=512,heads=8,vocab=1024,sequence=128", machine, by, **options)
    size = int(re.search(f"{by}=(\\d+)", found)[1])
    plan(read_profile(found, machine, 1), machine, **options)
    step = 8 if by == "hidden" else 1
    too_large = found.replace(f"{by}={size}", f"{by}={size + step}")
    with pytest.raises(InfeasibleError):
        plan(read_profile(too_large, machine, 1), machine, **options)
    # It does not depend on the size that the search begins with.
    assert largest(found.replace(f"{by}={size}", f"{by}={4 * size}"), machine, by, **options) == found


def test_the_largest_model_takes_every_option_of_a_plan_that_the_command_line_gives():
    machine = Topology((Level("server", 4, 12e9),), Device(memory_bytes=2e9, flops=100e12))
    asked = {"global_batch": 8, "tensors": [1], "depths": [4], "whole_messages": False, "blocking": True}
    assert largest("gpt:layers=2,hidden=512,heads=8,vocab=1024,sequence=128", machine, "layers", **asked)


def test_the_largest_model_needs_limits_and_a_method_that_orders_sizes():
    with pytest.raises(PlanError, match="limited memory"):
        largest(SMALL, Topology((Level("m", 2, 1e9),), Device(flops=1e12)), "layers")
    with pytest.raises(PlanError, match="--method"):
        largest(SMALL, load_topology("dgx-a100-8"), "layers", method="ptdp")
    tiny = Topology((Level("m", 2, 1e9),), Device(memory_bytes=1e3, flops=1e12))
    with pytest.raises(InfeasibleError, match="the cheapest change"):
        largest(SMALL, tiny, "layers", global_batch=2)


# ------------------------------------------------------------------------------------------ the command that runs it


def test_a_plan_for_one_machine_names_no_command(capsys):
    words = ("plan", "--profile", SMALL, "--topology", "dgx-a100-8", "--global-batch", "8", "--tensor", "1")
    assert "run" not in answered(capsys, *words)


def test_a_plan_for_several_machines_names_the_command_that_runs_it():
    machine = load_topology("dgx-a100-64")
    made = plan(read_profile(SMALL, machine, 1), machine, global_batch=64, tensors=[1], depths=[4])
    said = run_command(made, machine, "plan.json")
    assert said.startswith("torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m ")
    options = "--model gpt --option layers=4,hidden=256,heads=4,vocab=51200,context=2048"
    assert said.endswith(f"-m pipefit train --plan plan.json --batch 64 {options}")


@pytest.mark.long
@pytest.mark.dist
def test_the_command_of_a_plan_runs_it(tmp_path, capsys):
    """As two machines of one device, which meet at a port of this one."""
    level = "[[levels]]\nname = '{}'\nwidth = {}\nbandwidth_bytes_per_s = '1 GB/s'\n"
    text = "format = 'pipefit.topology/1'\n[device]\nflops = '1 TFLOP/s'\n" + level.format("machine", 1)
    (tmp_path / "two.toml").write_text(text + level.format("network", 2))
    tiny = "gpt:layers=2,hidden=32,heads=2,vocab=256,sequence=16"
    words = ("--profile", tiny, "--topology", str(tmp_path / "two.toml"), "--depth", "2", "--global-batch", "6")
    command = answered(capsys, "plan", *words, "--tensor", "1", "-o", str(tmp_path / "plan.json"))["run"].split()
    assert command[:3] == ["torchrun", "--nnodes=2", "--nproc-per-node=1"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    started = [word.replace("HOST:29500", endpoint) for word in command[1:]]
    run = [sys.executable, "-m", "torch.distributed.run", *started, "--steps", "2"]
    both = [subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
    printed = [each.communicate(timeout=240)[0].decode(errors="replace") for each in both]
    assert [each.returncode for each in both] == [0, 0], printed
    assert "trained 2 steps" in "".join(printed)
