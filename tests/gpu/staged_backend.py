"""A backend of `torch.distributed` for several processes on one GPU, where NCCL refuses to start; for tests only.

Tensors of a GPU go through the host's memory and Gloo. As with NCCL a call returns at once, after the kernels that made
its tensors have ended, and `wait` lets the current stream wait for what arrives. A rank that imports this module takes
the backend wherever it would take NCCL.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"


class Arrival(dist.Work):
    """Work of Gloo, and the copies of what it brings to the GPU."""

    def __init__(self, work: Any, arrived: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work, self._arrived = work, arrived

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        for target, host in self._arrived:
            target.copy_(host)
        self._arrived = ()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class Staged(dist.ProcessGroup):
    """A process group whose tensors may be on the host or on a GPU."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        cpu, gloo = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
        self._hosts = dist.ProcessGroup(store, rank, size)
        self._hosts._set_default_backend(gloo)
        self._hosts._register_backend(cpu, gloo, dist.ProcessGroupGloo(store, rank, size, timeout))

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return NAME

    def _through_host(self, start: Callable[..., Any], taken: Sequence[Any], given: Sequence[Any]) -> Any:
        """Starts Gloo's work on copies of `taken`, tensors and lists of them, of which `given` come back."""
        hosts: dict[int, Tensor] = {}

        def on_host(value: Any) -> Any:
            if isinstance(value, Tensor):
                return hosts.setdefault(id(value), value.cpu())
            return [on_host(one) for one in value]

        work = start(*map(on_host, taken))
        arrived = [(tensor, hosts[id(tensor)]) for tensor in given if tensor.is_cuda]
        return Arrival(work, arrived) if arrived else work

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        return self._through_host(lambda own: self._hosts.send(own, to, tag), [tensors], [])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return self._through_host(lambda own: self._hosts.recv(own, source, tag), [tensors], tensors)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._through_host(lambda own: self._hosts.allreduce(own, options), [tensors], tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._through_host(lambda own: self._hosts.broadcast(own, options), [tensors], tensors)

    def allgather(self, lists: list[list[Tensor]], tensors: list[Tensor], options: Any = None) -> Any:
        given = [tensor for own in lists for tensor in own]
        return self._through_host(lambda *own: self._hosts.allgather(*own), [lists, tensors], given)

    def alltoall_base(self, output: Tensor, given: Tensor, to: list[int], by: list[int], options: Any = None) -> Any:
        return self._through_host(lambda *own: self._exchange(*own, to, by), [output, given], [output])

    def _allgather_base(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        parts = list(output.view(self.size(), -1).unbind())
        return self.allgather([parts], [given.reshape(-1)])

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        whole = given.cpu()
        self._hosts.allreduce([whole]).wait()
        output.copy_(whole.view(self.size(), -1)[self.rank()].view_as(output))
        return self._hosts.barrier()

    # torch's names since 2.13
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base

    def _exchange(self, *given: Any) -> Any:
        call = getattr(self._hosts, "all_to_all_single", None) or self._hosts.alltoall_base
        return call(*given)

    def barrier(self, options: Any = None) -> Any:
        return self._hosts.barrier()


if not hasattr(dist.Backend, NAME.upper()):
    dist.Backend.register_backend(NAME, Staged, devices=["cuda"])
dist.Backend.default_device_backend_map["cuda"] = NAME
