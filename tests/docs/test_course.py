"""The course: its drawings are made, its chapters are short, and the answers of its exercises are right."""

import json
import re
from dataclasses import replace

import pytest
from docs.pages import ROOT

from docs import drawings
from pipefit.cli import main
from pipefit.cost import unit
from pipefit.draw.drawing import draw
from pipefit.partition import pipedream
from pipefit.reproduce.exercises import exercises
from pipefit.schedules import registry
from pipefit.simulate import simulate
from pipefit.spec import Layer, Level, Profile, Topology
from pipefit.study.simulation import TrialCost, simulate_study

CHAPTERS = sorted((ROOT / "docs/course").glob("[1-9]-*.md"))


def text(number: int) -> str:
    return " ".join(CHAPTERS[number - 1].read_text().split())


def figures(capsys, *words: str) -> dict:
    assert not main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def bubble(name: str, m: int, v: int = 1, message: float = 0, slower: tuple[float, ...] = (1, 1, 1, 1)) -> str:
    """The bubble of four ranks, as pages write it."""
    program = draw(name, 4, m, v).program
    cost = replace(unit(program.header, 1, 2, latency=message), speed=tuple(1 / factor for factor in slower))
    return f"{100 * simulate(program, cost, rendezvous=False).bubble_fraction:.1f} %"


def test_there_are_nine_short_chapters_with_a_drawing_and_an_answer_each():
    assert len(CHAPTERS) == 9
    for chapter in CHAPTERS:
        page = chapter.read_text()
        assert drawings.commands(page) and page.count("<summary>Answer</summary>") == 1
        prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
        assert len(prose.split()) <= 600


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_the_drawings_of_a_chapter_are_made(chapter, tmp_path):
    names = [drawings.make(command, tmp_path) for command in drawings.commands(chapter.read_text())]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "command", ["pipefit plan -o a.html", "pipefit draw 1f1b -p 2 -m 2 -o a.svg", "pipefit draw no -p 2 -m 2 -o a.html"]
)
def test_a_command_that_makes_no_drawing_stops_the_manual(command, tmp_path):
    with pytest.raises(ValueError, match="pipefit draw"):
        drawings.make(command, tmp_path)


def test_pipedream_keeps_as_many_versions_as_there_are_ranks_ahead(capsys):
    found = figures(capsys, "draw", "pipedream", "-p", "8", "-m", "16")
    assert found["weight_versions"] == found["peak_inflight"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert draw("naive", 4, 4).metrics["bubble_fraction"] == 0.75


def test_one_slot_hides_no_copy():
    one, two = (draw("spilled", 4, 4, slots=slots).timeline.bubble_fraction for slots in (1, 2))
    assert f"from {100 * two:.1f} % to {100 * one:.1f} %" in text(2)


def test_a_version_that_is_not_dropped_is_one_too_many(tmp_path, capsys):
    path = draw("pipedream-2bw", 4, 4).save(tmp_path / "2bw.pipe")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "drop s3 w0" not in line))
    assert main(["verify", str(path)]) == 1
    assert "3 versions of stage 3 alive, at most 2 allowed" in capsys.readouterr().out


def test_more_microbatches_do_not_cure_a_slow_rank():
    slow = (1, 1, 2, 1)
    page = text(3)
    assert f"from {bubble('1f1b', 8)} to {bubble('1f1b', 8, slower=slow)}" in page
    assert f"would be at {bubble('1f1b', 32)}, this one stays at {bubble('1f1b', 32, slower=slow)}" in page


@pytest.mark.slow
def test_the_plan_for_vgg_copies_the_convolutions_and_not_the_last_layers(capsys):
    found = figures(capsys, "plan", "--profile", "vgg16", "--topology", "pcie-4x4", "--method", "pipedream")
    assert "replicas 8-7-1" in found["candidates"][0]["summary"]


