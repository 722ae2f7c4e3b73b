"""`pipefit verify` and `pipefit simulate`: programs and plans from files, good and bad."""

import json

import pytest
from tests.verbs import answered, refused

from pipefit.cli import main
from pipefit.schedules import names
from pipefit.spec import Device, Layer, Level, Partition, Placement, Plan, Profile, Topology


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a program, a plan, the profile of its model and a topology, as the working directory."""
    monkeypatch.chdir(tmp_path)
    assert main(["draw", "1f1b", "-p", "2", "-m", "4", "-o", "a.pipe"]) == 0
    partition = Partition.from_counts([2, 1])
    Plan(partition, Placement(((0,), (1,))), "1f1b", num_microbatches=4, microbatch_size=2).save("plan.json")
    layers = tuple(Layer(name, 1e-3, 1e-3, 1e-3, 1000, 4000, 100) for name in "abc")
    Profile("abc", 2, layers).save("profile.json")
    Topology((Level("host", 2, 1e9, 1e-4),), device=Device(memory_bytes=16e3)).save("topology.toml")
    return tmp_path


@pytest.mark.parametrize("schedule", names())
def test_every_drawn_program_verifies(schedule, tmp_path, capsys):
    path = str(tmp_path / "a.pipe")
    assert main(["draw", schedule, "-p", "3", "-m", "6", "-v", "2" if schedule == "zb-v" else "1", "-o", path]) == 0
    assert answered(capsys, "verify", path)["violations"] == []


def test_a_lost_receive_is_found_and_every_violation_is_printed_with_its_grid(files, capsys):
    text = (files / "a.pipe").read_text()
    (files / "b.pipe").write_text(text.replace("  recv s0 m1 act <0\n", ""))
    data = answered(capsys, "verify", "b.pipe", code=1)
    assert data["ok"] is False
    assert {"messages", "dependencies"} <= {violation["rule"] for violation in data["violations"]}
    assert main(["verify", "b.pipe"]) == 1
    out = capsys.readouterr().out
    assert all(violation["message"] in out for violation in data["violations"])
    assert ">F1.1<" in out


def test_what_does_not_fit_is_a_violation_of_memory(files, capsys):
    assert answered(capsys, "verify", "plan.json", "--profile", "profile.json", "--capacity", "1 MiB")["ok"]
    data = answered(capsys, "verify", "plan.json", "--profile", "profile.json", "--capacity", "4kB", code=1)
    assert {violation["rule"] for violation in data["violations"]} == {"memory"}


def test_the_devices_of_a_topology_are_a_capacity(files, capsys):
    # Two micro-batches of two layers, 4 kB each, are the 16 kB of the device already, and then there are the weights.
    arguments = ("--profile", "profile.json", "--topology", "topology.toml")
    data = answered(capsys, "verify", "plan.json", *arguments, code=1)
    assert [violation["rank"] for violation in data["violations"]] == [0]
    assert answered(capsys, "verify", "a.pipe", "--layers", "2,1", *arguments, code=1) == data


def test_a_capacity_without_sizes_says_what_is_missing(files, capsys):
    assert "--profile" in refused(capsys, "verify", "a.pipe", "--capacity", "8GiB")


def test_a_simulated_program_takes_as_long_as_drawn(files, capsys):
    data = answered(capsys, "simulate", "a.pipe", "--forward", "2", "--backward", "3")
    assert (data["makespan"], data["busy"]) == ((4 + 1) * 5, [20, 20])
    assert data["peak_inflight"] == data["peak_memory"] == [2, 1]


def test_a_plan_with_a_profile_gives_seconds_and_bytes(files, capsys):
    data = answered(capsys, "simulate", "plan.json", "--profile", "profile.json", "--topology", "topology.toml")
    # Rank 0 has two layers of 1 ms forward and 2 ms backward; its work and the first and last of rank 1 cannot overlap.
    assert data["unit"] == "s"
    assert data["busy"] == pytest.approx([4 * 6e-3, 4 * 3e-3])
    assert 4 * 6e-3 < data["makespan"] < 4 * 9e-3
    assert data["peak_bytes"][0] > 2 * 8000


def test_people_get_a_row_for_each_rank(files, capsys):
    assert main(["simulate", "plan.json", "--profile", "profile.json"]) == 0
    out = capsys.readouterr().out
    assert "makespan" in out and "period" in out and "peak memory" in out
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["0", "1"]


def test_a_simulation_is_drawn(files, capsys):
    data = answered(capsys, "simulate", "plan.json", "--profile", "profile.json", "-o", "t.svg")
    assert data["output"] == "t.svg" and (files / "t.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("name", ["t.html", "t.txt"])
def test_a_simulation_is_drawn_in_seconds_where_there_is_a_profile(files, capsys, name):
    answered(capsys, "simulate", "plan.json", "--profile", "profile.json", "-o", name)
    assert {"t.html": '"unit":"s"', "t.txt": " ms\n"}[name] in (files / name).read_text()
    answered(capsys, "simulate", "a.pipe", "-o", name)
    assert {"t.html": '"unit":""', "t.txt": "column: 0.3333\n"}[name] in (files / name).read_text()


def test_a_slower_link_takes_longer(files, capsys):
    fast = answered(capsys, "simulate", "a.pipe")["makespan"]
    slow = Topology((Level("host", 2, 1e9, 0.5),)).save(files / "slow.toml")
    assert answered(capsys, "simulate", "a.pipe", "--topology", str(slow))["makespan"] > fast


def test_a_byte_order_mark_is_no_part_of_a_file(files, capsys):
    expected = answered(capsys, "simulate", "plan.json", "--profile", "profile.json", "--topology", "topology.toml")
    for name in ("a.pipe", "plan.json", "profile.json", "topology.toml"):
        (files / name).write_bytes(b"\xef\xbb\xbf" + (files / name).read_bytes())
    assert answered(capsys, "verify", "a.pipe")["ok"]
    found = answered(capsys, "simulate", "plan.json", "--profile", "profile.json", "--topology", "topology.toml")
    assert found == expected


def test_a_missing_file_is_named(files, capsys):
    assert "none.pipe: no such file" in refused(capsys, "verify", "none.pipe")
    assert "none.json: no such file" in refused(capsys, "simulate", "none.json")
    assert "none.json: no such file" in refused(capsys, "simulate", "plan.json", "--profile", "none.json")
    assert "none.toml: no such file" in refused(capsys, "simulate", "plan.json", "--topology", "none.toml")


def test_a_directory_in_place_of_a_file_is_named(files, capsys):
    assert "got a directory" in refused(capsys, "verify", str(files))
    assert "got a directory" in refused(capsys, "simulate", "plan.json", "--profile", str(files))


def test_a_malformed_program_is_refused_with_the_line(files, capsys):
    lines = (files / "a.pipe").read_text().splitlines()
    lines[11] = "  fwd s0 m0"
    (files / "b.pipe").write_text("\n".join(lines))
    assert "b.pipe:12: fwd takes stage mb version" in refused(capsys, "verify", "b.pipe")
    (files / "c.pipe").write_text("hello\n")
    assert "c.pipe:1: expected 'format pipefit.program/1'" in refused(capsys, "verify", "c.pipe")
    (files / "d.pipe").write_bytes(b"\xff\xfe\x00")
    assert "d.pipe: cannot be read" in refused(capsys, "verify", "d.pipe")


def test_json_that_is_none_or_something_else_is_refused(files, capsys):
    (files / "a.json").write_text("{")
    assert "a.json: not JSON" in refused(capsys, "simulate", "a.json")
    assert "format: expected 'pipefit.plan/1'" in refused(capsys, "simulate", "profile.json")
    (files / "b.json").write_text("[]")
    assert "expected a JSON object" in refused(capsys, "verify", "b.json")


def test_a_plan_with_an_unknown_schedule_gets_the_nearest(files, capsys):
    data = json.loads((files / "plan.json").read_text()) | {"schedule": "1f2b"}
    (files / "b.json").write_text(json.dumps(data))
    assert "did you mean 1f1b?" in refused(capsys, "verify", "b.json")


def test_an_order_without_a_forward_is_refused(files, capsys):
    assert main(["draw", "1f1b", "-p", "2", "-m", "2", "-o", "mine.pipe"]) == 0
    whole = (files / "mine.pipe").read_text()
    (files / "mine.pipe").write_text(whole.replace("  fwd s0 m0 w0\n", ""))
    assert "rank 0: 'bwd s0 m0 w0': its forward is missing" in refused(
        capsys, "draw", "mine.pipe", "-p", "2", "-m", "2"
    )


def test_a_whole_number_beyond_all_use_is_refused(files, capsys):
    data = json.loads((files / "profile.json").read_text()) | {"microbatch_size": 10**400}
    (files / "b.json").write_text(json.dumps(data))
    said = refused(capsys, "plan", "--profile", "b.json", "--topology", "local:2")
    assert "microbatch_size: expected at most 2^63, got a number of 1329 bits" in said


def test_a_plan_without_a_chunk_is_refused(files, capsys):
    data = json.loads((files / "plan.json").read_text()) | {"num_chunks": 0}
    (files / "b.json").write_text(json.dumps(data))
    for verb in ("verify", "simulate"):
        assert "num_chunks: expected at least 1, got 0" in refused(capsys, verb, "b.json")


def test_a_layer_given_twice_or_lost_is_named(files, capsys):
    data = json.loads((files / "plan.json").read_text())
    data["partition"]["stages"][1]["layers"] = [1]
    (files / "b.json").write_text(json.dumps(data))
    assert "layer 1 is given twice" in refused(capsys, "verify", "b.json")
    data["partition"]["stages"][1]["layers"] = [3]
    (files / "b.json").write_text(json.dumps(data))
    assert "layers [2] belong to no stage" in refused(capsys, "verify", "b.json")


def test_a_program_that_hangs_is_refused_by_the_simulator(files, capsys):
    text = (files / "a.pipe").read_text()
    (files / "b.pipe").write_text(text.replace("  recv s0 m1 act <0\n", ""))
    assert "rank 1" in refused(capsys, "simulate", "b.pipe")


def test_counts_of_layers_must_fit_the_profile(files, capsys):
    assert "--layers" in refused(capsys, "simulate", "a.pipe", "--profile", "profile.json")
    assert "add up to 2" in refused(capsys, "simulate", "a.pipe", "--profile", "profile.json", "--layers", "1,1")


def test_a_topology_with_too_few_devices_is_refused(files, capsys):
    assert "1 devices" in refused(capsys, "simulate", "a.pipe", "--topology", "local:1")


def test_another_ending_is_refused(files, capsys):
    (files / "a.txt").write_text("")
    assert "expected a program (.pipe) or a plan (.json)" in refused(capsys, "verify", "a.txt")


def test_a_folder_that_is_no_run_has_no_report(files, capsys):
    assert "none: expected the folder of a run" in refused(capsys, "report", "none")
    assert "run.json: no such file" in refused(capsys, "report", str(files))
    (files / "run.json").write_text("[]")
    assert "is this the folder of a run?" in refused(capsys, "report", str(files))
    assert "one of .html" in refused(capsys, "report", str(files), "-o", "page.pdf")


@pytest.mark.slow
def test_a_plan_that_spills_is_planned_proved_and_simulated_by_hand(tmp_path, capsys):
    path = tmp_path / "plan.json"
    shape = ("--profile", "gpt:layers=8,hidden=1024,heads=16", "--topology", "one-gpu")
    assert main(["plan", *shape, "--device-memory", "2.5 GiB", "-m", "4", "-o", str(path)]) == 0
    assert "binds" in capsys.readouterr().out
    assert main(["verify", str(path), *shape, "--capacity", "2.5 GiB", "--tier-capacity", "4 GiB"]) == 0
    assert main(["verify", str(path), *shape, "--capacity", "1 GiB", "--tier-capacity", "1 GiB"]) == 1
    assert "the host holds" in capsys.readouterr().out
    assert main(["simulate", str(path), *shape, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["peak_bytes"][0] <= 2.5 * 2**30
    assert answer["period"] == pytest.approx(Plan.load(path).prediction.period_s)
    assert main(["simulate", str(path), *shape[:2]]) == 2
    assert "seconds are computed for a device; give --topology as well" in capsys.readouterr().err
    assert main(["plan", *shape, "--device-memory", "2.5 GiB", "-m", "4", "--step-on", "host"]) == 0
    assert "steps: on the host" in capsys.readouterr().out
    assert main(["plan", *shape, "--step-on", "host"]) == 2
    assert "expected --device-memory too" in capsys.readouterr().err
    assert main(["plan", *shape, "--device-memory", "2.5 GiB", "--recompute", "stage"]) == 2
    assert "--recompute: it is for plans without --device-memory" in capsys.readouterr().err
    assert main(["plan", *shape, "--device-memory", "10 MiB"]) == 1
    assert "the smallest cap that works is" in capsys.readouterr().err
    assert main(["verify", str(path), "--tier-capacity", "1 GiB"]) == 2
    assert "--tier-capacity needs --profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "3"], "--steps: a .pipe file has its own"),
        (["--layers", "3,3"], "--layers: expected together with --profile"),
        (["--profile", "vgg16", "--layers", "20,21", "--forward", "2"], "--profile has the costs"),
    ],
)
def test_an_option_that_a_program_makes_useless_is_refused(words, said, capsys, tmp_path):
    program = tmp_path / "own.pipe"
    assert main(["draw", "1f1b", "-p", "2", "-m", "2", "-o", str(program)]) == 0
    assert said in refused(capsys, "simulate", str(program), *words)
