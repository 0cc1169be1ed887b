"""`fulgurite.quantize(model, "fp8")`: linears packed in place, one at a time; a report out.

    dense model ─ calibrate (static scales only) ─▶ one linear after the other: rows quantized in
    pieces, the module replaced by a `QuantLinear`, its dense weight let go ─▶ Report

So the most memory in use is the quantized model plus one layer. A module that says `takes_packed`, such as
the stacked experts of a mixture, has those parameters packed where they are. Embeddings, norms and what
`skip` names stay as they are; the report says why for each.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError, FormatError, WeightsError
from fulgurite.kernels.gemm.modules import QuantLinear, natural_activations, packable
from fulgurite.kernels.gemm.quant_linear import PLAIN
from fulgurite.kernels.quantize.ops import static_name
from fulgurite.kernels.quantize.row_chunks import (
    highest_value,
    quantize_by_rows,
    signal_to_noise_by_rows,
)
from fulgurite.quant import QuantTensor, features_of, require_native, resolve
from fulgurite.quant.blocks import scale_for
from fulgurite.quant.checks import check_scales
from fulgurite.quant.format import Format
from fulgurite.quant.recipe import RECIPES, LayerReport, Recipe, Report, Skipped
from fulgurite.quant.shapes import check_shape
from fulgurite.quant.storage import load_quantized, open_file, save_quantized

ACTIVATIONS_KEY = "fulgurite.activations"
SHARED_KEY = "fulgurite.shared"
DEFAULT_SKIP = ("head", "lm_head", "*.head", "*.lm_head", "*.router")


def quantize(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    skip: Sequence[str] = DEFAULT_SKIP,
    calibrate: Iterable[Any] | None = None,
    progress: bool = True,
) -> Report:
    """Pack the linears of a model, in place, for inference.

    `recipe` is a name of `RECIPES`, a number format, or a `Recipe`; `skip` are patterns of module
    names; `calibrate` are a few inputs of the model (a tensor, a tuple or a dict of arguments each).
    """
    if not isinstance(model, nn.Module) or type(model) is nn.Linear:
        raise ArgumentError(
            f"the linears inside of a module are quantized, and this is a {type(model).__name__}",
            next="nn.Sequential(linear) around a linear; fulgurite.quant.quantize(tensor, format)",
        )
    chosen = resolve_recipe(recipe)
    if chosen.static and calibrate is None:
        raise ArgumentError(
            "static activation scales are measured, and there are no batches to measure them on",
            next="pass calibrate=[batch, ...], or Recipe(..., static=False)",
        )
    before = model_bytes(model)
    layers, skipped = choose_layers(model, chosen, skip)
    linears = [path for path in layers if isinstance(model.get_submodule(path), nn.Linear)]
    amax = measure_inputs(model, linears, calibrate or ()) if chosen.static else {}
    reports: list[LayerReport] = []
    for name in _progress(layers, chosen.weights, progress):
        if name in linears:
            reports.append(_quantize_layer(model, name, chosen, amax.get(name)))
        else:
            reports += _quantize_stacks(model.get_submodule(name), name, chosen, skipped)
    return Report(chosen, tuple(reports), tuple(skipped), before, model_bytes(model))


def resolve_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe with full names of formats."""
    if isinstance(recipe, str):
        recipe = RECIPES.get(recipe.lower()) or Recipe(resolve(recipe).name)
    recipe = replace(recipe, weights=resolve(recipe.weights).name)
    if recipe.activations in (None, PLAIN):
        if recipe.static:
            raise ArgumentError(
                "static scales need a format for activations",
                next='Recipe("fp8_e4m3_row", activations="fp8_e4m3_tensor", static=True)',
            )
        return recipe
    activations = resolve(recipe.activations)  # type: ignore[arg-type]
    if recipe.static:
        static_name(activations)
    return replace(recipe, activations=activations.name)


