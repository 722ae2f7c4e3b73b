"""Tensors of stages that live on a tier: they come onto the device stage by stage while they are saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, ValuesView
from typing import Any

from torch import Tensor

from pipefit.runtime.worker import Worker

__all__ = ["StagedTensors"]


class StagedTensors(dict[str, Tensor]):
    """A rank's tensors by name, of which those of spilled stages are read when they are walked or asked for.

    Keys and items tell names, shapes and types without reading anything: there a spilled tensor is a stand-in.

    Args:
        worker: of the rank.
        stages: whose tensors they are, in their order.
        of: the tensors of a stage as they are now, by name.
    """

    def __init__(self, worker: Worker, stages: list[int], of: Callable[[int], dict[str, Tensor]]) -> None:
        super().__init__()
        self._worker, self._stages, self._of = worker, stages, of
        self._home: dict[str, int] = {}
        self._read: tuple[int, dict[str, Tensor]] = (-1, {})
        for stage in stages:
            found = of(stage)
            self._home.update(dict.fromkeys(found, stage))
            self.update(found)

    def values(self) -> ValuesView[Tensor]:
        """The tensors, each valid until the next."""
        return self._walk()

    def _walk(self) -> Iterator[Tensor]:
        for stage in self._stages:
            with self._worker.presence(stage, optim=True):
                yield from self._of(stage).values()

    def get(self, name: str, default: Any = None) -> Any:
        """A tensor by its name; the stage it is of is kept until one of another is asked for."""
        stage = self._home.get(name)
        if stage is None:
            return default
        if self._read[0] != stage:
            with self._worker.presence(stage, optim=True):
                self._read = (stage, {key: tensor.clone() for key, tensor in self._of(stage).items()})
        return self._read[1][name]
