"""Quantized checkpoints outside the registry: packed linears in transformers' modules."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="its modules are tested")

from fulgurite.errors import WeightsError
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.models import ARCHITECTURES, load_model, open_checkpoint
from fulgurite.models.loading.loader import build_meta_model
from fulgurite.models.transformers_backend.model import TransformersModel
from fulgurite.plan.memory import weight_bytes
from fulgurite.quant import QuantTensor
from fulgurite.serve.llm import LLM, SamplingParams
from tests.models.loading.published_layouts import LAYERS, LAYOUTS, write_checkpoints

ARCEE = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee"}
MELLUM = {"architectures": ["MellumForCausalLM"], "model_type": "mellum"}
NONE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
IDS, POSITIONS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]), torch.arange(8)
EXPERT_LAYOUTS = ("fp8_block", "ct_nvfp4", "ct_int4", "gptq", "bnb_nf4")


def write(folder, layout, moe=False):
    """A family outside the registry, quantized and dense. Arcee's MLP has no gate."""
    fields = {**(MELLUM if moe else ARCEE), **NONE}
    assert fields["architectures"][0] not in ARCHITECTURES, "this test needs another architecture"
    return write_checkpoints(folder, layout, moe, () if moe else ("mlp.gate_proj",), **fields)


def count_packed(model):
    return sum(isinstance(module, QuantLinear) for module in model.modules())


def assert_equal_logits(model, reference):
    expected = load_model(reference)(IDS, POSITIONS)
    actual = model(IDS, POSITIONS)
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_linears_stay_packed(layout, tmp_path):
    folder, reference = write(tmp_path, layout)
    model = load_model(folder, keep_quantized=True, activations="none")
    assert isinstance(model, TransformersModel)
    dense = 2 * LAYERS if layout.endswith("block") else 0  # keys and values have too few rows
    assert count_packed(model) == 6 * LAYERS - dense
    assert_equal_logits(model, reference)
    assert model.load_report.method == open_checkpoint(folder).quantization.method
    assert LAYOUTS[layout].format in model.load_report.formats
    assert not model.load_report.dequantized
    meta = build_meta_model(open_checkpoint(folder), torch.float32, keep_quantized=True)
    assert {n: (p.shape, p.nbytes) for n, p in meta.named_parameters()} == {
        n: (p.shape, p.nbytes) for n, p in model.named_parameters()
    }
    if LAYOUTS[layout].extra:
        for spec in model.attention_specs:
            assert (spec.key_scale, spec.value_scale) == pytest.approx((0.03, 0.05))
        assert model.attention_specs == meta.attention_specs


@pytest.mark.parametrize("layout", ["fp8_block", "ct_int4_asym", "bnb_nf4"])
def test_without_keep_quantized_all_weights_are_dense(layout, tmp_path):
    folder, reference = write(tmp_path, layout)
    model = load_model(folder)
    assert not any(isinstance(parameter, QuantTensor) for parameter in model.parameters())
    assert_equal_logits(model, reference)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_are_dequantized(layout, tmp_path):
    """transformers stacks experts into one parameter; the linears of attention stay packed."""
    folder, reference = write(tmp_path, layout, moe=True)
    model = load_model(folder, keep_quantized=True, activations="none")
    assert isinstance(model, TransformersModel)
    assert count_packed(model) == (2 if layout == "fp8_block" else 4) * LAYERS
    assert_equal_logits(model, reference)
    reasons = {reason for name, reason in model.load_report.dequantized.items()}
    assert reasons == {"transformers' modules have no linear of this name and shape"}


def test_the_engine_generates_with_packed_linears(tmp_path):
    """Compiled, paged and batched, as dense weights; the plan counts packed bytes."""
    folder, reference = write(tmp_path, "fp8_block")
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    tokens, weights = [], []
    for path in (reference, folder):
        with LLM(path, device="cpu", context=64, max_sequences=4, cache_tokens=256) as llm:
            results = llm.engine.generate(prompts, params)
            tokens.append([result.token_ids for result in results])
            weights.append(llm.plan.weights)
            assert llm.plan.weights == weight_bytes(llm.model, llm.device)
            assert llm.model.packed_weight_bytes == 0, "linears run kernels of ours"
    assert tokens[1] == tokens[0]
    assert weights[1] < 0.65 * weights[0]  # with the kernels' layout of packed weights


def test_zero_biases_of_gptq_are_left_out(tmp_path):
    folder, reference = write(tmp_path, "gptq")
    file = folder / "model-b.safetensors"
    bias = "model.layers.0.mlp.up_proj.bias"
    tensors = load_file(file)
    save_file(tensors | {bias: torch.zeros(256)}, file)
    assert_equal_logits(load_model(folder, keep_quantized=True, activations="none"), reference)
    save_file(tensors | {bias: torch.ones(256)}, file)
    with pytest.raises(WeightsError, match=r"(?s)1 unexpected.*up_proj\.bias"):
        load_model(folder, keep_quantized=True)


def test_refusals_name_the_field(tmp_path):
    write(tmp_path, "fp8_block")
    config = tmp_path / "fp8_block" / "config.json"
    config.write_text(config.read_text().replace('"fp8"', '"quip"'))
    with pytest.raises(WeightsError, match="quant_method='quip' is not supported"):
        load_model(tmp_path / "fp8_block")