def choose_layers(
    model: nn.Module, recipe: Recipe, skip: Sequence[str]
) -> tuple[list[str], list[Skipped]]:
    """The modules to pack, and every other parameter of two dimensions or more with its reason."""
    format = resolve(recipe.weights)
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    layers: list[str] = []
    skipped: list[Skipped] = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            full = f"{path}.{name}" if path else name
            why = _reason(module, name, path, parameter, format, skip, owners[id(parameter)])
            if why is not None:
                skipped.append(Skipped(full, _bytes(parameter), why))
            elif path not in layers:
                layers.append(path)
    return layers, skipped


def _reason(
    module: nn.Module,
    name: str,
    path: str,
    parameter: Tensor,
    format: Format,
    skip: Sequence[str],
    owners: list[str],
) -> str | None:
    """Why a parameter is not packed, or None."""
    if isinstance(parameter, QuantTensor):
        return f"already in {parameter.format.name}"
    if name not in packable(module):
        return f"{type(module).__name__}, not a linear"
    pattern = next((p for p in skip if fnmatch.fnmatch(path, p)), None)
    if pattern is not None:
        return f"skip={pattern!r}"
    if len(owners) > 1:
        other = next(owner for owner in owners if owner != f"{path}.{name}")
        return f"shared with {other}"
    if parameter.is_meta:
        return "on the meta device, without values"
    try:
        check_shape(format, parameter.shape)
    except FormatError as error:
        return error.what
    return None


def measure_inputs(
    model: nn.Module, layers: Sequence[str], batches: Iterable[Any]
) -> dict[str, Tensor]:
    """The largest finite magnitude of each layer's input over the batches."""
    amax: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().abs()
            largest = x.masked_fill(~x.isfinite(), 0.0).amax() if x.numel() else x.new_zeros(())
            amax[name] = largest if name not in amax else torch.maximum(amax[name], largest)

        return hook

    handles = [model.get_submodule(n).register_forward_pre_hook(watch(n)) for n in layers]
    try:
        with torch.no_grad():
            for batch in batches:
                _call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    for name in layers:
        if name not in amax or not bool(amax[name] > 0):
            raise FormatError(
                "calibration gave no scale: the layer's input was "
                + ("never seen" if name not in amax else "all zero"),
                where=name,
                next="calibrate with batches that reach it, or name it in skip=",
            )
    return amax


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)


def _quantize_layer(
    model: nn.Module, path: str, recipe: Recipe, amax: Tensor | None
) -> LayerReport:
    dense = model.get_submodule(path)
    assert isinstance(dense, nn.Linear), f"{path} was a linear when layers were chosen"
    weight = dense.weight.detach()
    packed = quantize_by_rows(weight, resolve(recipe.weights))
    check_scales(packed.parts, packed.format, f"{path}.weight")
    activations = recipe.activations or natural_activations(packed)
    input_scale = None
    if activations != PLAIN:
        entry = resolve(activations)
        check_shape(entry, weight.shape, where=f"the input of {path}")
        if weight.device.type == "cuda":
            require_native(entry, features_of(weight.device))
        if amax is not None:
            input_scale = static_scale(amax, entry)
    bias = None if dense.bias is None else dense.bias.detach()
    layer = QuantLinear(packed, bias, recipe.activations, input_scale)
    layer.train(dense.training)
    decibels = signal_to_noise_by_rows(weight, packed)
    above, _, last = path.rpartition(".")
    setattr(model.get_submodule(above), last, layer)
    text = activations + (" static" if input_scale is not None else "")
    shape = tuple(weight.shape)
    return LayerReport(
        path, shape, packed.format.name, text, _bytes(weight), packed.nbytes, decibels
    )


