"""`fulgurite.quantize(model, "fp8")`: quantizes the linears of a model in place.

    dense model ─ calibrate (static scales only) ─▶ for each linear: quantize its weight in chunks
    of rows, replace the module by a `QuantLinear`, free the dense weight ─▶ QuantReport

So peak memory is the quantized model plus one layer. Parameters that a module lists in
`quantizable`, such as stacked experts, are quantized in place. Embeddings, norms and modules that
match `skip` stay dense; the report gives the reason for each.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from fulgurite.errors import ArgumentError, FormatError, WeightsError
from fulgurite.kernels.gemm.modules import (
    QuantLinear,
    default_activation_format,
    quantizable_parameters,
)
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.quantize.reference import static_scale_name
from fulgurite.kernels.quantize.row_chunks import (
    compute_sqnr_in_row_chunks,
    quantize_in_row_chunks,
    tensor_scale_target,
)
from fulgurite.quant import QuantTensor, get_device_features, require_native, resolve_format
from fulgurite.quant.checks import check_scales
from fulgurite.quant.codecs.blocks import compute_scale
from fulgurite.quant.config import QUANT_CONFIGS, QuantConfig
from fulgurite.quant.files.safetensors_io import load_quantized, open_safetensors, save_quantized
from fulgurite.quant.format import Format
from fulgurite.quant.report import LayerReport, QuantReport, SkippedParameter
from fulgurite.quant.shapes import check_shape

ACTIVATIONS_KEY = "fulgurite.activations"
TIED_TENSORS_KEY = "fulgurite.tied_tensors"
DEFAULT_SKIP = ("head", "lm_head", "*.head", "*.lm_head", "*.router")


def quantize(
    model: nn.Module,
    config: str | QuantConfig,
    *,
    skip: Sequence[str] = DEFAULT_SKIP,
    calibrate: Iterable[Any] | None = None,
    progress: bool = True,
) -> QuantReport:
    """Quantize the linears of a model in place, for inference.

    Args:
        model: the module whose linears and experts are quantized.
        config: a name in `QUANT_CONFIGS`, a number format, or a `QuantConfig`.
        skip: patterns of module names that stay dense.
        calibrate: input batches for static activation scales: tensors, or tuples or dicts of
            arguments.
        progress: show a progress bar.

    Returns:
        A report that prints as a table, with format, bytes and SQNR of each layer, and the reason
            for each skipped one.
    """
    if not isinstance(model, nn.Module) or type(model) is nn.Linear:
        raise ArgumentError(
            f"quantize() needs a module that contains linears, not a {type(model).__name__}",
            next="wrap a linear in nn.Sequential; for tensors use fulgurite.quant.quantize",
        )
    config = resolve_quant_config(config)
    if config.static_activations and calibrate is None:
        raise ArgumentError(
            "static activation scales need calibration batches",
            next="pass calibrate=[batch, ...], or use QuantConfig(..., static_activations=False)",
        )
    bytes_before = model_bytes(model)
    layers, skipped = select_layers(model, config, skip)
    linears = [path for path in layers if isinstance(model.get_submodule(path), nn.Linear)]
    amax: dict[str, Tensor] = {}
    if config.static_activations:
        amax = calibrate_input_amax(model, linears, calibrate or ())
    reports: list[LayerReport] = []
    for name in _show_progress(layers, config.weights, progress):
        if name in linears:
            reports.append(_quantize_linear(model, name, config, amax.get(name)))
        else:
            reports += _quantize_experts(model.get_submodule(name), name, config, skipped)
    return QuantReport(config, tuple(reports), tuple(skipped), bytes_before, model_bytes(model))


def resolve_quant_config(config: str | QuantConfig) -> QuantConfig:
    """A `QuantConfig` with full format names, from a name or a config; raises if it is invalid."""
    if isinstance(config, str):
        config = QUANT_CONFIGS.get(config.lower()) or QuantConfig(resolve_format(config).name)
    config = replace(config, weights=resolve_format(config.weights).name)
    if config.activations is None or config.activations == UNQUANTIZED:
        if config.static_activations:
            raise ArgumentError(
                "static_activations=True needs an activation format",
                next='QuantConfig("fp8_e4m3_row", "fp8_e4m3_tensor", static_activations=True)',
            )
        return config
    activations = resolve_format(config.activations)
    if config.static_activations:
        static_scale_name(activations)  # raises if the format has no static scale
    return replace(config, activations=activations.name)


def select_layers(
    model: nn.Module, config: QuantConfig, skip: Sequence[str], allow_meta: bool = False
) -> tuple[list[str], list[SkippedParameter]]:
    """The modules to quantize; and skipped parameters (of two or more dimensions), with reasons.

    `allow_meta`: select parameters on the meta device, too, for a model that is loaded later.
    """
    format = resolve_format(config.weights)
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    layers: list[str] = []
    skipped: list[SkippedParameter] = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            full_name = f"{path}.{name}" if path else name
            reason = _skip_reason(module, name, path, format, skip, owners[id(parameter)])
            if reason is None and parameter.is_meta and not allow_meta:
                reason = "on the meta device"
            if reason is not None:
                skipped.append(SkippedParameter(full_name, _nbytes(parameter), reason))
            elif path not in layers:
                layers.append(path)
    return layers, skipped


def _skip_reason(
    module: nn.Module,
    name: str,
    path: str,
    format: Format,
    skip: Sequence[str],
    owners: list[str],
) -> str | None:
    """Why a parameter is not quantized, or None."""
    parameter = module.get_parameter(name)
    if isinstance(parameter, QuantTensor):
        return f"already quantized to {parameter.format.name}"
    if name not in quantizable_parameters(module):
        return f"{type(module).__name__}, not a linear"
    pattern = next((p for p in skip if fnmatch.fnmatch(path, p)), None)
    if pattern is not None:
        return f"skip={pattern!r}"
    if len(owners) > 1:
        other = next(owner for owner in owners if owner != f"{path}.{name}")
        return f"tied to {other}"
    try:
        check_shape(format, parameter.shape)
    except FormatError as error:
        return error.what
    return None


def calibrate_input_amax(
    model: nn.Module, layers: Sequence[str], batches: Iterable[Any]
) -> dict[str, Tensor]:
    """The largest finite |x| of each layer's input over the batches."""
    amax: dict[str, Tensor] = {}

    def make_hook(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().abs()
            largest = x.masked_fill(~x.isfinite(), 0.0).amax() if x.numel() else x.new_zeros(())
            amax[name] = largest if name not in amax else torch.maximum(amax[name], largest)

        return hook

    handles = [model.get_submodule(n).register_forward_pre_hook(make_hook(n)) for n in layers]
    try:
        with torch.no_grad():
            for batch in batches:
                _run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    for name in layers:
        if name not in amax or not bool(amax[name] > 0):
            raise FormatError(
                "calibration found no scale: "
                + ("the layer was never called" if name not in amax else "its input was all zero"),
                where=name,
                next="calibrate with batches that use the layer, or add it to skip=",
            )
    return amax


def _run_batch(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)


def _quantize_linear(
    model: nn.Module, path: str, config: QuantConfig, amax: Tensor | None
) -> LayerReport:
    dense = model.get_submodule(path)
    assert isinstance(dense, nn.Linear), f"{path} must be a linear"
    weight = dense.weight.detach()
    quantized = quantize_in_row_chunks(weight, resolve_format(config.weights))
    check_scales(quantized.packed_data, quantized.format, f"{path}.weight")
    activations = config.activations or default_activation_format(quantized)
    input_scale = None
    if activations != UNQUANTIZED:
        entry = resolve_format(activations)
        check_shape(entry, weight.shape, where=f"the input of {path}")
        if weight.device.type == "cuda":
            require_native(entry, get_device_features(weight.device))
        if amax is not None:
            input_scale = compute_static_scale(amax, entry)
    bias = None if dense.bias is None else dense.bias.detach()
    layer = QuantLinear(quantized, bias, config.activations, input_scale)
    layer.train(dense.training)
    sqnr_db = compute_sqnr_in_row_chunks(weight, quantized)
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)
    if input_scale is not None:
        activations += " static"
    return _report_layer(path, weight, quantized, activations, sqnr_db)


