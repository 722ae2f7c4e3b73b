"""Convolutional chains: a small one with batch norm for the digits, AlexNet and VGG-16.

AlexNet: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), the single-tower form.
VGG-16: Simonyan and Zisserman, "Very deep convolutional networks" (2015), configuration D.
"""

from __future__ import annotations

from torch import nn

from pipefit.errors import ModelError
from pipefit.models.blocks import chain, require_multiple, require_positive, require_probability


def initialise(model: nn.Sequential) -> nn.Sequential:
    """The model, after He initialisation (2015) of every convolution, by fan-out; norms stay as torch makes them."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding)
    return chain([("convolution", convolution), ("activation", nn.ReLU())])


def _norm_block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return chain([("convolution", convolution), ("norm", nn.BatchNorm2d(outputs)), ("activation", nn.ReLU())])


def _pooled(layer: nn.Sequential, kernel: int, stride: int) -> nn.Sequential:
    layer.add_module("pool", nn.MaxPool2d(kernel, stride))
    return layer


def convnet(
    layers: int = 6,
    channels: int = 32,
    image: int = 8,
    inputs: int = 1,
    classes: int = 10,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Blocks of convolution, batch norm and ReLU, then a head: (b, inputs, image, image) -> (b, classes).

    The layers are `block0` … and `head`. Every second block from the third on halves the image and doubles the
    channels, as long as the image is larger than 2 × 2.

    Args:
        layers: blocks and the head together; at least 2.
        channels: of the first block.
        image: height and width of the image.
        inputs: channels of the image.
        classes: logits of the head.
        dropout: rate before the head's linear map.

    Raises:
        ModelError: a size is not positive, or there is no block.
    """
    require_positive("convnet", layers=layers, channels=channels, image=image, inputs=inputs, classes=classes)
    require_probability("convnet", dropout=dropout)
    if layers < 2:
        raise ModelError(f"convnet: expected at least 2 layers (one block and the head), got layers={layers}")
    model: list[tuple[str, nn.Module]] = []
    size, width = image, inputs
    for index in range(layers - 1):
        halve = index >= 2 and index % 2 == 0 and size > 2
        outputs = 2 * width if halve else (channels if index == 0 else width)
        model.append((f"block{index}", _norm_block(width, outputs, 2 if halve else 1)))
        size, width = (size + 1) // 2 if halve else size, outputs
    head = [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("dropout", nn.Dropout(dropout))]
    model.append(("head", chain([*head, ("linear", nn.Linear(width, classes))])))
    return initialise(chain(model))


def _scaled(channels: int, width: float) -> int:
    return max(1, round(channels * width))


def _require_width(model: str, width: float, dropout: float) -> None:
    if not width > 0:
        raise ModelError(f"{model}: width is a factor on all channels and must be above 0, got {width!r}")
    require_probability(model, dropout=dropout)


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
) -> nn.Sequential:
    """AlexNet of layers `conv1` … `conv5`, `fc6`, `fc7`, `fc8`: (b, inputs, image, image) -> (b, classes).

    At the defaults it has 61,100,840 parameters. Scaled down: `image=64, width=0.25, classes=10`.

    Args:
        image: height and width; at least 63, because of the strided first layer and three poolings.
        inputs: channels of the image.
        classes: logits.
        width: factor on all channels and hidden units.
        dropout: rate before `fc6` and `fc7`.

    Raises:
        ModelError: a size is not positive, or the image too small to survive the poolings.
    """
    require_positive("alexnet", image=image, inputs=inputs, classes=classes)
    _require_width("alexnet", width, dropout)
    if image < 63:
        raise ModelError(f"alexnet: image={image} vanishes in the poolings; the smallest that works is image=63")
    c = [_scaled(channels, width) for channels in (64, 192, 384, 256, 256)]
    conv5 = _pooled(_convolution(c[3], c[4], 3, padding=1), 3, 2)
    conv5.add_module("average", nn.AdaptiveAvgPool2d(6))
    model = chain(
        [
            ("conv1", _pooled(_convolution(inputs, c[0], 11, stride=4, padding=2), 3, 2)),
            ("conv2", _pooled(_convolution(c[0], c[1], 5, padding=2), 3, 2)),
            ("conv3", _convolution(c[1], c[2], 3, padding=1)),
            ("conv4", _convolution(c[2], c[3], 3, padding=1)),
            ("conv5", conv5),
            *_classifier(c[4] * 36, _scaled(4096, width), classes, dropout, is_first=True),
        ]
    )
    return initialise(model)


_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # (channels, convolutions) of the five groups


def vgg16(
    image: int = 224, inputs: int = 3, classes: int = 1000, width: float = 1.0, dropout: float = 0.5
) -> nn.Sequential:
    """VGG-16 of layers `conv1_1` … `conv5_3`, `fc6`, `fc7`, `fc8`: (b, inputs, image, image) -> (b, classes).

    A convolution's layer holds its ReLU and, at the end of a group, the pooling. At the defaults it has 138,357,544
    parameters. Scaled down: `image=32, width=0.25, classes=10`.

    Args:
        image: height and width, a multiple of 32.
        inputs: channels of the image.
        classes: logits.
        width: factor on all channels and hidden units.
        dropout: rate before `fc7` and `fc8`.

    Raises:
        ModelError: a size is not positive, or `image` not a multiple of 32.
    """
    require_positive("vgg16", image=image, inputs=inputs, classes=classes)
    require_multiple("vgg16", "image", image, "the product of its poolings", 32)
    _require_width("vgg16", width, dropout)
    model: list[tuple[str, nn.Module]] = []
    before = inputs
    for group, (channels, count) in enumerate(_VGG16, start=1):
        for index in range(1, count + 1):
            layer = _convolution(before, _scaled(channels, width), 3, padding=1)
            model.append((f"conv{group}_{index}", _pooled(layer, 2, 2) if index == count else layer))
            before = _scaled(channels, width)
    features = before * (image // 32) ** 2
    model += _classifier(features, _scaled(4096, width), classes, dropout, is_first=False)
    return initialise(chain(model))
