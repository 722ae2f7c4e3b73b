"""`pipefit draw` and `pipefit schedules`."""

import json
import re

import pytest
from tests.verbs import answered, refused

from pipefit.cli import main
from pipefit.cli.options import PICTURES
from pipefit.draw import SUFFIXES
from pipefit.ir import Op, Spill, text
from pipefit.schedules import Shape, generate, names
from pipefit.timeline import load_trace


def drawn(capsys, *arguments: str) -> dict:
    return answered(capsys, "draw", *arguments)


def test_the_json_object_has_every_promised_field(capsys):
    data = drawn(capsys, "1f1b", "-p", "4", "-m", "8")
    order = data.pop("order")
    assert data == {
        "schedule": "1f1b",
        "num_stages": 4,
        "num_ranks": 4,
        "num_microbatches": 8,
        "num_chunks": 1,
        "makespan": 33.0,
        "period": 33.0,
        "bubble_fraction": pytest.approx(1 - 24 / 33),
        "bubble_over_ideal": pytest.approx(9 / 24),
        "peak_inflight": [4, 3, 2, 1],
        "kept_inputs": [0, 0, 0, 0],
        "weight_versions": [1, 1, 1, 1],
        "messages": 48,
        "num_updates": 1,
        "total_microbatches": 8,
    }
    assert order[3][:4] == ["F3.0", "B3.0", "F3.1", "B3.1"]


def test_times_are_per_rank_so_chunks_shorten_the_bubble(capsys):
    data = drawn(capsys, "interleaved", "-p", "4", "-m", "8", "-v", "2")
    assert data["makespan"] == (8 + 3 / 2) * 3
    assert (data["num_stages"], data["num_ranks"], data["num_chunks"]) == (8, 4, 2)


def test_latency_enters_as_the_closed_form_says(capsys):
    p, m, c = 4, 8, 0.25
    data = drawn(capsys, "1f1b", "-p", str(p), "-m", str(m), "--latency", str(c))
    assert data["makespan"] == pytest.approx((m + p - 1) * 3 + 2 * c * ((p - 1) * m / p + p - 2))


def test_forward_input_and_weight_set_the_costs(capsys):
    data = drawn(capsys, "gpipe", "-p", "2", "-m", "3", "--forward", "2", "--input", "3", "--weight", "5")
    assert data["makespan"] == (3 + 1) * (2 + 8)


def test_pipedream_s_microbatches_are_minibatches_with_an_update_each(capsys):
    data = drawn(capsys, "pipedream", "-p", "4", "-m", "16")
    assert (data["num_microbatches"], data["num_updates"], data["total_microbatches"]) == (16, 16, 16)
    assert data["weight_versions"] == [4, 3, 2, 1]
    assert data["period"] == 16 * 3  # no bubble in the steady state


def test_vertical_sync_holds_as_many_versions_on_every_rank(capsys):
    assert drawn(capsys, "pipedream-vertical-sync", "-p", "4", "-m", "16")["weight_versions"] == [4] * 4


def test_2bw_never_holds_more_than_two_versions(capsys):
    data = drawn(capsys, "pipedream-2bw", "-p", "4", "-m", "8")
    assert data["weight_versions"] == [2] * 4
    assert data["period"] == 8 * 3


def test_steps_are_taken_literally(capsys):
    data = drawn(capsys, "pipedream", "-p", "2", "-m", "3", "--steps", "2")
    assert (data["num_microbatches"], data["num_updates"], data["total_microbatches"]) == (3, 2, 6)


def test_replicas_lie_on_ranks_of_their_own(capsys):
    assert drawn(capsys, "1f1b", "-p", "2", "-m", "4", "--replicas", "2,1")["num_ranks"] == 3


def test_recompute_replays_every_forward(capsys):
    order = drawn(capsys, "1f1b", "-p", "2", "-m", "2", "--recompute")["order"]
    assert order[0] == ["F0.0", "F0.1", "R0.0", "B0.0", "R0.1", "B0.1"]


