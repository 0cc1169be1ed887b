"""Weights of transformers' modules: transformers' loader, and packed linears where the file has them.

    plan ─ build_state_dict ─▶ LazyTensors ─ transformers' loader ─▶ module ─ install ─▶ QuantLinears

transformers renames, merges and stacks tensors (experts become one parameter), so all weights go
through its loader, one at a time. It gets lazy tensors of our reader: each is read, and dequantized
if it is stored so, when the loader asks for it. A linear that stays packed (see `find_transformers_sources`)
gets a placeholder without memory, which its packed weight replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.errors import WeightsError
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.models.loading.checkpoint_tensor import TensorEntry
from fulgurite.models.loading.load_plan import LoadPlan, apply_kv_scales
from fulgurite.models.loading.quantized import load_packed_parameter
from fulgurite.models.loading.weight_assignment import TRANSFORMERS_PREFIX, check_dtype
from fulgurite.models.transformers_backend.config import refuse
from fulgurite.models.transformers_backend.family import (
    TransformersFamily,
    load_transformers_model,
)
from fulgurite.models.transformers_backend.model import TransformersModel
from fulgurite.quant import QuantTensor


@dataclass(frozen=True)
class LazyTensor:
    """A weight that is read and dequantized by `tensor[...]`, as transformers' loader does."""

    entry: TensorEntry
    is_transposed: bool = False

    def __getitem__(self, index: EllipsisType) -> Tensor:
        values = self.entry.read_all()
        if self.is_transposed:
            return values.transpose(-1, -2).contiguous()
        return values if self.entry.is_quantized else values.clone()  # not a view of the file

    def is_floating_point(self) -> bool:
        return self.entry.dtype is None or self.entry.dtype.is_floating_point


def load_transformers(plan: LoadPlan) -> TransformersModel:
    """Load the modules of a plan, packed where it says so."""
    checkpoint, options = plan.checkpoint, plan.options
    family = checkpoint.family
    assert isinstance(family, TransformersFamily), f"{family.name} is not made of transformers"
    dtype = options.dtype or checkpoint.config.dtype
    model = load_transformers_model(
        family,
        checkpoint.config,
        checkpoint.path,
        dtype,
        options.device,
        build_state_dict(plan, checkpoint.source.entries(), dtype),
        partial(install_packed_linears, plan),
    )
    apply_kv_scales(model, checkpoint.read_kv_scales())
    return model


def build_state_dict(
    plan: LoadPlan, entries: Mapping[str, TensorEntry], dtype: torch.dtype
) -> dict[str, Any]:
    """The weights by their names in the checkpoint, as transformers' loader takes them."""
    parameters = dict(plan.model.named_parameters())
    state_dict: dict[str, Any] = {}
    for name, entry in entries.items():
        check_dtype(entry, plan.checkpoint.path)
        parameter = parameters.get(TRANSFORMERS_PREFIX + name)
        if isinstance(parameter, QuantTensor):
            state_dict[name] = torch.zeros((), dtype=dtype).expand(entry.shape)
        elif not _is_zero_bias(plan, name, entry):
            is_transposed = _is_transposed(plan, name, entry, parameter)
            state_dict[name] = LazyTensor(entry, is_transposed)
    return state_dict


def _is_zero_bias(plan: LoadPlan, name: str, entry: TensorEntry) -> bool:
    """Whether a tensor is the bias of a linear without one, and all zeros, as GPTQ writes it."""
    path, _, last = (TRANSFORMERS_PREFIX + name).rpartition(".")
    linear = dict(plan.model.named_modules()).get(path) if last == "bias" else None
    if not isinstance(linear, nn.Linear | QuantLinear) or linear.bias is not None:
        return False
    return not bool(entry.read_all().any())


def _is_transposed(plan: LoadPlan, name: str, entry: TensorEntry, parameter: Tensor | None) -> bool:
    """Whether the module holds stacked experts as [E, K, N]; quantized ones are stored [E, N, K]."""
    if parameter is None or parameter.dim() != 3 or not entry.is_quantized:
        return False
    experts, rows, columns = entry.shape
    if rows == columns:
        raise WeightsError(
            f"{name} is quantized and square, {list(entry.shape)}: which way transformers' module "
            "holds it is not known",
            where=str(plan.checkpoint.path),
            next="use a dense checkpoint, or an architecture of fulgurite",
        )
    return parameter.shape == (experts, columns, rows)


def install_packed_linears(plan: LoadPlan, module: nn.Module) -> None:
    """Replace the placeholders in a loaded module by packed weights on the device of the plan."""
    checkpoint, options = plan.checkpoint, plan.options
    for name, shard in plan.shards.items():
        path = name.removeprefix(TRANSFORMERS_PREFIX).rpartition(".")[0]
        linear, planned = module.get_submodule(path), plan.model.get_submodule(name[:-7])
        assert isinstance(planned, QuantLinear), f"{name} is planned as a packed linear"
        assert isinstance(planned.weight, QuantTensor), f"{name} is planned as a packed linear"
        if type(linear) is not nn.Linear or any(linear.weight.stride()):
            assert isinstance(checkpoint.family, TransformersFamily), "a module of transformers"
            raise refuse(
                checkpoint.family.architecture,
                f"its loader fills {path}.weight with a tensor of another name",
                str(checkpoint.path),
            )
        weight, scale = load_packed_parameter(
            planned.weight, shard, plan.sources[name], checkpoint.config, options.device
        )
        has_scale = planned.input_scale is not None
        activations = None if planned.uses_default_activations else planned.activations
        packed = QuantLinear(weight, None, activations, scale if has_scale else None)
        packed.bias = linear.bias
        parent, _, child = path.rpartition(".")
        setattr(module.get_submodule(parent), child, packed)
