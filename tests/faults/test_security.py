"""The sentences of docs/security.md, each with what holds it."""

import json
import os
import re
from pathlib import Path

import pytest
from tests.faults import jobs
from tests.study.cases import MLP, SMALL
from tests.verbs import refused

from pipefit.cli import main
from pipefit.errors import PipefitError, TopologyError
from pipefit.ir import program, text
from pipefit.ir.values import CONSUMES
from pipefit.schedules import Shape, generate
from pipefit.spec import Level, Plan, Topology, arguments, files, topology
from pipefit.spec.sealed import FileEntry, read_sealed, seal
from pipefit.study import file as study_file
from pipefit.study.execute.folder import StudyFolder
from pipefit.study.trial import StudyError, StudySpec, Trial
from pipefit.verify import subject, verify

PAGE = Path(__file__).parents[2] / "docs/security.md"
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def test_the_table_of_limits_has_the_numbers_of_the_code():
    limits = dict(re.findall(r"^\| ([^|]+) \| ([\d,]+)(?: MiB)? \|$", PAGE.read_text(), re.MULTILINE))
    assert [int(limit.replace(",", "")) for limit in limits.values()] == [
        files.MOST_BYTES >> 20,
        program.MOST_STAGES,
        program.MOST_FORWARDS,
        text.MOST_MISSING,
        15,
        topology.MOST_DEVICES,
        study_file.MOST_TRIALS,
        arguments.MOST_THREADS,
    ]


@pytest.mark.parametrize(
    ("line", "value", "says"),
    [
        ("microbatches", "99999999999999999999", "at most 15 digits"),
        ("microbatches", "9" * 5000, "at most 15 digits"),
        ("microbatches", "400000", "forwards are too many"),
        ("microbatches", "900", "2,250 forwards and steps"),
        ("steps", "1000000000", "forwards are too many"),
        ("placement", "0 99999999", "100,000,000 ranks are too many"),
        ("placement", "0 " * 5000, "5,000 stages are too many"),
    ],
)
def test_a_small_program_cannot_exhaust_the_machine(line, value, says, tmp_path, capsys):
    whole = text.dump(generate("1f1b", Shape(2, 4)))
    if line == "placement":
        whole = re.sub("^updates .*", f"updates {' '.join('1' for _ in value.split())}", whole, flags=re.MULTILINE)
    path = tmp_path / "a.pipe"
    path.write_text(re.sub(f"^{line} .*", f"{line} {value}", whole, flags=re.MULTILINE))
    for verb in (["verify"], ["simulate"], ["draw", "-p", "2", "-m", "4"]):
        assert says in refused(capsys, *verb, str(path))


def test_a_line_of_a_header_comes_once(tmp_path, capsys):
    whole = text.dump(generate("1f1b", Shape(2, 4)))
    (tmp_path / "a.pipe").write_text(whole.replace("\nsteps 1\n", "\nsteps 1\nsteps 2\n"))
    assert "a.pipe:5: the header has a line 'steps' already" in refused(capsys, "verify", str(tmp_path / "a.pipe"))


def test_what_was_consumed_is_listed_once_however_much_is_missing(monkeypatch):
    calls = []

    def counted(rule):
        return lambda *args: calls.append(1) or rule(*args)

    monkeypatch.setattr(subject, "CONSUMES", {op: counted(rule) for op, rule in CONSUMES.items()})
    lines = text.dump(generate("1f1b", Shape(2, 100))).splitlines()
    report = verify(text.parse("\n".join(line for line in lines if not line.startswith(("  recv", "  load")))))
    assert sum(violation.rule == "dependencies" for violation in report.violations) >= 200
    assert len(calls) == report.num_instructions


def test_a_reduction_of_many_gradients_is_not_copied_for_each():
    from pipefit.ir.graph import dependency_graph

    many = 2000
    lines = [f"  bwd s0 m{mb} w0" for mb in range(many)] + ["  reduce s0 w0 replicas"] * many
    header = (
        "format pipefit.program/1\nschedule x\nmicrobatches 2000\nsteps 1\nweights flush\nplacement 0+1\nupdates 2000"
    )
    graph = dependency_graph(text.parse("\n".join([header, "rank 0", *lines, "rank 1"])))
    assert sum(map(len, graph.preds)) < 5 * many


