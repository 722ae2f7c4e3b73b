"""Layers under `torch.compile`: one compiled function for each kind of layer, which takes the layer that it runs.

    layer(x)   becomes   function of its kind(forward of the layer, x)

The weights are inputs of what is compiled. So layers that are built alike share it, and so do the versions of a weight,
the copies of a stage, and the slots that a spilled stage is loaded into.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipefit.errors import ModelError, PipefitError, nearest
from pipefit.stage.split import NamedLayer, called_module

Forward = Callable[..., Any]

Forwards = dict[nn.Module, Forward]
"""Modules with other forwards, for `replaced_forwards`."""

_MOST_VARIANTS = 64
"""Compiled variants of a kind (shapes, with and without gradients, under autocast), after which it runs as it is."""


def backend_of(choice: bool | str, device: torch.device) -> str | None:
    """The compiler that a user asks for, made ready; None: layers run as they are.

    Args:
        choice: True is "inductor".
        device: where layers run.

    Raises:
        PipefitError: torch has no such backend, or it has no C++ compiler for a CPU.
    """
    if not choice:
        return None
    import torch._functorch.config
    import torch._inductor.exc
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.hub import tqdm

    if choice is True:
        name = "inductor"
    else:
        name = choice
    known = torch.compiler.list_backends(exclude_tags=None)
    if name not in known:
        raise PipefitError(
            f"compile: expected True, False or a backend of torch.compile, got {choice!r}; "
            f"{nearest(str(choice), known)}"
        )
    if name == "inductor" and device.type == "cpu":
        try:
            get_cpp_compiler()
        except torch._inductor.exc.InvalidCxxCompiler:
            raise PipefitError(
                "torch.compile needs a C++ compiler on a CPU, and found none: install g++, or name one in the "
                'environment variable CXX; or give compile="aot_eager", which needs none and fuses nothing'
            ) from None
    # Buffers given away to the first backward would be missing in the second half of a split one. What is set holds for
    # this thread; the default for those of autograd and of the caller, too.
    torch._functorch.config.donated_buffer = False
    torch._functorch.config._config["donated_buffer"].default = False  # type: ignore[attr-defined]
    # The compiler's progress bar would make a semaphore of the system, which a rank leaves behind at its end.
    if hasattr(tqdm, "set_lock"):
        tqdm.set_lock(threading.RLock())
    return name


def compiled_forwards(layers: Sequence[NamedLayer], backend: str | None) -> Forwards:
    """The modules of some layers that are compiled, with their compiled forwards, for `replaced_forwards`.

    Of a cut model these are its blocks. A single layer of torch's own stays as it is: it has nothing to fuse.

    Raises:
        ModelError: blocks whose forwards hand out what the model's own code gathers cannot be compiled.
    """
    if backend is None:
        return {}
    found: Forwards = {}
    for layer in layers:
        module = called_module(layer)
        if getattr(getattr(layer.module, "shell", None), "carried", ()):
            raise ModelError(
                "the outputs of the model's routers are gathered by hooks, which torch.compile would compile anew for "
                "each micro-batch; train it without compile, or with output_router_logits=False"
            )
        if module is not None and not is_one_of_torch(module):
            found[module] = functools.partial(_function_of(backend, repr(module)), module.forward)
    return found


def is_one_of_torch(module: nn.Module) -> bool:
    """Returns whether a module is a single one of torch's own, such as a linear layer."""
    if isinstance(module, _BatchNorm):
        return True
    return type(module).__module__.startswith("torch.nn.") and not list(module.children())


def _run(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


@functools.cache
def _function_of(backend: str, kind: str) -> Forward:
    """The compiled function of a kind of layer, the same for all pipelines of the process."""
    _clock()
    # What is compiled is kept with the code of a function: each kind has its own.
    function = types.FunctionType(_run.__code__.replace(), globals(), "layer")
    # The random numbers of torch itself, so that dropout draws what it draws without a compiler.
    if backend == "inductor":
        options: Any = {"fallback_random": True}
    else:
        options = None
    compiled: Any = torch.compile  # the types of torch do not name every argument
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return compiled(function, backend=backend, options=options, recompile_limit=_MOST_VARIANTS)
    # Older versions of torch have one limit for all functions of a process.
    from torch._dynamo import config

    config.recompile_limit = max(_MOST_VARIANTS, config.recompile_limit)
    return compiled(function, backend=backend, options=options)


class _Clock:
    """The time that torch's compilers take in this process."""

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self.seconds = self._began = 0.0
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def _start(self, _: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, _: Any) -> None:
        self.seconds += time.perf_counter() - self._began


_clock = functools.cache(_Clock)


def compile_seconds() -> float:
    """Seconds that this process has spent in compiling layers, 0 where it has compiled none."""
    if _function_of.cache_info().currsize:
        return _clock().seconds
    return 0.0
