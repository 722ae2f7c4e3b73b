"""The proof of a cut: one batch through its layers, with all values and gradients compared with the whole model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.cutting.anatomy import Anatomy, Seen, observe
from pipefit.cutting.shell import Shell
from pipefit.cutting.traced import Traced
from pipefit.errors import ModelError


class Difference(NamedTuple):
    """A place at which a cut gives other results than the model.

    Attributes:
        block: number of the first block (from 0) before which it cannot be cut; None: no single one.
        why: for people.
    """

    block: int | None
    why: str


def prove(shell: Shell, example: Any, seen: Seen) -> Difference | None:
    """Compares the layers, one by one, with the whole model: outputs, buffers, and gradients of every weight.

    Args:
        shell: of the cut.
        example: a batch.
        seen: the run of the whole model on it, each layer with its number as the seed.
    """
    payload: Any = example
    last = shell.num_layers - 1
    for number in range(shell.num_layers):
        try:
            payload = shell.run(number, number, payload, torch.manual_seed)
        except ModelError:
            raise
        except Exception as problem:
            where = max(number - 1, 0)
            return Difference(where, f"its forward fails there: {type(problem).__name__}: {problem}")
        if number < last:
            leaves = seen.entries[number] if number < last - 1 else seen.exits[-1]
            wanted = [leaves[place] for place in shell.crossing[number + 1]]
            worst = _worst(payload["values"], wanted)
            if worst is not None:
                return Difference(
                    min(number, last - 2), f"a value that enters it differs from the whole model by {worst}"
                )
    worst = _worst(pytree.tree_leaves(payload), pytree.tree_leaves(shell.result(seen.output)))
    if worst is not None:
        return Difference(last - 2, f"the output differs from the whole model's by {worst}")
    worst = _worst(list(shell.model.buffers()), seen.buffers)
    if worst is not None:
        return Difference(None, f"a buffer that its own code writes differs from the whole model's by {worst}")
    half = shell.num_layers // 2
    with torch.no_grad():
        first = shell.run(0, half - 1, example, torch.manual_seed)
        joined = shell.run(half, last, first, torch.manual_seed)
    worst = _worst(
        pytree.tree_leaves(joined),
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(payload)],
    )
    if worst is not None:
        return Difference(None, f"several layers together differ from the same ones one by one by {worst}")
    args, kwargs = shell.arguments(example)
    worst = _gradients(shell.model, payload, lambda: shell.result(_whole(shell, args, kwargs)))
    return None if worst is None else Difference(None, worst)


def prove_trace(shell: Traced, model: nn.Module, example: Any) -> str | None:
    """Compares the layers of a trace with the whole model: outputs and buffers in both modes, and gradients.

    Args:
        shell: its layers hold the model's own weights.
        model: the whole one.
        example: a batch.

    Returns:
        What differs; None: nothing does.
    """
    args, kwargs = shell.arguments(example)
    own, modes = model.training, [(module, module.training) for module in model.modules()]
    with kept_buffers(model) as restore:

        def begin(layer: int = 0) -> None:
            if layer == 0:
                torch.manual_seed(0)
                restore()

        def whole() -> Any:
            begin()
            return shell.result(model(*args, **kwargs))

        def after(output: Any) -> list[Any]:
            return [*pytree.tree_leaves(output), *(buffer.clone() for buffer in model.buffers())]

        try:
            for mode in sorted({key[0] for key, traces in shell.traces.items() if traces}, key=own.__eq__):
                shell.train(mode)
                for module, flag in modes:
                    module.training = flag if mode == own else mode
                with torch.no_grad():
                    worst = _worst(after(shell.run(0, shell.num_layers - 1, example, begin)), after(whole()))
                if worst is not None:
                    return f"its {'training' if mode else 'evaluation'} differs from the whole model's by {worst}"
            payload = example
            for number in range(shell.num_layers):
                payload = shell.run(number, number, payload, begin)
            return _gradients(model, payload, whole)
        finally:
            shell.train(own)
            for module, flag in modes:
                module.training = flag


@contextlib.contextmanager
def kept_buffers(model: nn.Module) -> Iterator[Callable[[], None]]:
    """The context after which a model has its buffers back, also those that its forward replaced by others.

    It gives the function that does this.
    """
    kept = [(module, dict(module._buffers)) for module in model.modules()]
    values = {id(buffer): buffer.clone() for buffer in model.buffers()}

    @torch.no_grad()
    def restore() -> None:
        for module, buffers in kept:
            module._buffers.update(buffers)
        for buffer in model.buffers():
            buffer.copy_(values[id(buffer)])

    try:
        yield restore
    finally:
        restore()


def _worst(got: Sequence[Any], wanted: Sequence[Any]) -> str | None:
    """The largest relative difference, if it is more than rounding; or a difference of structure or shape."""
    if len(got) != len(wanted):
        return f"its structure ({len(got)} values, {len(wanted)} wanted)"
    for mine, other in zip(got, wanted, strict=True):
        if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
            continue
        if mine.shape != other.shape or mine.dtype != other.dtype:
            return f"its shape ({list(mine.shape)}, {list(other.shape)} wanted)"
        if not mine.is_floating_point():
            if not torch.equal(mine, other):
                return "whole numbers"
            continue
        far = (mine.detach() - other).abs()
        scale = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
        same = (mine.detach() == other) | (mine.detach().isnan() & other.isnan())
        distance = float(far[~same].max()) if (~same).any() else 0.0
        if not distance <= 1e3 * torch.finfo(mine.dtype).eps * max(scale, 1e-30):
            return "NaN" if distance != distance else f"{distance / max(scale, 1e-30):.1e}"
    return None


def _gradients(model: nn.Module, payload: Any, whole: Callable[[], Any]) -> str | None:
    try:
        got = _sums_of_gradients(model, payload)
        wanted = got and _sums_of_gradients(model, whole())
    except RuntimeError as problem:
        return f"its backward fails: {problem}"
    if got is None or wanted is None:
        return None
    scale = max((float(sums.abs().nan_to_num(0).max()) for sums in wanted.values() if sums.numel()), default=0.0)
    for name in {**wanted, **got}:
        one = next(sums[name] for sums in (wanted, got) if name in sums)
        mine, other = (sums.get(name, torch.zeros_like(one)) for sums in (got, wanted))
        # NaN in the whole model too is not a mistake of the cut.
        far = torch.where(mine.isnan() & other.isnan(), 0, mine - other).abs()
        distance = float(far.max()) if far.numel() else 0.0
        most = max(float(other.abs().nan_to_num(0).max()) if other.numel() else 0.0, scale / 100)
        if not distance <= 1e4 * torch.finfo(one.dtype).eps * most:
            return f"the gradient of {name} differs from the whole model's by {distance / most:.1e}"
    return None


def _whole(shell: Shell, args: Any, kwargs: Any) -> Any:
    """Runs the whole model once more, now with its graph; each layer has its number as the seed."""
    paths = {id(module): path for path, module in shell.model.named_modules()}
    parts = Anatomy(tuple(paths[id(block)] for block in shell.blocks), (), ())
    return observe(shell.model, parts, args, kwargs, torch.manual_seed).output


def _sums_of_gradients(model: nn.Module, payload: Any) -> dict[str, Tensor] | None:
    """Weighted sums along the rows of each weight's gradient, which is freed at once; None: nothing is trained.

    So the gradients of a large model are never all in memory at the same time.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(payload) if isinstance(leaf, Tensor) and leaf.requires_grad]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not leaves or not trained:
        return None
    sums: dict[str, Tensor] = {}
    before = [(parameter, parameter.grad) for _, parameter in trained]

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        rows = parameter.grad.reshape(len(parameter) if parameter.dim() > 1 and parameter.numel() else 1, -1)
        sums[name] = rows @ _uneven(rows.shape[1], rows)
        parameter.grad = None

    for _, parameter in trained:
        parameter.grad = None
    handles = [p.register_post_accumulate_grad_hook(functools.partial(keep, name)) for name, p in trained]
    try:
        torch.autograd.backward(leaves, [_uneven(leaf.numel(), leaf).view(leaf.shape) for leaf in leaves])
    finally:
        for handle in handles:
            handle.remove()
        for parameter, grad in before:
            parameter.grad = grad
    return sums


def _uneven(count: int, like: Tensor) -> Tensor:
    """Weights that differ, so that two errors do not cancel."""
    return torch.linspace(0.5, 1.5, count).to(like)
