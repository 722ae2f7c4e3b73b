"""Grids, pages, drawings and files."""

import gzip
import json
import os
import re
import subprocess
import sys

import pytest
from tests import golden
from tests.draw.page_data import critical_path
from tests.draw.test_page import collect
from tests.draw.timelines import timeline_of

import pipefit.draw
from pipefit.draw import grid, save
from pipefit.draw.caption import TITLES
from pipefit.draw.choices import others
from pipefit.draw.drawing import draw, drawing_of
from pipefit.draw.encode import to_text
from pipefit.draw.look import chunk_colour
from pipefit.draw.reasons import Why, reasons
from pipefit.draw.scene import scene_of
from pipefit.draw.svg import svg
from pipefit.errors import PipefitError, ScheduleError
from pipefit.ir import Op, Spill, bwd, fwd
from pipefit.ir.text import load
from pipefit.schedules import Shape, find, generate, names, registry, schedule
from pipefit.timeline import load_trace

# ------------------------------------------------------------------------------------------------------------- the grid


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"rank \d", line)]


def test_a_small_grid_is_the_picture_of_the_papers():
    text = grid(timeline_of("1f1b", Shape(2, 3)), width=80, color=False)
    assert (
        text
        == """\
1F1B  p = 2 · m = 3  (simulated)

                                              peak
rank 0  F0 F1 ······B0─── F2 B1─── ···B2───      2
rank 1  ···F0 B0─── F1 B1─── F2 B2─── ······     1
        0              5              10

F forward  B backward  · idle  column: 0.3333
bubble 25.0 % · over ideal 33.3 % · makespan 12 · peak in flight 2 1
"""
    )


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("color", [False, True])
def test_no_line_of_a_grid_is_wider_than_asked(width, color):
    text = grid(timeline_of("interleaved", Shape(8, 32, 2)), width=width, color=color)
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(len(line) for line in rows(plain)) <= width
    assert ("\x1b[" in text) is color


def test_a_grid_at_one_column_per_unit_shows_each_rank_busy_as_long_as_it_is():
    timeline = timeline_of("gpipe", Shape(4, 6))
    text = grid(timeline, width=50, color=False)
    for rank, row in enumerate(rows(text)):
        cells = row[8 : 8 + int(timeline.makespan_s)]
        assert len(cells) - cells.count("·") == timeline.busy_s(rank)


def test_a_scaled_grid_keeps_the_order_of_the_phases():
    first = rows(grid(timeline_of("gpipe", Shape(8, 64)), width=70, color=False))[0]
    assert re.fullmatch(r"rank 0  F+·+B+\s+64", first)


@pytest.mark.parametrize("width", [50, 80, 130])
def test_a_scaled_grid_gives_each_kind_as_many_columns_as_its_time_is_worth(width):
    timeline = timeline_of("1f1b", Shape(4, 64))
    for row in rows(grid(timeline, width=width, color=False)):
        cells = re.fullmatch(r"rank \d  ([FB·]+)\s+\d+", row).group(1)
        assert cells.count("F") == pytest.approx(64 / timeline.makespan_s * len(cells), abs=1.5)
        assert cells.count("B") == pytest.approx(128 / timeline.makespan_s * len(cells), abs=1.5)


# ------------------------------------------------------------------------------------------------- why, critical path


def test_a_box_waits_for_the_message_that_came_last_and_else_for_its_rank():
    scene = scene_of(timeline_of("1f1b", Shape(2, 3)))
    found = {box.short: reason for box, reason in zip(scene.boxes, reasons(scene), strict=True)}
    by = {name: scene.boxes[reason.item].short for name, reason in found.items() if reason.item >= 0}
    assert found["F0.0"].why is Why.START
    assert (found["B0.0"].why, by["B0.0"]) == (Why.MESSAGE, "B1.0")
    assert (found["F1.0"].why, by["F1.0"]) == (Why.MESSAGE, "F0.0")
    assert (found["B1.0"].why, by["B1.0"]) == (Why.RANK, "F1.0")


@pytest.mark.parametrize(("name", "shape"), [("1f1b", Shape(4, 8)), ("interleaved", Shape(2, 4, 2))])
def test_the_boxes_of_the_critical_path_fill_the_makespan_when_messages_take_no_time(name, shape):
    scene = scene_of(timeline_of(name, shape))
    path = critical_path(scene, reasons(scene))
    assert sum(scene.boxes[number].duration_s for number in path) == pytest.approx(scene.facts.makespan_s)
    assert scene.boxes[path[0]].start_s == 0


# --------------------------------------------------------------------------------------------------------------- files


