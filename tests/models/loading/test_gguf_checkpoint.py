"""GGUF checkpoints, written with the gguf package, against the model they were written from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fulgurite.errors import WeightsError
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.models import load_model
from fulgurite.models.families.deepseek import KVUpProjection
from fulgurite.models.loading.gguf_checkpoint import GGUFCheckpoint
from fulgurite.quant import QuantTensor
from tests.models.loading.gguf_export import write_gguf
from tests.models.reference_models import MLA_FIELDS, build_reference, make_prompt

gguf = pytest.importorskip("gguf", reason="the gguf package writes the files")

# GGUF files store one value for mscale and mscale_all_dim.
DEEPSEEK_SCALING = {
    "rope_parameters": {**MLA_FIELDS["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 0.7}  # type: ignore[dict-item]
}
# family -> GGUF architecture, overrides for fields that GGUF files do not store
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"attention_bias": False, "mlp_bias": False}),
    "llama3": ("llama", {}),
    "llama_yarn": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"attention_bias": False}),
    "qwen3_moe": ("qwen3moe", {"mlp_only_layers": []}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 20, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3",
        {
            "num_hidden_layers": 7,
            "layer_types": None,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("phi3", {}),
    "mixtral": ("llama", {"sliding_window": None}),
    "gpt_oss": ("gpt-oss", {"swiglu_limit": 7.0}),
    "deepseek_v2": ("deepseek2", DEEPSEEK_SCALING),
    "deepseek_v2_lite": ("deepseek2", DEEPSEEK_SCALING),
    "deepseek_v3": ("deepseek2", DEEPSEEK_SCALING),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "olmoe": ("olmoe", {"clip_qkv": None}),
    "olmo2": ("olmo2", {"attention_bias": False}),
    "olmo3": ("olmo2", {}),
    "granite": ("granite", {"attention_bias": False, "mlp_bias": False}),
    "granite_moe": ("granitemoe", {}),
    "granite_moe_shared": ("granitemoe", {}),
    "glm4": ("glm4", {"attention_bias": True}),
    "glm4_moe": ("glm4moe", {}),
    "qwen2_moe": ("qwen2moe", {"use_sliding_window": False, "mlp_only_layers": []}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "attention_bias": False}),
    "seed_oss": ("seed_oss", {"attention_out_bias": False}),
    "ernie": ("ernie4_5", {"use_bias": False}),
    "ernie_moe": ("ernie4_5-moe", {}),
    "hunyuan": ("hunyuan-dense", {"rope_parameters": None}),
    "hunyuan_moe": ("hunyuan-moe", {}),
    "cohere": ("command-r", {"attention_bias": False, "tie_word_embeddings": True}),
    "cohere2": ("cohere2", {"tie_word_embeddings": True}),
    "starcoder2": ("starcoder2", {}),
    "exaone4": ("exaone4", {"layer_types": None}),
    "dots1": ("dots1", {"max_window_layers": 4}),
    "minimax_m2": ("minimax-m2", {}),
    "llama4": (
        "llama4",
        {
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_matches_the_exported_model(name: str, tmp_path: Path) -> None:
    architecture, overrides = FAMILIES[name]
    reference = build_reference(name, **overrides)
    model = load_model(write_gguf(reference, architecture, tmp_path))
    assert model.needs_sequence_lengths == (name == "phi3")
    ids = make_prompt(40)
    expected, actual = reference(ids[None]).logits[0], model(ids, torch.arange(40))
    assert ((actual - expected).abs().max() / expected.abs().max()).item() < 1e-4


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3"])
def test_unsplit_kv_b(name: str, tmp_path: Path) -> None:
    """Older DeepSeek files store kv_b unsplit, and the lengths of a head, not those of MLA."""
    architecture, overrides = FAMILIES[name]
    reference = build_reference(name, **overrides)
    model = load_model(write_gguf(reference, architecture, tmp_path, split_kv_b=False))
    from_safetensors = load_model(tmp_path)  # from safetensors
    for key, tensor in from_safetensors.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key


@pytest.mark.parametrize("split_kv_b", [True, False])
def test_quantized_deepseek_keeps_kv_b_dense(split_kv_b: bool, tmp_path: Path) -> None:
    """kv_b_proj is read per head and by columns, so it stays dense; others stay quantized."""
    architecture, overrides = FAMILIES["deepseek_v3"]
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16}
    reference = build_reference("deepseek_v3", **overrides, **sizes)
    path = write_gguf(reference, architecture, tmp_path, split_kv_b, quantized=True)
    dense_model, quantized_model = (
        load_model(path),
        load_model(path, keep_quantized=True, activations="none"),
    )
    attention = quantized_model.layers[0].attention
    assert isinstance(attention.kv_a_proj, QuantLinear)
    assert isinstance(attention.q_b_proj, QuantLinear)
    assert (
        type(attention.kv_b_proj) is KVUpProjection
        and attention.kv_b_proj.weight.dtype.is_floating_point
    )
    ids, positions = make_prompt(30), torch.arange(30)
    with torch.inference_mode():
        expected, actual = dense_model(ids, positions), quantized_model(ids, positions)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "llama4"])
def test_gguf_config_matches_config_json(name: str, tmp_path: Path) -> None:
    """Settings that logits of a short text do not show: chunks, temperature, MoE layers."""
    architecture, overrides = FAMILIES[name]
    model = load_model(
        write_gguf(build_reference(name, **overrides), architecture, tmp_path)
    ).config
    from_safetensors = load_model(tmp_path).config
    assert model.moe is not None and from_safetensors.moe is not None
    scaling = from_safetensors.moe.routed_scaling_factor  # stored in float32
    assert model.moe.routed_scaling_factor == pytest.approx(scaling)
    assert (
        replace(model.moe, routed_scaling_factor=scaling) == from_safetensors.moe
        and model.mla == from_safetensors.mla
    )
    assert model.attention_scale == pytest.approx(from_safetensors.attention_scale)
    for layer, reference in zip(model.layers, from_safetensors.layers, strict=True):
        fields = ("sliding_window", "attention_chunk_size", "is_moe", "attention_temperature")
        assert [getattr(layer, key) for key in fields] == [
            getattr(reference, key) for key in fields
        ]
        assert (layer.rope is None) == (reference.rope is None)


def test_llama4_with_128_experts_has_no_qk_norm(tmp_path: Path) -> None:
    architecture, overrides = FAMILIES["llama4"]
    overrides_128 = {
        **overrides,
        "num_local_experts": 128,
        "use_qk_norm": False,
        "intermediate_size": 8,
    }
    reference = build_reference("llama4", **overrides_128)
    model = load_model(write_gguf(reference, architecture, tmp_path))
    ids = make_prompt(20)
    expected, actual = reference(ids[None]).logits[0], model(ids, torch.arange(20))
    assert not model.config.qk_norm
    assert ((actual - expected).abs().max() / expected.abs().max()).item() < 1e-4


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference = build_reference("llama", attention_bias=False, mlp_bias=False)
    return write_gguf(reference, "llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.02, 0.2, 0.99, 0.99999])
def test_truncated_file_is_an_error(llama_file: Path, tmp_path: Path, fraction: float) -> None:
    data = llama_file.read_bytes()
    truncated = tmp_path / "cut.gguf"
    truncated.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(WeightsError, match="truncated"):
        load_model(truncated)


def test_unsupported_architecture_and_missing_tensors(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"'mamba' is not supported(.|\n)*supported: llama"):
        load_model(tmp_path / "mamba.gguf")
    reference = build_reference("qwen3", attention_bias=True)
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_q\.bias"):
        load_model(write_gguf(reference, "qwen3", tmp_path))


def test_reading_rows_of_quantized_tensors(tmp_path: Path) -> None:
    """With our codecs and with the gguf package, for three dimensions and for one."""
    writer = gguf.GGUFWriter(tmp_path / "packed.gguf", "llama")
    for type_name in ("Q4_1", "Q6_K", "Q5_K"):
        type = gguf.GGMLQuantizationType[type_name]
        size = gguf.GGML_QUANT_SIZES[type][1]
        for name, shape in (("cube", (3, 4, 2 * size)), ("line", (2 * size,))):
            data = torch.randint(0, 60, shape, dtype=torch.uint8).numpy()
            writer.add_tensor(f"{type_name}.{name}", data, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFCheckpoint(tmp_path / "packed.gguf")
    for name, entry in file.entries().items():
        tensor, type_name = entry.load(), gguf.GGMLQuantizationType[name.split(".")[0]]
        data = tensor.data.packed if isinstance(tensor.data, QuantTensor) else tensor.data
        whole = torch.from_numpy(gguf.quants.dequantize(data.numpy(), type_name))
        assert tensor.shape == entry.shape == tuple(whole.shape) == file.shapes()[name]
        assert torch.equal(tensor.read_all(), whole)
        assert torch.equal(tensor.read_rows(1, 2), whole[1:2])


def test_split_files_are_rejected(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"several GGUF files(.|\n)*gguf-split"):
        load_model(tmp_path / "part.gguf")
