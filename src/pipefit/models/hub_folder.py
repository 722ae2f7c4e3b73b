"""A folder that `save_pretrained` wrote: its weights, read layer by layer."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pipefit.errors import ModelError
from pipefit.parallel import Mesh

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MOST_NAMED = 5


@dataclass
class _Group:
    """Tensors of a folder from which one conversion makes weights.

    Attributes:
        conversion: of transformers.
        sources: (name on disk, pattern of the conversion).
        targets: names of the weights in the model.
    """

    conversion: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)

    @property
    def is_renamed(self) -> bool:
        """Whether it is one tensor, with nothing but another name."""
        return type(self.conversion).__name__ == "WeightRenaming"


_Wanted = dict[str, list[tuple[str, Tensor]]]
"""Of a weight in the model: the user's name, and the memory that it goes to; of a tied one several."""


class FolderWeights:
    """Sets the weights of layers from a folder, and reads no others: an `InitialiseLayer`.

    Names on disk are those of the Hub; transformers' own conversions map them to the names in the model. Weights get
    the type that they have in the model, regardless of their type on disk.

    Args:
        folder: of the weights.
        files: of each tensor, from `weight_files`.
        model: as transformers builds it, on the meta device.

    Raises:
        ModelError: tensors are missing, superfluous or of other shapes.
    """

    is_complete = True

    def __init__(self, folder: Path, files: Mapping[str, str], model: Any) -> None:
        self.folder = folder
        self._file_of = files
        self._model = model
        self._mesh = Mesh()
        state = dict(model.state_dict(keep_vars=True))
        self._groups, self._shown = self._grouped(state)
        # A tied weight is on disk under one of its names.
        found = {name for group in self._groups.values() for name in group.targets}
        owner = {id(state[name]): name for name in state if name in found}
        self._tied = {name: owner.get(id(value), name) for name, value in state.items()}
        self._check(state, found)

    def over(self, mesh: Mesh) -> FolderWeights:
        """This folder, of which one process of a mesh reads only its part of the weights."""
        other = copy.copy(self)
        other._mesh = mesh
        return other

    def __call__(self, prefix: str, module: nn.Module) -> None:
        """Reads the weights of a layer.

        Args:
            prefix: of the names of its weights.
            module: of the layer; weights with memory are set, those of the meta device stay without.
        """
        wanted: _Wanted = {}
        for path, part in module.named_modules(prefix=prefix):
            for own, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and not tensor.is_meta:
                    name = f"{path}.{own}".removeprefix(".")
                    plain = saved_name(name)
                    target: str = self._tied.get(plain) or plain
                    wanted.setdefault(target, []).append((name, tensor))
        for group in self._groups.values():
            if not wanted.keys().isdisjoint(group.targets):
                self._read(group, wanted)

    @torch.no_grad()
    def _read(self, group: _Group, wanted: _Wanted) -> None:
        conversion = copy.deepcopy(group.conversion)
        first = group.targets[0]
        for source, pattern in group.sources:
            with safe_open(self.folder / self._file_of[source], framework="pt") as file:
                if group.is_renamed:
                    for name, tensor in wanted[first]:
                        read = file.get_tensor
                        if name in self._mesh.shards:
                            read = file.get_slice
                        tensor.copy_(self._mesh.part(name, read(source)))
                    return
                conversion.add_tensor(first, source, pattern, file.get_tensor(source))
        made = conversion.convert(first, model=self._model, config=self._model.config)
        for target, value in made.items():
            if isinstance(value, list):
                value = value[0]
            for name, tensor in wanted.get(target, ()):
                tensor.copy_(self._mesh.part(name, value))

    def _grouped(self, state: Mapping[str, Tensor]) -> tuple[dict[str, _Group], dict[str, str]]:
        """Groups by their first target; and for each name on disk its target."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self._model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        base = self._model.base_model_prefix
        groups: dict[str, _Group] = {}
        shown = {}
        # Experts are joined in the order of their numbers.
        for name in sorted(self._file_of, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, base, dict(state))
            if target not in state and name in state:
                target = name
                pattern = None
            shown[name] = target
            if target not in state:
                continue
            conversion = by_pattern[pattern] if pattern else WeightRenaming(name, target)
            targets = [target]
            if pattern:
                targets += [target.replace(conversion.target_patterns[0], t) for t in conversion.target_patterns[1:]]
            group = groups.setdefault(target, _Group(conversion, targets=targets))
            group.sources.append((name, pattern or name))
        return groups, shown

    def _check(self, state: Mapping[str, Tensor], found: set[str]) -> None:
        ignored = [*(self._model._keys_to_ignore_on_load_missing or ())]
        missing = _without([name for name in state if self._tied[name] not in found], ignored)
        ignored = [*(self._model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"position_ids$"]
        extra = _without([name for name, target in self._shown.items() if target not in state], ignored)
        wrong = []
        for group in self._groups.values():
            name = group.sources[0][0]
            target = group.targets[0]
            if group.is_renamed:
                shape = self._shape(name)
                expected = list(state[target].shape)
                if shape != expected:
                    wrong.append(f"{name} {shape} instead of {expected}")
        problems = []
        for what, names in (("missing", missing), ("not of this model", extra), ("of another shape", wrong)):
            if names:
                problems.append(f"{len(names)} {what}: {_some(names)}")
        if problems:
            kind = type(self._model).__name__
            raise ModelError(
                f"{self.folder}: its tensors are not those of {kind}: {'; '.join(problems)}; is "
                "config.json the one with which these weights were saved?"
            )

    def _shape(self, name: str) -> list[int]:
        with safe_open(self.folder / self._file_of[name], framework="pt") as file:
            return list(file.get_slice(name).get_shape())


def _without(names: list[str], ignored: list[str]) -> list[str]:
    """The names that no pattern has."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in ignored)]


def saved_name(name: str) -> str:
    """The name of a weight without the parts that peft adds."""
    return re.sub(r"\.(base_layer|original_module)(?=\.)", "", name.removeprefix("base_model.model."))


def weight_files(folder: Path) -> dict[str, str]:
    """The file of each tensor of a folder with one safetensors file, or several and an index.

    Raises:
        ModelError: there are none, or only pickles.
    """
    try:
        if (folder / _INDEX).is_file():
            files = dict(json.loads((folder / _INDEX).read_text())["weight_map"])
            lacking = [file for file in sorted(set(files.values())) if not (folder / file).is_file()]
            if lacking:
                raise ModelError(f"{folder}: {_INDEX} names {_some(lacking)}, which are not there")
            return files
        if (folder / _SINGLE).is_file():
            with safe_open(folder / _SINGLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), _SINGLE)
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as problem:
        raise ModelError(f"{folder}: its weights cannot be read: {problem}") from problem
    for path in folder.iterdir():
        if path.suffix in (".bin", ".pt", ".pth"):
            raise ModelError(
                f"{folder}: {path.name} is a pickle, which can run any code; convert it where you trust it: "
                "AutoModel.from_pretrained(folder).save_pretrained(folder)"
            )
    raise ModelError(f"{folder}: expected {_SINGLE}, or several files with {_INDEX}; found neither")


def _some(names: list[str]) -> str:
    some = ", ".join(names[:_MOST_NAMED])
    rest = len(names) - _MOST_NAMED
    if rest > 0:
        return f"{some} and {rest} more"
    return some
