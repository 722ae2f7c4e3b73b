"""A trial larger than its worker's memory: it is never whole there, and its numbers are those of one that is."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tests.torch.study_cases import CPU, GPT, SMALL, alone, in_turns
from torch import nn

from pipefit.errors import ModelError
from pipefit.study.execute.export import export
from pipefit.study.execute.live import LiveTrial
from pipefit.study.execute.recipe import recipe_of
from pipefit.study.trial import Trial

# A trial of 340 MB of weights: two steps under a cap, then its weights as a file, with the most memory that took.
_LARGE = """
import json, sys
from pathlib import Path
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
from pipefit.study.execute.export import export
from pipefit.study.execute.live import LiveTrial
from pipefit.study.trial import Trial

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024

options = {"layers": 12, "hidden": 768, "heads": 8, "context": 16, "tied": False}
trial = Trial("large", options=options, data=("synthetic",), batch=1, microbatches=1, steps=2, optimizer="sgd")
live = LiveTrial(0, trial, Path(sys.argv[1]) / "large", torch.device("cpu"), 128 << 20)
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
admitted = live.admit()
admission = memory("VmHWM") - before
Path("/proc/self/clear_refs").write_text("5")
for _ in range(2 * admitted.num_turns):
    live.turn()
turns = memory("VmHWM") - before
Path("/proc/self/clear_refs").write_text("5")
export(live, sys.argv[1] + "/weights.safetensors")
print(json.dumps([admitted.parameters, admitted.num_shards, admission, turns, memory("VmHWM") - before]))
"""


def test_a_trial_larger_than_its_cap_is_never_whole_in_memory(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", _LARGE, str(tmp_path)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    parameters, num_shards, *peaks = json.loads(found.stdout)
    assert 4 * parameters > 320 << 20 and num_shards >= 6
    assert max(peaks) < 128 << 20, [peak >> 20 for peak in peaks]


@pytest.mark.parametrize("trial", [Trial("gpt", **GPT, **SMALL)], ids=["gpt"])
def test_the_numbers_are_those_without_a_cap(trial, tmp_path):
    losses, weights = alone(trial)
    live = LiveTrial(0, trial, tmp_path / "capped", CPU, 300_000)
    other = LiveTrial(0, trial, tmp_path / "capped", CPU, 300_000)
    admitted = live.admit()
    assert live._recipe.is_empty and admitted.num_shards > 1
    other.admit()
    found = [(live, other)[count % 2].turn().loss for count in range(trial.steps * admitted.num_turns)]
    assert [loss for loss in found if loss == loss] == losses
    assert in_turns(replace(trial, shards=2), tmp_path / "whole") == losses
    export(live, str(tmp_path / "weights.safetensors"))
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
