"""Two nodes: network namespaces joined by a switch, a torchrun in each, which meet by a rendezvous of kind c10d."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.network.lab import Lab, laboratory, why_not
from tests.runtime.nodes import ended, start

pytestmark = [pytest.mark.dist, pytest.mark.long]

SIZE = "--ranks 2 --microbatches 2 --schedule 1f1b --steps 4 --batch 8"
TRAIN = f"train --model convnet --data digits {SIZE} --json".split()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    with laboratory(2) as made:
        yield made


def on_both(lab: Lab, *words: str, folders: tuple[Path, Path]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of `torchrun … -m pipefit` on each node, which has its own name and folder."""
    return ended(start(lab, folders, "-m", "pipefit", *words))


def answer(ended: list[tuple[int, str, str]]) -> Any:
    assert [code for code, _, _ in ended] == [0, 0], ended
    written = [out for _, out, _ in ended if out]
    assert len(written) == 1, ended
    return json.loads(written[0])


def test_two_nodes_train_to_the_losses_of_one_process(lab: Lab, tmp_path: Path) -> None:
    single = [sys.executable, "-m", "pipefit", *TRAIN, "--transport", "local"]
    done = subprocess.run(single, capture_output=True, text=True, cwd=tmp_path, check=True, timeout=500)
    expected = json.loads(done.stdout)["losses"]
    two = answer(on_both(lab, *TRAIN, "-o", "run", folders=(tmp_path, tmp_path)))
    assert two["losses"] == pytest.approx(expected, rel=1e-6)
    assert (tmp_path / "run" / "checkpoints" / "step-000004").is_dir()


def test_without_a_shared_folder_a_run_with_checkpoints_is_refused_before_it_trains(lab: Lab, tmp_path: Path) -> None:
    folders = (tmp_path / "a", tmp_path / "b")
    for folder in folders:
        folder.mkdir()
    ended = on_both(lab, *TRAIN, "-o", "run", folders=folders)
    assert all(code != 0 for code, _, _ in ended)
    assert "node-1 does not see what rank 0 on node-0 writes there" in "".join(err for _, _, err in ended)
    assert {path.name for path in tmp_path.glob("*/run/*")} <= {".lock"}


def test_the_doctor_compares_two_nodes_in_one_table(lab: Lab, tmp_path: Path) -> None:
    seen = answer(on_both(lab, "doctor", "--json", folders=(tmp_path, tmp_path)))
    assert [(node["node"], node["ranks"], node["shared"]) for node in seen["nodes"]] == [
        ("node-0", [0], True),
        ("node-1", [1], True),
    ]
    assert seen["ok"] and not list(tmp_path.iterdir())
