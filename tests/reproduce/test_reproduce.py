"""`pipefit reproduce`: entries, their comparison, and the page."""

import re

import pytest
from tests.draw.browser import needs_browser, shown
from tests.verbs import answered, refused

from pipefit.cli import main
from pipefit.errors import InfeasibleError, TopologyError
from pipefit.planner.machines import load_topology
from pipefit.reproduce.entry import MOST_WITHIN, Bench, Entry, Value, sort_of
from pipefit.reproduce.lectures import DECKS, ENTRIES, find_entry
from pipefit.reproduce.lectures_page import lectures_page
from pipefit.reproduce.outcome import Compared, run_all, run_entry, tally
from pipefit.reproduce.predicted import data_parallel, minibatch_s, stages_by_hand
from pipefit.reproduce.steps import Draw
from pipefit.spec.published import load_profile
from pipefit.timeline.breakdown import breakdown

pytestmark = pytest.mark.slow

DRAWN = [entry for entry in ENTRIES.values() if entry.kind == "drawn"]
COMPUTED = [entry for entry in ENTRIES.values() if entry.kind == "computed"]


@pytest.fixture(scope="module")
def drawn():
    return {outcome.entry.name: outcome for outcome in run_all(DRAWN)}


def test_every_name_is_used_once_and_every_lecture_has_entries():
    assert len(DECKS) == 5 and all(DECKS.values())
    assert sum(map(len, DECKS.values())) == len(ENTRIES)


def test_every_published_value_has_a_source_and_every_entry_something_to_show():
    for entry in ENTRIES.values():
        assert entry.source and entry.topic and entry.line, entry.name
        assert entry.values or entry.pictures or (entry.kind == "cited" and entry.note), entry.name


def test_drawn_entries_agree_exactly_or_say_why(drawn):
    for outcome in drawn.values():
        for each in outcome.values:
            assert each.agrees is not False or each.value.why, (outcome.entry.name, each.value.name, each.ours)


def test_commands_of_drawn_entries_give_the_same_figures(drawn, capsys):
    commands = [command for name in ("1f1b-rr", "interleaved-bubble") for command in drawn[name].commands]
    for command in commands:
        words = command.split()[1:]
        step = answered(capsys, *words)
        assert step["order"] and step["makespan"] > 0
    rr = answered(capsys, *drawn["1f1b-rr"].commands[0].split()[1:])
    assert rr["period"] / rr["total_microbatches"] == 2


def test_every_picture_is_a_whole_svg(drawn):
    for outcome in drawn.values():
        for picture in outcome.pictures:
            assert picture.svg().startswith("<svg") and picture.text


@pytest.mark.long
def test_computed_entries_run_and_differences_have_causes():
    for outcome in run_all(COMPUTED):
        for each in outcome.values:
            named = each.value.why or outcome.entry.note
            assert each.agrees is not False or named, (outcome.entry.name, each.value.name, each.ours)


def nothing(run: Bench) -> float:
    raise InfeasibleError("nothing fits")


def test_a_ratio_within_its_tolerance_agrees():
    value = Value("x", nothing, 100.0, within=0.08)
    assert Compared(value, 107.0).agrees and Compared(value, 93.0).ratio == 0.93
    assert Compared(value, 109.0).agrees is False
    assert Compared(value, "does not fit").agrees is False
    assert Compared(Value("x", nothing), 3.0).agrees is None


def test_a_number_agrees_within_less_than_the_effect_that_it_shows():
    for entry in ENTRIES.values():
        for value in entry.values:
            if value.sort == "number" and value.unit == "×":
                assert value.within <= abs(1 - 1 / value.published) / 2, (entry.name, value.name)
            assert value.within <= MOST_WITHIN


@pytest.mark.parametrize(
    ("published", "within", "kind", "sort"),
    [
        (0.5, 0.0, "drawn", "formula"),
        (True, 0.0, "drawn", "formula"),
        (2, 0.1, "drawn", "number"),
        (34, 0.1, "computed", "number"),
        ("15-1", 0.0, "computed", "choice"),
        (True, 0.0, "computed", "trend"),
        (None, 0.0, "computed", None),
    ],
)
def test_the_sort_of_a_value_follows_from_what_is_published(published, within, kind, sort):
    assert sort_of(published, within, kind) == sort


