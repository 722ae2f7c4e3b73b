"""Kinds of devices that this machine does not have: what they can do, and how it is said that they cannot."""

import os
from collections.abc import Callable

import pytest
import torch

from pipefit.errors import PipefitError
from pipefit.pipeline.repairable import why_not
from pipefit.runtime import repairs
from pipefit.spec import Partition, Placement, Plan
from pipefit.spill.lanes import Lane
from pipefit.stage import accelerator
from pipefit.stage.device import process_device, usable_device

Pretend = Callable[[str], None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Lets torch see one accelerator of a kind."""

    def see(kind: str) -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)

    return see


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_accelerators_with_messages_of_their_own_are_used_unless_another_device_is_named(
    kind: str, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", made_current.append)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setitem(torch.distributed.Backend.default_device_backend_map, kind, "its-own")
    pretend(kind)
    assert process_device() == torch.device(kind, 0)
    assert made_current == [torch.device(kind, 0)]
    assert accelerator.backends() == f"cpu:gloo,{kind}:its-own"
    assert process_device("cpu") == torch.device("cpu")


def test_mps_is_used_only_where_it_is_named(pretend: Pretend) -> None:
    pretend("mps")
    assert process_device() == torch.device("cpu")
    assert accelerator.backends() == "gloo"


def test_a_second_rank_on_mps_is_refused(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("mps")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(PipefitError, match=r"each rank needs a GPU of its own, but 2 ranks were started .* sees 1"):
        usable_device("mps")


def test_a_device_without_float64_is_refused_for_training(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*_: object, dtype: torch.dtype, device: torch.device) -> None:
        raise TypeError(f"Cannot convert a MPS Tensor to {dtype}")

    pretend("mps")
    monkeypatch.setattr("pipefit.stage.device.usable_device", torch.device)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(PipefitError, match=r"--device mps: cannot train: it has no float64, .* \(device cpu\)"):
        process_device("mps")


def test_a_process_outlives_others_by_the_settings_of_torch_unless_the_user_has_set_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    monkeypatch.delenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", raising=False)
    accelerator.outlive_others()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"  # NoHandling, in torch's sources
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"


def test_a_loss_is_not_repaired_where_nothing_ends_a_wait_for_others(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(Partition.even(4, 2), Placement(((0, 2), (1, 3))), "1f1b", 4, data=2)
    monkeypatch.setattr(repairs, "channel", object())
    assert not why_not(plan)
    monkeypatch.setitem(torch.distributed.Backend.default_device_backend_map, "xpu", "its-own")
    pretend("xpu")
    assert why_not(plan) == "nothing ends a wait of xpu for others"


def test_lanes_on_mps_are_refused_with_a_way_out() -> None:
    with pytest.raises(PipefitError, match=r"mps:0: it has no streams for copies .* or spill on the CPU"):
        Lane("read", torch.device("mps", 0))


def test_a_kind_without_a_generator_is_refused() -> None:
    with pytest.raises(PipefitError, match="torch offers no generator of its random numbers; train on the CPU"):
        accelerator.generator_of(torch.device("xpu", 0))
