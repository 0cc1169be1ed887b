"""What the linears of a layer see, and the rounding of their inputs.

In: a layer whose weights are loaded. Out, while texts run through it:

    record_inputs      for every linear and expert: the largest |x|, and the Hessian sum x xᵀ
    simulate_inputs    inputs rounded as the scheme says, for perplexities of W8A8 and W4A4

Linears that read the same input share one record. Experts keep the tokens that were routed to
them; the Hessian of one expert is computed when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.compress.weights import find_fused_linears
from fulgurite.errors import FormatError, WeightsError
from fulgurite.kernels.gemm.modules import quantizable_parameters
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.kv_cache import NoKVCache
from fulgurite.models.moe import Experts
from fulgurite.quant import quantize
from fulgurite.quant.codecs.blocks import amax_over_dims
from fulgurite.quant.files.compressed_tensors_writer import NVFP4_RANGE
from fulgurite.quant.format import E4M3

RoundInputs = Callable[[Tensor], Tensor]
FP8_RANGE = E4M3.max_value


@dataclass
class InputRecord:
    """The inputs of a linear: largest finite |x|, and the Hessian if it is needed."""

    amax: Tensor
    hessian_KK: Tensor | None = None

    @classmethod
    def of(cls, x_TK: Tensor, with_hessian: bool) -> InputRecord:
        record = cls(torch.zeros((), device=x_TK.device))
        record.add(x_TK, with_hessian)
        return record

    def add(self, x_TK: Tensor, with_hessian: bool) -> None:
        if not x_TK.numel():
            return
        x_TK = x_TK.float()
        self.amax = torch.maximum(self.amax, amax_over_dims(x_TK, (0, 1), keep_nan=False))
        if with_hessian:
            if self.hessian_KK is None:
                self.hessian_KK = x_TK.new_zeros(x_TK.shape[1], x_TK.shape[1])
            self.hessian_KK.addmm_(x_TK.t(), x_TK)


class LayerRecords:
    """The records of one layer. Keys: the path of a linear; the parameter of stacked experts."""

    def __init__(self, with_hessian: bool) -> None:
        self.with_hessian = with_hessian
        self.linears: dict[str, InputRecord] = {}
        self.experts: dict[str, ExpertInputs] = {}

    def find(self, module: str, parameter: str, expert: int | None) -> InputRecord:
        """The record of a weight; an error if it saw no input that is not zero."""
        if expert is not None:
            return self.experts[module].record(parameter.rpartition(".")[2], expert)
        record = self.linears.get(module)
        if record is None or not bool(record.amax > 0):
            raise FormatError(
                "calibration found no scale: "
                + ("the layer was never called" if record is None else "its input was all zero"),
                where=module,
                next="calibrate with other text, or add it to --ignore",
            )
        return record


class ExpertInputs:
    """The tokens that were routed to each expert of a layer."""

    def __init__(self, experts: Experts, with_hessian: bool) -> None:
        self.experts = experts
        self.with_hessian = with_hessian
        self.tokens: list[tuple[Tensor, Routes]] = []
        self.amax: dict[str, Tensor] = {}

    def add(self, x_TD: Tensor, routes: Routes) -> None:
        self.tokens.append((x_TD, routes))

    def inputs_of(self, name: str, expert: int) -> Tensor:
        """The inputs of one expert's `gate_up_proj` or `down_proj`."""
        x_SD = torch.cat([_select_tokens(self.experts, expert, *t).x_SD for t in self.tokens])
        if name == "gate_up_proj":
            return x_SD
        return _run_gate_up(self.experts, expert, x_SD)

    def record(self, name: str, expert: int) -> InputRecord:
        """The record of one expert. An expert without tokens gets the amax of all experts."""
        record = InputRecord.of(self.inputs_of(name, expert), self.with_hessian)
        if not bool(record.amax > 0):
            record.amax = self._amax_of_all(name)
        return record

    def _amax_of_all(self, name: str) -> Tensor:
        if name not in self.amax:
            count = self.experts.gate_up_proj.shape[0]
            parts = [InputRecord.of(self.inputs_of(name, e), False).amax for e in range(count)]
            self.amax[name] = torch.stack(parts).amax()
        if not bool(self.amax[name] > 0):
            raise FormatError(
                "calibration found no scale: the inputs of all experts were zero",
                next="calibrate with other text",
            )
        return self.amax[name]


