"""The torchvision models of the suite `zoo`: one small model for each family and task.

In: the name of a model. Out: a module with random weights, and its positional arguments. Detection models take a list
of images, and for training a list of targets.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.bench.zoo.sizes import Sizes

CLASSES = 10


MakeInputs = Callable[[Sizes], tuple[Any, ...]]
DEFAULT_IMAGE = 224


def _images(small: int) -> MakeInputs:
    def make(sizes: Sizes) -> tuple[Any, ...]:
        pixels = small if sizes.name == "small" else max(DEFAULT_IMAGE, small)
        return (torch.randn(sizes.batch, 3, pixels, pixels),)

    return make


def _clips(pixels: int, frames: int, small_batch: int = 2) -> MakeInputs:
    def make(sizes: Sizes) -> tuple[Any, ...]:
        if sizes.name == "small":
            return (torch.randn(small_batch, 3, frames, pixels, pixels),)
        return (torch.randn(sizes.batch, 3, 16, DEFAULT_IMAGE, DEFAULT_IMAGE),)

    return make


def _image_pairs(sizes: Sizes) -> tuple[Any, ...]:
    return torch.randn(sizes.batch, 3, 128, 128), torch.randn(sizes.batch, 3, 128, 128)


def _image_list(sizes: Sizes) -> tuple[Any, ...]:
    return ([torch.rand(3, 64, 64) for _ in range(sizes.batch)],)


# name: (family, makes the inputs)
MODELS: dict[str, tuple[str, MakeInputs]] = {
    "alexnet": ("alexnet", _images(96)),
    "convnext_tiny": ("convnext", _images(64)),
    "densenet121": ("densenet", _images(64)),
    "efficientnet_b0": ("efficientnet", _images(64)),
    "efficientnet_v2_s": ("efficientnet_v2", _images(64)),
    "googlenet": ("googlenet", _images(96)),
    "inception_v3": ("inception", _images(128)),
    "maxvit_t": ("maxvit", _images(224)),
    "mnasnet0_5": ("mnasnet", _images(64)),
    "mobilenet_v2": ("mobilenet_v2", _images(64)),
    "mobilenet_v3_small": ("mobilenet_v3", _images(64)),
    "regnet_x_400mf": ("regnet_x", _images(64)),
    "regnet_y_400mf": ("regnet_y", _images(64)),
    "resnet18": ("resnet", _images(64)),
    "resnext50_32x4d": ("resnext", _images(64)),
    "shufflenet_v2_x0_5": ("shufflenet_v2", _images(64)),
    "squeezenet1_1": ("squeezenet", _images(64)),
    "swin_t": ("swin", _images(64)),
    "swin_v2_t": ("swin_v2", _images(64)),
    "vgg11": ("vgg", _images(64)),
    "vgg11_bn": ("vgg_bn", _images(64)),
    "vit_b_32": ("vit", _images(224)),
    "wide_resnet50_2": ("wide_resnet", _images(64)),
    "deeplabv3_mobilenet_v3_large": ("deeplabv3", _images(64)),
    "fcn_resnet50": ("fcn", _images(64)),
    "lraspp_mobilenet_v3_large": ("lraspp", _images(64)),
    "fasterrcnn_mobilenet_v3_large_320_fpn": ("faster_rcnn", _image_list),
    "retinanet_resnet50_fpn": ("retinanet", _image_list),
    "ssdlite320_mobilenet_v3_large": ("ssdlite", _image_list),
    "mc3_18": ("mc3", _clips(32, 8)),
    "r2plus1d_18": ("r2plus1d", _clips(32, 8)),
    "r3d_18": ("r3d", _clips(32, 8)),
    "s3d": ("s3d", _clips(224, 16, small_batch=1)),
    "mvit_v2_s": ("mvit", _clips(224, 16, small_batch=1)),
    "swin3d_t": ("swin3d", _clips(32, 8)),
    "raft_small": ("raft", _image_pairs),
}
DETECTORS: dict[str, dict[str, Any]] = {  # arguments of their constructors
    "fasterrcnn_mobilenet_v3_large_320_fpn": {"min_size": 64, "max_size": 96},
    "retinanet_resnet50_fpn": {"min_size": 64, "max_size": 96},
    "ssdlite320_mobilenet_v3_large": {},
}
WITHOUT_CLASSES = {"raft_small"}
WITH_BACKBONE = {
    "deeplabv3_mobilenet_v3_large",
    "fcn_resnet50",
    "lraspp_mobilenet_v3_large",
    *DETECTORS,
}
WITH_CPP_OPS = {"fasterrcnn_mobilenet_v3_large_320_fpn"}  # its RoI align takes minutes in Python


def build(name: str, training: bool, sizes: Sizes) -> tuple[nn.Module, tuple[Any, ...]]:
    """The module and its positional arguments."""
    torchvision = import_torchvision()
    if name in WITH_CPP_OPS and not torchvision.extension._has_ops():
        raise ImportError(f"torchvision's C++ ops can't be loaded; {name} needs them")
    chosen: dict[str, Any] = {} if name in WITHOUT_CLASSES else {"num_classes": CLASSES}
    if name in WITH_BACKBONE:
        chosen |= {"weights_backbone": None, **DETECTORS.get(name, {})}
    args = MODELS[name][1](sizes)
    if name in DETECTORS and training:
        args += (_targets(sizes.batch),)
    return torchvision.models.get_model(name, weights=None, **chosen), args


def _targets(batch: int) -> list[dict[str, Tensor]]:
    """Two boxes an image, inside its 64 x 64 pixels."""
    boxes = torch.tensor([[4.0, 8.0, 30.0, 40.0], [20.0, 10.0, 60.0, 50.0]])
    return [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in range(batch)]


def import_torchvision() -> Any:
    """torchvision; with a CPU build of torch also if its C++ ops need CUDA libraries.

    PyPI's wheels of torchvision are built with CUDA. Without its libraries the C++ ops don't load, and the import
    fails because one op is missing. Non-maximum suppression is then defined here.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as problem:
        if "nms does not exist" not in str(problem):
            raise
    for op in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou) -> Tensor"
        )
    torch.library.impl("torchvision::nms", "CPU")(_non_maximum_suppression)
    torchvision = importlib.import_module("torchvision")
    boxes: Any = importlib.import_module("torchvision.ops.boxes")
    boxes._assert_has_ops = lambda: None
    return torchvision


def _non_maximum_suppression(boxes: Tensor, scores: Tensor, iou: float) -> Tensor:
    """Indices of the boxes to keep, by falling score: none overlaps a kept one by more than `iou`."""
    order = scores.argsort(descending=True, stable=True)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    kept: list[int] = []
    while order.numel():
        best = int(order[0])
        kept.append(best)
        order = order[1:]
        low = torch.maximum(boxes[best, :2], boxes[order, :2])
        high = torch.minimum(boxes[best, 2:], boxes[order, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        order = order[shared / (area[best] + area[order] - shared) <= iou]
    return torch.tensor(kept, dtype=torch.int64)