def test_no_figure_is_counted_twice(drawn):
    plain = [outcome for outcome in drawn.values() if not outcome.entry.like]
    repeating = [outcome for outcome in drawn.values() if outcome.entry.like]
    assert {outcome.entry.name for outcome in repeating} == {"staleness"}
    once, all_of_them = tally(plain), tally(drawn.values())
    assert (once.agreeing, once.judged) == (all_of_them.agreeing, all_of_them.judged)
    assert all_of_them.repeated == 3
    assert once.judged["formula"] - once.agreeing["formula"] == 3 and once.judged["trend"] == 0
    assert "formulas" in once.text and "3 repeat others" in all_of_them.text


@pytest.fixture(scope="module")
def of_clusters():
    names = ("pipedream-table", "takeaways", "pipedream-speedups")
    return dict(zip(names, run_all(map(find_entry, names)), strict=True))


def test_every_cluster_has_one_assumption(of_clusters):
    """A command that changes the links of a machine would be a second one."""
    commands = [command for outcome in of_clusters.values() for command in outcome.commands]
    assert any("nvlink-2x8" in command for command in commands)
    assert not any("bandwidth" in command for command in commands)


def test_the_authors_own_stages_are_simulated_next_to_the_plan_found(of_clusters):
    ours = {each.value.name: each.ours for each in of_clusters["pipedream-table"].values}
    assert ours["vgg16 on pcie-4x4"] == "15-1"
    same = ("vgg16 on pcie-4x4: speed-up of this plan", "vgg16 on pcie-4x4: speed-up of the authors' 15-1")
    assert ours[same[0]] == ours[same[1]], "the same stages are as fast, by whichever way"


@pytest.mark.parametrize("machine", ["pcie-4x4", "nvlink-2x8"])
def test_no_simulated_pipeline_is_faster_than_its_slowest_stage(machine):
    profile, topology = load_profile("vgg16").at(64), load_topology(machine)
    seconds = minibatch_s(stages_by_hand(profile, (34, 7), (15, 1)), profile, topology)
    convolutions_s = sum(layer.total_s for layer in profile.layers[:34])
    assert convolutions_s / 15 < seconds < minibatch_s(data_parallel(profile, topology), profile, topology)


def test_an_infeasible_plan_is_shown_as_such():
    outcome = run_entry(Entry("x", "t", "l", "computed", "s", (Value("v", nothing, 3, why="memory"),)))
    assert outcome.values[0].ours == "does not fit" and "memory" in outcome.text


def test_equal_steps_run_once():
    class Counted(Draw):
        runs = 0

        def run(self):
            Counted.runs += 1
            return super().run()

    bench = Bench()
    assert bench(Counted("gpipe", 2, 2)) is bench(Counted("gpipe", 2, 2))
    assert Counted.runs == 1 and bench.commands == ["pipefit draw gpipe -p 2 -m 2"]


def test_the_page_is_self_contained_and_names_what_differs(drawn):
    page = lectures_page(list(drawn.values()))
    assert not re.search(r'(?:src|href)="(?!#)', page) and "<script" not in page and "@import" not in page
    assert "spilled-execution" in page and "What does not agree, and why" in page
    assert "accuracy-over-time" in page  # left out, and listed


@needs_browser
def test_on_a_phone_the_reasons_are_within_the_window(drawn, tmp_path):
    page = lectures_page(list(drawn.values())).replace("default-src 'none'; ", "")
    script = """const ends = [...document.querySelectorAll(".whys td")].map(cell => cell.getBoundingClientRect().right);
      document.body.dataset.fits = ends.length > 9 && ends.every(end => end <= innerWidth);"""
    assert 'data-fits="true"' in shown(page, script, tmp_path, 400)


