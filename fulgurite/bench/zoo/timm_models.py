"""The timm models of the suite `zoo`: one small model for each family.

In: the name of a model. Out: a module with random weights, and a batch of images. A family is a module of
`timm.models`. Sizes are the model's own if they are fixed, else 96 x 96 pixels.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fulgurite.bench.zoo.sizes import Sizes

CLASSES = 10


@dataclass(frozen=True)
class TimmModel:
    """`depth` replaces the number of layers where all are equal."""

    name: str
    image_size: int = 96
    depth: int | None = None


FAMILIES: dict[str, TimmModel] = {
    "beit": TimmModel("beit_base_patch16_224", 224, depth=4),
    "byoanet": TimmModel("eca_botnext26ts_256", 256),
    "byobnet": TimmModel("test_byobnet"),
    "cait": TimmModel("cait_xxs24_224", 224, depth=4),
    "coat": TimmModel("coat_lite_tiny", 224),
    "convit": TimmModel("convit_tiny", 224, depth=4),
    "convmixer": TimmModel("convmixer_1024_20_ks9_p14"),
    "convnext": TimmModel("test_convnext3"),
    "cpubone": TimmModel("cpubone_nano"),
    "crossvit": TimmModel("crossvit_tiny_240", 240),
    "csatv2": TimmModel("csatv2"),
    "cspnet": TimmModel("cs3darknet_focus_s"),
    "davit": TimmModel("davit_tiny"),
    "deepseek_vit": TimmModel("deepseek_vit_412m", 98, depth=4),
    "deit": TimmModel("deit_tiny_patch16_224", 224, depth=4),
    "densenet": TimmModel("densenet121"),
    "dla": TimmModel("dla46x_c"),
    "dpn": TimmModel("dpn48b"),
    "edgenext": TimmModel("edgenext_xx_small"),
    "efficientformer": TimmModel("efficientformer_l1", 224),
    "efficientformer_v2": TimmModel("efficientformerv2_s0", 224),
    "efficientnet": TimmModel("test_efficientnet"),
    "efficientvim": TimmModel("efficientvim_m1"),
    "efficientvit_mit": TimmModel("efficientvit_b0"),
    "efficientvit_msra": TimmModel("efficientvit_m0", 224),
    "eva": TimmModel("eva02_tiny_patch14_224", 224, depth=4),
    "fasternet": TimmModel("fasternet_t0"),
    "fastvit": TimmModel("fastvit_t8"),
    "focalnet": TimmModel("focalnet_tiny_srf"),
    "gcvit": TimmModel("gcvit_xxtiny", 224),
    "gemma4_vit": TimmModel("gemma4_vit_167m_enc", depth=4),
    "ghostnet": TimmModel("ghostnet_050"),
    "hardcorenas": TimmModel("hardcorenas_a"),
    "hgnet": TimmModel("hgnetv2_b0"),
    "hiera": TimmModel("hiera_tiny_224", 224),
    "hieradet_sam2": TimmModel("sam2_hiera_tiny", 128),
    "hrnet": TimmModel("hrnet_w18_small"),
    "iformer": TimmModel("iformer_t"),
    "inception_next": TimmModel("inception_next_atto"),
    "inception_resnet_v2": TimmModel("inception_resnet_v2"),
    "inception_v3": TimmModel("inception_v3"),
    "inception_v4": TimmModel("inception_v4"),
    "lcnetv2": TimmModel("lcnetv2_small"),
    "levit": TimmModel("levit_128s", 224),
    "lowformer": TimmModel("lowformer_e1"),
    "mambaout": TimmModel("test_mambaout"),
    "maxxvit": TimmModel("coatnet_pico_rw_224", 224),
    "metaformer": TimmModel("poolformerv2_s12"),
    "mlp_mixer": TimmModel("gmlp_ti16_224", 224),
    "mobilenetv3": TimmModel("lcnet_035"),
    "mobilenetv5": TimmModel("mobilenetv5_base"),
    "mobilevit": TimmModel("mobilevitv2_050"),
    "mvitv2": TimmModel("mvitv2_tiny", 224),
    "naflexvit": TimmModel("naflexvit_base_patch16_gap", depth=4),
    "nasnet": TimmModel("nasnetalarge"),
    "nest": TimmModel("nest_tiny", 224),
    "nextvit": TimmModel("nextvit_small"),
    "nfnet": TimmModel("test_nfnet"),
    "pit": TimmModel("pit_ti_224", 224),
    "pnasnet": TimmModel("pnasnet5large"),
    "pvt_v2": TimmModel("pvt_v2_b0"),
    "qwen3_vit": TimmModel("qwen3_vit_88m", depth=4),
    "rdnet": TimmModel("rdnet_tiny"),
    "regnet": TimmModel("regnetx_002"),
    "repghost": TimmModel("repghostnet_050"),
    "repvit": TimmModel("repvit_m0_9"),
    "res2net": TimmModel("res2net50_48w_2s"),
    "resnest": TimmModel("resnest14d"),
    "resnet": TimmModel("test_resnet"),
    "resnetv2": TimmModel("resnetv2_18"),
    "rexnet": TimmModel("rexnet_100"),
    "selecsls": TimmModel("selecsls42"),
    "senet": TimmModel("legacy_seresnet18"),
    "sequencer": TimmModel("sequencer2d_s", 224),
    "shvit": TimmModel("shvit_s1"),
    "sknet": TimmModel("skresnet18"),
    "starnet": TimmModel("starnet_s050"),
    "swiftformer": TimmModel("swiftformer_xs", 224),
    "swin_transformer": TimmModel("swin_tiny_patch4_window7_224", 224),
    "swin_transformer_v2": TimmModel("swinv2_tiny_window8_256", 256),
    "swin_transformer_v2_cr": TimmModel("swinv2_cr_tiny_224", 224),
    "tiny_vit": TimmModel("tiny_vit_5m_224"),
    "tnt": TimmModel("tnt_s_legacy_patch16_224", 224, depth=4),
    "tresnet": TimmModel("tresnet_m"),
    "twins": TimmModel("twins_pcpvt_small", 224),
    "vgg": TimmModel("vgg11"),
    "visformer": TimmModel("visformer_tiny", 224, depth=4),
    "vision_transformer": TimmModel("test_vit", 160, depth=4),
    "vision_transformer_hybrid": TimmModel("vit_tiny_r_s16_p8_224", 224, depth=4),
    "vision_transformer_relpos": TimmModel("vit_srelpos_small_patch16_224", 224, depth=4),
    "vision_transformer_sam": TimmModel("samvit_base_patch16_224", 224, depth=4),
    "vitamin": TimmModel("vitamin_small_224", 224, depth=4),
    "volo": TimmModel("volo_d1_224", 224),
    "vovnet": TimmModel("ese_vovnet19b_slim_dw"),
    "xception": TimmModel("legacy_xception"),
    "xception_aligned": TimmModel("xception41p"),
    "xcit": TimmModel("xcit_nano_12_p8_224", 224, depth=4),
}
BY_NAME = {model.name: model for model in FAMILIES.values()}


def build(name: str, sizes: Sizes) -> tuple[nn.Module, Tensor]:
    """The module and its images. At the default size the depth and the images are the model's own."""
    model = BY_NAME[name]
    timm = importlib.import_module("timm")
    is_small = sizes.name == "small"
    chosen = {"depth": model.depth} if is_small and model.depth is not None else {}
    module = timm.create_model(name, num_classes=CLASSES, **chosen)
    image_size = model.image_size if is_small else module.default_cfg["input_size"][-1]
    return module, torch.randn(sizes.batch, 3, image_size, image_size)
