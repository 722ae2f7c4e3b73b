"""A trial larger than its worker's memory: it is never whole there, and its numbers are those of one that is."""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.study.cases import CPU, GPT, SMALL, alone, in_turns
from torch import nn

from pipefit.errors import ModelError
from pipefit.study.execute.admission import build_trial, recipe_of
from pipefit.study.execute.open_trial import OpenTrial
from pipefit.study.execute.runner import export, take_turn
from pipefit.study.file import load_study
from pipefit.study.trial import Trial

pytestmark = pytest.mark.slow

# A trial of 340 MB of weights: two steps under a cap, then its weights as a file, with the most memory that took.
_LARGE = """
import json, sys
from pathlib import Path
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
from pipefit.study.execute.open_trial import OpenTrial
from pipefit.study.execute.runner import export, take_turn
from pipefit.study.trial import Trial

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024

options = {"layers": 12, "hidden": 768, "heads": 8, "context": 16, "tied": False}
trial = Trial("large", options=options, data=("synthetic",), batch=1, microbatches=1, steps=2, optimizer="sgd")
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
opened = OpenTrial(0, trial, Path(sys.argv[1]) / "large", torch.device("cpu"), 128 << 20)
figures = opened.state.figures
admission = memory("VmHWM") - before
Path("/proc/self/clear_refs").write_text("5")
for _ in range(2 * figures.num_turns):
    take_turn(opened)
turns = memory("VmHWM") - before
Path("/proc/self/clear_refs").write_text("5")
export(opened, sys.argv[1] + "/weights.safetensors")
print(json.dumps([figures.parameters, figures.shards, admission, turns, memory("VmHWM") - before]))
"""


@pytest.mark.long
def test_a_trial_larger_than_its_cap_is_never_whole_in_memory(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", _LARGE, str(tmp_path)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    parameters, num_shards, *peaks = json.loads(found.stdout)
    assert 4 * parameters > 320 << 20 and num_shards >= 6
    assert max(peaks) < 128 << 20, [peak >> 20 for peak in peaks]


_STUDY = """
format = "pipefit.study/1"
name = "large"
workers = 1
threads = 1
device_memory = "48 MiB"
model = "gpt"
data = "synthetic"
batch = 2
microbatches = 2
steps = 2
optimizer = "adamw"
options = {layers = 6, hidden = 384, heads = 8, context = 16, tied = false}
[grid]
lr = [1e-2, 1e-3]
"""


def _children(pid):
    """Processes that were started by a process."""
    with contextlib.suppress(OSError):
        lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(child) for children in lists for child in children]
    return []


def _peak_bytes(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def _studied(place, until=lambda: False, more=()):
    """Runs `pipefit study` until it ends or is cut off; what its workers grew by, and its exit code.

    What they grew by is how far the kernel's peaks lie above that of the process they were copied from.
    """
    path = place / "study.toml"
    path.write_text(_STUDY)
    words = [sys.executable, "-m", "pipefit", "study", str(path), "-o", str(place / "out"), "--json", *more]
    grown = {}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as study:
        while study.poll() is None:
            for template in _children(study.pid):
                for worker in _children(template):
                    with contextlib.suppress(OSError, StopIteration):
                        grown[worker] = _peak_bytes(worker) - _peak_bytes(template)
            if until():
                study.send_signal(signal.SIGTERM)
                until = lambda: False  # noqa: E731
            time.sleep(0.02)
    return max(grown.values()), study.returncode


def test_a_trial_that_has_ended_gives_its_memory_back_at_once(tmp_path):
    """Its tensors and hooks refer to each other: a worker would hold two trials until Python looks for such circles."""
    gc.collect()
    gc.disable()
    try:
        opened = OpenTrial(0, Trial("gpt", **GPT, **SMALL), tmp_path / "t", CPU, 300_000)
        take_turn(opened)
        slots = weakref.ref(opened.spilling.arena)
        assert opened.held_bytes > 100_000
        opened.close()
        del opened
        assert slots() is None
    finally:
        gc.enable()


@pytest.mark.long
def test_a_study_of_trials_larger_than_the_cap_keeps_it_and_can_be_interrupted(tmp_path):
    state = tmp_path / "out" / "state"
    grown, code = _studied(
        tmp_path, lambda: any(re.search(rb'"turn": [2-9]', path.read_bytes()) for path in state.glob("*/trial.commit"))
    )
    assert code == 128 + signal.SIGTERM and grown < 48 << 20, (code, grown >> 20)
    grown, code = _studied(tmp_path, more=["--resume"])
    assert code == 0 and grown < 48 << 20, (code, grown >> 20)
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["trials"]
    # Weights and AdamW's states of a trial alone are more than twice the cap.
    assert all(12 * row["parameters"] > 2 * 48 << 20 and row["shards"] > 2 for row in rows)
    for row in rows:
        spec = load_study(tmp_path / "study.toml")
        trial = next(trial for trial in spec.trials if trial.lr == row["values"]["lr"])
        lines = (tmp_path / "out" / "trials" / row["name"] / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["loss"] for line in lines] == alone(trial)[0]


@pytest.mark.parametrize("trial", [Trial("gpt", **GPT, **SMALL)], ids=["gpt"])
def test_the_numbers_are_those_without_a_cap(trial, tmp_path):
    losses, weights = alone(trial)
    opened = [OpenTrial(0, trial, tmp_path / "capped", CPU, 300_000) for _ in range(2)]
    figures = opened[0].state.figures
    assert build_trial(trial, 300_000)[0].is_empty and figures.shards > 1
    found = [take_turn(opened[count % 2]).loss for count in range(trial.steps * figures.num_turns)]
    assert [loss for loss in found if loss == loss] == losses
    assert in_turns(replace(trial, shards=2), tmp_path / "whole") == losses
    export(opened[0], str(tmp_path / "weights.safetensors"))
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "weights.safetensors")
    names = [name for layer in recipe_of(trial).layers for name in layer.module.state_dict(prefix=f"{layer.prefix}.")]
    assert list(saved) == sorted(names) or set(saved) == set(names)
    assert all(torch.equal(saved[name], weight) for name, weight in zip(names, weights, strict=True))


def test_a_factory_may_give_a_model_without_weights(tmp_path):
    def factory():
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, affine=False), nn.ReLU(), nn.Linear(16, 4))

    def data(step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)

    trial = Trial("own", model=factory, loss=nn.functional.cross_entropy, data=data, microbatches=2, steps=3)
    losses = in_turns(replace(trial, shards=2), tmp_path / "two")
    assert all(loss == loss for loss in losses)
    assert in_turns(trial, tmp_path / "one") == losses
    tied = nn.Linear(8, 8, device="meta")
    with pytest.raises(ModelError, match="layers draw their own weights"):
        in_turns(replace(trial, model=lambda: nn.Sequential(tied, nn.ReLU(), tied)), tmp_path / "tied")