def _quantize_experts(
    module: nn.Module, path: str, config: QuantConfig, skipped: Sequence[SkippedParameter]
) -> list[LayerReport]:
    """Quantize the parameters in a module's `quantizable`. Static scales apply to linears only."""
    skipped_names = {parameter.name for parameter in skipped}
    module.activations = None if config.static_activations else config.activations
    reports = []
    for name in quantizable_parameters(module):
        full_name, weight = f"{path}.{name}", getattr(module, name).detach()
        if full_name in skipped_names:
            continue
        quantized = quantize_in_row_chunks(weight, resolve_format(config.weights))
        check_scales(quantized.packed_data, quantized.format, full_name)
        activations = module.activations or default_activation_format(quantized)
        if activations != UNQUANTIZED:
            check_shape(
                resolve_format(activations), weight.shape, where=f"the input of {full_name}"
            )
        sqnr_db = compute_sqnr_in_row_chunks(weight, quantized)
        setattr(module, name, nn.Parameter(quantized, requires_grad=False))
        reports.append(_report_layer(full_name, weight, quantized, activations, sqnr_db))
    return reports


def _report_layer(
    name: str, weight: Tensor, quantized: QuantTensor, activations: str, sqnr_db: float
) -> LayerReport:
    return LayerReport(
        name=name,
        shape=tuple(weight.shape),
        format=quantized.format.name,
        activations=activations,
        bytes_before=_nbytes(weight),
        bytes_after=quantized.nbytes,
        sqnr_db=sqnr_db,
    )


