"""Versions of a stage's weights, several alive at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class WeightStore:
    """`at(version)` points the live parameters at the tensors of a version; nothing is copied to read one.

    The optimizer works on masters, parameters of their own that share the newest version's memory: a step on the live
    parameters would be seen by autograd as a change of what micro-batches in flight have saved, and refused.

    Attributes:
        masters: the parameters that the optimizer gets.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._versions: dict[int, list[Tensor]] = {0: [parameter.data for parameter in self._parameters]}
        self._current = 0
        self.masters = [nn.Parameter(parameter.data) for parameter in self._parameters]

    def at(self, version: int) -> None:
        """Makes a version the live one."""
        if version != self._current:
            for parameter, data in zip(self._parameters, self._versions[version], strict=True):
                parameter.data = data
            self._current = version

    @torch.no_grad()
    def begin_step(self, version: int, in_place: bool) -> None:
        """Readies masters and gradients for the optimizer, which turns `version` into `version` + 1.

        Args:
            version: what the step starts from.
            in_place: `version` is not needed any more, so its tensors are overwritten; else they are copied once.
        """
        data = self._versions[version]
        if not in_place:
            data = [tensor.clone() for tensor in data]
        self._versions[version + 1] = data
        for master, tensor, parameter in zip(self.masters, data, self._parameters, strict=True):
            if not in_place:
                master.data = tensor
            master.grad = parameter.grad
        if in_place and self._current == version:
            # While draining, the live parameters may still point at an older version: then they stay there.
            self._current = version + 1

    def end_step(self) -> None:
        """Lets go of the gradients."""
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            master.grad = parameter.grad = None

    def drop(self, version: int) -> None:
        """Forgets a version."""
        del self._versions[version]

    def rebase(self) -> None:
        """Calls the newest version 0 again: a program has ended, the next one starts counting anew."""
        newest = max(self._versions)
        self.at(newest)
        self._versions = {0: self._versions[newest]}
        self._current = 0
