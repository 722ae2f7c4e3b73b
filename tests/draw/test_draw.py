"""Grids, pages, drawings and files."""

import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise

import msgspec
import pytest
from matplotlib.colors import rgb2hex
from tests import golden
from tests.draw.browser import needs_browser, shown
from tests.draw.page_data import bars_in, boxes_in, critical_path

import pipefit.draw
from pipefit.cost import unit
from pipefit.draw import chart, grid, html, save
from pipefit.draw.caption import TITLES
from pipefit.draw.chart import hue
from pipefit.draw.choices import others
from pipefit.draw.drawing import draw, drawing_of
from pipefit.draw.encode import COPIED_KINDS, encode_scene, to_text
from pipefit.draw.look import chunk_colour
from pipefit.draw.reasons import Why, reasons
from pipefit.draw.scene import scene_of
from pipefit.draw.slots import stays_of
from pipefit.draw.svg import svg
from pipefit.errors import PipefitError, ScheduleError
from pipefit.ir import Op, Spill, bwd, fwd
from pipefit.ir.op import OP_SPEC
from pipefit.ir.text import load
from pipefit.schedules import Shape, find, generate, names, registry, schedule
from pipefit.simulate import simulate
from pipefit.timeline import Timeline, load_trace


def timeline_of(name: str, shape: Shape, **cost: float) -> Timeline:
    program = generate(name, shape)
    return simulate(program, unit(program.header, 1, 2, **cost), rendezvous=False)


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


# ------------------------------------------------------------------------------------------------------------- the page


