"""The cache of packed weights: hits, invalidation by a write, eviction with the weight, threads."""

from __future__ import annotations

import gc

import torch

from fulgurite.kernels.gemm.cpu_layout_cache import WeightLayoutCache
from fulgurite.quant import QuantTensor, quantize
from tests.kernels.threads import in_threads


def weight():
    return quantize(torch.randn(16, 32), "q8_0").packed


def test_hits_until_written():
    computed = []
    cache = WeightLayoutCache(lambda given: computed.append(given) or len(computed))
    data = weight()
    assert [cache(data, [], "q8_0") for _ in range(3)] == [1, 1, 1]
    data.copy_(weight())
    assert [cache(data, [], "q8_0") for _ in range(2)] == [2, 2]
    assert cache(data[8:], [], "q8_0") == 3  # other rows of the same storage


def test_scales_and_strides_are_part_of_the_key():
    """The same data under other scales, after its scale was written to, or transposed, is
    another weight."""
    cache = WeightLayoutCache(lambda given: given.dequantize())
    first = quantize(torch.randn(32, 32), "fp8_e4m3_tensor")
    data, scale = first.packed, first.scales["scale"]
    for given, scales in ((data, [scale]), (data, [scale * 3]), (data.t(), [scale])):
        expected = QuantTensor("fp8_e4m3_tensor", given, {"scale": scales[0]}).dequantize()
        assert torch.equal(cache(given, scales, "fp8_e4m3_tensor"), expected)
    before = cache(data, [scale], "fp8_e4m3_tensor").clone()
    scale.mul_(2)
    assert torch.equal(cache(data, [scale], "fp8_e4m3_tensor"), 2 * before)


def test_entries_expire_with_the_weight():
    cache = WeightLayoutCache(lambda given: None)
    for _ in range(10):
        cache(weight(), [], "q8_0")
        gc.collect()
    assert len(cache.entries) == 1


def test_from_many_threads():
    """Weights come and go in eight threads at once: each finds its own result."""
    cache = WeightLayoutCache(lambda given: given.packed.float().sum())

    def use():
        for seed in range(300):
            data = torch.full((1, 34), seed % 128, dtype=torch.uint8)
            assert cache(data, [], "q8_0") == 34 * (seed % 128)

    in_threads(use)
