"""FP8 training of sharded parameters (FSDP2), and packed weights cut over ranks as DTensors."""

from __future__ import annotations

import pytest

from tests.parallel import quant_cases as cases


@pytest.mark.covering
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_fp8_training_of_sharded_parameters(ranks_with_groups, recipe, checkpointed):
    """Batches are apart, so each rank's casts are those of one process; sums differ in their order."""
    for found in ranks_with_groups(2).run(cases.train_sharded, recipe, checkpointed):
        assert found and max(found.values()) < 1e-5, found


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("format", ["int8", "nvfp4", "q4_k", "fp8_e4m3_1x128", "int4_g128_asym"])
def test_quantized_weights_are_sharded_over_ranks(ranks_with_groups, format, dim):
    assert max(ranks_with_groups(2).run(cases.packed_as_dtensor, format, dim)) < 1e-5
