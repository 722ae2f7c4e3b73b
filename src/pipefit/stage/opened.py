"""Any object as its tensors and the rest: dataclasses, other classes, containers that no pytree knows.

    Output(logits=T₀, extra=[T₁, "text"])   ─►   [T₀, T₁]  and  Output(logits=·0, extra=[·1, "text"])

The rest is a pickle in which tensors have numbers. It stays in its process: classes and functions in it are references.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_REFERENCES = (type, types.BuiltinFunctionType, types.ModuleType)
"""Kinds of values that a rest refers to, for instance because they are local to a function."""


class _Opening(pickle.Pickler):
    """Writes an object without its tensors and references, which it collects."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.tensors: list[Tensor] = []
        self.references: list[Any] = []
        self._places: dict[int, tuple[str, int]] = {}

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        """The number of a tensor or a reference; None: the value itself is written."""
        if isinstance(value, Tensor):
            return self._place("tensor", self.tensors, value)
        # A function that has variables of another one may have tensors, which nobody would find.
        is_free = isinstance(value, types.FunctionType) and value.__closure__ is None
        if is_free or isinstance(value, _REFERENCES):
            return self._place("reference", self.references, value)
        return None

    def _place(self, kind: str, known: list[Any], value: Any) -> tuple[str, int]:
        if id(value) not in self._places:
            self._places[id(value)] = kind, len(known)
            known.append(value)
        return self._places[id(value)]


class _Closing(pickle.Unpickler):
    """Reads an object, with other tensors."""

    def __init__(self, rest: Rest, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(rest.data))
        self._known = {"tensor": tensors, "reference": rest.references}

    def persistent_load(self, place: tuple[str, int]) -> Any:
        """The tensor or the reference with a number."""
        kind, number = place
        return self._known[kind][number]


@dataclass(frozen=True)
class Rest:
    """An object without its tensors.

    Attributes:
        data: its pickle.
        references: what the pickle refers to.
    """

    data: bytes
    references: tuple[Any, ...]

    def closed(self, tensors: Sequence[Tensor]) -> Any:
        """The object with some tensors; the inverse of `opened`."""
        return _Closing(self, tensors).load()


def opened(value: Any) -> tuple[list[Tensor], Rest]:
    """The tensors of an object, each once, and the rest.

    Raises:
        TypeError: a part of it cannot be pickled, such as a lock or an open file.
    """
    stream = io.BytesIO()
    opening = _Opening(stream)
    opening.dump(value)
    return opening.tensors, Rest(stream.getvalue(), tuple(opening.references))
