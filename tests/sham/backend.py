"""A backend of `torch.distributed` for simulated GPUs with the rules of NCCL; it takes NCCL's place.

    tensors         of the host go to Gloo, of a GPU through copies on the host; they must be dense
    order           one queue per group, no tags: a message is taken by the next receive, and one that has not been
                    received blocks all later ones
    streams         a group has its own stream, which waits for the caller's; `wait` lets the caller's wait for it
    first use       of a pair or a group blocks the host until all have come
    a dead process  raises nothing: who waits for it waits on, until the group is aborted
    abort           ends all kernels without an error; what has not come yet never does, and a new call is an error

A GPU's host would launch on after `wait`. Here its kernels run at once, so the host waits for their numbers too.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.gpu.staged_backend import Staged
from torch import Tensor

NAME = "sham"
first_uses: list[str] = []
"""Where in pipefit the host was blocked by the first use of a pair or a group."""
_driver: Any = sys.modules["sham_driver"]


class Queued(dist.Work):
    """Work in a group's queue, and the copies of what it brings to the GPU."""

    def __init__(
        self, stream: torch.cuda.Stream, held: Sequence[Tensor], arriving: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__()
        self.done = threading.Event()
        self.has_come = False
        self._stream, self._held, self._arriving = stream, held, arriving
        self._end: torch.cuda.Event | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.done.wait()
        if self._end is None:
            with _driver.unseen(), torch.cuda.stream(self._stream):
                for target, host in self._arriving if self.has_come else ():
                    target.copy_(host)
                self._end = self._stream.record_event()
        torch.cuda.current_stream(self._stream.device).wait_event(self._end)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class Sham(Staged):
    """A process group whose tensors may be on the host or on a simulated GPU."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self._queue: queue.SimpleQueue[tuple[Queued, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._met: set[tuple[str, int]] = set()
        self._stream: torch.cuda.Stream | None = None

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return NAME

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            queued, run = task
            if not self._aborted.is_set():
                try:
                    run()
                    queued.has_come = True
                except RuntimeError:  # another process is gone, and nobody says so
                    self._aborted.wait()
            queued.done.set()

    def abort(self) -> None:
        self._aborted.set()
        self.shutdown()

    def shutdown(self) -> None:
        self._queue.put(None)

    def _through_host(
        self, start: Callable[..., Any], taken: Sequence[Any], given: Sequence[Any], met: Any = "all"
    ) -> Any:
        tensors = [leaf for value in taken for leaf in _leaves(value)]
        if not any(tensor.is_cuda for tensor in tensors):
            return super()._through_host(start, taken, given)
        if self._aborted.is_set():
            raise RuntimeError(f"NCCL communicator was aborted on rank {self.rank()}.")
        device = tensors[0].device
        for tensor in tensors:
            assert tensor.device == device, f"a tensor of {tensor.device} in a message of {device}"
            assert tensor.is_contiguous(), "NCCL takes dense tensors only"
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            threading.Thread(target=self._work, daemon=True).start()
        self._stream.wait_stream(torch.cuda.current_stream(device))
        hosts: dict[int, Tensor] = {}
        with _driver.unseen(), torch.cuda.stream(self._stream):
            for tensor in tensors:
                hosts[id(tensor)] = tensor.cpu()
            for tensor in given:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 99)  # until it has arrived
        queued = Queued(self._stream, tensors, [(tensor, hosts[id(tensor)]) for tensor in given])
        self._queue.put((queued, lambda: start(*(_hosts_of(value, hosts) for value in taken)).wait()))
        if met not in self._met:
            self._met.add(met)
            first_uses.append(_driver.place())
            queued.done.wait()
        return queued

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        tag = 0 if tensors[0].is_cuda else tag
        return self._through_host(lambda own: self._hosts.send(own, to, tag), [tensors], [], ("pair", to))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        tag = 0 if tensors[0].is_cuda else tag
        return self._through_host(lambda own: self._hosts.recv(own, source, tag), [tensors], tensors, ("pair", source))

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        def start(part: Tensor, whole: Tensor) -> Any:
            self._hosts.allreduce([whole]).wait()
            part.copy_(whole.view(self.size(), -1)[self.rank()].view_as(part))
            return self._hosts.barrier()

        return self._through_host(start, [output, given], [output])

    reduce_scatter_single = _reduce_scatter_base


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for one in value for leaf in _leaves(one)]


def _hosts_of(value: Any, hosts: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return hosts[id(value)]
    return [_hosts_of(one, hosts) for one in value]


def register() -> None:
    """Takes the place of NCCL."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, Sham, devices=["cuda"])
    dist.Backend.default_device_backend_map["cuda"] = NAME
