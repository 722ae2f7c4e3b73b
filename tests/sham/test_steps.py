"""One step of every kind on the second GPU: its numbers, nothing on the first GPU, and each wait of the host."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu import plain
from tests.gpu.cases import SYNCHRONOUS
from tests.gpu.test_one_process import dropping
from tests.pipelines import grouped
from torch import nn

from pipefit import Pipeline, Spilled
from pipefit.errors import NonFiniteLossError

pytestmark = pytest.mark.gpu

DEVICE = "cuda:1"
LIST = Path(__file__).with_name("steps.json")
"""Waits of the host in the fourth step of each case, of all four where they overlap; PIPEFIT_SHAM_WRITE=1 writes."""

SPILLED = {"stages": 4, "chunks": 4}


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, fused=True)


CASES: dict[str, dict[str, Any]] = {
    **SYNCHRONOUS,
    "adamw, clipped": {"stages": 3, "optimizer": plain.adamw, "clip_norm": 0.05},
    "replayed": {"stages": 3, "recompute": "layer"},
    "spilled to the host": {**SPILLED, "spill": Spilled()},
    "spilled to the host, clipped": {**SPILLED, "spill": Spilled(), "clip_norm": 0.05},
    "spilled to the host, fused": {**SPILLED, "spill": Spilled(), "optimizer": fused},
    "zb-v, fused": {**SYNCHRONOUS["zb-v"], "optimizer": fused},
    "spilled to disk": {**SPILLED, "spill": "disk"},
    "spilled with activations": {**SPILLED, "spill": Spilled(activations=True)},
    "spilled without prefetching": {**SPILLED, "spill": Spilled(prefetch=0)},
    "stepping on the host": {**SPILLED, "spill": Spilled(step_on=(0, 1, 2, 3))},
    "stepping on the host, clipped": {**SPILLED, "spill": Spilled(step_on=(0, 1, 2, 3)), "clip_norm": 0.05},
}
OTHERS: dict[str, dict[str, Any]] = {
    "pipedream": {"schedule": "pipedream", "stages": 3, "microbatches": 1},
    "pipedream-2bw": {"schedule": "pipedream-2bw", "stages": 3},
    "bf16": {"stages": 3, "precision": "bf16"},
    "fp16": {"stages": 3, "precision": "fp16", "loss_scale": 128.0},
    "fp16, its scale moves": {"stages": 3, "precision": "fp16"},
    "bf16, spilled": {**SPILLED, "precision": "bf16", "spill": Spilled()},
}
"""Cases that plain torch has no numbers for: those of the same pipeline on the CPU."""


def expected_waits(name: str, waits: dict[str, int]) -> dict[str, int]:
    listed = json.loads(LIST.read_text()) if LIST.exists() else {}
    if "PIPEFIT_SHAM_WRITE" in os.environ:
        LIST.write_text(json.dumps(listed | {name: waits}, indent=1, sort_keys=True) + "\n")
        return waits
    return listed.get(name, {})


def trained(
    model: Callable[[], nn.Module], data: list[plain.Batch], device: str, options: dict[str, Any], tier: Path
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int]]:
    """Losses, weights, and the waits of the last step."""
    settings = {"loss": nn.functional.cross_entropy, "optimizer": plain.sgd, "microbatches": 4, "device": device}
    settings |= options
    if settings.get("spill") == "disk":
        settings["spill"] = Spilled(disk=tier)
    driver = sys.modules["sham_driver"]
    pipe = Pipeline(model(), **grouped(**settings))
    losses = []
    if options.get("schedule", "").startswith("pipedream"):
        driver.waits.clear()
        losses += pipe.fit(data)
    else:
        for x, y in data:
            driver.waits.clear()
            losses.append(pipe.step(x, y))
    waits = dict(driver.waits)
    weights = {name: value.cpu() for name, value in pipe.state_dict().items()}
    pipe.close()
    return losses, weights, waits


def in_single() -> nn.Module:
    return plain.network().float()


@pytest.fixture(autouse=True)
def _nothing_on_the_first_gpu() -> Any:
    torch.cuda.set_device(0)
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    yield
    torch.cuda.set_device(0)
    assert torch.cuda.max_memory_allocated(0) == before


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_numbers_of_plain_torch_and_the_known_waits(name: str, tmp_path: Path) -> None:
    options = CASES[name]
    losses, weights, waits = trained(plain.network, plain.batches(), DEVICE, options, tmp_path)
    wanted = plain.trained(
        plain.network(), plain.batches(), options.get("optimizer", plain.sgd), options.get("clip_norm")
    )
    plain.assert_close((losses, weights), wanted, 1e-6 if "optimizer" in options else plain.TOLERANCE)
    assert waits == expected_waits(name, waits)


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_has_the_numbers_of_the_cpu_and_the_known_waits(name: str, tmp_path: Path) -> None:
    options = OTHERS[name]
    data = [(x.float(), y) for x, y in plain.batches()]
    losses, weights, waits = trained(in_single, data, DEVICE, options, tmp_path / "one")
    on_cpu, _, _ = trained(in_single, data, "cpu", options, tmp_path / "other")
    # Autocast has other lists of operators for a GPU.
    assert losses == pytest.approx(on_cpu, rel=2e-2 if "precision" in options else 1e-6)
    assert all(value.isfinite().all() for value in weights.values())
    assert waits == expected_waits(name, waits)


def test_a_spilled_model_of_the_meta_device_is_drawn_on_the_second_gpu(tmp_path: Path) -> None:
    def nowhere() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4)])

    data = [(torch.randn(8, 6), torch.randint(6, (8,))) for _ in range(2)]
    losses, _, _ = trained(nowhere, data, DEVICE, CASES["spilled to the host"], tmp_path)
    on_cpu, _, _ = trained(nowhere, data, "cpu", CASES["spilled to the host"], tmp_path)
    assert losses == pytest.approx(on_cpu, rel=1e-5)


def test_a_fused_step_that_is_not_finite_is_left_out_by_the_gpu_and_reported(tmp_path: Path) -> None:
    settings = {"loss": nn.functional.cross_entropy, "optimizer": fused, "microbatches": 4, "device": DEVICE}
    pipe = Pipeline(plain.network(), **grouped(**settings, **SPILLED, spill=Spilled()))
    (x, y), *_ = plain.batches()
    pipe.step(x, y)
    before = {name: value.cpu().clone() for name, value in pipe.state_dict().items()}
    with pytest.raises(NonFiniteLossError, match="a gradient of update 0 of stage"):
        pipe.step(x * torch.inf, y)
    after = pipe.state_dict()
    assert all(torch.equal(value, after[name].cpu()) for name, value in before.items())
    pipe.close()


def test_dropout_on_the_second_gpu_does_not_depend_on_stages(tmp_path: Path) -> None:
    one, *_ = trained(dropping, plain.batches(), DEVICE, {"stages": 1, "schedule": "gpipe"}, tmp_path)
    torch.cuda.default_generators[0].manual_seed(9)
    other, *_ = trained(dropping, plain.batches(), DEVICE, {"stages": 3, "schedule": "1f1b"}, tmp_path)
    assert other == pytest.approx(one, rel=plain.TOLERANCE)
