"""The simulated GPU is as strict as a real one, and finds what a real one would not show."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from pipefit.spill.arena import aligned
from pipefit.stage.accelerator import pin, unpin

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_a_kernel_with_tensors_of_two_devices_is_refused() -> None:
    here, there = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
        here + there
    with pytest.raises(RuntimeError, match="on the same device, but got one on cpu"):
        nn.Linear(2, 2).to("cuda:1")(torch.ones(1, 2)).sum()


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device=f"cuda:{torch.cuda.device_count()}")


def test_memory_that_was_not_written_is_not_a_number() -> None:
    assert torch.empty(5, device="cuda:1").isnan().all()
    assert torch.empty(5, dtype=torch.float16, device="cuda:1").isnan().all()
    assert torch.empty(4, pin_memory=True).isnan().all()


def test_memory_is_counted_and_ends() -> None:
    before = torch.cuda.memory_allocated(1)
    torch.cuda.reset_peak_memory_stats(1)
    held = torch.zeros(MIB, dtype=torch.uint8, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == before + MIB
    del held
    assert torch.cuda.memory_allocated(1) == before
    assert torch.cuda.max_memory_allocated(1) == before + MIB
    free, total = torch.cuda.mem_get_info(1)
    assert free == total - before
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda:1")


@pytest.mark.finds
def test_accesses_of_two_streams_without_an_order_are_a_race() -> None:
    x = torch.zeros(8, device="cuda:1")
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream), pytest.raises(RuntimeError, match=r"race: aten::mul of stream \d+ of cuda:1 reads"):
        x * 2
    stream.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(stream):
        y = x * 2
    with pytest.raises(RuntimeError, match="writes what aten::mul of stream"):
        x.zero_()
    torch.cuda.current_stream("cuda:1").wait_stream(stream)
    x.zero_()
    assert y.sum() == 0


@pytest.mark.finds
def test_only_overlapping_bytes_race() -> None:
    x = torch.zeros(8, device="cuda:1")
    stream = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize("cuda:1")
    x[:4].fill_(1)
    with torch.cuda.stream(stream):
        x[4:].fill_(2)
        with pytest.raises(RuntimeError, match="race"):
            x[3:].fill_(2)
    torch.cuda.synchronize("cuda:1")


@pytest.mark.finds
def test_memory_freed_under_another_stream_is_found_unless_it_was_recorded() -> None:
    stream = torch.cuda.Stream("cuda:1")
    for is_recorded in (True, False):
        x = torch.ones(8, device="cuda:1")
        stream.wait_stream(torch.cuda.current_stream("cuda:1"))
        with torch.cuda.stream(stream):
            y = x * 2
        if is_recorded:
            x.record_stream(stream)
        del x
        if is_recorded:
            torch.cuda.synchronize("cuda:1")
        else:
            with pytest.raises(RuntimeError, match="is freed while aten::mul of stream"):
                torch.cuda.synchronize("cuda:1")
        torch.cuda.synchronize("cuda:1")
        del y


def test_a_host_buffer_cannot_be_read_before_the_host_has_waited() -> None:
    source, target = torch.ones(4, device="cuda:1"), torch.zeros(4).pin_memory()
    target.copy_(source, non_blocking=True)
    assert target.isnan().all()
    torch.cuda.current_stream("cuda:0").synchronize()
    assert target.isnan().all(), "that was another device"
    torch.cuda.current_stream("cuda:1").synchronize()
    assert target.tolist() == [1] * 4


@pytest.mark.finds
def test_a_pinned_source_must_stay_until_its_copy_has_ended() -> None:
    source = torch.ones(4).pin_memory()
    source.to("cuda:1", non_blocking=True)
    source.zero_()
    with pytest.raises(RuntimeError, match="overwritten before its copy"):
        torch.cuda.synchronize("cuda:1")


@pytest.mark.finds
def test_pinned_memory_must_stay_until_its_copies_have_ended() -> None:
    memory = aligned(4096)
    pin(memory)
    memory.copy_(torch.ones(4096, dtype=torch.uint8, device="cuda:1"), non_blocking=True)
    unpin(memory)
    with pytest.raises(RuntimeError, match="pinned memory is given back while copy_"):
        torch.cuda.synchronize("cuda:1")
    torch.cuda.synchronize("cuda:1")


def test_what_a_thread_has_waited_for_is_known_to_those_who_wait_for_the_thread() -> None:
    stream, x = torch.cuda.Stream("cuda:1"), torch.ones(4, device="cuda:1")
    stream.wait_stream(torch.cuda.current_stream("cuda:1"))

    def work() -> None:
        with torch.cuda.stream(stream):
            x.mul_(2)
        stream.synchronize()

    with ThreadPoolExecutor(1, "pipefit-test") as pool:
        pool.submit(work).result()
    assert x.tolist() == [2] * 4


def test_each_device_has_a_generator() -> None:
    torch.manual_seed(3)
    one = torch.rand(3, device="cuda:1")
    torch.rand(3, device="cuda:2")
    torch.rand(3)
    torch.cuda.default_generators[1].manual_seed(3)
    assert torch.equal(one, torch.rand(3, device="cuda:1"))
    assert nn.functional.dropout(torch.ones(100, device="cuda:1"), 0.5).sum() != 100


def test_a_fork_of_a_process_that_has_asked_for_a_gpu_cannot_use_it() -> None:
    assert torch.cuda.is_available()
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda.is_available()) + 2 * int(torch.cuda._is_in_bad_fork()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_waits_of_the_host_are_seen_with_their_place() -> None:
    from pipefit.profiling.clock import Clock

    driver = sys.modules["sham_driver"]
    clock = Clock(torch.zeros(1, device="cuda:1").device)
    driver.begin_case()
    clock.settle()
    clock.settle()  # there is nothing left to wait for
    assert driver.waits == {"profiling/clock.py settle: synchronize": 1}
