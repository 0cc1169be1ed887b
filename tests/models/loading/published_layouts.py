"""Tiny checkpoints in the layouts that other projects publish, and the same weights dense.

Each layout is a function: the shape of a weight in, its tensors by name suffix and its values out.
Codes and scales are random; the values are computed here, by the definition of the layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTERMEDIATE, EXPERT, EXPERTS, HEADS, KV_HEADS, HEAD = 256, 256, 128, 4, 4, 2, 32
WIDE_HEAD = 128
VOCABULARY, LAYERS = 64, 2
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each nibble of a word, from the lowest
Written = tuple[dict[str, Tensor], Tensor]
GENERATOR = torch.Generator()


@dataclass(frozen=True)
class Layout:
    """A layout: how a weight is written, what config.json says, and the format it loads as."""

    write: Callable[[int, int], Written]
    format: str
    config: dict[str, Any]
    expert_format: str = ""
    modelopt_file: bool = False
    extra: dict[str, Tensor] = field(default_factory=dict)  # tensors of each attention module


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def positive(*shape: int) -> Tensor:
    return 0.5 + torch.rand(shape, generator=GENERATOR)


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR)


def repeat(scale: Tensor, rows: int, columns: int) -> Tensor:
    """One scale a block as one scale an element."""
    down, across = rows // scale.shape[0], columns // scale.shape[1]
    return scale.repeat_interleave(down, 0).repeat_interleave(across, 1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte, the first in the low nibble."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes of a row as 32-bit words, the first code in the lowest bits."""
    words = torch.zeros(codes.shape[0], codes.shape[1] * bits // 32, dtype=torch.int64)
    for index in range(32 // bits):
        words |= codes[:, index :: 32 // bits].long() << bits * index
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


# ---- FP8 -----------------------------------------------------------------------------------------


def fp8(
    scale_shape: Callable[[int, int], tuple[int, ...]],
    scale_name: str = ".weight_scale",
    static: bool = False,
) -> Callable[[int, int], Written]:
    def write(rows: int, columns: int) -> Written:
        weight = noise(rows, columns).to(torch.float8_e4m3fn)
        scale = 0.1 * positive(*scale_shape(rows, columns))
        tensors = {".weight": weight, scale_name: scale}
        if static:
            tensors[".input_scale"] = torch.tensor(0.1).reshape(scale.shape if scale.dim() else ())
        table = scale.reshape(1, 1) if scale.numel() == 1 else scale
        return tensors, weight.float() * repeat(table, rows, columns)

    return write


def blocks(rows: int, columns: int) -> tuple[int, ...]:
    return rows // 128, columns // 128


def fp8_channels(rows: int, columns: int) -> tuple[int, ...]:
    return rows, 1


def write_torchao(rows: int, columns: int) -> Written:
    """Float8 rows: the parts of a flattened tensor subclass."""
    weight, scale = noise(rows, columns).to(torch.float8_e4m3fn), 0.1 * positive(rows, 1)
    return {"._weight_qdata": weight, "._weight_scale": scale}, weight.float() * scale


def write_mxfp8(rows: int, columns: int) -> Written:
    weight = noise(rows, columns).to(torch.float8_e4m3fn)
    exponent = integers(121, 125, rows, columns // 32).to(torch.uint8)
    scale = 2.0 ** (exponent.float() - 127)
    return {".weight": weight, ".weight_scale": exponent}, weight.float() * repeat(
        scale, rows, columns
    )


# ---- FP4 -----------------------------------------------------------------------------------------


def nvfp4(style: str, static: bool = True) -> Callable[[int, int], Written]:
    def write(rows: int, columns: int) -> Written:
        codes = integers(0, 16, rows, columns)
        scale = (100 * positive(rows, columns // 16)).to(torch.float8_e4m3fn)
        tensor_scale = torch.tensor(2.0**-11)  # one for all, as gate and up must share it
        packed = pack_nibbles(codes)
        if style == "modelopt":
            tensors = {".weight": packed, ".weight_scale": scale, ".weight_scale_2": tensor_scale}
            tensors |= {".input_scale": torch.tensor(0.01)} if static else {}
        else:
            tensors = {".weight_packed": packed, ".weight_scale": scale}
            tensors[".weight_global_scale"] = (1 / tensor_scale).reshape(1)
            tensors |= {".input_global_scale": torch.tensor([64.0])} if static else {}
        return tensors, E2M1[codes] * repeat(scale.float(), rows, columns) * tensor_scale

    return write


def write_mxfp4(rows: int, columns: int) -> Written:
    codes = integers(0, 16, rows, columns)
    exponent = integers(121, 124, rows, columns // 32).to(torch.uint8)
    scale = 2.0 ** (exponent.float() - 127)
    tensors = {".weight_packed": pack_nibbles(codes), ".weight_scale": exponent}
    return tensors, E2M1[codes] * repeat(scale, rows, columns)


def write_nf4(rows: int, columns: int) -> Written:
    """bitsandbytes: codes of the flat weight, the first in the high nibble, in blocks of 64."""
    codes = integers(0, 16, rows * columns)
    absmax = 0.2 * positive(rows * columns // 64)
    packed = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "float32",
        "shape": [rows, columns],
    }
    tensors = {
        ".weight": packed[:, None],
        ".weight.absmax": absmax,
        ".weight.quant_map": torch.tensor(NF4),
        ".weight.quant_state.bitsandbytes__nf4": torch.frombuffer(
            bytearray(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    values = torch.tensor(NF4)[codes] * absmax.repeat_interleave(64)
    return tensors, values.view(rows, columns)


# ---- integers ------------------------------------------------------------------------------------


def write_int8(rows: int, columns: int) -> Written:
    codes = integers(-127, 128, rows, columns).to(torch.int8)
    scale = (0.001 * positive(rows, 1)).to(torch.bfloat16)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale.float()


def packed_integers(bits: int, group: int, symmetric: bool) -> Callable[[int, int], Written]:
    """compressed-tensors pack-quantized: unsigned codes in words; zero points packed along rows."""

    def write(rows: int, columns: int) -> Written:
        middle = 2 ** (bits - 1)
        codes = integers(0, 2**bits, rows, columns)
        groups = columns // group if group else 1
        scale = 0.2 / middle * positive(rows, groups)
        zero = torch.full((rows, groups), middle)
        tensors = {
            ".weight_packed": pack_words(codes, bits),
            ".weight_scale": scale,
            ".weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            zero = integers(0, 2**bits, rows, groups)
            tensors[".weight_zero_point"] = pack_words(zero.t(), bits).t().contiguous()
        values = (codes - repeat(zero, rows, columns)) * repeat(scale, rows, columns)
        return tensors, values.float()

    return write


def write_awq(rows: int, columns: int) -> Written:
    """[K, N / 8] words of eight rows in AWQ's order, groups of 64."""
    codes, zero = integers(0, 16, rows, columns), integers(0, 16, rows, columns // 64)
    scale = (0.03 * positive(rows, columns // 64)).half()

    def pack(values: Tensor) -> Tensor:
        ordered = values.t().unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1)
        return pack_words(ordered, 4)

    tensors = {".qweight": pack(codes), ".qzeros": pack(zero), ".scales": scale.t().contiguous()}
    values = (codes - repeat(zero, rows, columns)) * repeat(scale.float(), rows, columns)
    return tensors, values


def write_gptq(rows: int, columns: int) -> Written:
    """[K / 8, N] words along K, zero points minus one, groups of 64 in order."""
    codes, zero = integers(0, 16, rows, columns), integers(1, 16, rows, columns // 64)
    scale = (0.03 * positive(rows, columns // 64)).half()
    tensors = {
        ".qweight": pack_words(codes, 4).t().contiguous(),
        ".qzeros": pack_words(zero.t() - 1, 4),
        ".scales": scale.t().contiguous(),
        ".g_idx": torch.arange(columns, dtype=torch.int32) // 64,
    }
    values = (codes - repeat(zero, rows, columns)) * repeat(scale.float(), rows, columns)
    return tensors, values


# ---- configs -------------------------------------------------------------------------------------


def compressed(
    weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        **more,
    }


def args(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False,
        **more,
    }  # fmt: skip


DYNAMIC_FP8 = args(8, "float", "token", dynamic=True)
KV_SCHEME = args(8, "float", "tensor")
KV_SCALES = {"k_scale": torch.tensor(0.03), "v_scale": torch.tensor(0.05)}
MODELOPT_KV = {"k_proj.k_scale": torch.tensor(0.03), "v_proj.v_scale": torch.tensor(0.05)}

LAYOUTS: dict[str, Layout] = {
    "ct_fp8_static": Layout(
        fp8(lambda n, k: (1,), static=True),
        "fp8_e4m3_tensor",
        compressed(args(8, "float", "tensor"), KV_SCHEME, kv_cache_scheme=KV_SCHEME),
        expert_format="fp8_e4m3_row",
        extra=KV_SCALES,
    ),
    "ct_fp8_channel": Layout(
        fp8(fp8_channels),
        "fp8_e4m3_row",
        compressed(args(8, "float", "channel"), DYNAMIC_FP8),
    ),
    "ct_fp8_block": Layout(
        fp8(blocks),
        "fp8_e4m3_128x128",
        compressed(args(8, "float", "block", block_structure=[128, 128]), DYNAMIC_FP8),
    ),
    "ct_nvfp4": Layout(
        nvfp4("compressed"),
        "nvfp4",
        compressed(
            args(4, "float", "tensor_group", group_size=16),
            args(4, "float", "tensor_group", group_size=16, dynamic="local"),
        ),
    ),
    "ct_nvfp4a16": Layout(
        nvfp4("compressed", static=False),
        "nvfp4",
        compressed(args(4, "float", "tensor_group", group_size=16), None),
    ),
    "ct_mxfp4": Layout(
        write_mxfp4, "mxfp4", compressed(args(4, "float", "group", group_size=32), None)
    ),
    "ct_mxfp8": Layout(
        write_mxfp8,
        "mxfp8_e4m3",
        compressed(args(8, "float", "group", group_size=32), DYNAMIC_FP8),
    ),
    "ct_int8": Layout(
        write_int8,
        "int8",
        compressed(args(8, "int", "channel"), args(8, "int", "token", dynamic=True)),
    ),
    "ct_int8_packed": Layout(
        packed_integers(8, 0, True), "int8", compressed(args(8, "int", "channel"), None)
    ),
    "ct_int4": Layout(
        packed_integers(4, 128, True),
        "int4_g128",
        compressed(args(4, "int", "group", group_size=128), None),
    ),
    "ct_int4_asym": Layout(
        packed_integers(4, 64, False),
        "int4_g64_asym",
        compressed(args(4, "int", "group", group_size=64, symmetric=False), None),
    ),
    "modelopt_fp8": Layout(
        fp8(lambda n, k: (), static=True),
        "fp8_e4m3_tensor",
        {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "*gate"],
        },
        expert_format="fp8_e4m3_row",
        modelopt_file=True,
        extra=MODELOPT_KV,
    ),
    "modelopt_nvfp4": Layout(
        nvfp4("modelopt"),
        "nvfp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
    ),
    "fbgemm_fp8": Layout(
        fp8(fp8_channels),
        "fp8_e4m3_row",
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
    ),
    "fp8_static": Layout(
        fp8(lambda n, k: (), static=True),
        "fp8_e4m3_tensor",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        expert_format="fp8_e4m3_row",
    ),
    "fp8_block": Layout(
        fp8(blocks, ".weight_scale_inv"),
        "fp8_e4m3_128x128",
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "awq": Layout(
        write_awq,
        "int4_g64_asym",
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
    ),
    "gptq": Layout(
        write_gptq,
        "int4_g64_asym",
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False},
    ),
    "auto_round": Layout(
        write_gptq,
        "int4_g64_asym",
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 64,
            "sym": False,
        },
    ),
    "torchao_fp8": Layout(
        write_torchao,
        "fp8_e4m3_row",
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8DynamicConfig"}}},
    ),
    "bnb_nf4": Layout(
        write_nf4,
        "nf4",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
}


# ---- checkpoints ---------------------------------------------------------------------------------


def linear_shapes(moe: bool, wide: bool = False) -> dict[str, tuple[int, int]]:
    """The linears of one layer: name -> [N, K]. `wide`: their halves are whole blocks of 128."""
    head = WIDE_HEAD if wide else HEAD
    shapes = {
        "self_attn.q_proj": (HEADS * head, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * head),
    }
    size = EXPERT if moe and not wide else INTERMEDIATE
    prefixes = [f"mlp.experts.{e}." for e in range(EXPERTS)] if moe else ["mlp."]
    for prefix in prefixes:
        shapes |= {f"{prefix}{name}_proj": (size, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}down_proj"] = (HIDDEN, size)
    return shapes


def model_fields(moe: bool) -> dict[str, Any]:
    fields = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "LlamaForCausalLM"],
        "model_type": "qwen3_moe" if moe else "llama",
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    if moe:
        fields |= {
            "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    return fields


def write_checkpoints(
    root: Path,
    name: str,
    moe: bool,
    skip: tuple[str, ...] = (),
    wide: bool = False,
    **config: Any,
) -> tuple[Path, Path]:
    """A checkpoint in the layout, in two shards, and the same weights dense.

    `skip`: linears of a layer that the architecture lacks. `wide`: two ranks can share them in every
    layout. `config`: fields that differ.
    """
    layout = LAYOUTS[name]
    GENERATOR.manual_seed(len(name))
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {
        "model.embed_tokens.weight": noise(VOCABULARY, HIDDEN),
        "model.norm.weight": positive(HIDDEN),
        "lm_head.weight": 0.1 * noise(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        dense[prefix + "input_layernorm.weight"] = positive(HIDDEN)
        dense[prefix + "post_attention_layernorm.weight"] = positive(HIDDEN)
        if moe:
            dense[prefix + "mlp.gate.weight"] = 0.1 * noise(EXPERTS, HIDDEN)
            for norm in ("q_norm", "k_norm"):
                dense[f"{prefix}self_attn.{norm}.weight"] = positive(WIDE_HEAD if wide else HEAD)
        stored |= {f"{prefix}self_attn.{key}": value for key, value in layout.extra.items()}
    values = dict(dense)
    for layer in range(LAYERS):
        for linear, (rows, columns) in linear_shapes(moe, wide).items():
            base = f"model.layers.{layer}.{linear}"
            if linear in skip:
                continue
            if name.endswith("block") and rows < 128:  # published key heads have 128 rows
                values[base + ".weight"] = dense[base + ".weight"] = 0.1 * noise(rows, columns)
                continue
            tensors, values[base + ".weight"] = layout.write(rows, columns)
            stored |= {base + suffix: tensor for suffix, tensor in tensors.items()}
    quantized, reference = root / name, root / f"{name}-dense"
    fields = model_fields(moe) | config
    if wide:
        fields |= {"head_dim": WIDE_HEAD, "moe_intermediate_size": INTERMEDIATE}
    if layout.modelopt_file:
        save_folder(quantized, stored | dense, fields)
        section = {"producer": {"name": "modelopt"}, "quantization": layout.config}
        (quantized / "hf_quant_config.json").write_text(json.dumps(section))
    else:
        save_folder(quantized, stored | dense, fields | {"quantization_config": layout.config})
    save_folder(reference, values, fields)
    return quantized, reference


def save_folder(folder: Path, tensors: dict[str, Tensor], fields: dict[str, Any]) -> None:
    """Two shards; the scales of a weight lie in another one than its data."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    shards: dict[str, dict[str, Tensor]] = {"a": {}, "b": {}}
    for name, tensor in tensors.items():
        shards["b" if "scale" in name or "absmax" in name else "a"][name] = tensor.clone()
    shards["b"]["model.norm.weight"] = shards["a"].pop("model.norm.weight")
    names = {shard: f"model-{shard}.safetensors" for shard in shards}
    for shard, content in shards.items():
        save_file({name: t.contiguous() for name, t in content.items()}, folder / names[shard])
    weight_map = {name: names[shard] for shard, content in shards.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
