"""Ranks load their shards of checkpoints in published layouts: the logits of the dense weights."""

from __future__ import annotations

import pytest

from fulgurite.errors import RankError
from tests.models.loading.published_layouts import write_checkpoints
from tests.parallel import quantized_layout_cases as cases

TENSOR, EXPERT, BOTH = (1, 2, 1), (2, 1, 2), (1, 2, 2)
LAYOUTS = ["ct_fp8_static", "ct_nvfp4", "ct_mxfp4", "ct_int8", "awq", "bnb_nf4"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensor_parallel(ranks, tmp_path, name):
    folder, reference = write_checkpoints(tmp_path, name, moe=False)
    for error, packed in ranks(2).run(cases.compare_logits, folder, reference, TENSOR):
        assert error < 2e-5 and packed == 14


@pytest.mark.parametrize("shape", [TENSOR, EXPERT, BOTH], ids=str)
@pytest.mark.parametrize("name", ["ct_fp8_static", "ct_nvfp4", "awq"])
def test_experts(ranks, tmp_path, name, shape):
    folder, reference = write_checkpoints(tmp_path, name, moe=True)
    for error, packed in ranks(2).run(cases.compare_logits, folder, reference, shape):
        assert error < 2e-5 and packed == 12


def test_blocks_over_expert_ranks(ranks, tmp_path):
    folder, reference = write_checkpoints(tmp_path, "fp8_block", moe=True)
    for error, packed in ranks(2).run(cases.compare_logits, folder, reference, EXPERT):
        assert error < 2e-5 and packed == 8  # key heads are dense


@pytest.mark.parametrize("format", ["int8", "nvfp4"])
def test_quantize_while_loading_a_shard(ranks, tmp_path, format):
    _, dense = write_checkpoints(tmp_path, "ct_int8", moe=True)
    for error, packed in ranks(2).run(cases.compare_logits, dense, dense, BOTH, format):
        assert error < 0.5 and packed == 12


@pytest.mark.parametrize("name", ["ct_int4", "fp8_block"])
def test_shards_inside_a_block_are_an_error(ranks, tmp_path, name):
    folder, reference = write_checkpoints(tmp_path, name, moe=False)
    message = r"attention\.\w_proj\.weight can't be sharded over 2 ranks(.|\n)*block of 128"
    with pytest.raises(RankError, match=message):
        ranks(2).run(cases.compare_logits, folder, reference, TENSOR)
    for error, packed in ranks(2).run(cases.compare_dequantized, folder, reference, TENSOR):
        assert error < 2e-5 and packed == 0
