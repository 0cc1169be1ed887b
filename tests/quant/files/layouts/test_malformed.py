"""Damaged tensors of every layout: an error that names the weight, never one of torch's."""

import itertools

import pytest
import torch

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant import describe_quantized_weight, quantize, read_quantized_weight
from tests.quant.files.layouts.support import headers, random_scales, seeded
from tests.quant.files.layouts.test_awq import gemm_tensors
from tests.quant.files.layouts.test_bitsandbytes import bnb_tensors
from tests.quant.files.layouts.test_compressed_tensors import packed_tensors
from tests.quant.files.layouts.test_gptq import gptq_config, gptq_tensors
from tests.quant.files.layouts.test_modelopt import pack_rows


def fp8(*shape):
    return torch.randn(shape, generator=seeded()).to(torch.float8_e4m3fn)


def make_samples():
    nvfp4 = quantize(torch.randn(32, 128, generator=seeded()), "nvfp4")
    mxfp4 = quantize(torch.randn(32, 128, generator=seeded()), "mxfp4")
    codes = torch.randint(-8, 8, (32, 128), generator=seeded(), dtype=torch.int8)
    exponents = mxfp4.scales["scale"].view(torch.uint8)
    global_scale = nvfp4.scales["tensor_scale"].reshape(1)
    stacked = {"up": fp8(3, 64, 32), "up_weight_scale": random_scales(3, 32)}
    torchao_int4 = {
        "up._weight_qdata": torch.zeros(32, 64, dtype=torch.uint8),
        "up._weight_scale": random_scales(4, 32),
        "up._weight_zero_point": random_scales(4, 32),
    }
    return {
        "awq": (gemm_tensors(32, 128, 64)[0], {"version": "gemm", "group_size": 64}),
        "gptq": (gptq_tensors(32, 128, 64, 4)[0], gptq_config(4, 64)),
        "bnb nf4": (bnb_tensors((32, 128), nested=True)[0], None),
        "bnb int8": ({"up.weight": codes, "up.SCB": random_scales(32)}, None),
        "ct packed": (packed_tensors((32, 128), 4, 32, zero_points=True)[0], None),
        "ct int8": ({"up.weight": codes, "up.weight_scale": random_scales(32, 1),
                     "up.weight_zero_point": torch.ones(32, 1, dtype=torch.int8)}, None),
        "ct nvfp4": ({"up.weight_packed": nvfp4.packed, "up.weight_scale": nvfp4.scales["scale"],
                      "up.weight_global_scale": 1 / global_scale}, None),
        "ct mxfp4": ({"up.weight_packed": mxfp4.packed, "up.weight_scale": exponents}, None),
        "modelopt nvfp4": ({"up.weight": nvfp4.packed, "up.weight_scale": nvfp4.scales["scale"],
                            "up.weight_scale_2": global_scale}, None),
        "modelopt int4": ({"up.weight": pack_rows(codes), "up.weight_scale": random_scales(32, 2),
                           "up.pre_quant_scale": random_scales(128)}, None),
        "fp8 row": ({"up.weight": fp8(32, 128), "up.weight_scale": random_scales(32, 1)}, None),
        "fp8 block": ({"up.weight": fp8(256, 384), "up.weight_scale_inv": random_scales(2, 3)},
                      {"weight_block_size": [128, 128]}),
        "fp8 stacked": (stacked, None),
        "gpt-oss": ({"up_blocks": mxfp4.packed.reshape(32, 4, 16), "up_scales": exponents}, None),
        "torchao int8": ({"up._weight_qdata": codes, "up._weight_scale": random_scales(32, 1)}, None),
        "torchao int4": (torchao_int4, None),
        "torchao tiles": ({"up._weight_qdata": torch.zeros(2, 8, 32, 4, dtype=torch.int32),
                           "up._weight_scale_and_zero": random_scales(8, 16, 2)}, None),
        "torchao nvfp4": ({"up._weight_qdata": nvfp4.packed,
                           "up._weight_scale": nvfp4.scales["scale"]}, None),
    }  # fmt: skip


SAMPLES = make_samples()
DAMAGES = {
    "fewer rows": lambda t: t[:-1] if t.dim() else t,
    "one row": lambda t: t[:1] if t.dim() else t,
    "no rows": lambda t: t[:0] if t.dim() else t,
    "fewer columns": lambda t: t[..., :-1] if t.dim() else t,
    "flat": lambda t: t.flatten(),
    "another dimension": lambda t: t.unsqueeze(0),
    "float64": lambda t: t.to(torch.float64),
    "int16": lambda t: t.to(torch.float32).to(torch.int16),
    "bool": lambda t: t.to(torch.float32).bool(),
    "NaN": lambda t: torch.full_like(t, float("nan")) if t.dtype.is_floating_point else t,
}


@pytest.mark.parametrize("layout", SAMPLES)
def test_damaged_tensors(layout):
    tensors, config = SAMPLES[layout]
    read_quantized_weight(tensors, "up", config=config)
    errors = 0
    for name, (damage, change) in itertools.product(tensors, DAMAGES.items()):
        damaged = tensors | {name: change(tensors[name])}
        try:
            loaded = read_quantized_weight(damaged, "up", config=config)
        except (FormatError, WeightsError) as error:
            errors += 1
            assert "up" in str(error), (name, damage)
            assert "next" in error.details, (name, damage, str(error))
            continue
        described = describe_quantized_weight(headers(damaged), "up", config, damaged.__getitem__)
        assert tuple(loaded.weight.shape) == described.shape, (name, damage)
    assert errors > 3


@pytest.mark.parametrize("layout", SAMPLES)
def test_missing_tensors(layout):
    tensors, config = SAMPLES[layout]
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        try:
            read_quantized_weight(rest, "up", config=config)
        except (FormatError, WeightsError) as error:
            assert "up" in str(error)