class Collector(HTMLParser):
    """The texts of elements by id, and every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.links: list[tuple[str, str | None]] = []
        self.current = ""

    def handle_starttag(self, tag, attributes):
        self.current = dict(attributes).get("id") or tag
        self.links += [
            (name, value) for name, value in attributes if name in ("src", "href", "srcset", "data", "action")
        ]

    def handle_data(self, data):
        self.texts[self.current] = self.texts.get(self.current, "") + data


def collect(page: str) -> Collector:
    parser = Collector()
    parser.feed(page)
    return parser


@pytest.mark.parametrize(
    ("name", "shape"),
    [("gpipe", Shape(4, 8)), ("interleaved", Shape(2, 4, 2)), ("pipedream", Shape(3, 1, num_steps=5))],
)
def test_the_data_in_the_page_comes_back_as_the_boxes_it_was_made_from(name, shape):
    timeline = timeline_of(name, shape, latency=0.25)
    (data,) = json.loads(collect(html(timeline)).texts["data"])
    scene = scene_of(timeline)
    decoded = boxes_in(data)
    assert [reason for _, reason in decoded] == reasons(scene)
    for (box, _), own in zip(decoded, scene.boxes, strict=True):
        assert box._replace(position=own.position, start_s=0, end_s=0) == own._replace(start_s=0, end_s=0)
        assert (box.start_s, box.end_s) == pytest.approx((own.start_s, own.end_s))


SPILLED = [
    ("spilled", (5, 3), {}),
    ("spilled", (4, 2), {"slots": 1, "activations": True}),
    ("interleaved", (2, 4, 3), {"slots": 2}),
    ("spilled", (4, 3), {"on_host": (1, 3)}),
    ("1f1b", (3, 4), {"slots": 1, "copy": 0.7}),
]


def spilled_timeline(name, shape, options):
    timeline = draw(name, *shape, **{key: value for key, value in options.items() if key != "on_host"}).timeline
    if "on_host" not in options:
        return timeline
    spill = msgspec.structs.replace(timeline.program.header.spill, on_host=options["on_host"])
    program = generate(name, Shape(*shape, spill=spill))
    return simulate(program, unit(program.header, 1, 2), rendezvous=False)


@pytest.mark.parametrize(("name", "shape", "options"), SPILLED)
def test_the_copies_in_the_page_come_back_as_the_bars_they_were_made_from(name, shape, options):
    scene = scene_of(spilled_timeline(name, shape, options))
    data = json.loads(to_text("x", scene))
    found = reasons(scene)
    assert [reason for _, reason in boxes_in(data)] == found[: len(scene.boxes)]
    copies = bars_in(data)
    in_lanes = (Op.FETCH, Op.EVICT, Op.HOST_STEP)
    assert len(copies) == len(scene.bars) == sum(i.op in in_lanes for _, _, i in scene.timeline.program)
    for (bar, reason), drawn, why in zip(copies, scene.bars, found[len(scene.boxes) :], strict=True):
        assert (bar.rank, bar.lane, bar.short, bar.mb) == (drawn.rank, drawn.lane, drawn.short, drawn.mb)
        assert (bar.start_s, bar.end_s) == pytest.approx((drawn.start_s, drawn.end_s), abs=1e-5)
        assert (reason.why, reason.item) == (why.why, why.item)
        assert reason.waited_s == pytest.approx(why.waited_s, abs=1e-5)


@pytest.mark.parametrize(("name", "shape", "options"), SPILLED)
def test_what_something_waited_for_was_over_when_it_began(name, shape, options):
    scene = scene_of(spilled_timeline(name, shape, options))
    for item, reason in zip(scene.items, reasons(scene), strict=True):
        assert reason.item < 0 or scene.items[reason.item].end_s <= item.start_s + 1e-9
    path = [scene.items[number] for number in critical_path(scene, reasons(scene))]
    assert path[-1].end_s == scene.facts.makespan_s


def test_a_forward_waits_for_its_weights_and_a_fetch_for_its_slot():
    scene = scene_of(draw("spilled", 4, 4).timeline)
    found: dict[tuple[str, str], tuple[Why, str]] = {}
    for item, why in zip(scene.items, reasons(scene), strict=True):
        first = item.lane or item.letter, item.short  # w1 comes a second time for its backward
        found.setdefault(first, (why.why, scene.items[why.item].short))
    assert found["F", "F0.0"] == (Why.COPY, "w0")
    assert found["fetch", "w1"] == (Why.LANE, "w0")  # the second copy of the lane
    assert found["fetch", "w2"] == (Why.RANK, "F0.3")  # the last use of what was in its slot
    assert found["fetch", "o2"] == (Why.COPY, "o3")
    assert found["evict", "w3"] == (Why.LANE, "o3")


@pytest.mark.parametrize(("name", "shape", "options"), SPILLED)
def test_a_slot_holds_one_stage_at_a_time_and_whatever_a_rank_computes_lies_in_one(name, shape, options):
    scene = scene_of(spilled_timeline(name, shape, options))
    stays = [stay for stay in stays_of(scene) if stay.kind == "weights"]
    assert len(stays) == sum(bar.lane == "fetch" and bar.what == "weights" for bar in scene.bars)
    assert {stay.slot for stay in stays} == set(range(options.get("slots", 2)))
    for before, after in pairwise(stays):
        assert (before.rank, before.slot) != (after.rank, after.slot) or before.end_s <= after.start_s + 1e-9
    for box in scene.boxes:
        assert any(
            (stay.rank, stay.stage) == (box.rank, box.stage)
            and stay.start_s <= box.start_s
            and box.end_s <= stay.end_s + 1e-9
            for stay in stays
        )


def test_every_kind_of_copy_has_a_number_in_the_data_and_a_name_in_the_script():
    # A kind was added to fetches, and the page had no name for steps on the host.
    assert {*OP_SPEC[Op.FETCH].kinds, ""} == set(COPIED_KINDS)
    script = (files("pipefit.draw") / "words.js").read_text(encoding="utf-8")
    named = json.loads(re.search(r"const MOVED = (.*?);", script, re.DOTALL).group(1))
    assert len(named) == len(COPIED_KINDS) and named[COPIED_KINDS.index("")] == ["S", "optimizer step"]


def test_times_that_are_no_simple_fractions_come_back_to_a_millionth_of_the_makespan():
    program = generate("1f1b", Shape(3, 5))
    timeline = simulate(program, unit(program.header, 0.00123457, 0.00271828), rendezvous=False)
    scene = scene_of(timeline, seconds=True)
    for (box, _), own in zip(boxes_in(encode_scene("x", scene)), scene.boxes, strict=True):
        assert abs(box.start_s - own.start_s) <= 1e-6 * scene.facts.makespan_s


def test_names_in_a_page_are_escaped_everywhere():
    timeline = timeline_of("gpipe", Shape(2, 2))
    evil = "</script><img src=x onerror=alert(1)>"
    page = html({evil: timeline, "other": timeline}, title=evil)
    assert "<img" not in page
    assert page.count("</script>") == 3
    assert json.loads(collect(page).texts["data"])[0]["name"] == evil


def test_a_page_refers_to_nothing_outside():
    parser = collect(html(timeline_of("1f1b", Shape(2, 4))))
    assert parser.links == []
    page = html(timeline_of("1f1b", Shape(2, 4)))
    assert set(re.findall(r"https?://[^\"' ;)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def test_a_prediction_beside_what_was_measured_has_the_same_unit():
    predicted = timeline_of("1f1b", Shape(2, 4))
    measured = dataclasses.replace(predicted, source="measured")
    for named, word in (({"measured": measured, "predicted": predicted}, "s"), ({"a": predicted, "b": predicted}, "")):
        assert {entry["unit"] for entry in json.loads(collect(html(named)).texts["data"])} == {word}


def test_a_page_of_a_drawing_with_replays_offers_none_without_them():
    # Another m led to a drawing of the shelf, in which nothing was replayed.
    (data,) = json.loads(collect(draw("gpipe", 4, 8, recompute=True).html()).texts["data"])
    assert data["kept"] == [7, 7, 7, 7]


def test_a_page_without_timelines_is_refused():
    with pytest.raises(PipefitError, match="at least one timeline"):
        html([])


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("drawing", "keys", "told"),
    [
        (("1f1b", 4, 8), ["Right", "Down"], "it waited for the message of F0.0 on rank 0"),
        (("spilled", 4, 4), ["Right"], "it waited for the weights of stage 0 to arrive"),
        (("spilled", 4, 4), ["Right", "Down"], "fetch w1</b> brings the weights of stage 1 from the host"),
        (("spilled", 4, 4), ["Right", "Down"], "its lane was busy with fetch w0"),
    ],
)
def test_a_browser_draws_every_item_of_the_page_and_tells_why_one_waited(drawing, keys, told, tmp_path):
    timeline = draw(*drawing).timeline
    press = f"for (const key of {['Arrow' + key for key in keys]}) document.querySelector('.scroll').dispatchEvent("
    press += "new KeyboardEvent('keydown', {key, bubbles: true}));"
    page = shown(html(timeline), press, tmp_path)
    scene = scene_of(timeline)
    assert len(re.findall(r'<rect class="cell', page)) == len(scene.items)
    assert page.count('class="stay"') == len(stays_of(scene) if scene.bars else [])
    assert told in page


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


# --------------------------------------------------------------------------------------------------------------- charts


def paths_of(picture: str, hue: str) -> list[list[tuple[float, float]]]:
    """The corners of the shapes that are filled or stroked in a colour."""
    found = re.findall(rf'<path d="([^"]+)"[^>]*(?:fill|stroke): {hue}', picture)
    return [[tuple(map(float, point)) for point in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)] for path in found]


def test_bars_are_as_high_as_their_values():
    picture = chart({"a": [("x", 10.0), ("y", 20.0)]}, kind="bar")
    first, second, _ = ([y for _, y in corners] for corners in paths_of(picture, rgb2hex(hue(0))))  # then the legend's
    assert max(second) - min(second) == pytest.approx(2 * (max(first) - min(first)))


def test_points_of_a_logarithmic_axis_are_evenly_spaced_when_they_double():
    line = paths_of(chart({"a": [(4, 3.0), (1, 1.0), (2, 2.0)]}, log_x=True), rgb2hex(hue(0)))[0]
    (first, _), (second, _), (third, _) = line
    assert third - second == pytest.approx(second - first)


@pytest.mark.parametrize("count", [8, 14, 28])
def test_no_two_lines_of_a_chart_share_both_dash_and_mark_so_that_hues_are_not_needed(count):
    picture = chart({f"line {n}": [(1, 1.0 + n), (2, 2.0)] for n in range(count)})
    legend = picture[picture.index('<g id="legend_1">') :]
    signs = re.findall(
        r'style="fill: none(; stroke-dasharray: [\d.,]+; stroke-dashoffset: 0|); stroke: .*?<use xlink:href="#(\w+)"',
        legend,
        re.S,
    )
    marks = {name: re.search(rf'<path id="{name}" d="([^"]+)"', picture).group(1) for _, name in signs}
    signs = [(dash, marks[name]) for dash, name in signs]
    assert len(signs) == len(set(signs)) == count


def test_a_line_of_many_points_is_marked_here_and_there():
    points = [(float(x), 1.0 + x) for x in range(500)]
    picture = chart({"a": points, "b": points}).partition('id="legend_1"')[0]
    places = [
        set(re.findall(rf'<use xlink:href="#\w+" x="([\d.]+)" [^>]*fill: {rgb2hex(hue(index))}', picture))
        for index in (0, 1)
    ]
    assert all(5 <= len(line) <= 12 for line in places) and not places[0] & places[1]


def test_a_chart_has_one_ink_that_follows_the_paper():
    picture = chart({"a": [(1, 1.0)]}, title="t")
    assert "fill: currentColor" in picture and "#010203" not in picture
    assert "@media (prefers-color-scheme:dark)" in picture and "<text " in picture


def test_a_chart_without_matplotlib_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PipefitError, match=r"pip install 'pipefit\[plot\]'"):
        chart({"a": [(1, 1.0)]})


def test_names_in_charts_are_escaped():
    picture = chart({"<b>": [(1, 1.0)]}, title="<i>", x_label="<u>", y_label="&")
    assert not re.search(r"<[biu]>", picture)


@pytest.mark.parametrize("series", [{}, {"a": []}, {"a": [(1, float("nan"))]}])
def test_a_chart_of_nothing_or_of_no_numbers_is_refused(series):
    with pytest.raises(PipefitError, match="chart"):
        chart(series)


def test_the_script_data_never_holds_a_tag():
    text = to_text("<a>&</a>", scene_of(timeline_of("gpipe", Shape(2, 2))))
    assert not set("<>&") & set(text)


def test_a_spilled_schedule_can_be_drawn_with_its_steps_on_the_host():
    there, here = (draw("spilled", 4, 2, step_on=where) for where in ("host", "device"))
    assert {i.op.value for i in there.program.ranks[0] if "step" in i.op.value} == {"host_step"}
    assert not [i for i in there.program.ranks[0] if i.kind == "optim"]
    assert [line for line in there.grid().splitlines() if line.split()[:1] == ["host"]]
    assert not [line for line in here.grid().splitlines() if line.split()[:1] == ["host"]]
