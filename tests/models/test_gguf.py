"""GGUF files, written with the gguf package's writer and names, against the model they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fulgurite.errors import WeightsError
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.models import load_model
from fulgurite.models.deepseek import LatentUp
from fulgurite.models.gguf_file import GGUFFile
from tests.models.model_oracle import LATENT, make_theirs, prompt

gguf = pytest.importorskip("gguf", reason="the gguf package is what these compare with")

# A file has one number for mscale and mscale_all_dim.
DEEPSEEK_SCALING = {
    "rope_parameters": {**LATENT["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 0.7}  # type: ignore[dict-item]
}
# family -> GGUF architecture, fields of the case that a GGUF file can't say
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


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Rows (half, pair) of each head as (pair, half): how GGUF's llama files turn."""
    shape = weight.shape
    return weight.view(heads, 2, shape[0] // heads // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def stacked(state: dict[str, Tensor], prefix: str, name: str, count: int) -> Tensor:
    return torch.stack([state[f"{prefix}.{expert}.{name}.weight"] for expert in range(count)])


def exported(
    model: nn.Module, architecture: str, path: Path, split_up: bool = True
) -> dict[str, Tensor]:
    """The tensors by GGUF name, as converters write them; names come from the gguf package.

    `split_up`: DeepSeek's kv_b in two, keys turned over, as files since 2025 have it.
    """
    from safetensors.torch import load_file

    model.save_pretrained(path)  # type: ignore[operator]
    state, config = load_file(path / "model.safetensors"), model.config
    count = config.num_hidden_layers
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, count)
    result = {}
    for name, tensor in state.items():
        if ".experts." in name:
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_" in name else config.num_key_value_heads
            tensor = permuted(tensor, heads)
        if architecture.startswith("gemma") and "norm" in name:
            tensor = tensor + 1
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        result[found + ".weight" if name.endswith("sinks") else found] = tensor
    for layer in range(count):
        result |= exported_experts(state, layer, config)
        if split_up and f"blk.{layer}.attn_kv_b.weight" in result:
            up = result.pop(f"blk.{layer}.attn_kv_b.weight")
            heads = up.unflatten(0, (config.num_attention_heads, -1))
            keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
            result[f"blk.{layer}.attn_k_b.weight"] = keys.transpose(1, 2)
            result[f"blk.{layer}.attn_v_b.weight"] = values
    return result


def exported_experts(state: dict[str, Tensor], layer: int, config: object) -> dict[str, Tensor]:
    """The stacked experts of one layer."""
    block, start = f"blk.{layer}.ffn_", f"model.layers.{layer}."
    if f"{start}block_sparse_moe.gate.weight" in state:
        prefix = start + "block_sparse_moe.experts"
        parts = {"gate": "w1", "up": "w3", "down": "w2"}
        count = config.num_local_experts  # type: ignore[attr-defined]
        return {
            f"{block}{k}_exps.weight": stacked(state, prefix, v, count) for k, v in parts.items()
        }
    if f"{start}mlp.experts.0.up_proj.weight" in state:
        count = getattr(config, "num_experts", None) or config.n_routed_experts  # type: ignore[attr-defined]
        return {
            f"{block}{part}_exps.weight": stacked(
                state, start + "mlp.experts", f"{part}_proj", count
            )
            for part in ("gate", "up", "down")
        }
    if f"{start}feed_forward.experts.gate_up_proj" in state:
        gate_up = state[start + "feed_forward.experts.gate_up_proj"].transpose(1, 2)
        gate, up = gate_up.chunk(2, dim=1)
        down = state[start + "feed_forward.experts.down_proj"].transpose(1, 2)
        return {
            block + "gate_exps.weight": gate,
            block + "up_exps.weight": up,
            block + "down_exps.weight": down,
        }
    if f"{start}mlp.experts.gate_up_proj" in state:
        gate_up = state[start + "mlp.experts.gate_up_proj"].transpose(1, 2)
        bias = state[start + "mlp.experts.gate_up_proj_bias"]
        return {
            block + "gate_exps.weight": gate_up[:, 0::2],
            block + "up_exps.weight": gate_up[:, 1::2],
            block + "gate_exps.bias": bias[:, 0::2],
            block + "up_exps.bias": bias[:, 1::2],
            block + "down_exps.weight": state[start + "mlp.experts.down_proj"].transpose(1, 2),
            block + "down_exps.bias": state[start + "mlp.experts.down_proj_bias"],
        }
    return {}


