"""`pipefit watch` and the report of a run: while it trains, at its end, and in a browser."""

import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from itertools import count
from pathlib import Path

import pytest
import torch
from tests.draw.browser import needs_browser, shown
from tests.small_probes import shrink

from pipefit.cli import main
from pipefit.draw.chart import chart
from pipefit.errors import PipefitError
from pipefit.run import following
from pipefit.run.curves import curves, figures_of
from pipefit.run.following import LatestTimeline, server_of
from pipefit.run.guesses import guesses_of, picture_of
from pipefit.run.report_page import page_of, write_report

pytestmark = pytest.mark.slow

FIGURES = {"learning_rates": [0.1], "gradient_norm": 2.0, "samples_per_s": 8.0, "bubble": 0.25}


def metrics(folder: Path, num_steps: int, end: str = "\n") -> Path:
    lines = [
        {"step": step, "loss": 5 / step, "memory_bytes": [2e6, 1e6], **FIGURES} for step in range(1, num_steps + 1)
    ]
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + end)
    return path


def get(url: str, host: str = "") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Host": host} if host else {})) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as problem:
        with problem:
            return problem.code, ""


@pytest.fixture
def page(tmp_path):
    """The address of the page of a folder."""
    with server_of(tmp_path, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_the_page_follows_a_run_from_before_its_first_step(tmp_path, page):
    code, text = get(page)
    assert code == 200 and "no step yet" in text and f"<h1>{tmp_path.name}</h1>" in text
    metrics(tmp_path, 3, end='\n{"step": 4, "lo')  # the last line is being written
    assert "step 3, loss 1.6667; this run has not ended" in get(page)[1]
    metrics(tmp_path, 5)
    assert "step 5, loss 1.0000" in get(page)[1]


def test_the_page_answers_to_its_own_name_and_path_alone(page):
    assert get(page, host="evil.example:80")[0] == 404 and get(page + "metrics.jsonl")[0] == 404
    assert get(page, host=page[7:-1].replace("127.0.0.1", "localhost"))[0] == 200


def test_a_damaged_file_is_named_and_the_page_stays(tmp_path, page):
    (tmp_path / "metrics.jsonl").write_text("[1]\n")
    assert get(page)[0] == 503
    metrics(tmp_path, 1)
    assert get(page)[0] == 200


def test_a_folder_that_does_not_exist_and_a_port_in_use_are_refused(tmp_path, page, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "got no folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--port", page.split(":")[2][:-1]]) == 2
    assert "cannot be used" in capsys.readouterr().err


def test_curves_show_what_the_metrics_hold(tmp_path):
    entries = figures_of(metrics(tmp_path, 30))
    entries += [{"step": 10, "held_out_loss": 1.5}, {"step": 11, "loss": float("inf")}]
    found = curves(entries, ["entropy", 3.0])
    titles = [re.search("<title>(.*?)</title>", picture)[1] for picture in found]
    assert titles == ["Loss", "Learning rate", "Gradient norm", "Throughput", "Bubble", "Peak memory"]
    assert all(word in found[0] for word in ("held out", "entropy", "training")) and "process 1" in found[-1]
    assert not curves([], None)


def test_a_curve_of_many_steps_has_few_points(tmp_path):
    short, long = (curves([{"step": step, "loss": 1.0 / step} for step in range(1, n)], None)[0] for n in (400, 40_000))
    assert len(long) < 1.5 * len(short)


def test_a_loss_below_zero_is_drawn_and_a_bar_below_zero_is_refused():
    assert "<svg" in chart({"loss": [(1, -2.0), (2, -3.0)]})
    with pytest.raises(PipefitError, match="heights of at least 0"):
        chart({"bar": [("a", -1.0)]}, kind="bar")


class Recorder:
    """A pipeline that counts how often its timeline is asked for."""

    rank, asked = 1, 0

    def timeline(self):
        self.asked += 1


@pytest.mark.parametrize(("steps", "every", "asked"), [(9, 10, 0), (60, 10, 5), (300, 30, 9), (100_000, 100, 999)])
def test_timelines_are_taken_all_along_but_not_among_the_last_steps(steps, every, asked, tmp_path):
    pipe = Recorder()
    callback = LatestTimeline(pipe, tmp_path, steps)
    for step in range(1, steps + 1):
        callback.step(type("Record", (), {"step": step}))
    assert callback.every == every and pipe.asked == asked


