"""All models of the zoo, by their library."""

from __future__ import annotations

import importlib
import importlib.util

from tests.zoo.specimen import Specimen

LIBRARIES = {
    "torchvision": ("torchvision_models",),
    "diffusers": ("diffusers_models",),
    "torch_geometric": ("torch_geometric_models",),
    "torchaudio": ("torchaudio_models",),
    "transformers": ("transformers_models",),
    "timm": ("timm_models",),
    "hand": ("hand.channels", "hand.state", "hand.flow", "hand.structure", "hand.gradients"),
}
"""The modules that hold the models of each library; they are imported only for these."""


def specimens_of(library: str) -> list[Specimen]:
    """The models of a library, in order; none of torchaudio where it is not installed."""
    if library == "torchaudio" and importlib.util.find_spec(library) is None:
        return []
    found: list[Specimen] = []
    for name in LIBRARIES[library]:
        found += importlib.import_module(f"tests.zoo.{name}").SPECIMENS
    return found
