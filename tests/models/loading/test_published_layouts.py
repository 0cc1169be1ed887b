"""Checkpoints in published layouts stay packed and compute what their dequantized weights compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from fulgurite.errors import WeightsError
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.models import load_model
from fulgurite.quant import QuantTensor
from tests.models.loading.published_layouts import (
    GENERATOR,
    HEAD,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    LAYOUTS,
    VOCABULARY,
    Layout,
    model_fields,
    noise,
    positive,
    save_folder,
    write_checkpoints,
)

IDS = torch.randint(0, VOCABULARY, (11,), generator=torch.Generator().manual_seed(5))
POSITIONS = torch.arange(11)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that are opened, in order."""
    found: list[str] = []
    safe_open = safetensors.safe_open

    def count(path: str, **options: object) -> object:
        found.append(Path(path).name)
        return safe_open(path, **options)

    monkeypatch.setattr(safetensors, "safe_open", count)
    return found


@torch.inference_mode()
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_weights_match_their_values(
    tmp_path: Path, opened: list[str], name: str, moe: bool
) -> None:
    layout = LAYOUTS[name]
    folder, reference = write_checkpoints(tmp_path, name, moe)
    model = load_model(folder, keep_quantized=True, activations="none")
    assert sorted(opened) == ["model-a.safetensors", "model-b.safetensors"]
    expected = load_model(reference)(IDS, POSITIONS)
    actual = model(IDS, POSITIONS)
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
    report = model.load_report
    assert report is not None and report.file_opens == 2 and not report.dequantized, str(report)
    for path, module in model.named_modules():
        if isinstance(module, QuantLinear):
            assert module.weight.format.name == layout.format, path
    experts = [p for p in model.parameters() if p.dim() == 3]
    for weight in experts:
        assert isinstance(weight, QuantTensor)
    formats = {weight.format.name for weight in experts}
    assert formats <= {layout.format, layout.expert_format}
    assert sum(isinstance(m, QuantLinear) for m in model.modules()) >= (4 if moe else 10)


@torch.inference_mode()
@pytest.mark.parametrize("name", LAYOUTS)
def test_dequantized_weights_are_the_values(tmp_path: Path, name: str) -> None:
    folder, reference = write_checkpoints(tmp_path, name, moe=True)
    expected = dict(load_model(reference).named_parameters())
    for path, parameter in load_model(folder).named_parameters():
        assert torch.allclose(parameter, expected[path], rtol=1e-6, atol=0), path


def test_a_weight_stored_twice_is_an_error(tmp_path: Path) -> None:
    folder, _ = write_checkpoints(tmp_path, "ct_int4", moe=False)
    name = "model.layers.0.mlp.up_proj.weight"
    shard = folder / "model-a.safetensors"
    save_file(load_file(shard) | {name: torch.ones(256, 256)}, shard)
    with pytest.raises(WeightsError, match=f"{name} is stored twice"):
        load_model(folder)


def test_one_matrix_of_two_nvfp4_tensors_needs_one_scale(tmp_path: Path) -> None:
    """Gate and up with tensor scales of their own are dequantized, and the report says why."""
    folder, reference = write_checkpoints(tmp_path, "modelopt_nvfp4", moe=True)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    shard, other = folder / "model-b.safetensors", reference / "model-a.safetensors"
    scales, values = load_file(shard), load_file(other)
    scales[f"{name}_scale_2"] = 3 * scales[f"{name}_scale_2"]
    save_file(scales, shard)
    save_file(values | {name: 3 * values[name]}, other)
    model = load_model(folder, keep_quantized=True, activations="none")
    dequantized = "layers.1.feed_forward.experts.gate_up_proj"
    assert list(model.load_report.dequantized) == [dequantized]
    assert "tensor scale" in str(model.load_report) and dequantized in str(model.load_report)
    assert isinstance(model.layers[0].feed_forward.experts.gate_up_proj, QuantTensor)
    expected = load_model(reference)(IDS, POSITIONS)
    assert (model(IDS, POSITIONS) - expected).abs().max() <= 2e-5 * expected.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["ct_fp8_static", "ct_nvfp4", "awq", "fp8_block"])
def test_fused_projections_are_sliced_packed(tmp_path: Path, name: str) -> None:
    """Phi stores qkv_proj and gate_up_proj; their rows become the rows of packed weights."""
    layout = LAYOUTS[name]
    quantized, dense = write_phi(tmp_path, layout)
    model = load_model(quantized, keep_quantized=True, activations="none")
    expected = load_model(dense)(IDS, POSITIONS)
    assert (model(IDS, POSITIONS) - expected).abs().max() <= 2e-5 * expected.abs().max()
    formats = {m.weight.format.name for m in model.modules() if isinstance(m, QuantLinear)}
    assert formats == (
        {"fp8_e4m3_128x128", "fp8_e4m3_1x128"} if "block" in name else {layout.format}
    )
    assert sum(isinstance(m, QuantLinear) for m in model.modules()) == 14
    if "static" in name:
        attention = load_model(quantized, keep_quantized=True).layers[0].attention
        assert attention.q_proj.input_scale == attention.v_proj.input_scale == pytest.approx(0.1)


def write_phi(root: Path, layout: Layout) -> tuple[Path, Path]:
    """A Phi-3 checkpoint with fused projections."""
    GENERATOR.manual_seed(3)
    linears = {
        "self_attn.qkv_proj": ((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_up_proj": (2 * INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    dense = {
        "model.embed_tokens.weight": noise(VOCABULARY, HIDDEN),
        "model.norm.weight": positive(HIDDEN),
        "lm_head.weight": 0.1 * noise(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            dense[f"model.layers.{layer}.{norm}.weight"] = positive(HIDDEN)
    stored, values = dict(dense), dict(dense)
    for layer in range(LAYERS):
        for linear, shape in linears.items():
            base = f"model.layers.{layer}.{linear}"
            tensors, values[f"{base}.weight"] = layout.write(*shape)
            stored |= {base + suffix: tensor for suffix, tensor in tensors.items()}
    fields = model_fields(moe=False) | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    fields["original_max_position_embeddings"] = 64
    save_folder(root / "phi", stored, fields | {"quantization_config": layout.config})
    save_folder(root / "dense", values, fields)
    return root / "phi", root / "dense"