@pytest.mark.parametrize(
    ("old", "new"), [("fwd s1 m0", "fwd s9 m0"), ("fwd s1 m0", "fwd s1 m9"), ("bwd s0 m1 ", "bwd s* m1 ")]
)
def test_an_instruction_that_makes_no_sense_is_refused_by_those_who_do_not_verify(old, new, tmp_path, capsys):
    path = tmp_path / "a.pipe"
    path.write_text(text.dump(generate("1f1b", Shape(2, 4))).replace(old, new))
    assert new in refused(capsys, "simulate", str(path))
    assert new.strip() in refused(capsys, "draw", "-p", "2", "-m", "4", str(path))


def test_a_number_too_large_for_a_quantity_is_refused(tmp_path):
    with pytest.raises(TopologyError, match="too many digits"):
        Topology.parse(f'format = "pipefit.topology/1"\n[device]\nflops = 1{"0" * 400}\n')


def test_a_file_without_an_end_is_not_read_to_the_end(monkeypatch, capsys):
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    assert "expected at most 1 MiB" in refused(capsys, "plan", "--profile", "/dev/zero", "--topology", "local:2")


@pytest.mark.parametrize("nested", ["[" * 100_000, "9" * 5000])
def test_json_and_toml_that_python_cannot_parse_are_refused(nested, tmp_path, capsys):
    (tmp_path / "a.json").write_text(nested)
    assert "a.json: not JSON: " in refused(capsys, "verify", str(tmp_path / "a.json"))
    (tmp_path / "a.toml").write_text(f"a = {nested}")
    message = refused(capsys, "simulate", "none.pipe", "--topology", str(tmp_path / "a.toml"))
    assert "none.pipe" in message or "a.toml: not TOML: " in message
    assert "a.toml: not TOML: " in refused(capsys, "study", str(tmp_path / "a.toml"))


def test_devices_ranks_and_trials_are_counted_before_they_are_made(tmp_path, capsys):
    with pytest.raises(TopologyError, match="too many"):
        Topology((Level("host", 10**15, 1e9),))
    data = {"partition": {"stages": [{"layers": [0]}]}, "placement": {"ranks": [[10**12]]}, "schedule": "1f1b"}
    (tmp_path / "a.json").write_text(json.dumps({"format": "pipefit.plan/1", "num_microbatches": 1, **data}))
    with pytest.raises(PipefitError, match="number the ranks from 0 without gaps"):
        Plan.load(tmp_path / "a.json")
    many = "\n".join(f"{key} = [{', '.join(map(str, range(1, 60)))}]" for key in ("lr", "batch", "steps", "seed"))
    (tmp_path / "a.toml").write_text(f'model = "mlp"\n[grid]\n{many}\n')
    assert "12,117,361 trials are too many" in refused(capsys, "study", str(tmp_path / "a.toml"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lr", "nan"], "lr: expected a number of at least 0, got nan"),
        (["--lr", "-1"], "lr: expected a number of at least 0, got -1"),
        (
            ["--seed", "99999999999999999999999"],
            "--seed: expected a whole number of at least 0 and at most 9.22337e+18",
        ),
        (["--steps", "2000000000000000"], "--steps: expected at most 10^15, got a number of 51 bits"),
        (["--clip", "-1"], "clip: expected a number of at least 0"),
        (["--warmup", "-1"], "warmup: expected a whole number of at least 0"),
        (["--sample", "-1"], "sample: expected a whole number of at least 0"),
        (["--threads", "-1"], "--threads: expected a whole number of at least 1 and at most 1024"),
        (["--threads", "100000"], "--threads: expected a whole number of at least 1 and at most 1024"),
        (["--output", ""], "--output: expected a value, got an empty one"),
        (["--schedule", ""], "--schedule: expected a value, got an empty one"),
        (["--device", "foo", "--transport", "local", "--json"], "--device foo: cannot be used here"),
        (["--device", "meta", "--transport", "local", "--json"], "--device meta: cannot be used here"),
    ],
)
def test_a_number_that_no_training_can_use_is_refused(words, says, capsys):
    assert says in refused(capsys, "train", "--model", "mlp", "--data", "synthetic", *words)


def test_an_empty_study_file_trains_nothing(tmp_path, capsys):
    (tmp_path / "a.toml").write_text("")
    assert "it names nothing to train" in refused(capsys, "study", str(tmp_path / "a.toml"))


