"""Ranks load their shards of checkpoints in published layouts: tokens of one rank, dense logits."""

from __future__ import annotations

import shutil

import pytest

from fulgurite.errors import RankError
from fulgurite.models import load_model
from fulgurite.quantize import quantize, save
from tests.models.loading.published_layouts import LAYERS, LAYOUTS, write_checkpoints
from tests.parallel import quantized_layout_cases as cases

TENSOR, EXPERT, BOTH = (1, 2, 1), (2, 1, 2), (1, 2, 2)


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def folders(request, tmp_path_factory):
    """All layouts, quantized and dense, whose halves are whole blocks; and whether with experts."""
    root = tmp_path_factory.mktemp("layouts")
    found = {name: write_checkpoints(root, name, moe=request.param, wide=True) for name in LAYOUTS}
    return found, request.param


@pytest.mark.covering
@pytest.mark.parametrize("shape", [TENSOR, EXPERT, BOTH], ids=["tensor", "expert", "both"])
def test_every_layout(ranks, folders, shape):
    layouts, has_experts = folders
    if shape != TENSOR and not has_experts:
        pytest.skip("a dense model has no expert axis")
    for compared in ranks(2).run(cases.compare_layouts, layouts, shape):
        assert compared.keys() == LAYOUTS.keys()
        for name, found in compared.items():
            assert found.error < 2e-5, name
            assert found.tokens == found.whole, name
            assert found.packed == ((6 if has_experts else 7) * LAYERS,) * 2, name


@pytest.mark.parametrize("has_experts", [False, True], ids=["dense", "moe"])
def test_what_quantize_saved(ranks, tmp_path, has_experts):
    """`fulgurite.quantize.save` writes parameters under our names."""
    _, dense = write_checkpoints(tmp_path, "ct_int8", moe=has_experts, wide=True)
    layouts = {}
    for format in ("fp8", "nvfp4", "int4"):
        saved = tmp_path / format
        saved.mkdir()
        shutil.copy(dense / "config.json", saved)
        model = load_model(dense)
        quantize(model, format, progress=False)
        save(model, saved / "model.safetensors")
        layouts[format] = saved, saved
    shapes = (TENSOR, EXPERT, BOTH) if has_experts else (TENSOR,)
    for shape in shapes:
        for compared in ranks(2).run(cases.compare_layouts, layouts, shape):
            for name, found in compared.items():
                assert found.error < 2e-5 and found.tokens == found.whole, name
                assert found.packed[0] == found.packed[1] > 0, name


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