def write_latent(writer: object, config: object, split_up: bool) -> None:
    """What DeepSeek's converter says beyond the usual; sizes of the latent where it is split."""
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim  # type: ignore[attr-defined]
    key, value = config.qk_nope_head_dim + rope, config.v_head_dim  # type: ignore[attr-defined]
    writer.add_kv_lora_rank(rank)  # type: ignore[attr-defined]
    if config.q_lora_rank:  # type: ignore[attr-defined]
        writer.add_q_lora_rank(config.q_lora_rank)  # type: ignore[attr-defined]
    writer.add_key_length(rank + rope if split_up else key)  # type: ignore[attr-defined]
    writer.add_value_length(rank if split_up else value)  # type: ignore[attr-defined]
    if split_up:
        writer.add_key_length_mla(key)  # type: ignore[attr-defined]
        writer.add_value_length_mla(value)  # type: ignore[attr-defined]
    writer.add_rope_dimension_count(rope)  # type: ignore[attr-defined]
    writer.add_leading_dense_block_count(config.first_k_dense_replace)  # type: ignore[attr-defined]
    writer.add_expert_shared_count(config.n_shared_experts)  # type: ignore[attr-defined]
    writer.add_expert_weights_scale(config.routed_scaling_factor)  # type: ignore[attr-defined]
    if getattr(config, "n_group", None) and getattr(config, "topk_method", "") != "greedy":
        writer.add_expert_group_count(config.n_group)  # type: ignore[attr-defined]
        writer.add_expert_group_used_count(config.topk_group)  # type: ignore[attr-defined]
    if config.model_type == "deepseek_v3":  # type: ignore[attr-defined]
        writer.add_expert_weights_norm(config.norm_topk_prob)  # type: ignore[attr-defined]
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)  # type: ignore[attr-defined]
    scaling = config.rope_parameters  # type: ignore[attr-defined]
    writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])  # type: ignore[attr-defined]
    writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])  # type: ignore[attr-defined]
    writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])  # type: ignore[attr-defined]


def write(
    model: nn.Module,
    architecture: str,
    folder: Path,
    split_up: bool = True,
    packed: bool = False,
) -> Path:
    """A GGUF file of a transformers model, in float32, or Q8_0 where rows are whole blocks."""
    config = model.config
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    inner = getattr(config, "intermediate_size_mlp", config.intermediate_size)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    is_latent = architecture == "deepseek2"
    writer.add_head_count_kv(1 if is_latent and split_up else config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if is_latent:
        write_latent(writer, config, split_up)
    elif getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if hasattr(config, "num_experts_per_tok"):
        counts = ("num_local_experts", "num_experts", "n_routed_experts")
        writer.add_expert_count(next(getattr(config, n) for n in counts if hasattr(config, n)))
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "llama4":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    tensors = exported(model, architecture, folder, split_up)
    parameters = config.rope_parameters
    parameters = parameters.get("full_attention", parameters)
    writer.add_rope_freq_base(parameters["rope_theta"])
    kind = parameters["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(parameters["factor"])
    if kind in ("yarn", "longrope"):
        original = parameters["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "longrope":
        writer.add_rope_dimension_count(8)
        tensors["rope_factors_short.weight"] = torch.tensor(parameters["short_factor"])
        tensors["rope_factors_long.weight"] = torch.tensor(parameters["long_factor"])
    if kind == "llama3":
        scaled = dict(model.named_buffers())["model.rotary_emb.inv_freq"]
        plain = 1.0 / parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
        tensors["rope_freqs.weight"] = plain / scaled
    for name, tensor in tensors.items():
        if packed and tensor.ndim > 1 and tensor.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            blocks = gguf.quants.quantize(tensor.contiguous().numpy(), kind)
            writer.add_tensor(name, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_is_the_model_it_was_written_from(name: str, tmp_path: Path) -> None:
    architecture, changed = FAMILIES[name]
    theirs = make_theirs(name, **changed)
    ours = load_model(write(theirs, architecture, tmp_path))
    assert ours.needs_extent == (name == "phi3")
    ids = prompt(40)
    wanted, got = theirs(ids[None]).logits[0], ours(ids, torch.arange(40))
    assert ((got - wanted).abs().max() / wanted.abs().max()).item() < 1e-4


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3"])
def test_an_up_projection_in_one_piece(name: str, tmp_path: Path) -> None:
    """Older DeepSeek files keep kv_b whole, and a head's sizes where newer ones keep the latent's."""
    architecture, changed = FAMILIES[name]
    theirs = make_theirs(name, **changed)
    ours = load_model(write(theirs, architecture, tmp_path, split_up=False))
    same = load_model(tmp_path)  # from safetensors
    for key, tensor in same.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor), key


@pytest.mark.parametrize("split_up", [True, False])
def test_a_packed_deepseek_keeps_its_up_projection_dense(split_up: bool, tmp_path: Path) -> None:
    """It is read head by head and by columns; everything else that can stays packed."""
    architecture, changed = FAMILIES["deepseek_v3"]
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16}
    theirs = make_theirs("deepseek_v3", **changed, **sizes)
    path = write(theirs, architecture, tmp_path, split_up, packed=True)
    dense, kept = load_model(path), load_model(path, keep="packed", activations="none")
    attention = kept.layers[0].attention
    assert isinstance(attention.latent_down, QuantLinear)
    assert isinstance(attention.query[2], QuantLinear)
    assert (
        type(attention.latent_up) is LatentUp and attention.latent_up.weight.dtype.is_floating_point
    )
    ids, positions = prompt(30), torch.arange(30)
    with torch.inference_mode():
        wanted, got = dense(ids, positions), kept(ids, positions)
    assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "llama4"])