def test_the_list_names_every_entry(capsys):
    listed = answered(capsys, "reproduce")["entries"]
    assert [entry["name"] for entry in listed] == list(ENTRIES)
    assert main(["reproduce"]) == 0 and "PipeDream and GPipe" in capsys.readouterr().out


def test_an_entry_by_name_as_json_and_as_files(capsys, tmp_path):
    found = answered(capsys, "reproduce", "bubble-fraction", "-o", str(tmp_path / "figures"))
    assert found["values"][0]["ours"] == found["values"][0]["published"] == 3 / 8
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["bubble-fraction.svg"]
    answered(capsys, "reproduce", "model-quality", "-o", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists(), "an entry without pictures leaves no empty folder"


def test_bad_input_is_refused(capsys, tmp_path):
    assert "did you mean naive" in refused(capsys, "reproduce", "naiv")
    assert "leave out naive" in refused(capsys, "reproduce", "naive", "--all")
    assert "--all" in refused(capsys, "reproduce", "--measured")
    (tmp_path / "file").write_text("")
    assert "expected a folder" in refused(capsys, "reproduce", "naive", "-o", str(tmp_path / "file"))


def test_stages_cost_what_their_work_says(capsys):
    data = answered(
        capsys, "draw", "gpipe", "-p", "2", "-m", "1", "--stage-work", "2,1", "--forward", "1", "--backward", "1"
    )
    assert data["makespan"] == 6
    message = refused(capsys, "draw", "gpipe", "-p", "2", "-m", "1", "--stage-work", "2,1,1")
    assert "a figure for each of 2 stages, got 3" in message


def test_arrows_of_a_micro_batch_end_at_the_birth_of_its_version(capsys, tmp_path):
    picture = Draw("pipedream", 3, 8).run().svg(follow=4)
    assert picture.count('class="halo" style="fill:none"') == 6  # a forward and a backward at three stages
    assert "follow: expected a micro-batch" in refused(
        capsys, "draw", "gpipe", "-p", "2", "-m", "2", "--follow", "9", "-o", str(tmp_path / "a.svg")
    )
    assert ".svg or .png" in refused(capsys, "draw", "gpipe", "-p", "2", "-m", "2", "--follow", "1")


def test_the_purposes_of_a_step_add_up_to_one():
    drawing = Draw("gpipe", 4, 4, recompute=True, stage_work=(1, 2, 1, 1)).run()
    found = breakdown(drawing.timeline)
    assert sum(found.values()) == pytest.approx(1)
    assert found["recompute"] > 0 and found["load imbalance"] > 0 and found["bubble"] > 0
    plain = breakdown(Draw("gpipe", 4, 8).run().timeline)
    assert plain["bubble"] == pytest.approx(3 / 11) and plain["load imbalance"] == pytest.approx(0)


def test_machines_by_name_have_any_number_of_servers():
    assert [level.width for level in load_topology("dgx-a100-1536").levels] == [8, 192]
    assert [level.width for level in load_topology("pcie-3x4").levels] == [4, 3]
    assert [level.width for level in load_topology("dgx-a100-2").levels] == [2]
    for wrong in ("dgx-a100-12", "pcie-3x5", "dgx-a100-0", "unknown-8"):
        with pytest.raises(TopologyError, match="no such topology"):
            load_topology(wrong)


def test_machines_are_named_by_their_gpus():
    machine = load_topology("8xH100:16")
    assert [level.width for level in machine.levels] == [8, 16] and machine.device == load_topology(
        "dgx-h100-64"
    ).device
    assert [level.width for level in load_topology("4xA100-40GB").levels] == [4]
    assert load_topology("1xRTX3090:4").levels[1].bandwidth_bytes_per_s == 3.125e9
    for wrong, why in (
        ("8xH101:2", "did you mean H100"),
        ("9xH100", "1 to 8 H100"),
        ("8xH100:0", "at least one server"),
    ):
        with pytest.raises(TopologyError, match=f"such as 8xH100:16; .*{why}"):
            load_topology(wrong)
