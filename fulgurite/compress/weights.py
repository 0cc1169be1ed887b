"""Which tensors of a checkpoint are quantized, and the tensors that are written for each.

In: a `Source`, its modules on the meta device, a scheme. Out: a `WeightPlan`.

Linears and experts are quantized. Embeddings, norms, routers, the LM head, what `--ignore` names
and weights whose size does not fit the format stay dense. Weights that other engines run as one
matmul (query, key and value; gate and up) share NVFP4's scale per tensor, as those engines need.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fulgurite.compress.source import Source, SourceTensor
from fulgurite.errors import ArgumentError, FormatError, WeightsError
from fulgurite.kernels.gemm.modules import quantizable_parameters
from fulgurite.models.layers import CausalLM
from fulgurite.quant.files.compressed_tensors_writer import (
    CompressionScheme,
    encode_input_scale,
    encode_kv_scales,
    encode_weight,
    make_meta_weight,
)
from fulgurite.quant.files.safetensors_writer import TensorSpec
from fulgurite.quant.shapes import check_shape
from fulgurite.quantize import DEFAULT_SKIP

WEIGHT = ".weight"
STALE_SUFFIXES = (".k_scale", ".v_scale")  # of the source's KV cache


@dataclass(frozen=True)
class PlannedWeight:
    """A weight that is quantized.

    Attributes:
        tensor: where it comes from.
        base: the name of its linear in the checkpoint.
        module: our module: a linear, or stacked experts.
        parameter: our parameter, with the path of its module.
        expert: its expert; None for a linear.
        fused: the same for all weights that other engines run as one matmul.
    """

    tensor: SourceTensor
    base: str
    module: str
    parameter: str
    expert: int | None
    fused: str


@dataclass(frozen=True)
class WeightPlan:
    """What is written: quantized weights, dense tensors, KV scales.

    Attributes:
        scheme: how weights are quantized.
        quantized: by tensor name.
        dense: all other tensors by name.
        ignored: linears that stay dense, and why.
        kv_bases: attention module by layer index; empty if KV scales are not written.
        specs: every tensor of the output.
    """

    scheme: CompressionScheme
    quantized: dict[str, PlannedWeight]
    dense: dict[str, SourceTensor]
    ignored: dict[str, str]
    kv_bases: dict[int, str]
    specs: dict[str, TensorSpec]

    @property
    def num_weights(self) -> int:
        """Elements of the quantized weights."""
        return sum(torch.Size(w.tensor.shape).numel() for w in self.quantized.values())


def plan_weights(
    source: Source,
    model: CausalLM,
    scheme: CompressionScheme,
    ignore: Sequence[str] = (),
    kv_cache: bool = False,
) -> WeightPlan:
    """Decide what becomes of every tensor. Nothing is read."""
    quantized: dict[str, PlannedWeight] = {}
    dense: dict[str, SourceTensor] = {}
    ignored = {"lm_head": "LM head"}
    unused = set(ignore)
    for tensor in source.tensors.values():
        reason = _dense_reason(tensor, model, scheme, ignore, unused)
        if reason is None:
            quantized[tensor.name] = _plan_weight(tensor, model)
            continue
        if not tensor.assignments and tensor.name.endswith(STALE_SUFFIXES):
            continue
        _reject_dequantized_experts(tensor, source)
        dense[tensor.name] = tensor
        if len(tensor.shape) == 2 and tensor.name.endswith(WEIGHT) and reason:
            ignored[tensor.name.removesuffix(WEIGHT)] = reason
    if unused:
        raise ArgumentError(
            f"--ignore {sorted(unused)[0]!r} matches no linear",
            next="patterns match module names, such as model.layers.0.mlp.* or re:.*down_proj",
        )
    if not quantized:
        raise WeightsError(
            f"no weight of this checkpoint can be quantized to {scheme.name}",
            where=", ".join(f"{name}: {reason}" for name, reason in [*ignored.items()][:3]),
            next="use another format, or fewer --ignore patterns",
        )
    _check_fused_weights(quantized, ignored, source, model)
    kv_bases = _find_attention_bases(source, model) if kv_cache else {}
    specs = _plan_tensors(quantized, dense, kv_bases, scheme)
    return WeightPlan(scheme, quantized, dense, ignored, kv_bases, specs)


def scale_dtype(tensor: SourceTensor) -> torch.dtype:
    """The dtype of a weight's float scales."""
    return torch.bfloat16 if tensor.dtype == torch.bfloat16 else torch.float32