def test_a_replay_needs_the_inputs_of_all_micro_batches_and_one_whole_stage(capsys):
    data = drawn(capsys, "gpipe", "-p", "3", "-m", "8", "--recompute")
    assert (data["peak_inflight"], data["kept_inputs"]) == ([1, 1, 1], [7, 7, 7])
    assert drawn(capsys, "1f1b", "-p", "3", "-m", "8", "--recompute")["kept_inputs"] == [3, 2, 0]
    assert drawn(capsys, "gpipe", "-p", "3", "-m", "8")["kept_inputs"] == [0, 0, 0]
    assert main(["draw", "gpipe", "-p", "3", "-m", "8", "--recompute"]) == 0
    shown = capsys.readouterr().out
    assert "  1 + 7\n" in shown and "inputs kept for replays 7 7 7" in " ".join(shown.split())


def test_a_schedule_takes_options_of_its_own(capsys):
    found = drawn(capsys, "1f1b", "-p", "4", "-m", "8", "--option", "warmup=2")
    assert found["peak_inflight"] == [7, 5, 3, 1]


@pytest.mark.parametrize("schedule", names())
def test_every_schedule_prints_a_grid_with_a_line_for_each_rank(schedule, capsys):
    assert main(["draw", schedule, "-p", "4", "-m", "8", "-v", "2" if schedule == "zb-v" else "1"]) == 0
    out = capsys.readouterr().out
    assert all(f"rank {rank} " in out for rank in range(1 if schedule == "spilled" else 4))


def test_what_is_spilled_is_drawn_with_its_lanes_of_copies(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["draw", "spilled", "-p", "4", "-m", "4"]) == 0
    rank, fetch, evict = capsys.readouterr().out.splitlines()[3:6]
    assert rank.startswith("rank 0  ··FFFFFFFFFFFFFB─FB─FB─FB─RB─")
    assert fetch == " fetch  w0w1··w2··w3o3··············o2w1········o1w0········o0············"
    assert evict == " evict  ··························o3w3········o2w2········o1w1········w0o0"
    answer = drawn(capsys, "interleaved", "-p", "2", "-m", "2", "-v", "2", "--slots", "1", "--copy", "0")
    assert answer["makespan"] > drawn(capsys, "interleaved", "-p", "2", "-m", "2", "-v", "2")["makespan"]
    waiting = drawn(capsys, "spilled", "-p", "4", "-m", "4", "--prefetch", "0")["makespan"]
    assert waiting > drawn(capsys, "spilled", "-p", "4", "-m", "4")["makespan"] == 16.5
    path = tmp_path / "a.pipe"
    assert main(["draw", "spilled", "-p", "3", "-m", "2", "--tier", "disk", "--optim-slots", "0", "-o", str(path)]) == 0
    assert text.load(path).header.spill == Spill("disk", 2, 0, (0, 1, 2))
    assert main(["verify", str(path)]) == main(["simulate", str(path), "--copy", "4"]) == 0
    assert main(["draw", "pipedream", "-p", "2", "-m", "2", "--slots", "1"]) == 2
    assert "spilling needs a schedule that flushes" in capsys.readouterr().err


