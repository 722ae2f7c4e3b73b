"""The data and the parts of Python objects, by names for people."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Named = tuple[str, Any]
"""A value with its name."""


def data_of(value: Any) -> Any:
    """The data of an array or a generator of random numbers, which can be compared; None: it is another object."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return repr(value)
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return None


def named_parts(name: str, value: Any) -> Iterator[Named]:
    """The values that a container or an object holds, with their names."""
    if isinstance(value, dict):
        for key, inner in list(value.items()):
            yield f"{name}[{str(key)[:40]!r}]", inner
    elif isinstance(value, list | tuple | set | deque):
        for index, inner in enumerate(list(value)):
            yield f"{name}[{index}]", inner
    elif hasattr(value, "__dict__"):
        for key, inner in list(vars(value).items()):
            yield f"{name}.{key}", inner