def _dense_reason(
    tensor: SourceTensor,
    model: nn.Module,
    scheme: CompressionScheme,
    ignore: Sequence[str],
    unused: set[str],
) -> str | None:
    """Why a tensor stays dense; "" if it is no linear; None if it is quantized."""
    base = tensor.name.removesuffix(WEIGHT)
    matched = [pattern for pattern in ignore if matches(base, pattern)]
    unused.difference_update(matched)
    if not tensor.assignments:
        return "not part of the language model"
    path, _, name = tensor.assignments[0].parameter.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, nn.Embedding):
        return ""
    if any(fnmatch.fnmatch(path, pattern) for pattern in DEFAULT_SKIP):
        return "LM head" if path.endswith("head") else "router"
    if name not in quantizable_parameters(module):
        return f"{type(module).__name__}, not a linear"
    if len(tensor.shape) != 2 or not tensor.name.endswith(WEIGHT):
        return "stacked experts, which have no names of their own"
    if matched:
        return f"--ignore {matched[0]}"
    try:
        check_shape(scheme.format, tensor.shape)
    except FormatError as error:
        return error.what
    return None


def matches(name: str, pattern: str) -> bool:
    """Whether a module name matches a pattern: `re:` and a regular expression, or a glob."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def _plan_weight(tensor: SourceTensor, model: nn.Module) -> PlannedWeight:
    assignment = tensor.assignments[0]
    path = assignment.parameter.rpartition(".")[0]
    module, base = model.get_submodule(path), tensor.name.removesuffix(WEIGHT)
    if not isinstance(module, nn.Linear):
        fused = f"{assignment.parameter}.{assignment.expert}"
        return PlannedWeight(tensor, base, path, assignment.parameter, assignment.expert, fused)
    siblings = find_fused_linears(model, path)
    return PlannedWeight(tensor, base, path, assignment.parameter, None, siblings[0])


def find_fused_linears(model: nn.Module, path: str) -> list[str]:
    """The paths of the linears that read the same input as this one, itself included."""
    parent_path, _, _ = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    members = getattr(parent, "fused_projections", ())
    prefix = f"{parent_path}." if parent_path else ""
    names = {id(child): child_name for child_name, child in parent.named_children()}
    paths = [f"{prefix}{names[id(m)]}" for m in members if id(m) in names]
    return paths if path in paths else [path]


def _check_fused_weights(
    quantized: dict[str, PlannedWeight],
    ignored: dict[str, str],
    source: Source,
    model: nn.Module,
) -> None:
    """Linears that other engines fuse must be quantized together, or not at all."""
    partners = {weight.fused: weight.base for weight in quantized.values()}
    for base, reason in ignored.items():
        tensor = source.tensors.get(base + WEIGHT)
        if tensor is None or not reason.startswith("--ignore"):
            continue
        partner = partners.get(_plan_weight(tensor, model).fused)
        if partner is not None:
            raise ArgumentError(
                f"{reason} keeps {base} dense, but {partner} is quantized",
                next="other engines run them as one matmul: ignore all of them, or none",
            )


def _reject_dequantized_experts(tensor: SourceTensor, source: Source) -> None:
    if tensor.was_quantized and len(tensor.shape) == 3:
        raise WeightsError(
            f"the experts of {source.family.name} are stacked and already quantized",
            where=tensor.name,
            next="use the checkpoint as it is; only experts with names of their own are requantized",
        )


def _find_attention_bases(source: Source, model: CausalLM) -> dict[int, str]:
    """The name of each layer's attention module in the checkpoint."""
    bases: dict[int, str] = {}
    for tensor in source.tensors.values():
        for assignment in tensor.assignments:
            found = re.fullmatch(r"layers\.(\d+)\.attention\.k_proj\.weight", assignment.parameter)
            if found:
                bases[int(found.group(1))] = tensor.name.rpartition(".")[0].rpartition(".")[0]
    if any(spec.is_mla for spec in model.attention_specs) or not bases:
        raise ArgumentError(
            f"--kv fp8 is not supported for {source.family.name}: its cache holds latent vectors",
            next="omit --kv",
        )
    return bases


def _plan_tensors(
    quantized: dict[str, PlannedWeight],
    dense: dict[str, SourceTensor],
    kv_bases: dict[int, str],
    scheme: CompressionScheme,
) -> dict[str, TensorSpec]:
    specs = {name: TensorSpec(tensor.dtype, tensor.shape) for name, tensor in dense.items()}
    for weight in quantized.values():
        dtype = scale_dtype(weight.tensor)
        meta = make_meta_weight(weight.tensor.shape, scheme.format)
        parts = encode_weight(weight.base, meta, scheme, dtype)
        if scheme.input_scale:
            parts |= encode_input_scale(weight.base, torch.ones(()), scheme, dtype)
        specs |= {name: TensorSpec.of(part) for name, part in parts.items()}
    for base in kv_bases.values():
        parts = encode_kv_scales(base, torch.ones(()), torch.ones(()), torch.float32)
        specs |= {name: TensorSpec.of(part) for name, part in parts.items()}
    return dict(sorted(specs.items(), key=lambda item: natural_key(item[0])))


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
