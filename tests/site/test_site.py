"""The site: its pages hold what the planner says, run in a browser, and need nothing else."""

import json
import re
from urllib.parse import unquote

import pytest
from docs.pages import ROOT
from tests.draw.browser import needs_browser, shown
from tests.verbs import answered, refused

from pipefit.planner import plan
from pipefit.planner.machines import load_topology, read_profile
from pipefit.reproduce import run_scores
from pipefit.site import pages
from pipefit.site.pages import plan_page
from pipefit.site.plan_grid import plan_grid

GPT = "gpt:layers=12,hidden=1024,heads=16"
LLAMA = "llama:layers=80,hidden=8192,heads=64,kv_heads=8,ffn=28672,vocab=128256,sequence=8192"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grid():
    said = []
    made = plan_grid({"small": GPT, "70B": LLAMA}, ["dgx-a100-8"], [16], said.append)
    assert said == ["small on dgx-a100-8, batch 16", "70B on dgx-a100-8, batch 16"]
    return made


def in_browser(grid, folder, script: str, width: int = 1280, dark: bool = False) -> dict:
    """What a script that runs after the page's own puts into `found`; dark: for a reader who prefers that."""
    page = plan_page(grid)
    if dark:
        page = page.replace("(prefers-color-scheme: dark)", "all")
    tail = "document.body.dataset.found = encodeURIComponent(JSON.stringify(found));"
    document = shown(page, f"const found = {{}}; {script}; {tail}", folder, width)
    return json.loads(unquote(re.search(r'data-found="([^"]*)"', document)[1]))


def test_a_cell_holds_the_plan_that_the_planner_makes(grid):
    small, large = grid["cells"]
    machine = load_topology("dgx-a100-8")
    made = plan(read_profile(GPT, machine, 1), machine, global_batch=16)
    assert small["plans"][0]["summary"] == made.candidates[0].summary
    assert small["plans"][0]["throughput"] == made.prediction.throughput
    assert small["memory"] == made.prediction.peak_bytes and small["devices"] == 8
    assert "fits no plan on 8 devices" in large["why"] and "plans" not in large


READ = """
  const text = () => ["figures", "command", "answer"].map(id => document.getElementById(id).innerText).join("\\n");
  const give = (id, value) => {
    document.getElementById(id).value = value;
    document.getElementById(id).dispatchEvent(new Event("input"));
  };
  found.first = text();
  found.width = document.documentElement.scrollWidth;
  give("price", "3"); give("tokens", "2000"); found.dearer = text();
  give("model", "70B"); found.large = text();
  give("config", JSON.stringify({ model_type: "gpt2", n_layer: 12, n_embd: 1024, n_head: 16, vocab_size: 51200 }));
  found.known = document.getElementById("model").value;
  give("config", JSON.stringify({ model_type: "llama", num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4,
    num_key_value_heads: 2, intermediate_size: 128, vocab_size: 100, max_position_embeddings: 512 }));
  found.other = document.getElementById("command").innerText;
  const bert = { model_type: "bert", num_hidden_layers: 2, hidden_size: 8, num_attention_heads: 2, vocab_size: 9 };
  for (const wrong of ["{", "{}", JSON.stringify(bert)]) {
    give("config", wrong);
    (found.refused ??= []).push(document.getElementById("read").textContent);
  }
"""


@needs_browser
def test_the_page_of_plans_shows_days_money_memory_and_the_command(grid, tmp_path):
    found = in_browser(grid, tmp_path, READ)
    best = grid["cells"][0]["plans"][0]
    days = 1e12 / (best["throughput"] * 2048) / 86400
    shown_days = float(re.search(r"([\d.]+)\s*days", found["first"])[1])
    assert shown_days == pytest.approx(days, rel=5e-3)
    assert best["summary"] in found["first"] and re.search("ranks? 0", found["first"])
    command = "pipefit plan --profile gpt:layers=12,hidden=1024,heads=16 --topology dgx-a100-8 --global-batch 16"
    assert f"{command} --tokens 1e12" in found["first"] and f"{command} --tokens 2e12" in found["dearer"]
    price = re.search(r"([\d.]+) k\s*at your price", found["dearer"])[1]
    assert 1e3 * float(price) == pytest.approx(2 * days * 24 * 8 * 3, rel=5e-3)
    assert "Nothing fits" in found["large"] and "fits no plan on 8 devices" in found["large"]
    assert found["known"] == "small"
    assert "llama:layers=2,hidden=64,heads=4,kv_heads=2,ffn=128,vocab=100,sequence=512" in found["other"]
    json_error, missing, family = found["refused"]
    assert "not JSON" in json_error and "num_hidden_layers" in missing and "expected llama, mistral" in family