def test_each_suffix_writes_its_kind(tmp_path):
    timeline = timeline_of("1f1b", Shape(2, 4))
    paths = {suffix: save(timeline, tmp_path / f"a{suffix}") for suffix in pipefit.draw.SUFFIXES if suffix != ".png"}
    starts = {".svg": "<svg ", ".html": "<!doctype html>", ".pipe": "format pipefit.program/1", ".txt": "1F1B  p = 2"}
    for suffix, start in starts.items():
        assert paths[suffix].read_text(encoding="utf-8").startswith(start)
    assert load(paths[".pipe"]) == timeline.program
    assert load_trace(paths[".trace.json"]).program == timeline.program


@pytest.mark.parametrize("name", ["a.gif", "a", "a.json", "a.svg.gz"])
def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path, name):
    with pytest.raises(PipefitError, match=r"\.svg, \.html, \.png, \.trace\.json, \.pipe, \.txt"):
        save(timeline_of("gpipe", Shape(2, 2)), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_png_has_the_colours_of_the_svg_where_the_svg_has_them(tmp_path):
    image_of = pytest.importorskip("PIL.Image")
    timeline = timeline_of("gpipe", Shape(2, 4))
    path = save(timeline, tmp_path / "a.png", title="a $ & b")
    picture = image_of.open(path).convert("RGB")
    drawn = svg(timeline, title="a $ & b")
    assert picture.size == tuple(
        2 * int(re.search(rf' {side}="(\d+)"', drawn).group(1)) for side in ("width", "height")
    )
    for letter in "FB":
        x, y, wide = map(
            float,
            re.search(
                rf'class="{letter}0" data-i="{letter}0.0" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', drawn
            ).groups(),
        )
        # Near the corner, where no number stands.
        at = picture.getpixel((int(2 * (x + 3)), int(2 * (y + 3))))
        assert "#" + "".join(f"{channel:02x}" for channel in at) == chunk_colour(letter, 0, 1)
        assert wide > 6


@pytest.mark.parametrize("library", ["matplotlib", "resvg_py"])
def test_a_png_without_its_libraries_is_refused_with_the_cure(library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(PipefitError, match=r"pip install 'pipefit\[plot\]'"):
        save(timeline_of("gpipe", Shape(2, 2)), tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- drawings


def test_the_package_can_be_called_although_it_is_a_module():
    drawing = pipefit.draw("1f1b", num_stages=4, num_microbatches=8)
    assert drawing.metrics["makespan"] == 33
    assert drawing.metrics["peak_inflight"] == [4, 3, 2, 1]


def test_a_drawing_shows_itself_in_notebooks_and_in_print():
    drawing = draw("gpipe", 2, 3)
    assert drawing._repr_html_().startswith("<div")
    assert "<svg " in drawing._repr_html_()
    assert drawing._repr_svg_().startswith("<svg ")
    assert "rank 1" in str(drawing)


def test_pipedream_draws_each_microbatch_as_an_update_of_its_own():
    assert draw("pipedream", 4, 8).metrics["weight_versions"] == [4, 3, 2, 1]
    assert draw("pipedream-2bw", 4, 8).metrics["weight_versions"] == [2, 2, 2, 2]


def test_costs_and_options_reach_the_simulator():
    assert draw("1f1b", 4, 8, forward=2, backward=3).metrics["makespan"] == (8 + 3) * 5
    assert draw("1f1b", 4, 8, input=1, weight=2).metrics["makespan"] == (8 + 3) * 4
    assert draw("1f1b", 4, 8, warmup=2).metrics["peak_inflight"] == [7, 5, 3, 1]
    assert draw("interleaved", 4, 8, 2).metrics["makespan"] == (8 + 3 / 2) * 3


def test_an_unknown_schedule_is_refused_with_the_nearest():
    with pytest.raises(ScheduleError, match="1f1b"):
        draw("1f1c", 2, 2)


def test_a_users_own_schedule_is_drawn_like_any_other(monkeypatch):
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.REGISTRY))  # other tests go through all schedules

    @schedule(name="one-by-one-drawn")
    def own(task):
        """Every micro-batch alone."""
        for rank in range(task.num_ranks):
            yield [op(rank, mb) for mb in task.span for op in (fwd, bwd)]

    assert "one-by-one-drawn" in draw(own, 2, 2).svg()


@pytest.mark.slow
def test_the_drawings_made_ahead_are_those_of_today():
    # After a change that is meant: `make golden`.
    now, kept = golden.shelf_now(), golden.SHELF.read_bytes()
    assert gzip.decompress(now).decode().splitlines() == gzip.decompress(kept).decode().splitlines()


@pytest.mark.parametrize(("p", "m", "latency"), [(4, 8, 0), (4, 8, 0.5), (3, 6, 0)])
def test_a_page_offers_the_other_schedules_in_its_shape_and_its_own_in_other_shapes_each_once(p, m, latency):
    data = json.loads(collect(draw("1f1b", p, m, latency=latency).html()).texts["data"])
    shapes = [(entry["name"], entry["p"], entry["m"], entry["v"]) for entry in data]
    assert len(set(shapes)) == len(shapes)
    assert shapes[0] == ("1F1B", p, m, 1)
    over_ranks = {name for name in names() if name in TITLES and not find(name).spills and name != "zb-v"}
    assert {TITLES[name] for name in over_ranks} <= {name for name, *shape in shapes if shape[:2] == [p, m]}
    assert {("1F1B", stages, count, 1) for stages in (2, 4, 8) for count in (4, 8)} <= set(shapes)
    # A forward takes one, and a message its latency: so the second rank begins.
    (begin,) = {entry["ranks"][1][4] * entry["tick"] for entry in data if entry["name"] == "1F1B"}
    assert begin == 1 + latency


def choices_of(page):
    data = json.loads(collect(page).texts["data"])
    found = [(entry["name"], entry["p"], entry["m"], entry["v"], entry.get("s", 0)) for entry in data]
    assert len(set(found)) == len(found)
    return found


@pytest.mark.parametrize("options", [{}, {"copy": 1}, {"prefetch": 0}, {"tier": "disk"}])
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (6, 3)])
def test_the_page_of_one_device_offers_slots_stages_and_microbatches(stages, microbatches, options):
    name = TITLES["spilled"]
    found = choices_of(draw("spilled", stages, microbatches, **options).html())
    assert found[0] == (name, 1, microbatches, stages, 2)
    assert {(name, 1, microbatches, stages, slots) for slots in (1, 2, 3)} <= set(found)
    assert {name} == {entry[0] for entry in found}
    assert len({m for _, _, m, _, _ in found}) > 2 and len({v for _, _, _, v, _ in found}) > 1


