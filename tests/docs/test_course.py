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
from pipefit.schedules import registry
from pipefit.simulate import simulate

CHAPTERS = sorted((ROOT / "docs/course").glob("[1-5]-*.md"))


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


def test_there_are_five_short_chapters_with_a_drawing_and_an_answer_each():
    assert len(CHAPTERS) == 5
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