@needs_browser
def test_on_a_dark_phone_the_page_of_plans_is_readable_and_does_not_scroll_sideways(grid, tmp_path):
    read = """const ends = [...document.querySelectorAll("td, pre, select, .bars > *")];
      found.right = Math.max(...ends.map(each => each.getBoundingClientRect().right));
      found.width = document.documentElement.scrollWidth; found.window = innerWidth;
      const light = colour => colour.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3;
      const looks = [document.body, ...document.querySelectorAll("select, input, textarea, button, pre")];
      const styles = looks.map(each => getComputedStyle(each));
      found.contrast = Math.min(...styles.map(look => light(look.color) - light(look.backgroundColor)))"""
    found = in_browser(grid, tmp_path, read, 500, dark=True)
    assert found["width"] <= found["window"] and found["right"] <= found["window"]
    assert found["contrast"] > 150, "light on dark"


def test_the_schedules_and_the_course_are_written_with_their_drawings(tmp_path, capsys):
    answer = answered(capsys, "site", "-o", str(tmp_path), "--only", "schedules", "--only", "course")
    assert answer["pages"] == ["schedules", "course"]
    first = (tmp_path / "index.html").read_text()
    assert re.findall(r'<a href="(?!index)([^"]+)"', first) == ["schedules.html", "course/index.html"]
    chapters = sorted(path for path in (tmp_path / "course").glob("[1-9]-*.html"))
    sources = sorted((ROOT / "docs/course").glob("[1-9]-*.md"))
    titles = [source.read_text().partition("\n")[0].removeprefix("# ") for source in sources]
    assert len(titles) == 9
    for chapter, title in zip(chapters, titles, strict=True):
        assert f"<h1>{title}</h1>" in chapter.read_text() and "<iframe src=" in chapter.read_text()
    contents = (tmp_path / "course/index.html").read_text()
    assert all(f'<a href="{chapter.name}">' in contents for chapter in chapters)
    schedules = (tmp_path / "schedules.html").read_text()
    assert '<script id="data" type="application/json">[{' in schedules and '<a href="index.html">' in schedules
    for page in [*chapters, tmp_path / "course/index.html", tmp_path / "index.html", tmp_path / "schedules.html"]:
        text = page.read_text()
        assert not re.search(r'(?:src|href)="(?:https?:)?//', text), page
        for target in re.findall(r'(?:src|href)="([^"#]+)"', text):
            assert (page.parent / target).is_file(), (page, target)
        assert "```" not in text
        assert ("<nav>" in text) == (page.parent != tmp_path or page.name != "index.html")


def test_the_runs_and_the_lectures_hold_their_figures_and_a_way_back(tmp_path, capsys, monkeypatch):
    """Two published runs and two entries: all of them take a minute."""
    few = tmp_path / "few.csv"
    few.write_text("".join(run_scores.RUNS.read_text().splitlines(keepends=True)[:3]))
    monkeypatch.setattr(run_scores, "RUNS", few)
    monkeypatch.setattr(pages, "ENTRIES", {name: pages.ENTRIES[name] for name in ("vanilla-waste", "gpipe-timeline")})
    answered(capsys, "site", "-o", str(tmp_path), "--only", "runs", "--only", "lectures")
    runs = (tmp_path / "runs.html").read_text()
    lectures = (tmp_path / "lectures.html").read_text()
    assert re.search(r"korthikanti +data sheet +2 ", runs) and "<svg" in runs
    assert "93.8 %" in lectures and "2.29 ×" in lectures and "<svg" in lectures
    for page in (runs, lectures):
        assert page.count('<a href="index.html">pipefit</a>') == 1


def test_every_page_has_a_link_on_the_first_one():
    linked = re.findall(r'<li><a href="([^"]+)"', pages.first_page(list(pages.MAKERS)))
    assert [target.partition(".")[0].partition("/")[0] for target in linked] == list(pages.MAKERS)


def test_wrong_requests_are_refused_before_anything_is_planned(tmp_path, capsys):
    folder = str(tmp_path / "site")
    wrong = refused(capsys, "site", "-o", folder, "--only", "schedules", "--only", "plans")
    assert "no page is called 'plans'; did you mean plan" in wrong and not (tmp_path / "site").exists()
    wrong = refused(capsys, "site", "-o", folder, "--only", "plan", "--profile", "vgg16")
    assert "vgg16: expected gpt:layers=" in wrong and " on " not in wrong
    (tmp_path / "file").touch()
    for inside in ("file", "file/site"):
        for page in ("schedules", "course"):
            message = refused(capsys, "site", "-o", str(tmp_path / inside), "--only", page)
            assert "file" in message and "mistake of pipefit" not in message