def compute_static_scale(amax: Tensor, format: Format) -> Tensor:
    """The scale that maps `amax` to the largest value of the format."""
    return compute_scale(amax.float(), tensor_scale_target(format))


# ---- files ---------------------------------------------------------------------------------------


def save(model: nn.Module, path: str | PathLike[str]) -> None:
    """Save a quantized model's state_dict and activation formats in one safetensors file.

    Tied tensors are stored once.
    """
    activations = {
        name: None if getattr(module, "uses_default_activations", False) else module.activations
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear)
        or (quantizable_parameters(module) and hasattr(module, "activations"))
    }
    tensors: dict[str, Tensor] = {}
    first_name: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        data = tensor.packed if isinstance(tensor, QuantTensor) else tensor
        identity = data.data_ptr(), data.dtype, tuple(data.shape), data.stride(), tensor.dtype
        owner = first_name.setdefault(identity, name)
        if owner == name or tensor.numel() == 0:
            tensors[name] = tensor
        else:
            tied[name] = owner
    header = {ACTIVATIONS_KEY: json.dumps(activations), TIED_TENSORS_KEY: json.dumps(tied)}
    save_quantized(tensors, path, header)


def load(
    model: nn.Module, path: str | PathLike[str], device: torch.device | str = "cpu"
) -> nn.Module:
    """Load a file of `save` into the model it was saved from, dense or on the meta device."""
    tensors = load_quantized(path, device=device)
    activations = _read_metadata(path, ACTIVATIONS_KEY)
    tied = _read_metadata(path, TIED_TENSORS_KEY)
    tensors |= {name: tensors[owner] for name, owner in tied.items()}
    for name, tensor in tensors.items():
        module_path, _, last = name.rpartition(".")
        if not isinstance(tensor, QuantTensor):
            continue
        dense = model.get_submodule(module_path)
        if last not in quantizable_parameters(dense):
            continue
        if not isinstance(dense, nn.Linear):
            dense.activations = activations.get(module_path)
            setattr(dense, last, nn.Parameter(tensor, requires_grad=False))
            continue
        parent, _, child = module_path.rpartition(".")
        scale = tensors.get(f"{module_path}.input_scale")
        bias = tensors.get(f"{module_path}.bias")
        quantized = QuantLinear(tensor, bias, activations.get(module_path), scale)
        setattr(model.get_submodule(parent), child, quantized.train(dense.training))
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if missing or unexpected:
        raise WeightsError(
            f"the file does not match the model: {len(missing)} missing, "
            f"{len(unexpected)} unexpected",
            where=str(path),
            missing="\n".join(missing),
            unexpected="\n".join(unexpected),
            next="build the model that the file was saved from",
        )
    return model


def _read_metadata(path: str | PathLike[str], key: str) -> dict[str, str]:
    with open_safetensors(path) as file:
        values: dict[str, str] = json.loads((file.metadata() or {}).get(key, "{}"))
    return values


# ---- sizes and progress --------------------------------------------------------------------------


def model_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, each counted once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(_nbytes(tensor) for tensor in tensors.values())


def _nbytes(tensor: Tensor) -> int:
    if isinstance(tensor, QuantTensor):
        return tensor.nbytes
    return tensor.numel() * tensor.element_size()


def _show_progress(names: Sequence[str], format: str, enabled: bool) -> Iterable[str]:
    """The names, with a progress bar if enabled."""
    if not enabled:
        return names
    return track(names, description=f"quantize to {format}", transient=True)