def test_a_gguf_file_says_what_config_json_says(name: str, tmp_path: Path) -> None:
    """What logits of a short text can't tell: chunks, temperature, experts of each layer."""
    architecture, changed = FAMILIES[name]
    ours = load_model(write(make_theirs(name, **changed), architecture, tmp_path)).config
    same = load_model(tmp_path).config
    assert ours.experts is not None and same.experts is not None
    scaling = same.experts.scaling  # a file keeps it in float32
    assert ours.experts.scaling == pytest.approx(scaling)
    assert replace(ours.experts, scaling=scaling) == same.experts and ours.latent == same.latent
    assert ours.attention_scale == pytest.approx(same.attention_scale)
    for mine, theirs in zip(ours.layers, same.layers, strict=True):
        alike = ("window", "chunk", "experts", "temperature")
        assert [getattr(mine, key) for key in alike] == [getattr(theirs, key) for key in alike]
        assert (mine.rope is None) == (theirs.rope is None)


def test_llama_4_with_128_experts_has_no_norms_on_queries_and_keys(tmp_path: Path) -> None:
    architecture, changed = FAMILIES["llama4"]
    many = {**changed, "num_local_experts": 128, "use_qk_norm": False, "intermediate_size": 8}
    theirs = make_theirs("llama4", **many)
    ours = load_model(write(theirs, architecture, tmp_path))
    ids = prompt(20)
    wanted, got = theirs(ids[None]).logits[0], ours(ids, torch.arange(20))
    assert not ours.config.qk_norm
    assert ((got - wanted).abs().max() / wanted.abs().max()).item() < 1e-4


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    theirs = make_theirs("llama", attention_bias=False, mlp_bias=False)
    return write(theirs, "llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.02, 0.2, 0.99, 0.99999])
def test_a_truncated_file_is_an_error(llama_file: Path, tmp_path: Path, part: float) -> None:
    data = llama_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(WeightsError, match="cut short"):
        load_model(cut)


def test_an_unknown_architecture_and_missing_tensors_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"'mamba' is not one we read(.|\n)*known here: llama"):
        load_model(tmp_path / "mamba.gguf")
    theirs = make_theirs("qwen3", attention_bias=True)
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_q\.bias"):
        load_model(write(theirs, "qwen3", tmp_path))


def test_rows_of_packed_tensors_are_unpacked_alone(tmp_path: Path) -> None:
    """By our formats and by the gguf package's, in three dimensions and in one."""
    writer = gguf.GGUFWriter(tmp_path / "packed.gguf", "llama")
    for kind in ("Q4_1", "Q6_K", "Q5_K"):
        type = gguf.GGMLQuantizationType[kind]
        size = gguf.GGML_QUANT_SIZES[type][1]
        for name, shape in (("cube", (3, 4, 2 * size)), ("line", (2 * size,))):
            data = torch.randint(0, 60, shape, dtype=torch.uint8).numpy()
            writer.add_tensor(f"{kind}.{name}", data, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "packed.gguf")
    for stored in file.read():
        kind = gguf.GGMLQuantizationType[stored.format]
        whole = torch.from_numpy(gguf.quants.dequantize(stored.data.numpy(), kind))
        assert stored.shape == tuple(whole.shape) == file.shapes()[stored.name]
        assert torch.equal(stored.all(), whole)
        assert torch.equal(stored.rows(1, 2), whole[1:2])


def test_a_model_in_several_files_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"split over several(.|\n)*gguf-split"):
        load_model(tmp_path / "part.gguf")
