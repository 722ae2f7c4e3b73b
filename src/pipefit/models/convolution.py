"""A small convolutional chain with batch norm, for the digits."""

from __future__ import annotations

from torch import nn

from pipefit.errors import ModelError
from pipefit.models.blocks import chain, require_positive, require_probability


def _norm_block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return chain([("convolution", convolution), ("norm", nn.BatchNorm2d(outputs)), ("activation", nn.ReLU())])


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
    model = []
    size = image
    width = inputs
    for index in range(layers - 1):
        outputs = width
        stride = 1
        if index == 0:
            outputs = channels
        if index >= 2 and index % 2 == 0 and size > 2:
            outputs = 2 * width
            stride = 2
            size = (size + 1) // 2
        model.append((f"block{index}", _norm_block(width, outputs, stride)))
        width = outputs
    head = [
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("dropout", nn.Dropout(dropout)),
        ("linear", nn.Linear(width, classes)),
    ]
    model.append(("head", chain(head)))
    network = chain(model)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            # He initialisation (2015) by fan-out; norms stay as torch makes them.
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network
