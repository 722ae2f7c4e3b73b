"""The host tier: a flat buffer of exactly the size that the records need, pinned where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pipefit.errors import TierError
from pipefit.spill.arena import aligned, pin, unpin
from pipefit.spill.lanes import Copy, Lanes
from pipefit.spill.tiers import WEIGHTS, WGRAD, Key
from pipefit.units import format_bytes


class HostTier:
    """Records in the host's memory.

    Args:
        capacity_bytes: most that it may take; None: no limit.
        lanes: shared with other stores; None: its own.
        device: whose memory the records come from.
    """

    def __init__(
        self, capacity_bytes: int | None = None, lanes: Lanes | None = None, device: torch.device | None = None
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._device = device or torch.device("cpu")
        self._lanes = lanes or Lanes(self._device)
        self._closes_lanes = lanes is None
        self._buffers: list[Tensor] = []
        self._rooms: dict[Key, Tensor] = {}
        self._versions: dict[Key, int] = {}
        self._requested: dict[Key, int] = {}
        self._writes: dict[Key, Copy] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def reserve(self, sizes: Mapping[Key, int], scratch: Sequence[Key] = ()) -> None:
        """See `TierStore`."""
        self.reserve_scratch(sizes)

    def reserve_scratch(self, sizes: Mapping[Key, int]) -> None:
        """See `TierStore`."""
        total = sum(sizes.values())
        wanted = self.num_bytes + total
        if self._capacity_bytes is not None and wanted > self._capacity_bytes:
            raise TierError(
                f"the host tier needs {format_bytes(wanted)} for spilled records, --host-memory allows "
                f"{format_bytes(self._capacity_bytes)}; allow more, or give --disk as well"
            )
        try:
            buffer = aligned(total)
            if self._device.type == "cuda" and total:
                pin(buffer)
        except RuntimeError as problem:
            raise TierError(f"the host has no room for {format_bytes(total)} of spilled records: {problem}") from None
        self._buffers.append(buffer)
        position = 0
        for key, size in sizes.items():
            self._rooms[key] = buffer[position : position + size]
            position += size

    def write(self, key: Key, version: int, source: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """See `TierStore`."""
        target = self._room(key, source.numel())

        def work() -> None:
            _copy(source, target)
            self._versions[key] = version

        self._requested[key] = version
        copy = self._writes[key] = self._lanes.write.submit(work, source.numel(), after)
        return copy

    def read(self, key: Key, version: int, into: Tensor, after: Sequence[Copy] = ()) -> Copy:
        """See `TierStore`."""
        source = self._room(key, into.numel())

        def work() -> None:
            if self._versions.get(key) != version:
                raise TierError(f"{key}: version {version} is needed, the host tier holds {self._versions.get(key)}")
            _copy(source, into)

        written = self._writes.get(key)
        return self._lanes.read.submit(work, into.numel(), (*after, *([written] if written else [])))

    def record(self, key: Key) -> Tensor:
        """The bytes of a record, where they lie."""
        return self._rooms[key]

    def written(self, key: Key) -> Tensor:
        """The bytes of a record, once its last write has ended."""
        if key in self._writes:
            self._writes[key].wait()
        return self.record(key)

    def set_version(self, key: Key, version: int) -> None:
        """Notes the version of a record that was filled where it lies."""
        self._versions[key] = self._requested[key] = version

    def step(self, stage: int, version: int, work: Callable[[], None], after: Sequence[Copy] = ()) -> Copy:
        """Starts a step on the records of a stage, once its gradients are written; it makes `version` of them."""
        key = Key(stage, WEIGHTS)
        writes = [self._writes[key] for key in (key, Key(stage, WGRAD)) if key in self._writes]

        def step() -> None:
            work()
            self._versions[key] = version

        self._requested[key] = version
        copy = self._writes[key] = self._lanes.host.submit(step, 0, (*after, *writes))
        return copy

    def holds(self, key: Key) -> int | None:
        """See `TierStore`."""
        return self._requested.get(key)

    def close(self, discard: bool = False) -> None:
        """Releases the buffers."""
        if self._closes_lanes:
            self._lanes.close()
        for buffer in self._buffers:
            if self._device.type == "cuda" and buffer.numel():
                unpin(buffer)
        self._buffers.clear()
        self._rooms.clear()

    def _room(self, key: Key, num_bytes: int) -> Tensor:
        record = self._rooms[key]
        assert num_bytes <= record.numel(), f"{key}: {num_bytes} bytes for a record of {record.numel()}"
        return record[:num_bytes]


def _copy(source: Tensor, target: Tensor) -> None:
    """On the host with numpy: torch would take the threads that compute. With a GPU it is only begun."""
    if source.device.type == "cpu" and target.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)