class ObservedExperts(nn.Module):
    """Stacked experts in plain torch, one at a time: records inputs or rounds them."""

    def __init__(
        self, experts: Experts, inputs: ExpertInputs | None, rounding: Mapping[str, RoundInputs]
    ) -> None:
        super().__init__()
        self.experts = experts
        self.inputs = inputs
        self.rounding = rounding

    def forward(self, x_TD: Tensor, routes: Routes) -> Tensor:
        experts = self.experts
        if self.inputs is not None:
            self.inputs.add(x_TD, routes)
        out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        for expert in routes.experts_Tk.unique().tolist():
            token_S, weight_S1, x_SD = _select_tokens(experts, expert, x_TD, routes)
            h_SI = _run_gate_up(experts, expert, self._round("gate_up_proj", x_SD))
            bias = experts.down_proj_bias
            y_SD = F.linear(
                self._round("down_proj", h_SI),
                experts.down_proj[expert],
                None if bias is None else bias[expert],
            )
            out_TD.index_add_(0, token_S, y_SD.float() * weight_S1)
        return out_TD.to(x_TD.dtype)

    def _round(self, name: str, x: Tensor) -> Tensor:
        rounding = self.rounding.get(name)
        return x if rounding is None else rounding(x)


class ExpertTokens(NamedTuple):
    """The tokens of one expert: their indices, the weights of its outputs, its inputs."""

    token_S: Tensor
    weight_S1: Tensor
    x_SD: Tensor


def _select_tokens(experts: Experts, expert: int, x_TD: Tensor, routes: Routes) -> ExpertTokens:
    token_S, slot_S = (routes.experts_Tk == expert).nonzero(as_tuple=True)
    weight_S1 = routes.weights_Tk[token_S, slot_S, None]
    x_SD = x_TD[token_S]
    if not experts.apply_router_weight_on_input:
        return ExpertTokens(token_S, weight_S1, x_SD)
    weighted_SD = (x_SD * weight_S1).to(x_SD.dtype)
    return ExpertTokens(token_S, torch.ones_like(weight_S1), weighted_SD)


def _run_gate_up(experts: Experts, expert: int, x_SD: Tensor) -> Tensor:
    bias = experts.gate_up_proj_bias
    gate_up = F.linear(x_SD, experts.gate_up_proj[expert], None if bias is None else bias[expert])
    return experts.activation(gate_up)


