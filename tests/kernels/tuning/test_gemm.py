"""The heuristics of GEMM: configs fit a GPU, no program is idle, and measured choices stay."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.common.triton_operands import dequant_scheme
from fulgurite.kernels.tuning import Heuristics, heuristics_for, override_heuristics
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from fulgurite.quant import FORMATS

HEURISTICS = Sm90Heuristics()
SHARED_BYTES = 227 << 10
SHAPES = [(2048, 7168), (4096, 4096), (4096, 14336), (6144, 4096), (7168, 2048), (7168, 18432),
          (14336, 4096), (18432, 7168), (16, 128), (100, 200), (1, 16)]  # fmt: skip
ROWS = (1, 16, 17, 33, 64, 65, 128, 257, 512, 513, 8192)


@pytest.mark.parametrize("scaling", ["mainloop", "epilogue"])
@pytest.mark.parametrize("n, k", SHAPES)
def test_scaled_configs_fit(n, k, scaling):
    for m in ROWS:
        config = HEURISTICS.scaled_gemm(m, n, k, scaling)
        stage_bytes = (config.block_m + config.block_n) * config.block_k
        assert stage_bytes * config.num_stages <= SHARED_BYTES
        steps = -(-k // config.block_k)
        per_split = -(-steps // config.split_k)
        assert (config.split_k - 1) * per_split < steps, "a split without steps"
        assert config.block_n == 64 or config.num_warps == 8


def test_split_k_of_measured_shapes():
    splits = {(2048, 7168): 8, (4096, 4096): 4, (4096, 14336): 8, (7168, 2048): 2, (14336, 4096): 2}
    for (n, k), split_k in splits.items():
        assert HEURISTICS.scaled_gemm(1, n, k, "mainloop").split_k == split_k


@pytest.mark.parametrize("block", [(1, 0), (128, 128)])
@pytest.mark.parametrize("n, k", SHAPES)
def test_the_library_wins_from_some_number_of_rows_on(n, k, block):
    rows = (1, 16, 32, 64, 128, 256, 512, 8192)
    wins = [HEURISTICS.prefers_library_scaled_mm(block, m, n, k) for m in rows]
    assert wins == sorted(wins) and not wins[0] and wins[-1]
    assert HEURISTICS.prefers_library_scaled_mm((0, 0), 1, n, k)


@pytest.mark.parametrize("format", FORMATS)
def test_every_weight_has_a_config(format):
    scheme = dequant_scheme(FORMATS[format])
    if scheme is None:
        return
    for m, (n, k) in ((m, shape) for m in ROWS for shape in SHAPES):
        config = HEURISTICS.weight_only_gemm(m, n, k, scheme)
        assert (config is None) == (m >= HEURISTICS.dequantize_first_m)
        if config is not None:
            assert config.small_m == (m <= HEURISTICS.max_small_m)
            assert config.block_k % min(scheme.group_size, 128) == 0


def test_heuristics_can_be_overridden():
    class Custom(Sm90Heuristics):
        dequantize_first_m = 7

    device = torch.device("cpu")
    before = heuristics_for(device)
    with override_heuristics(Custom()):
        assert heuristics_for(device).dequantize_first_m == 7
    assert heuristics_for(device) is before and isinstance(before, Heuristics)