def _quantize_stacks(
    module: nn.Module, path: str, recipe: Recipe, skipped: Sequence[Skipped]
) -> list[LayerReport]:
    """Pack the parameters of a module that takes them packed; static scales are of linears only."""
    left = {one.name for one in skipped}
    wanted = None if recipe.static else recipe.activations
    module.activations = wanted
    reports = []
    for name in packable(module):
        full, weight = f"{path}.{name}", getattr(module, name).detach()
        if full in left:
            continue
        packed = quantize_by_rows(weight, resolve(recipe.weights))
        check_scales(packed.parts, packed.format, full)
        activations = wanted or natural_activations(packed)
        if activations != PLAIN:
            check_shape(resolve(activations), weight.shape, where=f"the input of {full}")
        decibels = signal_to_noise_by_rows(weight, packed)
        setattr(module, name, nn.Parameter(packed, requires_grad=False))
        sizes = (_bytes(weight), packed.nbytes)
        shape, format = tuple(weight.shape), packed.format.name
        reports.append(LayerReport(full, shape, format, activations, *sizes, decibels))
    return reports


def static_scale(amax: Tensor, format: Format) -> Tensor:
    """The scale that puts `amax` at the format's largest value."""
    return scale_for(amax.float(), highest_value(format))


# ---- files -----------------------------------------------------------------------------------------


def save(model: nn.Module, path: str | PathLike[str]) -> None:
    """The model's state_dict in one safetensors file, with how each layer takes its activations.

    A tensor that several names share is written once.
    """
    activations = {
        name: None if getattr(module, "open", False) else module.activations
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear) or (packable(module) and hasattr(module, "activations"))
    }
    tensors: dict[str, Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    shared: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        data = tensor.packed if isinstance(tensor, QuantTensor) else tensor
        same = data.data_ptr(), data.dtype, tuple(data.shape), data.stride(), tensor.dtype
        owner = first.setdefault(same, name)
        if owner == name or tensor.numel() == 0:
            tensors[name] = tensor
        else:
            shared[name] = owner
    header = {ACTIVATIONS_KEY: json.dumps(activations), SHARED_KEY: json.dumps(shared)}
    save_quantized(tensors, path, header)


def load(
    model: nn.Module, path: str | PathLike[str], device: torch.device | str = "cpu"
) -> nn.Module:
    """The same model, dense (or on meta) before, filled with what `save` wrote."""
    tensors = load_quantized(path, device=device)
    activations, shared = _saved(path, ACTIVATIONS_KEY), _saved(path, SHARED_KEY)
    tensors |= {name: tensors[owner] for name, owner in shared.items()}
    for name, tensor in tensors.items():
        module_path, _, last = name.rpartition(".")
        if not isinstance(tensor, QuantTensor):
            continue
        dense = model.get_submodule(module_path)
        if last not in packable(dense):
            continue
        if not isinstance(dense, nn.Linear):
            dense.activations = activations.get(module_path)
            setattr(dense, last, nn.Parameter(tensor, requires_grad=False))
            continue
        above, _, short = module_path.rpartition(".")
        scale = tensors.get(f"{module_path}.input_scale")
        bias = tensors.get(f"{module_path}.bias")
        packed = QuantLinear(tensor, bias, activations.get(module_path), scale)
        setattr(model.get_submodule(above), short, packed.train(dense.training))
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if missing or unexpected:
        raise WeightsError(
            f"the file does not fit the model: {len(missing)} missing, {len(unexpected)} extra",
            where=str(path),
            missing="\n".join(missing),
            extra="\n".join(unexpected),
            next="build the model the file was saved from",
        )
    return model


def _saved(path: str | PathLike[str], key: str) -> dict[str, str]:
    with open_file(path) as file:
        found: dict[str, str] = json.loads((file.metadata() or {}).get(key, "{}"))
    return found


# ---- texts and sizes -------------------------------------------------------------------------------


def model_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, each counted once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(_bytes(tensor) for tensor in tensors.values())


def _bytes(tensor: Tensor) -> int:
    return (
        tensor.nbytes if isinstance(tensor, QuantTensor) else tensor.numel() * tensor.element_size()
    )


def _progress(names: Sequence[str], format: str, wanted: bool) -> Iterator[str]:
    """The names, under a progress bar where rich is installed and someone looks."""
    try:
        from rich.progress import track
    except ImportError:
        wanted = False
    if not wanted:
        yield from names
        return
    yield from track(names, description=f"quantize to {format}", transient=True)