@contextmanager
def record_inputs(layer: nn.Module, prefix: str, with_hessian: bool) -> Iterator[LayerRecords]:
    """Record the inputs of a layer's linears and experts within the block."""
    records = LayerRecords(with_hessian)

    def make_hook(paths: list[str]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x_TK = inputs[0].flatten(0, -2)
            if paths[0] in records.linears:
                records.linears[paths[0]].add(x_TK, with_hessian)
                return
            record = InputRecord.of(x_TK, with_hessian)
            records.linears |= dict.fromkeys(paths, record)

        return hook

    seen: set[str] = set()
    with ExitStack() as stack:
        for path, linear in _linears(layer):
            group = [f"{prefix}{name}" for name in find_fused_linears(layer, path)]
            if group[0] not in seen:
                seen.add(group[0])
                handle = linear.register_forward_pre_hook(make_hook(group))
                stack.callback(handle.remove)
        for path, experts in _find_experts(layer):
            inputs = records.experts[f"{prefix}{path}"] = ExpertInputs(experts, with_hessian)
            stack.enter_context(_replace(layer, path, ObservedExperts(experts, inputs, {})))
        yield records


@contextmanager
def simulate_inputs(
    layer: nn.Module, prefix: str, rounding: Mapping[str, RoundInputs]
) -> Iterator[None]:
    """Round the inputs of linears (by path) and experts (by parameter) within the block."""
    if not rounding:
        yield
        return

    def make_hook(round_inputs: RoundInputs) -> Callable[..., tuple[Tensor, ...]]:
        return lambda module, inputs: (round_inputs(inputs[0]), *inputs[1:])

    with ExitStack() as stack:
        for path, linear in _linears(layer):
            if f"{prefix}{path}" in rounding:
                hook = make_hook(rounding[f"{prefix}{path}"])
                stack.callback(linear.register_forward_pre_hook(hook).remove)
        for path, experts in _find_experts(layer):
            names = {
                name: rounding[f"{prefix}{path}.{name}"]
                for name in experts.quantizable
                if f"{prefix}{path}.{name}" in rounding
            }
            stack.enter_context(_replace(layer, path, ObservedExperts(experts, None, names)))
        yield


def make_rounding(format: str | None, amax: Tensor | None) -> RoundInputs | None:
    """Rounds inputs to a number format; `amax` gives its static scale."""
    if format is None:
        return None
    static: dict[str, Tensor] = {}
    if amax is not None:
        name, largest = ("tensor_scale", NVFP4_RANGE) if format == "nvfp4" else ("scale", FP8_RANGE)
        static = {name: amax.float() / largest}

    def round_inputs(x: Tensor) -> Tensor:
        if not x.numel():
            return x
        rows = x.reshape(-1, x.shape[-1])
        return quantize(rows, format, **static).dequantize(x.dtype).view(x.shape)

    return round_inputs


def _linears(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for path, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            yield path, module


def _find_experts(layer: nn.Module) -> list[tuple[str, Experts]]:
    found = []
    for path, module in layer.named_modules():
        if isinstance(module, Experts):
            found.append((path, module))
        elif quantizable_parameters(module) and not isinstance(module, nn.Linear):
            raise WeightsError(f"{type(module).__name__} can't be calibrated", where=path)
    return found


@contextmanager
def _replace(layer: nn.Module, path: str, module: nn.Module) -> Iterator[None]:
    """Replace a submodule within the block."""
    parent, _, name = path.rpartition(".")
    owner = layer.get_submodule(parent)
    original = getattr(owner, name)
    setattr(owner, name, module)
    try:
        yield
    finally:
        setattr(owner, name, original)


# ---- KV cache ------------------------------------------------------------------------------------


@dataclass
class KVRecord:
    """The largest |key| and |value| of one layer."""

    key: Tensor
    value: Tensor


class ObservedKVCache(NoKVCache):
    """No cache; records the largest keys and values, or rounds them to FP8 by `scales`."""

    def __init__(self, scales: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        super().__init__()
        self.scales = scales
        self.records: dict[int, KVRecord] = {}

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        if k_XKH is not None and v_XKV is not None:
            index = spec.layer_index
            if self.scales is None:
                self._record(index, k_XKH, v_XKV)
            else:
                key_scale, value_scale = self.scales[index]
                k_XKH, v_XKV = _round_fp8(k_XKH, key_scale), _round_fp8(v_XKV, value_scale)
        return super().attend(spec, q_XNH, k_XKH, v_XKV, positions_X, sinks_N)

    def _record(self, index: int, key: Tensor, value: Tensor) -> None:
        found = KVRecord(*(x.abs().amax().float() for x in (key, value)))
        before = self.records.get(index, found)
        self.records[index] = KVRecord(
            torch.maximum(before.key, found.key), torch.maximum(before.value, found.value)
        )


def _round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return quantize(rows, "fp8_e4m3_tensor", scale=scale).dequantize(x.dtype).view(x.shape)
