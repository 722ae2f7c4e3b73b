"""Models of torchvision, small where they can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision import models
from torchvision.models import detection, segmentation, video

from tests.zoo.calm import calm
from tests.zoo.specimen import Specimen, vectors

SPECIMENS: list[Specimen] = []


def put(name: str, make: Callable[[], nn.Module], size: int | tuple[int, ...] = 64, **options: Any) -> None:
    """Adds a model that takes images of a size, or whatever `data` gives."""
    shape = (3, size, size) if isinstance(size, int) else size
    data = options.pop("data", vectors(*shape))
    SPECIMENS.append(Specimen(f"torchvision/{name}", lambda: calm(make()), data, **options))


def _images(samples: int, generator: torch.Generator) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Images and their boxes, as detection takes them."""
    images = [torch.rand(3, 64, 64, generator=generator) for _ in range(2)]
    corners = torch.tensor([[4.0, 4.0, 30.0, 30.0], [20.0, 16.0, 60.0, 50.0]])
    targets = [{"boxes": corners.clone(), "labels": torch.tensor([1, 2])} for _ in images]
    return images, targets


CLASSES = {"num_classes": 5}
SMALL = ("resnet18", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "shufflenet_v2_x0_5",
         "mnasnet0_5", "efficientnet_b0", "regnet_y_400mf", "regnet_x_400mf", "resnet34", "squeezenet1_0", "mnasnet1_0",
         "shufflenet_v2_x1_0")  # fmt: skip
for named in SMALL:
    put(named, lambda named=named: models.get_model(named, weights=None, **CLASSES), 32)
put("alexnet", lambda: models.alexnet(**CLASSES), 64)
put("googlenet", lambda: models.googlenet(**CLASSES, aux_logits=False, init_weights=False), 32)
put("googlenet with auxiliary heads", lambda: models.googlenet(**CLASSES, aux_logits=True, init_weights=False))
put("inception_v3", lambda: models.inception_v3(**CLASSES, aux_logits=False, init_weights=False), 75)
put("resnet, one block for each level", lambda: models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], **CLASSES))
put("resnext, one block for each level", lambda: models.ResNet(
    models.resnet.Bottleneck, [1, 1, 1, 1], **CLASSES, groups=8, width_per_group=4))  # fmt: skip
put("densenet", lambda: models.DenseNet(8, (2, 2, 2, 2), 16, **CLASSES))
put("vgg11_bn without its large layers", lambda: nn.Sequential(*models.vgg11_bn(**CLASSES).features[:15]), 32)
put("vision transformer", lambda: models.VisionTransformer(32, 8, 4, 4, 32, 64, **CLASSES), 32)
put("swin", lambda: models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, **CLASSES))
put("swin v2", lambda: models.SwinTransformer(
    [4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, **CLASSES,
    block=models.swin_transformer.SwinTransformerBlockV2,
    downsample_layer=models.swin_transformer.PatchMergingV2))  # fmt: skip
put("maxvit", lambda: models.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, stochastic_depth_prob=0.0, **CLASSES))
put("convnext", lambda: models.ConvNeXt(
    [models.convnext.CNBlockConfig(16, 32, 2), models.convnext.CNBlockConfig(32, None, 2)], **CLASSES))  # fmt: skip
put("segmentation fcn", lambda: segmentation.FCN(
    models._utils.IntermediateLayerGetter(models.resnet18(), {"layer4": "out"}),
    segmentation.fcn.FCNHead(512, 3)))  # fmt: skip
put("segmentation deeplab", lambda: segmentation.DeepLabV3(
    models._utils.IntermediateLayerGetter(models.resnet18(), {"layer3": "out"}),
    segmentation.deeplabv3.DeepLabHead(256, 3)))  # fmt: skip
put("segmentation lraspp", lambda: segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=3))
put("video r3d", lambda: _video(video.resnet.Conv3DSimple, video.resnet.BasicStem), (3, 4, 32, 32))
put("video mc3", lambda: _video(video.resnet.Conv3DNoTemporal, video.resnet.BasicStem), (3, 4, 32, 32))
put("video r2plus1d", lambda: _video(video.resnet.Conv2Plus1D, video.resnet.R2Plus1dStem), (3, 4, 32, 32))
put("video mvit", lambda: video.MViT((32, 32), 4, [
    video.mvit.MSBlockConfig(1, 16, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
    video.mvit.MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 1, 1]),
    video.mvit.MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 1, 1]),
], residual_pool=False, residual_with_cls_embed=False, rel_pos_embed=False, proj_after_attn=False,
    stochastic_depth_prob=0.0, **CLASSES), (3, 4, 32, 32))  # fmt: skip
put("video swin3d", lambda: video.swin_transformer.SwinTransformer3d(
    [2, 4, 4], 16, [2, 2], [2, 4], [2, 4, 4], stochastic_depth_prob=0.0, **CLASSES), (3, 4, 32, 32))  # fmt: skip
DETECTS = "the boxes that it keeps depend on the data, so what its heads compute has another size each time"
FOR_DETECTION = {"data": _images, "splits": False, "by_hand": False, "why": DETECTS}
put("detection fasterrcnn", lambda: detection.fasterrcnn_mobilenet_v3_large_320_fpn(
    weights_backbone=None, num_classes=3, min_size=64, max_size=64), is_random=True, **FOR_DETECTION)  # fmt: skip
put("detection ssdlite", lambda: detection.ssdlite320_mobilenet_v3_large(weights_backbone=None, num_classes=3),
    **FOR_DETECTION)  # fmt: skip


def _video(conv: Any, stem: Any) -> nn.Module:
    return video.resnet.VideoResNet(video.resnet.BasicBlock, [conv] * 4, [1, 1, 1, 1], stem, **CLASSES)
