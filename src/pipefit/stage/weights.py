"""Versions of a stage's weights, several alive at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class WeightStore:
    """`at(version)` points the live parameters at the tensors of a version; nothing is copied to read one.

    The optimizer works on masters, separate parameters that share the newest version's memory. Autograd would treat a
    step on the live parameters as a change of tensors saved by micro-batches in flight, and refuse their backward.

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
        """Prepares masters and gradients for the optimizer, which turns `version` into `version` + 1.

        Args:
            version: from which the step starts.
            in_place: `version` is no longer needed, so its tensors are overwritten; else they are copied once.
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
        """Frees the gradients."""
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            master.grad = parameter.grad = None

    def drop(self, version: int) -> None:
        """Frees a version."""
        del self._versions[version]

    def rebase(self) -> None:
        """Renumbers the newest version as 0: a program has ended, and the next one counts from 0."""
        newest = max(self._versions)
        self.at(newest)
        self._versions = {0: self._versions[newest]}
        self._current = 0