def test_pages_and_pictures_of_what_is_spilled_show_every_copy(tmp_path):
    program = generate("spilled", Shape(3, 2))
    num_copies = sum(i.op in (Op.FETCH, Op.EVICT) for i in program.ranks[0])
    for ending in (".svg", ".html"):
        path = tmp_path / f"a{ending}"
        assert main(["draw", "spilled", "-p", "3", "-m", "2", "-o", str(path)]) == 0
        page = path.read_text()
        assert len(re.findall(r"<title>(fetch|evict) s\d", page)) == num_copies
        assert "://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_program_is_written_as_text(tmp_path, capsys):
    path = tmp_path / "a.pipe"
    assert main(["draw", "gpipe", "-p", "2", "-m", "3", "-o", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    assert text.load(path).header.schedule == "gpipe"


def test_a_trace_is_written_and_loads_back(tmp_path):
    path = tmp_path / "a.trace.json"
    assert main(["draw", "gpipe", "-p", "2", "-m", "3", "-o", str(path)]) == 0
    assert load_trace(path).makespan_s == 12


@pytest.mark.parametrize("suffix", [".svg", ".html", ".png"])
def test_pictures_are_written(suffix, tmp_path, capsys):
    path = tmp_path / f"a{suffix}"
    assert main(["draw", "1f1b", "-p", "2", "-m", "3", "-o", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(path)
    assert path.stat().st_size > 1000


def test_a_mistyped_schedule_gets_the_nearest_one(capsys):
    assert "did you mean 1f1b?" in refused(capsys, "draw", "1f1", "-p", "2", "-m", "2")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["1f1b", "-p", "2", "-m", "0"], "-m: expected a whole number of at least 1, got 0"),
        (["1f1b", "-p", "0", "-m", "2"], "-p: expected a whole number of at least 1, got 0"),
        (["1f1b", "-p", "2", "-m", "2", "--steps", "0"], "--steps: expected a whole number of at least 1"),
        (["1f1b", "-p", "2", "-m", "two"], "-m: expected a whole number, got 'two'"),
        (["1f1b", "-p", "2", "-m", "2.5"], "-m: expected a whole number, got '2.5'"),
        (["1f1b", "-p", "2", "-m", "2", "--forward", "long"], "--forward: expected a number, got 'long'"),
        (["1f1b", "-p", "2"], "--microbatches"),
        (["1f1b", "-p", "2", "-m", "2", "-v", "2"], "use interleaved or breadth-first"),
        (["1f1b", "-p", "2", "-m", "2", "--forward", "nan"], "--forward: expected a number of at least 0"),
        (["1f1b", "-p", "2", "-m", "2", "--latency", "-1"], "--latency: expected a number of at least 0"),
        (["1f1b", "-p", "2", "-m", "2", "--input", "1", "--weight", "2", "--backward", "4"], "input + weight"),
        (["1f1b", "-p", "2", "-m", "2", "--option", "wramup=2"], "did you mean warmup?"),
        (["1f1b", "-p", "2", "-m", "2", "--option", "warmup"], "expected NAME=INTEGER"),
        (["naive", "-p", "2", "-m", "2", "--option", "forward=2"], "naive has no option 'forward'"),
        (["1f1b", "-p", "2", "-m", "2", "--option", "warmup=-1"], "0 or more"),
        (["1f1b", "-p", "2", "-m", "2", "--replicas", "2;1"], "like 2,1"),
        (["pipedream-2bw", "-p", "8", "-m", "2"], "use 7 or more"),
        (["1f1b", "-p", "9999", "-m", "9999"], "forwards are too many"),
    ],
)
def test_integers_and_times_without_a_meaning_are_refused_by_name(arguments, told, capsys):
    assert told in refused(capsys, "draw", *arguments)


def test_the_endings_are_those_that_drawings_can_be_saved_as():
    assert set(PICTURES) == set(SUFFIXES)


def test_an_unknown_ending_is_refused_with_the_known_ones_and_nothing_is_written(tmp_path, capsys):
    path = tmp_path / "a.pdf"
    err = refused(capsys, "draw", "1f1b", "-p", "2", "-m", "2", "-o", str(path))
    assert ".svg" in err and ".html" in err and not path.exists()


def test_a_directory_cannot_be_drawn_into(tmp_path, capsys):
    assert "got a directory" in refused(capsys, "draw", "1f1b", "-p", "2", "-m", "2", "-o", str(tmp_path))


def test_the_list_of_schedules_is_complete(capsys):
    assert main(["schedules", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["schedules"]
    assert [entry["name"] for entry in data] == names()
    assert all(entry["summary"] for entry in data)
    assert main(["schedules"]) == 0
    assert all(name in capsys.readouterr().out for name in ["1f1b"])