def test_a_timeline_that_cannot_be_written_ends_no_training(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise PipefitError("measured.trace.json: cannot be written: No space left on device")

    monkeypatch.setattr(following, "save_trace", full)
    pipe = Recorder()
    pipe.rank = 0
    LatestTimeline(pipe, tmp_path, 100).step(type("Record", (), {"step": 10}))
    assert pipe.asked == 1 and "No space left on device; training goes on without it" in caplog.text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a small run, whose measurements are small."""
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch.setattr)
        yield _trained(tmp_path_factory)


def _trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    words = ["--model", "gpt", "--option", "layers=2,hidden=16,heads=2,context=8", "--steps", "20", "--batch", "4"]
    assert main(["train", *words, "--transport", "local", "--sample", "0", "-o", str(folder), "--json"]) == 0
    return folder


@pytest.mark.dist
def test_an_unfinished_run_has_a_report_with_curves_and_its_latest_timeline(run, tmp_path):
    folder = tmp_path / "killed"
    shutil.copytree(run, folder)
    (folder / "run.json").unlink()
    text = write_report(folder).read_text()
    assert "this run has not ended" in text and "Timeline of the last measured steps" in text
    assert text.count('class="pipefit-chart"') == 6 and "<script>" not in text
    whole = page_of(run)
    assert whole.count('class="pipefit-chart"') == 6 and "Predicted next to measured" in whole
    assert "<title>small: gpt</title>" in (run / "timeline.html").read_text()


def comparison(folder: Path, busy: float = 1.0, batch: int = 4, **rates: float) -> None:
    """Writes the figures of a comparison, as samples per second by strategy, of threads that compute for that share."""
    rows = [
        {"strategy": name.replace("_", "-"), "num_microbatches": 4, "samples_per_s": r, "utilisation": [busy]}
        for name, r in rates.items()
    ]
    facts = {"model": "gpt(layers=2): 2 layers", "num_ranks": 2, "batch": batch, "repeats": 9}
    data = {"format": "pipefit.comparison/1", **facts, "rows": rows}
    (folder / "compare.json").write_text(json.dumps(data))


@pytest.mark.dist
def test_a_report_has_settings_machine_whole_timelines_and_the_speed_against_one_process(run, tmp_path, capsys):
    folder = tmp_path / "compared"
    shutil.copytree(run, folder)
    comparison(folder, one_thread=100.0, all_threads=120.0, gpipe=90.0, _1f1b=150.0)
    assert main(["report", str(folder)]) == 0
    assert "the pipeline helped: -1f1b, 4 micro-batches is 1.25 × as fast as one process, all cores" in (
        capsys.readouterr().out
    )
    text = (folder / "report.html").read_text()
    for words in ("medians of 9 alternating", "<dt>lr schedule</dt>", "<dd>layers=2,hidden=16,heads=2,context=8</dd>"):
        assert words in text
    assert f"<dt>torch</dt><dd>{torch.__version__}</dd>" in text
    widths = [int(width) for width in re.findall(r'class="pipefit-auto-1" width="(\d+)"', text)]
    assert max(widths) <= 1160 and len(widths) == 4
    comparison(folder, one_thread=100.0, gpipe=90.0)
    assert "did not help here: gpipe, 4 micro-batches is 0.90 ×" in page_of(folder)
    assert "left one thread" not in page_of(folder)
    comparison(folder, busy=0.15, one_thread=100.0, gpipe=90.0)
    assert "left one thread a core for 15% of the time: measure on a quiet machine" in page_of(folder)
    comparison(folder, gpipe=90.0)
    assert "against one process" not in page_of(folder)
    comparison(folder, batch=5, one_thread=100.0, gpipe=90.0)
    assert "against one process" not in page_of(folder)
    (folder / "compare.json").write_text("[]")
    with pytest.raises(PipefitError, match=r"compare\.json: expected the figures of `pipefit compare`"):
        page_of(folder)


def test_wrong_answers_come_first_and_are_drawn():
    images = torch.zeros(4, 1, 2, 2)
    images[:, 0, 0, 1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    # The pixels are the logits: the second one is the largest, and two labels differ.
    labels = torch.tensor([1, 0, 1, 0])
    found = guesses_of(torch.nn.Flatten(), images, labels)
    assert [(guess.label, guess.answer) for guess in found] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert found[0].share > found[1].share and found[0].pixels == ["0f", "00"]
    assert '<path d="M1 0h1v1h-1z" opacity="1.00"/>' in picture_of(found[0])


@pytest.mark.dist
@needs_browser
@pytest.mark.parametrize("width", [400, 1280])
def test_in_a_browser_no_page_of_a_run_is_wider_than_its_window(run, tmp_path, width):
    script = "document.body.dataset.over = document.documentElement.scrollWidth > innerWidth;"
    for path in (run / "report.html", run / "timeline.html"):
        page = path.read_text().replace("script-src", "script-src 'unsafe-inline'")
        page = page.replace("style-src 'unsafe-inline'\">", "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">")
        assert 'data-over="false"' in shown(page, script, tmp_path, width)


@needs_browser
def test_in_a_browser_the_page_shows_later_steps_by_itself(tmp_path, page, monkeypatch):
    steps = count(1)

    def grown(folder, follows):
        metrics(folder, next(steps))
        return page_of(folder, follows=follows)

    monkeypatch.setattr(following, "page_of", grown)
    options = ["headless", "no-sandbox", "disable-gpu", "disable-background-networking", "no-first-run"]
    options += [f"user-data-dir={tmp_path / 'profile'}", "virtual-time-budget=7000", "dump-dom"]
    command = ["chromium", *(f"--{option}" for option in options), page]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert int(re.search(r"step (\d+), loss", text)[1]) >= 3
