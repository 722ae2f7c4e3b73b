"""The proof of a traced graph: its layers against the whole model, on two batches and in both modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipefit.cutting.differences import compared_sums, sums_of_gradients, worst_difference
from pipefit.cutting.states import kept_buffers, own_copy, seed_torch
from pipefit.cutting.traced import Traced
from pipefit.stage.payload import leaves_of
from pipefit.stage.stage import in_mode


def prove_trace(shell: Traced, model: nn.Module, batches: Sequence[Any]) -> str | None:
    """Compares the layers of a trace with the whole model.

    The example shows outputs and buffers; a batch of other data shows gradients, too, and the other mode. So a constant
    that a trace took from the example is found.

    Args:
        shell: its layers hold the model's own weights.
        model: the whole one.
        batches: the example, and another one.

    Returns:
        What differs; None: nothing does.
    """
    with kept_buffers(model) as restore:
        pair = _Pair(shell, model, restore)
        example, other = batches
        why = pair.outputs(example) or pair.gradients(other) or pair.in_flight(batches)
        if why is None and any(mode != shell.training and traces for (mode, *_), traces in shell.traces.items()):
            own = shell.training
            shell.train(not own)
            try:
                why = pair.outputs(other)
            finally:
                shell.train(own)
        return why


class _Pair:
    """Runs of the layers and of the whole model from the same buffers and random numbers."""

    def __init__(self, shell: Traced, model: nn.Module, restore: Callable[[], None]) -> None:
        self.shell = shell
        self.model = model
        self._restore = restore

    def begin(self, layer: int = 0) -> None:
        """The state before a forward."""
        if layer == 0:
            seed_torch(0)
            self._restore()

    def whole(self, batch: Any) -> Any:
        """The output of the whole model in the mode of the layers; it may write into its batch."""
        args, kwargs = self.shell.arguments(own_copy(batch))
        mode: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.shell.training != self.model.training:
            # Not around the layers, which nobody tells the mode either: a module may change its weights with it.
            mode = in_mode(self.shell.training, self.model)
        with mode:
            self.begin()
            return self.shell.result(self.model(*args, **kwargs))

    def outputs(self, batch: Any) -> str | None:
        """Names the first difference of an output or a buffer; None: there is none."""
        with torch.no_grad():
            mine = self._after(self.shell.run(0, self.shell.num_layers - 1, own_copy(batch), self.begin))
            worst = worst_difference(mine, self._after(self.whole(batch)))
        if worst is None:
            return None
        return f"its {self._mode} differs from the whole model's by {worst}"

    def gradients(self, batch: Any) -> str | None:
        """Names the first difference of an output, a buffer or a gradient, layer by layer; None: there is none."""
        payload = own_copy(batch)
        for number in range(self.shell.num_layers):
            payload = self.shell.run(number, number, payload, self.begin)
        mine = self._after(payload)
        try:
            got = sums_of_gradients(self.model, payload)
            left = self._after(())
            output = self.whole(batch)
            worst = worst_difference(mine, self._after(output))
            if worst is not None:
                return f"its {self._mode} on other data differs from the whole model's by {worst}"
            wanted = sums_of_gradients(self.model, output)
            worst = worst_difference(left, self._after(()))
            if worst is not None:
                return f"a buffer that the backward of the model's code writes differs by {worst}: its graph loses that"
            return compared_sums(got, wanted)
        except RuntimeError as problem:
            return f"its backward fails: {problem}"

    def in_flight(self, batches: Sequence[Any]) -> str | None:
        """The error of backwards that come after all forwards, as in a pipeline: a later one wrote what they need."""
        self._restore()
        payloads = []
        for batch in batches:
            payload = own_copy(batch)
            for number in range(self.shell.num_layers):
                payload = self.shell.run(number, number, payload, lambda layer: None)
            payloads.append(payload)
        try:
            for payload in payloads:
                sums_of_gradients(self.model, payload)
        except RuntimeError as problem:
            return f"its backward fails after the forward of another micro-batch: {problem}"
        return None

    @property
    def _mode(self) -> str:
        if self.shell.training:
            return "training"
        return "evaluation"

    def _after(self, output: Any) -> list[Any]:
        leaves = leaves_of(output)
        # The layers' buffers and the model's are the same ones.
        return [*leaves, *(buffer.clone() for buffer in self.model.buffers())]
