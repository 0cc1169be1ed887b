"""Names of adapters in PEFT's files: our weights in, modules of transformers out.

A linear here is a linear of transformers, or some rows of one (query rows of a fused `qkv_proj`), or
several of them together. Adapters follow, exactly: the product B A of a row range is the row range of
B times A. Stacked experts are parameters of one module there (`target_parameters` in PEFT).

`LinearPart` says which rows of a linear of transformers some rows of a linear here are. `ExpertPart`
says how an expert weight is stored there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.models import ARCHITECTURES, CausalLM, weight_mapping
from fulgurite.models.config import ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.weight_mapping import Convert, WeightMapping

# Where transformers' modules are called other than the tensors of a checkpoint.
RENAMED_EXPERTS = {
    "mixtral": ("block_sparse_moe", "mlp"),
    "phi_moe": ("block_sparse_moe", "mlp"),
    "minimax_m2": ("block_sparse_moe", "mlp"),
}
# [E, in, out] parameters that PEFT takes for [E, out, in]: A and B change places.
SWAPPED_EXPERTS = ("llama4",)
PLAIN_EXPERTS = (weight_mapping.identity, weight_mapping.transpose)


@dataclass(frozen=True)
class LinearPart:
    """Rows `own` of a linear here are the rows `rows` of `module` in transformers, in this order."""

    module: str
    rows: Tensor
    own: Tensor


@dataclass(frozen=True)
class ExpertPart:
    """An expert weight here is the parameter `name` of `module` in transformers.

    `interleaved`: gate and up rows alternate there. `swapped`: A there is B transposed, and B is A.
    """

    module: str
    name: str
    interleaved: bool = False
    swapped: bool = False


def find_family(model: CausalLM) -> ModelFamily:
    """The family of a model."""
    name = model.config.family
    family = next((f for f in ARCHITECTURES.values() if f.name == name), None)
    if family is None:
        raise ArgumentError(
            f"{name} is no family of fulgurite, so the names of its adapters are not known",
            next="load it with implementation='fulgurite'",
        )
    return family


def find_mappings(family: ModelFamily, parameter: str) -> tuple[str, list[WeightMapping]]:
    """The layer of a parameter ("": of no layer) and the mappings that fill it."""
    match = re.match(r"layers\.(\d+)\.", parameter)
    target = re.sub(r"^layers\.\d+\.", "layers.{layer}.", parameter)
    found = [mapping for mapping in family.weights if mapping.target == target]
    assert found, f"{family.name} has no weight mapping for {parameter}"
    return (match.group(1) if match else ""), found


def linear_parts(
    family: ModelFamily, config: ModelConfig, path: str, outputs: int
) -> list[LinearPart]:
    """The linears of transformers that the linear at `path` consists of."""
    layer, mappings = find_mappings(family, f"{path}.weight")
    parts = []
    for mapping in mappings:
        own = mapping.target_view(torch.arange(outputs), config, 0).flatten()
        size = source_rows(family, config, mapping, len(own))
        rows = mapping.convert(torch.arange(size), config)
        if rows.shape != own.shape:
            raise ArgumentError(
                f"{mapping.source} is stored in a way that PEFT's files can't describe",
                where=path,
                next="merge the adapters: export='merged'",
            )
        module = mapping.source.replace("{layer}", layer).removesuffix(".weight")
        parts.append(LinearPart(module, rows, own))
    return parts


def source_rows(
    family: ModelFamily, config: ModelConfig, mapping: WeightMapping, own_rows: int
) -> int:
    """Rows of the tensor that a mapping reads: those of all weights here that are made of it."""
    fixed: dict[Convert, int] = {
        weight_mapping.slice_first_half: 2 * own_rows,
        weight_mapping.slice_second_half: 2 * own_rows,
        weight_mapping.slice_query: 2 * own_rows,
        weight_mapping.slice_gate: 2 * own_rows,
    }
    qkv = (weight_mapping.slice_q, weight_mapping.slice_k, weight_mapping.slice_v)
    if mapping.convert in qkv:
        return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return fixed.get(mapping.convert, own_rows)


def expert_part(family: ModelFamily, path: str) -> ExpertPart:
    """Where transformers keeps the expert weight at `path`."""
    layer, mappings = find_mappings(family, path)
    mapping, name = mappings[0], path.rpartition(".")[2]
    source = mapping.source.replace("{layer}", layer)
    if "{expert}" in source:
        module = source.partition(".{expert}.")[0]
    else:
        module = re.sub(r"\.(input_linear|output_linear)\.weight$", ".experts.", source)
        module = module.rpartition(".")[0]
    before, after = RENAMED_EXPERTS.get(family.name, ("", ""))
    module = module.replace(before, after) if before else module
    interleaved = mapping.convert is weight_mapping.transpose_deinterleave_gate_up
    if not interleaved and mapping.convert not in PLAIN_EXPERTS:
        raise ArgumentError(
            f"adapters of {source} can't be written in PEFT's layout",
            where=path,
            next="leave the experts out of --tune.targets, or export merged weights",
        )
    return ExpertPart(module, name, interleaved, family.name in SWAPPED_EXPERTS)
