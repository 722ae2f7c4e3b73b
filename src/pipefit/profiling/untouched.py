"""Restoring the user's model: weights, gradients, buffers, modes, and every random number generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipefit.cutting.states import attributes_kept, kept_outside
from pipefit.ir.collector import collector_paused
from pipefit.profiling.tensors import placed
from pipefit.stage.split import NamedLayer, joined
from pipefit.stage.stage import in_mode


@contextmanager
def untouched(
    chain: Sequence[NamedLayer], device: torch.device, dtype: torch.dtype | None, loss: Any = None
) -> Iterator[None]:
    """The context with the layers on `device` in `dtype`, in train mode and without gradients; then all is restored.

    Parameters keep their identity (so ties stay) and get other data meanwhile; buffers are replaced by copies, so a
    forward pass updates only the running statistics of the copies. So it is with attributes, and the loss's variables.
    """
    roots = joined(chain)
    buffers = [(module, dict(module._buffers)) for module in roots.modules()]
    copies: dict[int, Tensor] = {}

    with kept_outside(roots, device), collector_paused(), in_mode(True, roots):
        try:
            for parameter in roots.parameters():
                parameter.grad = None
                parameter.data = placed(parameter.data, device, dtype)
            for module, kept in buffers:
                for name, buffer in kept.items():
                    if buffer is not None:
                        module._buffers[name] = copies.setdefault(id(buffer), placed(buffer, device, dtype).clone())
            with attributes_kept(roots, loss), torch.enable_grad():
                yield
        finally:
            for module, kept in buffers:
                module._buffers.clear()
                module._buffers.update(kept)


@contextmanager
def with_threads(threads: int | None) -> Iterator[None]:
    """Runs torch with this many threads; None: unchanged."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