def test_gpipe_has_the_bubble_of_its_formula():
    page = text(4)
    for m, p in ((1, 4), (8, 4), (16, 4)):
        assert f"{100 * (p - 1) / (m + p - 1):.1f} %".replace("75.0", "75") in page
        assert bubble("gpipe", m) == f"{100 * (p - 1) / (m + p - 1):.1f} %"
    assert draw("gpipe", 4, 8, recompute=True).metrics["kept_inputs"] == [7, 7, 7, 7]


def test_the_schedule_of_the_answer_is_proved_and_replays_all_eight(capsys, monkeypatch):
    # The name is free again afterwards: other tests go through all schedules.
    monkeypatch.setitem(registry.REGISTRY, "first-comes-first", None)
    del registry.REGISTRY["first-comes-first"]
    (block,) = re.findall(r"^```python\n(.*?)^```$", CHAPTERS[3].read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/course/4-gpipe.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"  # (.*)$", block, re.MULTILINE)
    assert draw("first-comes-first", 4, 8, recompute=True).metrics["kept_inputs"] == [8, 8, 8, 8]


def test_four_chunks_bring_the_bubble_below_a_fifth(capsys):
    found = {
        v: figures(capsys, "draw", "interleaved" if v > 1 else "1f1b", "-p8", "-m8", f"-v{v}") for v in (1, 2, 3, 4)
    }
    assert [v for v, data in found.items() if data["bubble_fraction"] < 0.2] == [4]
    assert (found[1]["messages"], found[4]["messages"]) == (112, 496)
    page = text(5)
    assert f"chunks have a bubble of {bubble('interleaved', 8, 2)}, 1F1B of {bubble('1f1b', 8)}" in page
    for message in (0.5, 1):
        words = f"at {bubble('interleaved', 8, 2, message)} and {bubble('1f1b', 8, 1, message)}"
        assert words in page


def test_longest_remaining_time_first_reaches_the_bound_and_whole_models_do_not():
    """Chapter 6: three models of 3, 3 and 6 turns on two devices."""
    trials = [TrialCost((1.0,), steps) for steps in (3, 3, 6)]
    found = {policy: simulate_study(trials, 2, policy).makespan_s for policy in ("lrtf", "whole-task")}
    assert found == {"lrtf": 6, "whole-task": 9}
    assert "9" in text(6) and "6, the bound" in text(6)


def test_the_recurrence_that_is_worked_through_has_the_answer_of_the_partitioner():
    """Chapter 7: times 4, 2, 2; weights 1, 1, 8; three devices; B = 4."""
    layers = [Layer(name, t / 3, t / 3, t / 3, 1e-6, 1e-6, w) for name, t, w in (("a", 4, 1), ("b", 2, 1), ("c", 2, 8))]
    machine = Topology((Level("server", 3, 4.0),))
    found = pipedream(Profile("three", 1, tuple(layers)), machine, cost="paper", margin=0.0)
    assert (found.configuration, found.time_s, found.straight_s) == ("2-1", pytest.approx(3), pytest.approx(4))
    assert found.data_parallel_s == pytest.approx(10 / 3)


@pytest.mark.parametrize(
    ("chapter", "answer"),
    [(1, 8), (2, 11), (3, 45.5), (4, 100 * 7 / 31), (5, 17.9), (6, 4 / 3), (7, 3), (8, 60 + 48), (9, 25.2)],
)
def test_the_exercises_have_the_answers_of_the_papers_formulas(chapter, answer, capsys):
    assert figures(capsys, "course", str(chapter), "--answer", str(answer))["verdict"] == "right"
    assert len(exercises()) == len(CHAPTERS)
    assert CHAPTERS[chapter - 1].read_text().startswith(f"# {chapter}. {exercises()[chapter - 1].title}\n")
    assert f"pipefit course {chapter}" in CHAPTERS[chapter - 1].read_text()
    for wrong, verdict in ((0.9 * answer, "too small"), (1.1 * answer, "too large")):
        assert main(["course", str(chapter), "--answer", str(wrong)]) == 1
        assert capsys.readouterr().out.startswith(f"{verdict}\nhint: ")
