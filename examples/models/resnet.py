"""ResNet-50: He, Zhang, Ren and Sun, "Deep residual learning for image recognition" (2016), one bottleneck per layer.

    pipefit profile --model examples/models/resnet.py:resnet50 --option image=32,width=0.25,classes=10

The stride of a group stands in the 3 × 3 convolution, as the common "v1.5" form has it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

_GROUPS = ((64, 3), (128, 4), (256, 6), (512, 3))  # (inner channels, blocks)
_EXPANSION = 4


def _norm_convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3, 1 × 1 convolutions around a shortcut: (b, c, y, x) -> (b, 4·inner, y/stride, x/stride)."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = _EXPANSION * inner
        self.residual = nn.Sequential(
            *_norm_convolution(inputs, inner, 1),
            nn.ReLU(),
            *_norm_convolution(inner, inner, 3, stride),
            nn.ReLU(),
            *_norm_convolution(inner, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_norm_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """ReLU of residual plus shortcut."""
        return torch.relu(self.residual(x) + self.shortcut(x))


def resnet50(
    image: int = 224, inputs: int = 3, classes: int = 1000, width: float = 1.0, small: bool | None = None
) -> tuple[nn.Sequential, None, Any]:
    """ResNet-50 of layers `stem`, `block1_0` … `block4_2`, `head`: (b, inputs, image, image) -> (b, classes).

    At the defaults it has 25,557,032 parameters. Scaled down: `image=32, width=0.25, classes=10`.

    Args:
        image: height and width of the image.
        inputs: channels of the image.
        classes: logits.
        width: factor on all channels.
        small: a stem of one 3 × 3 convolution that keeps the size, instead of 7 × 7 with stride 2 and a pooling;
            None means: for images below 64.

    Returns:
        The model, no loss of its own, and `example(batch, seed)`.
    """
    channels = max(1, round(64 * width))
    if small is None:
        small = image < 64
    convolution = _norm_convolution(inputs, channels, 3) if small else _norm_convolution(inputs, channels, 7, 2)
    stem = nn.Sequential(*convolution, nn.ReLU(), *([] if small else [nn.MaxPool2d(3, 2, 1)]))
    model: list[tuple[str, nn.Module]] = [("stem", stem)]
    before = channels
    for group, (base, count) in enumerate(_GROUPS, start=1):
        inner = max(1, round(base * width))
        for index in range(count):
            stride = 2 if index == 0 and group > 1 else 1
            model.append((f"block{group}_{index}", Bottleneck(before, inner, stride)))
            before = _EXPANSION * inner
    head = [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("linear", nn.Linear(before, classes))]
    model.append(("head", nn.Sequential(OrderedDict(head))))
    network = nn.Sequential(OrderedDict(model))
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def example(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Normal images (batch, inputs, image, image) and classes (batch,) int64."""
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, inputs, image, image, generator=draw)
        return x, torch.randint(0, classes, (batch,), generator=draw)

    return network, None, example
