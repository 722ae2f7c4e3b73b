"""AlexNet and VGG-16 as chains of layers, each with its ReLU, dropout and pooling.

    pipefit profile --model examples/models/vgg.py:vgg16 --option image=32,width=0.25,classes=10

AlexNet: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), the single-tower form.
VGG-16: Simonyan and Zisserman, "Very deep convolutional networks" (2015), configuration D.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def chain(layers: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    """The layers in order; each child is one layer of the profile, the smallest unit that a cut may separate."""
    return nn.Sequential(OrderedDict(layers))


def _complete(
    layers: list[tuple[str, nn.Module]], image: int, inputs: int, classes: int
) -> tuple[nn.Sequential, None, Any]:
    """The model after He initialisation (2015) of every convolution, no loss of its own, and a random example."""
    model = chain(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)

    def example(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Normal images (batch, inputs, image, image) and classes (batch,) int64."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, inputs, image, image, generator=draw)
        return x, torch.randint(0, classes, (batch,), generator=draw)

    return model, None, example


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding)
    return chain([("convolution", convolution), ("activation", nn.ReLU())])


def _pooled(layer: nn.Sequential, kernel: int, stride: int) -> nn.Sequential:
    layer.add_module("pool", nn.MaxPool2d(kernel, stride))
    return layer


def _scaled(channels: int, width: float) -> int:
    return max(1, round(channels * width))


def _classifier(
    features: int, hidden: int, classes: int, dropout: float, *, is_first: bool
) -> list[tuple[str, nn.Module]]:
    """Three linear layers, the first of which flattens; dropout is first in two of them (AlexNet) or last (VGG)."""

    def layer(inputs: int, *first: tuple[str, nn.Module]) -> nn.Sequential:
        drop, linear = ("dropout", nn.Dropout(dropout)), ("linear", nn.Linear(inputs, hidden))
        parts = [drop, linear, ("activation", nn.ReLU())] if is_first else [linear, ("activation", nn.ReLU()), drop]
        return chain([*first, *parts])

    fc6 = layer(features, ("flatten", nn.Flatten()))
    return [("fc6", fc6), ("fc7", layer(hidden)), ("fc8", nn.Linear(hidden, classes))]


def alexnet(
    image: int = 224, inputs: int = 3, classes: int = 1000, width: float = 1.0, dropout: float = 0.5
) -> tuple[nn.Sequential, None, Any]:
    """AlexNet of layers `conv1` … `conv5`, `fc6`, `fc7`, `fc8`: (b, inputs, image, image) -> (b, classes).

    At the defaults it has 61,100,840 parameters. Scaled down: `image=64, width=0.25, classes=10`.

    Args:
        image: height and width; at least 63, because of the strided first layer and three poolings.
        inputs: channels of the image.
        classes: logits.
        width: factor on all channels and hidden units.
        dropout: rate before `fc6` and `fc7`.

    Returns:
        The model, no loss of its own, and `example(batch, seed)`.
    """
    if image < 63:
        raise ValueError(f"image={image} vanishes in the poolings; the smallest that works is image=63")
    c = [_scaled(channels, width) for channels in (64, 192, 384, 256, 256)]
    conv5 = _pooled(_convolution(c[3], c[4], 3, padding=1), 3, 2)
    conv5.add_module("average", nn.AdaptiveAvgPool2d(6))
    layers = [
        ("conv1", _pooled(_convolution(inputs, c[0], 11, stride=4, padding=2), 3, 2)),
        ("conv2", _pooled(_convolution(c[0], c[1], 5, padding=2), 3, 2)),
        ("conv3", _convolution(c[1], c[2], 3, padding=1)),
        ("conv4", _convolution(c[2], c[3], 3, padding=1)),
        ("conv5", conv5),
        *_classifier(c[4] * 36, _scaled(4096, width), classes, dropout, is_first=True),
    ]
    return _complete(layers, image, inputs, classes)


_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # (channels, convolutions) of the five groups


def vgg16(
    image: int = 224, inputs: int = 3, classes: int = 1000, width: float = 1.0, dropout: float = 0.5
) -> tuple[nn.Sequential, None, Any]:
    """VGG-16 of layers `conv1_1` … `conv5_3`, `fc6`, `fc7`, `fc8`: (b, inputs, image, image) -> (b, classes).

    A convolution's layer holds its ReLU and, at the end of a group, the pooling. At the defaults it has 138,357,544
    parameters. Scaled down: `image=32, width=0.25, classes=10`.

    Args:
        image: height and width, a multiple of 32.
        inputs: channels of the image.
        classes: logits.
        width: factor on all channels and hidden units.
        dropout: rate before `fc7` and `fc8`.

    Returns:
        The model, no loss of its own, and `example(batch, seed)`.
    """
    if image % 32:
        raise ValueError(f"image={image} is not a multiple of 32, the product of the poolings")
    model: list[tuple[str, nn.Module]] = []
    before = inputs
    for group, (channels, count) in enumerate(_VGG16, start=1):
        for index in range(1, count + 1):
            layer = _convolution(before, _scaled(channels, width), 3, padding=1)
            model.append((f"conv{group}_{index}", _pooled(layer, 2, 2) if index == count else layer))
            before = _scaled(channels, width)
    features = before * (image // 32) ** 2
    model += _classifier(features, _scaled(4096, width), classes, dropout, is_first=False)
    return _complete(model, image, inputs, classes)