def test_the_page_of_a_program_whose_stages_step_in_different_places_shows_it_alone():
    spill = Spill("host", 2, 1, (0, 1, 2, 3), on_host=(1,))
    page = drawing_of(generate("spilled", Shape(4, 4, spill=spill))).html()
    assert choices_of(page) == [(TITLES["spilled"], 1, 4, 4, 2)]


def test_the_page_of_a_spilled_pipeline_offers_other_slots_none_and_other_schedules():
    found = choices_of(draw("interleaved", 2, 4, 2, slots=2).html())
    name = TITLES["interleaved"]
    assert found[0] == (name, 2, 4, 2, 2)
    assert {(name, 2, 4, 2, slots) for slots in (0, 1, 2)} <= set(found)
    assert {("1F1B", 2, 4, 1, 0), ("Breadth-first", 2, 4, 2, 2)} <= set(found)
    assert not any(entry[0] == TITLES["pipedream"] for entry in found)


def test_a_grid_loads_no_heavy_library():
    code = "import pipefit.draw; pipefit.draw('1f1b', 8, 64).grid(200)\nimport sys\n"
    code += "print(*sorted({'torch', 'jinja2', 'matplotlib', 'rich', 'numpy'} & set(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=True)
    assert done.stdout.split() == []


def test_the_choices_of_a_page_are_few_forwards():
    # Simulating them takes the time of a page; the rest comes from the shelf.
    for drawing in (draw("1f1b", 8, 64), draw("spilled", 8, 16), draw("interleaved", 4, 8, 4, slots=2)):
        drawn = others(scene_of(drawing.timeline).facts, drawing.pricing, drawing.how, True)
        assert sum(i.op is Op.FWD for _, timeline in drawn for _, _, i in timeline.program) <= 1000


def test_the_script_data_never_holds_a_tag():
    text = to_text("<a>&</a>", scene_of(timeline_of("gpipe", Shape(2, 2))))
    assert not set("<>&") & set(text)


def test_a_spilled_schedule_can_be_drawn_with_its_steps_on_the_host():
    there, here = (draw("spilled", 4, 2, step_on=where) for where in ("host", "device"))
    assert {i.op.value for i in there.program.ranks[0] if "step" in i.op.value} == {"host_step"}
    assert not [i for i in there.program.ranks[0] if i.kind == "optim"]
    assert [line for line in there.grid().splitlines() if line.split()[:1] == ["host"]]
    assert not [line for line in here.grid().splitlines() if line.split()[:1] == ["host"]]
