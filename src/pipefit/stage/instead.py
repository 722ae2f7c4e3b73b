"""Functions of torch that are called in another way for a while, in code that is not compiled."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class Instead(TorchFunctionMode):
    """While it is entered, calls `call(function, *args)` in place of some functions of torch.

    Args:
        functions: of torch.
        call: gets the function and its arguments.
    """

    def __init__(self, functions: Container[Any], call: Callable[..., Any]) -> None:
        super().__init__()
        self._functions = functions
        self._call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch."""
        if func in self._functions:
            return self._call(func, *args, **kwargs or {})
        return func(*args, **kwargs or {})
