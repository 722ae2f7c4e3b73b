"""Models for the verbs: by name or factory, with options and a seed. Only used by verbs that need torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from pipefit.models import ModelBundle
    from pipefit.models.examples import Batch

ModelName = Annotated[
    str,
    Parameter(
        help="A built-in model (gpt, mlp, convnet), transformers:CLASS with fields of its configuration as options, a "
        "folder that save_pretrained wrote, or your own as package.module:factory or file.py:factory."
    ),
]
ModelOptions = Annotated[
    list[str] | None, Parameter(help="Options of the model, like layers=8,hidden=256; may be repeated.")
]


def make_model(name: str, options: list[str] | None, *, seed: int = 0, device: str | None = None) -> ModelBundle:
    """Builds a model with weights that depend only on the seed.

    Args:
        name: as given by the user.
        options: texts like "layers=8,hidden=256".
        seed: of torch's random numbers while it is built.
        device: of its tensors, such as "meta"; None: the model's choice.

    Raises:
        ModelError: an unknown model or option, or a factory that fails.
    """
    import torch

    from pipefit.models import build, parse_options

    given = parse_options(",".join(options or []), name)
    torch.manual_seed(seed)
    if device is None:
        return build(name, **given)
    with torch.device(device):
        return build(name, **given)


def importable(name: str) -> str:
    """A name by which other processes find the model too: a file becomes a module on the path."""
    place, _, factory = name.rpartition(":")
    file = Path(place)
    if file.suffix != ".py" or not file.is_file() or not file.stem.isidentifier():
        return name
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return f"{file.stem}:{factory}"


def batch_of(model: ModelBundle, size: int, seed: int = 0) -> Batch:
    """A random batch (x, y) for a model.

    Raises:
        ModelError: the user's example raised, or there is none.
    """
    from pipefit.errors import ModelError
    from pipefit.models.factory import call_factory

    made = call_factory(lambda: model.example(size, seed), {}, f"{model.name}: its example")
    if not isinstance(made, tuple) or len(made) != 2:
        raise ModelError(f"{model.name}: its example must give (x, y), got {type(made).__name__}")
    return made