@pytest.mark.slow
def test_figures_of_a_run_that_are_text_or_missing_are_named(tmp_path, capsys):
    small = ("--model", "mlp", "--data", "synthetic", "--steps", "2", "--transport", "local", "--batch", "4", "--json")
    assert main(["train", *small, "-o", str(tmp_path / "run")]) == 0
    metrics, result = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "run.json"
    whole = metrics.read_text()
    for line, says in (
        ('{"step": 1, "loss": "x"}', "loss: expected"),
        ("[" * 9999, "metrics.jsonl:1: "),
        ('{"step": 1, "loss": 1' + "0" * 400 + "}", "not those that a run wrote (OverflowError"),
        ("", "got none"),
    ):
        metrics.write_text(f"{line}\n" if line else "")
        assert says in refused(capsys, "report", str(tmp_path / "run"))
    metrics.write_text(whole)
    for data, says in (({"config": {}}, "KeyError: 'result'"), ({"result": None}, "TypeError"), ({"result": []}, "T")):
        result.write_text(json.dumps({"format": "pipefit.run/1", **data}))
        said = refused(capsys, "report", str(tmp_path / "run"))
        assert f"its files are not those that a run wrote ({says}" in said


# ---- checksums ---------------------------------------------------------------------------------------------------


def test_a_checksum_is_no_signature(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(seal({"format": "x/1", "step": 4}))
    path.write_text(path.read_text().replace("4", "5", 1))
    with pytest.raises(PipefitError, match="damaged"):
        read_sealed(path, "x/1")
    path.write_text(seal({"format": "x/1", "step": 5}))
    assert read_sealed(path, "x/1")["step"] == 5


def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path):
    for name in ("../a", "/etc/passwd", "a/b", "..", ""):
        with pytest.raises(PipefitError, match="file name"):
            FileEntry(name, 0, "")
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(PipefitError, match="missing"):
        FileEntry("link", 0, "").check(tmp_path)


@pytest.mark.parametrize(("step", "says"), [(-5, "step: expected at least 0"), (7, "is of step 7")])
def test_a_manifest_has_the_step_of_its_folder(step, says, tmp_path):
    from pipefit.checkpoint.manifest import read_manifest

    folder = tmp_path / "step-000004"
    folder.mkdir()
    numbers = {
        "step": 4,
        "ordinal": 0,
        "world": 1,
        "seed": 0,
        "schedule": "1f1b",
        "plan": "",
        "files": [],
        "aliases": {},
    }
    data = {"format": "pipefit.checkpoint/1", **numbers, "optimization": [], "extra": {}}
    (folder / "manifest.json").write_text(seal(data))
    assert read_manifest(folder).step == 4
    (folder / "manifest.json").write_text(seal({**data, "step": step}))
    with pytest.raises(PipefitError, match=says):
        read_manifest(folder)


def test_text_in_place_of_a_learning_rate_is_refused():
    from pipefit.checkpoint.optim import _like
    from pipefit.errors import ModelError

    with pytest.raises(ModelError, match=r"the checkpoint has 'x' where the optimizer or its schedule has 0\.1"):
        _like("x", 0.1)
    for other in ({"things": []}, {"items": 3}, {"items": [[1]]}):
        with pytest.raises(ModelError, match="where the optimizer or its schedule has"):
            _like(other, {})


# ---- who can reach what ------------------------------------------------------------------------------------------


@pytest.mark.dist
def test_ranks_on_one_machine_listen_on_the_loopback_interface_only():
    from pipefit.runtime.launch import launch

    found = [address for own in launch(jobs.listening, 2, quiet=True) for address in own]
    assert found and set(found) <= set(LOOPBACK)


@pytest.mark.slow
def test_the_store_of_torch_listens_on_all_interfaces():
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert set(jobs.sockets()) & {"00000000", "0" * 32}
    del store


@pytest.mark.parametrize("there", ["a link", "a folder that others can write to", "a file"])
def test_a_folder_in_shared_memory_is_made_exclusively(there, tmp_path):
    spec = StudySpec((Trial(**SMALL, **MLP),), output=str(tmp_path / "study"), tier="host")
    first = StudyFolder(spec, resume=False)
    state = first.state
    try:
        assert state.stat().st_mode & 0o777 == 0o700
        first.forget()
        first.close()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "mine").write_text("mine")
        if there == "a link":
            state.symlink_to(elsewhere)
        elif there == "a file":
            state.write_text("")
        else:
            state.mkdir()
            state.chmod(0o777)
        for resume in (True, False):
            if not resume:
                (tmp_path / "study" / "study.json").unlink()
            with pytest.raises(StudyError, match="is not a folder that only this user can write to"):
                StudyFolder(spec, resume=resume)
        assert (elsewhere / "mine").read_text() == "mine"
    finally:
        if state.is_symlink() or state.is_file():
            state.unlink()
        elif state.exists():
            os.rmdir(state)  # noqa: PTH106
