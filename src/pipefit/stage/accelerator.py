"""Accelerators: what pipefit asks of a device that is not the CPU. No other module calls functions of CUDA.

`torch.accelerator` answers for all kinds: CUDA and ROCm, which torch calls "cuda", XPU, MPS, HPU. What it does not
offer is here for each kind, and an error says what a kind does not have:

    streams of its own, for copies during computation       not MPS
    a backend for messages between processes                not MPS; it is used only where a user names it
    host memory that is pinned in place                     CUDA; elsewhere it stays pageable, and copies take longer
    products in TF32                                        CUDA; elsewhere they are those of float32
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.errors import PipefitError
from pipefit.spec.files import JsonObject
from pipefit.stage.record_layout import is_dense

CPU = torch.device("cpu")

AHEAD_BYTES = 1 << 20
"""Bytes from which a copy to a device has a stream of its own: a smaller one takes less time than its order."""
_PORTABLE = 1  # cudaHostRegisterPortable
_SINGLE = "mps"
"""The kind that has one device, with one stream, and no messages between processes."""


# ---- devices ---------------------------------------------------------------------------------------------------------


def kind() -> str:
    """The kind of this machine's accelerators, such as "cuda"; "": there are none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return ""
    return found.type


def default_kind() -> str:
    """The kind of device that a process computes on where no device is named."""
    here = kind()
    if here in ("", _SINGLE):
        return "cpu"
    return here


def is_accelerator(device: torch.device) -> bool:
    """Returns whether a device computes while the host goes on."""
    return device.type not in ("cpu", "meta")


def names() -> list[str]:
    """The name of each accelerator."""
    here = kind()
    return [name_of(torch.device(here, index)) for index in range(torch.accelerator.device_count())]


def name_of(device: torch.device) -> str:
    """The name of an accelerator; its kind where torch knows no name."""
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(device))
    return device.type


def make_current(device: torch.device) -> None:
    """Makes a device the one that calls without a device use, instead of the first."""
    torch.accelerator.set_device_index(device)


def is_lost_in_fork() -> bool:
    """Returns whether this process is a fork of one that has asked for accelerators: it cannot use them."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return False
    module = torch.get_device_module(found)
    return hasattr(module, "_is_in_bad_fork") and bool(module._is_in_bad_fork())


def backends() -> str:
    """The backends of messages between processes, as `init_process_group` takes them."""
    here = default_kind()
    if here == "cpu":
        return "gloo"
    return f"cpu:gloo,{here}:{dist.get_default_backend_for_device(here)}"


def give_streams_queues() -> None:
    """Lets each stream of a GPU have a queue of its own; call it before the GPU is used.

    Of the usual 8 queues some would serve several streams, and a message that waits for its sender would hold up the
    computation behind it. A rank has about a dozen: of its computation, its links, its groups, and its copies.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")


def outlive_others() -> None:
    """Lets this process outlive others with which it exchanges messages by NCCL; call it before there is a group.

    Torch's watchdog of NCCL would otherwise end the process when NCCL finds that another one is gone. Before that it
    would write a report of all ranks, for which the end of its group waits up to a minute.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")


def settle(device: torch.device) -> None:
    """Waits until a device has done all that it was given; a CPU has done it already."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def generator_of(device: torch.device) -> torch.Generator:
    """The generator of all random numbers on a device.

    Raises:
        PipefitError: torch has none for this kind.
    """
    if not is_accelerator(device):
        return torch.default_generator
    if device.type == _SINGLE:
        return torch.mps._get_default_mps_generator()
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    if not generators:
        raise PipefitError(f"device {device}: torch offers no generator of its random numbers; train on the CPU")
    return generators[device.index or 0]


