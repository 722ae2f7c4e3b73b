"""A run on a GPU says whether the host keeps up, on its page, in its output and in its trace."""

import json
import re
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.timeline import bottleneck, load_trace

pytestmark = pytest.mark.gpu

OPTIONS = (
    "--model mlp --option layers=3,width=16 --steps 3 --batch 8 --ranks 2 --transport local --quick --device cuda:0"
)


def test_a_run_reports_the_launches_of_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *OPTIONS.split(), "-o", str(tmp_path)]) == 0
    timeline = load_trace(tmp_path / "measured.trace.json")
    sentence = bottleneck(timeline)
    assert re.match(r"the host is (not )?the bottleneck: .* \d?\d?\d% ", sentence)
    assert sentence in capsys.readouterr().out
    assert sentence in (tmp_path / "report.html").read_text()
    assert len(timeline.launches) == len(list(timeline.compute())) > 0
    items = json.loads((tmp_path / "measured.trace.json").read_text())["traceEvents"]
    lanes = {(item["pid"], item["args"]["name"]) for item in items if item["name"] == "thread_name"}
    assert {(0, "launch"), (1, "launch"), (0, "compute"), (1, "compute")} <= lanes
