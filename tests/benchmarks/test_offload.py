"""The benchmark of spilling on a GPU, tiny and on a CPU: every way runs, and what fails is a row that says why."""

import subprocess
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist

from benchmarks import offload as bench
from pipefit.errors import ModelError, PipefitError
from pipefit.pipeline import memory_cap
from pipefit.profiling.survey import survey
from pipefit.profiling.workload import Workload
from pipefit.runtime.session import current
from pipefit.spec import Tier
from pipefit.spec.options import Request, Spilled
from pipefit.stage.split import named_layers

pytestmark = pytest.mark.long

_NOTES_BYTES = 100 << 10
TINY = bench.OffloadConfig("cpu", 4, 64, 2, 64, 32, cap_bytes=3 << 20, part=64, fsdp_part=64, steps=1)


@pytest.fixture
def here(monkeypatch):
    """What has a process of its own runs in this one."""

    def answered(asked):
        config = bench.OffloadConfig(**asked["config"])
        found = bench._answer(config, *((asked["way"], asked["tokens"]) if "way" in asked else ()))
        return asdict(found)

    monkeypatch.setattr(bench, "_of_child", answered)


def test_all_ways_train_the_same_model_and_the_peer_is_torchs_own(here):
    rows = bench.offload(TINY, (128,))
    assert [row.way for row in rows] == list(bench.WAYS)
    assert all(row.seconds > 0 and row.peak_bytes > 1 << 20 for row in rows)
    resident, spilled, offloaded = rows
    # Random tokens: nothing can be learnt, so all are near the logarithm of the vocabulary.
    assert all(row.loss == pytest.approx(torch.tensor(64.0).log().item(), abs=0.2) for row in rows)
    assert spilled.loss == pytest.approx(resident.loss, abs=0.01)
    assert " stages, " in spilled.note and offloaded.note == "2 micro-batches"
    assert not dist.is_initialized()


def test_a_plan_for_autocast_knows_what_it_keeps_and_how_fast_the_device_is_in_its_type(monkeypatch):
    """A GPU multiplies bfloat16 some ten times as fast as float32; activations are halved, weights cast and kept."""
    seen, measure = [], memory_cap.measure_device
    monkeypatch.setattr(
        memory_cap, "measure_device", lambda *a, **more: seen.append(more["dtype"]) or measure(*a, **more)
    )
    bundle, (x, y) = bench._gpt(TINY, "cpu"), next(bench._batches(TINY, 1024))
    for half in (None, torch.bfloat16):
        layers, cpu = named_layers(bundle.layers), torch.device("cpu")
        work = Workload(layers, bundle.loss, bench._adam, cpu, (x, y), half=half)
        found = memory_cap.plan_under_cap(Request(microbatches=1, spill=Spilled("1 GiB")), work, current())
        with torch.autocast("cpu", half, enabled=half is not None):
            kept = [one.layer for one in survey(layers, x)]
        # Some KiB more, by the allocator's leave: what autograd notes beside the tensors. Halving is at least 120 KiB.
        pairs = zip(found[1].layers, kept, strict=True)
        assert all(
            one.saved_bytes <= layer.saved_bytes + layer.copy_bytes <= one.saved_bytes + _NOTES_BYTES
            for layer, one in pairs
        )
    assert seen == [torch.float32, torch.bfloat16]


def test_weights_of_the_peer_wait_on_the_host_and_step_there():
    """One process, one group: what FSDP2 calls sharded is the whole, kept where its policy says."""
    from torch.distributed.tensor import DTensor

    found = []
    original = bench._adam
    try:
        bench._adam = lambda parameters: found.extend(parameters) or original(parameters)
        bench._offloaded(TINY, 64)
    finally:
        bench._adam = original
    assert len(found) == sum(1 for _ in bench._gpt(TINY, "meta").layers.parameters())
    assert all(isinstance(p, DTensor) and p.device.type == "cpu" and p.dtype == torch.float32 for p in found)


@pytest.mark.parametrize("cap", [1 << 10, 200 << 10])
def test_a_cap_that_is_too_small_is_a_row_that_says_so(here, cap):
    (row,) = bench.offload(replace(TINY, cap_bytes=cap), (64,), ["spilled"])
    assert row.seconds is None and row.note.startswith("out of memory: ")


def test_lack_of_memory_is_known_through_what_a_stage_makes_of_it():
    def failed(cause):
        try:
            raise ModelError("layer 3 failed in its forward") from cause
        except ModelError as problem:
            return problem

    assert bench._is_lack_of_memory(failed(torch.OutOfMemoryError("CUDA out of memory")))
    assert not bench._is_lack_of_memory(failed(ValueError("shapes")))


def test_a_process_that_is_killed_is_a_row_and_one_that_fails_ends_the_benchmark(monkeypatch):
    def ends(code):
        done = subprocess.CompletedProcess([], code, stdout="", stderr="no such layer")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)

    ends(-9)
    (row,) = bench.offload(TINY, (64,), ["resident"])
    assert row.note == "killed by signal 9"
    ends(1)
    with pytest.raises(PipefitError, match="resident: no such layer"):
        bench.offload(TINY, (64,), ["resident"])


def test_the_copies_are_measured_in_a_process_of_their_own():
    found = bench.rates(TINY)
    assert min(found.read_bytes_per_s, found.write_bytes_per_s) > 1e6


def test_without_a_gpu_it_says_what_can_be_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PipefitError, match=r"is for a GPU.*--device cpu"):
        bench.rates(bench.OffloadConfig())
    with pytest.raises(PipefitError, match="expected multiples of the context, 32, got 72"):
        bench.offload(TINY, (72,))


def test_the_table_compares_with_the_resident_run_and_a_cap_exceeded_is_a_finding(monkeypatch, capsys):
    rows = [
        bench.OffloadRow("resident", 64, 1.0, 4e10, 4.0),
        bench.OffloadRow("spilled", 64, 2.0, 3e10, 4.0, 1.5, "7 stages"),
        bench.OffloadRow("offloaded", 64, note="out of memory: no"),
    ]
    monkeypatch.setattr(bench, "rates", lambda config: Tier("host", 1e12, 25e9, 24e9, one_channel=True))
    monkeypatch.setattr(bench, "offload", lambda config, tokens, on_row: [on_row(row) or row for row in rows])
    assert bench.main(config=bench.OffloadConfig(layers=4)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "25.00 GB/s to the device, 24.00 GB/s to the host, which share one channel" in lines[1]
    assert lines[4].split()[:5] == ["64", "spilled", "2", "s", "50%"] and lines[5].endswith("out of memory: no")
    assert lines[6] == "the cap of 20 GiB was EXCEEDED"