def allow_tf32(device: torch.device) -> None:
    """Lets products of float32 round to TF32, where the device has it."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")


# ---- streams and events ----------------------------------------------------------------------------------------------


def new_stream(device: torch.device) -> Any:
    """A stream in addition to the current one.

    Raises:
        PipefitError: the device has only one.
    """
    if device.type == _SINGLE:
        raise PipefitError(
            f"device {device}: it has no streams for copies during computation, which spilled stages need; keep all "
            "stages on the device, or spill on the CPU"
        )
    if device.type == "cuda":
        return torch.cuda.Stream(device)
    return torch.Stream(device)


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """The context in which this thread's work goes to a stream, whose device is the current one."""
    if stream.device.type == "cuda":
        return torch.cuda.stream(stream)
    return stream


def current_stream(device: torch.device) -> Any:
    """The stream to which this thread's work goes."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device)
    return torch.accelerator.current_stream(device)


def event_on(stream: Any, is_timed: bool = False, spins: bool = False) -> Any:
    """The moment at which a stream will have done what it was given so far.

    Args:
        stream: of an accelerator.
        is_timed: whether its time can be read.
        spins: whether a thread that waits for it keeps its core and goes on at once; else it sleeps, where torch
            offers that.
    """
    if stream.device.type == "cuda":
        event: Any = torch.cuda.Event(enable_timing=is_timed, blocking=not spins)
    else:
        event = torch.Event(stream.device, enable_timing=is_timed)
    event.record(stream)
    return event


# ---- memory ----------------------------------------------------------------------------------------------------------


def pin(memory: Tensor) -> None:
    """Pins host memory in place, to the byte: torch's own pinned memory has sizes that are powers of two.

    It is pinned for all devices of the process. Copies to and from it are asynchronous. Torch's allocator does not know
    it and cannot prevent that it is freed meanwhile, so the caller must wait for them before it frees the memory.

    Args:
        memory: whole pages, as of `aligned`.

    Raises:
        RuntimeError: the system does not allow so much.
    """
    if kind() == "cuda":
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))


def unpin(memory: Tensor) -> None:
    """Removes the pins, before the memory is freed."""
    if kind() == "cuda":
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


def pinned_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host in pinned memory, for a copy to a device; MPS shares the host's memory."""
    if device.type == _SINGLE:
        return tensor
    # A view with gaps, such as all tokens but the last of each sample, would be copied through pageable memory.
    if tensor.layout is torch.strided and not tensor.is_contiguous() and not is_dense(tensor):
        tensor = tensor.contiguous()
    return tensor.pin_memory()


_stream_of_copies = functools.cache(new_stream)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, for work of the current stream; a large one is made while the device does earlier work."""
    if tensor.nbytes < AHEAD_BYTES or device.type == _SINGLE:
        return tensor.to(device, non_blocking=True)
    current, stream = current_stream(device), _stream_of_copies(device)
    with on_stream(stream):
        there = tensor.to(device, non_blocking=True)
    current.wait_event(event_on(stream))
    there.record_stream(current)
    return there


def free_bytes(device: torch.device) -> float:
    """Bytes of an accelerator that tensors can take, also those that torch holds and no tensor uses."""
    free, _ = torch.accelerator.get_memory_info(device)
    return float(free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device))


def forget_peak(device: torch.device) -> None:
    """Lets the peak of an accelerator's memory begin anew, after measurements; that of a process on the CPU cannot."""
    if is_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> float:
    """Peak memory of this process: of tensors on its accelerator where it trains there, else its resident set."""
    if is_accelerator(device):
        return float(torch.accelerator.max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def workspace_bytes(device: torch.device) -> int:
    """Bytes that products of matrices take of a GPU for themselves, from the first one on, both ways."""
    if device.type != "cuda":
        return 0
    settle(device)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.accelerator.memory_allocated(device)
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    torch.nn.functional.linear(weight, weight, weight[0]).sum().backward()
    del weight
    return torch.accelerator.memory_allocated(device) - before


# ---- CUDA only -------------------------------------------------------------------------------------------------------


def facts_of_cuda() -> JsonObject:
    """Versions of CUDA and NCCL, and for each two GPUs whether they reach each other's memory; {} on other machines."""
    if kind() != "cuda":
        return {}
    places = range(torch.cuda.device_count())
    return {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "direct": [[a == b or torch.cuda.can_device_access_peer(a, b) for b in places] for a in places],
    }
