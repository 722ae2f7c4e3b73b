"""Models by name, each with its loss and an example: built-in ones, and the user's `pkg.mod:factory`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from pipefit.cutting import Cut, cut
from pipefit.cutting.anatomy import num_weights
from pipefit.cutting.own import without_adapters
from pipefit.errors import ModelError, nearest
from pipefit.models import examples
from pipefit.models.blocks import chain
from pipefit.models.convolution import convnet
from pipefit.models.examples import Batch, Example, mean_cross_entropy, mean_cube
from pipefit.models.factory import Factory, Options, call_factory, find_factory
from pipefit.models.factory_options import check_options, parse_text, signature_of
from pipefit.models.gpt import gpt
from pipefit.models.hub import hub_parts, is_folder, is_hub
from pipefit.models.mlp import mlp
from pipefit.parallel.loss import Loss
from pipefit.stage.split import is_sequence, joined, named_layers


class BuiltIn(NamedTuple):
    """A model that comes with pipefit: its factory, its example, and the data set that suits its default sizes."""

    factory: Callable[..., nn.Sequential]
    example: Callable[..., Batch]
    data: str


BUILT_IN: Mapping[str, BuiltIn] = {
    "convnet": BuiltIn(convnet, examples.classified, "digits"),
    "gpt": BuiltIn(gpt, examples.text, "text"),
    "mlp": BuiltIn(mlp, examples.classified, "digits"),
}


@dataclass(frozen=True)
class ModelBundle:
    """A model, ready to be profiled, split and trained.

    Attributes:
        name: as the user wrote it.
        layers: the model as named layers in order, or cut into layers.
        loss: (output, target) -> scalar mean over the samples.
        example: (batch, seed) -> random (x, y) of the shapes and types that the model takes.
        data: name of the data set to train on when none is given ("text", "digits"), or None.
        options: every option with its value (for a user's factory, those given).
        num_parameters: trainable and frozen ones, a tied one once, as built; later a rank keeps only its part.
    """

    name: str
    layers: nn.Sequential | Cut
    loss: Loss
    example: Example
    data: str | None
    options: Options
    num_parameters: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_parameters", num_weights(joined(named_layers(self.layers))))

    def describe(self) -> str:
        """One line for people: name, options, layers, parameters."""
        given = ", ".join(f"{name}={value}" for name, value in self.options.items())
        sizes = f"{len(self.layers)} layers, {self.num_parameters:,} parameters"
        return f"{self.name}({given}): {sizes}"


def build(name_or_path: str, **options: object) -> ModelBundle:
    """Builds a model: a built-in one by name, one of transformers, or the user's `pkg.mod:factory`, `file.py:factory`.

    One of transformers is `transformers:CLASS`, with fields of its configuration as options, or a folder that
    `save_pretrained` wrote.

    The user's factory returns an `nn.Sequential`, a list of modules or of (name, module), a `Cut`, or any `nn.Module`;
    or a tuple (model, loss) or (model, loss, example), with `example(batch, seed) -> (x, y)`; other modules are cut by
    such an example. The loss is the model's own or cross entropy when none is given. Weights come
    from torch's global random state, so seed it first.

    Args:
        name_or_path: of the model.
        options: of its factory; words are read by the types in its signature.

    Raises:
        ModelError: an unknown name (the nearest is suggested) or option, or a factory that cannot be found, raises,
            or returns something else.
    """
    if _is_hub(name_or_path):
        return hub_bundle(name_or_path, options)
    factory = _factory(name_or_path)
    given = check_options(factory, options, name_or_path)
    made = call_factory(factory, given, name_or_path)
    entry = BUILT_IN.get(name_or_path)
    if entry is None:
        return _users(name_or_path, made, given)
    complete = {one.name: one.default for one in signature_of(factory).parameters.values()}
    complete |= given
    example = partial(entry.example, complete)
    return ModelBundle(name_or_path, made, mean_cross_entropy, example, entry.data, complete)


def hub_bundle(name: str, options: Options, lora: str = "") -> ModelBundle:
    """A model of transformers; see `hub_parts`."""
    layers, example = hub_parts(name, options, lora)
    kind = type(without_adapters(layers.shell.model)).__name__
    data = None
    if is_folder(name) and kind.endswith("ForCausalLM"):
        data = "text"
    return ModelBundle(name, layers, layers.loss or mean_cube, example, data, options)


def _is_hub(name: str) -> bool:
    return name not in BUILT_IN and is_hub(name)


def _factory(name_or_path: str) -> Factory:
    if ":" in name_or_path:
        return find_factory(name_or_path)
    if name_or_path not in BUILT_IN:
        own = "your own is given as package.module:factory, one of transformers as transformers:CLASS or a folder"
        raise ModelError(f"unknown model {name_or_path!r} ({own}); {nearest(name_or_path, BUILT_IN)}")
    return BUILT_IN[name_or_path].factory


def parse_options(text: str, name_or_path: str) -> dict[str, Any]:
    """Options of a model from text such as `layers=8,hidden=256`, by the types in its factory's signature.

    Raises:
        ModelError: not NAME=VALUE, an unknown option (the valid ones are listed), or a word of another type.
    """
    if _is_hub(name_or_path):
        return dict(parse_text(text, name_or_path))
    return check_options(_factory(name_or_path), parse_text(text, name_or_path), name_or_path)


def _users(path: str, made: object, given: Options) -> ModelBundle:
    """The bundle of the result of a user's factory."""
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3:
        raise ModelError(f"{path}: expected a model, (model, loss) or (model, loss, example); got {len(parts)} things")
    model, loss, example = (*parts, None, None)[:3]
    for part, what in ((loss, "loss"), (example, "example")):
        if part is not None and not callable(part):
            raise ModelError(f"{path}: the {what} must be callable, got {type(part).__name__}")
    layers = _as_layers(model, example, path)
    loss = loss or getattr(layers, "loss", None) or mean_cross_entropy
    return ModelBundle(path, layers, loss, example or _no_example(path), None, given)


def _no_example(path: str) -> Example:
    def example(batch: int, seed: int = 0) -> Batch:
        raise ModelError(
            f"{path}: the shapes of its input are not known; let the factory return (model, loss, example), "
            "with example(batch, seed) giving random (x, y), or train on --data digits"
        )

    return example


def _as_layers(model: object, example: Example | None, path: str) -> nn.Sequential | Cut:
    """The model as a sequence of layers; any other is cut into them by a batch of the example, if it has parts."""
    if isinstance(model, Cut):
        return model
    try:
        if isinstance(model, nn.Module) and not is_sequence(model):
            if not any(True for _ in model.children()):
                return chain([("model", model)])
            made = example and call_factory(lambda: example(3, 0), {}, f"{path}: its example")
            return cut(model, made and made[0])
        layers = named_layers(model)
    except ModelError as problem:
        raise ModelError(f"{path}: {problem}; a factory returns (model, loss, example)") from problem
    if isinstance(model, nn.Sequential):
        return model
    return chain((layer.name, layer.module) for layer in layers)
