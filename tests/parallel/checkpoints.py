"""Tiny checkpoints on disk: a configuration's fields in, a folder as the hub would have it out.

Parameters become tensors of the file by what a family's rules say, undone: `UNDO` has the inverse of each
`take`, written out by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from fulgurite.models import CausalLM, build_random_model
from fulgurite.models import weight_mapping as rules
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.registry import find_family
from fulgurite.models.loading.weight_assignment import map_expected_names
from fulgurite.models.weight_mapping import Convert
from fulgurite.quant import quantize

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def interleaved(x: Tensor) -> Tensor:
    """All gates, then all ups, as gate, up, gate, up."""
    return torch.stack(x.chunk(2, dim=1), dim=2).flatten(1, 2)


UNDO: dict[Convert, Callable[[Tensor], Tensor]] = {
    rules.identity: lambda x: x,
    rules.transpose: lambda x: x.transpose(-1, -2),
    rules.deinterleave_gate_up: interleaved,
    rules.transpose_deinterleave_gate_up: lambda x: interleaved(x).transpose(-1, -2),
    rules.as_row: lambda x: x,
    rules.flatten: lambda x: x[None],
    # parts of one tensor, in the order of the table
    rules.slice_q: lambda x: x,
    rules.slice_k: lambda x: x,
    rules.slice_v: lambda x: x,
    rules.slice_first_half: lambda x: x,
    rules.slice_second_half: lambda x: x,
}


def tensors_of(model: CausalLM, family: ModelFamily) -> dict[str, Tensor]:
    """The model's parameters by the names, and in the shapes, of a file."""
    found: dict[str, list[Tensor]] = {}
    parameters = dict(model.named_parameters())
    for name, fillings in map_expected_names(family.weights, model.config, parameters).items():
        for one in fillings:
            part = one.mapping.target_view(
                parameters[one.parameter].detach(), model.config, one.expert
            )
            found.setdefault(name, []).append(UNDO[one.mapping.convert](part))
    return {name: torch.cat(parts).contiguous() for name, parts in found.items()}


def save(folder: Path, fields: dict[str, object], packed: str = "", shards: int = 1) -> Path:
    """A checkpoint with wide random weights, its linears packed as `fp8`, its experts as `mxfp4`."""
    family = find_family(ConfigFields(fields, "a test"))
    config = family.read_config(ConfigFields(fields, "a test"))
    model = build_random_model(config, family, dtype=torch.float32, std=0.3)
    tensors = tensors_of(model, family)
    if packed == "fp8":
        fields, tensors = fields | {"quantization_config": FP8}, in_fp8(tensors)
    elif packed == "mxfp4":
        fields = fields | {"quantization_config": {"quant_method": "mxfp4"}}
        tensors = in_mxfp4(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields | {"torch_dtype": "float32"}))
    save_shards(folder, tensors, shards)
    return folder


def save_shards(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map = {n: f"model-{i % shards:05}.safetensors" for i, n in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def in_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every linear inside the layers as float8 with a scale a block of 128 x 128."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            packed = quantize(tensor, "fp8_e4m3_128x128")
            result |= {name: packed.packed, f"{name}_scale_inv": packed.scales["scale"]}
        else:
            result[name] = tensor
    return result


def in_mxfp4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss: experts as blocks of 32 along their inputs."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            packed = quantize(tensor.transpose(-1, -2).contiguous(), "mxfp4")
            result[f"{name}_blocks"] = packed.packed.unflatten(-1, (-1, 16)).contiguous()
            result[f"{name}_scales"] = packed.scales["scale"].view(torch.uint8)
        else:
            result[name] = tensor
    return result


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """One token a byte, as far as the vocabulary goes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocabulary - 1]
    backend = Tokenizer(models.BPE({text: id for id, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
