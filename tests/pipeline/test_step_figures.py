"""The figures of a running training: model FLOP utilisation, and the bubble and memory of every rank."""

from __future__ import annotations

import gc
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pipefit as pf
from pipefit.cli.display import Watcher
from pipefit.ir import Instruction, Op
from pipefit.pipeline import step_figures
from pipefit.pipeline.callbacks import Record
from pipefit.pipeline.step_figures import HeldMemory, ModelFlop, count_flop, own_figures
from pipefit.profiling.workload import Workload
from pipefit.runtime.malloc import in_use
from pipefit.runtime.progress import Progress
from pipefit.runtime.session import Session
from pipefit.spec.topology import Device
from pipefit.stage.split import named_layers


def test_mfu_counts_each_product_of_forward_and_backward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_figures, "measure_device", lambda *_, **__: Device(flops=1e3))
    layers = named_layers(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    x, y = torch.randn(6, 8), torch.randn(6, 4)
    work = Workload(layers, nn.functional.mse_loss, torch.optim.SGD, torch.device("cpu"), (x, y))
    found = count_flop(work, num_ranks=2)
    assert found is not None
    # A multiply-add is two; the first layer has no gradient of its input, the second all three products.
    products = 2 * 8 * 16 * 2 + 2 * 16 * 4 * 3
    assert found.flop_per_sample == pytest.approx(products, rel=0.1)
    assert found.mfu(samples_per_s=1.0) == pytest.approx(found.flop_per_sample / 2e3)
    assert "forward and backward once" in found.convention


def test_the_progress_line_names_bubble_memory_and_mfu() -> None:
    stream = io.StringIO()
    watcher = Watcher(num_steps=1, batch=4, stream=stream)
    watcher.counted(ModelFlop(10.0, 200.0, "model FLOP over the data sheet's"))
    watcher.step(Record(1, 2.0, 1.0, bubble=0.3, memory_bytes=(2.0**20, 2.0**21)))
    assert "MFU: model FLOP over the data sheet's" in stream.getvalue()
    assert "bubble 30%  memory 1 MiB + 2 MiB  MFU 20%" in stream.getvalue()


def test_more_flop_than_the_device_has_is_no_share_of_it() -> None:
    stream = io.StringIO()
    watcher = Watcher(num_steps=1, batch=4, stream=stream)
    watcher.counted(ModelFlop(10.0, 20.0, "model FLOP"))
    watcher.step(Record(1, 2.0, 1.0))
    assert "MFU unknown: the machine was busy while its speed was measured" in stream.getvalue()


def test_the_speed_of_a_device_is_the_highest_that_was_measured_twice(monkeypatch) -> None:
    measured = iter([1e3, 2e3, 1.5e3, 4e3, 3.9e3, 9e9])
    monkeypatch.setattr(step_figures, "measure_device", lambda *_, **__: Device(flops=next(measured)))
    layers = named_layers(nn.Sequential(nn.Linear(8, 4)))
    batch = torch.randn(6, 8), torch.randn(6, 4)
    work = Workload(layers, nn.functional.mse_loss, torch.optim.SGD, torch.device("cpu"), batch)
    found = count_flop(work, num_ranks=1)
    assert found is not None and found.flops == 4e3


def test_processes_that_share_a_rank_do_not_make_its_bubble_smaller() -> None:
    """Two ranks of two processes that only wait; the sum of the first ones' was once divided by four."""
    program = SimpleNamespace(header=SimpleNamespace(num_ranks=2))
    compiled = SimpleNamespace(program=program, instructions=[Instruction(Op.LOAD, 0, 0)])
    worker = SimpleNamespace(device=torch.device("cpu"), optimizers={})
    idle = SimpleNamespace(compiled=compiled, worker=worker, starts=[0.0], ends=[1.0], rates={})
    first, second = (own_figures(Session(process, 4, None, Progress()), [idle], [idle]) for process in (0, 2))
    assert first[0] + second[0] == 1.0
    assert [size > 0 for size in first[1:5]] == [True, False, False, False]


def test_garbage_that_goes_during_a_pass_hides_no_memory_of_it() -> None:
    pipe = pf.Pipeline([nn.Linear(4, 4)], loss=nn.MSELoss(), optimizer=torch.optim.SGD, stages=1)
    tell = in_use(torch.device("cpu"))
    if tell is None:
        pytest.skip("the system does not report memory in use")
    gc.disable()
    try:
        ring = [torch.ones(1 << 20)]
        ring.append(ring)
        del ring
        watch = HeldMemory(pipe.workers[0], tell)
        with watch.counting():
            gc.collect()
            kept = torch.ones(1 << 20)
            watch.look()
        assert watch.held_bytes == pytest.approx(kept.nbytes, rel=0.05)
    finally:
        gc.enable()
