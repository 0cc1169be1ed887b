"""A checkpoint folder with random weights of a published shape, dense or quantized, for benchmarks.

In: the config.json fields of a preset and a format. Out: a folder that `LLM` loads. Only a few rows
of each weight are random and quantized; they are repeated, which takes the same time to load and
to run. So a model of 8B parameters is written at the speed of the disk.

With `share_layers`, weights whose names differ only in numbers (layers, experts) are stored once,
and the others are aliases of it. On a GPU every one of them still has memory of its own. On a CPU
packed weights are views of the file: sharing them would make steps faster than they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fulgurite.compress.source import Source, SourceTensor, write_json
from fulgurite.compress.weights import plan_weights, scale_dtype
from fulgurite.errors import ArgumentError
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.registry import find_family
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading.loader import build_model
from fulgurite.models.loading.weight_assignment import map_expected_names
from fulgurite.models.weight_mapping import WeightAssignment
from fulgurite.quant import QuantTensor, quantize
from fulgurite.quant.files.compressed_tensors_writer import (
    CompressionScheme,
    build_quantization_config,
    encode_input_scale,
    encode_weight,
)
from fulgurite.quant.files.safetensors_writer import ShardWriter, TensorSpec, check_output_folder

TILE_ROWS = 256  # a multiple of every block's rows
STD = 0.02
INPUT_AMAX = 10.0  # of static input scales
MAX_SHARD_BYTES = 5_000_000_000


def write_random_checkpoint(
    fields: ConfigFields,
    folder: Path,
    scheme: CompressionScheme | None,
    seed: int = 0,
    share_layers: bool = False,
) -> None:
    """Write config.json and random weights; `scheme` None: dense, in the preset's dtype."""
    values = {k: v for k, v in fields.values.items() if k != "quantization_config"}
    family = find_family(fields)
    config = family.read_config(ConfigFields(values, fields.where))
    model = build_model(config, family, config.dtype)
    source = _describe(family, config, model, values)
    specs = {name: TensorSpec(t.dtype, t.shape) for name, t in source.tensors.items()}
    plan = None if scheme is None else plan_weights(source, model, scheme)
    if plan is not None:
        specs = plan.specs
    aliases = find_aliases(specs) if share_layers else {}
    specs = {name: spec for name, spec in specs.items() if name not in aliases}
    stored_modules = {module_name(name) for name in specs}
    check_output_folder(folder, sum(spec.nbytes for spec in specs.values()))
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, specs, MAX_SHARD_BYTES, aliases)
    tiles = RandomTiles(seed)
    for name, tensor in (source.tensors if plan is None else plan.dense).items():
        if name in specs:
            writer.write(name, tiles.make_dense(tensor))
    for weight in () if plan is None else plan.quantized.values():
        assert plan is not None, "there is a scheme"
        if weight.base not in stored_modules:
            continue
        dtype = scale_dtype(weight.tensor)
        quantized = tiles.make_quantized(weight.tensor.shape, plan.scheme.weights)
        parts = encode_weight(weight.base, quantized, plan.scheme, dtype)
        if plan.scheme.input_scale:
            amax = torch.tensor(INPUT_AMAX)
            parts |= encode_input_scale(weight.base, amax, plan.scheme, dtype)
        for name, part in parts.items():
            writer.write(name, part)
    writer.close(is_durable=False)
    if plan is not None:
        section = build_quantization_config(plan.scheme, [*plan.ignored], kv_cache=False)
        values = {**values, "quantization_config": section}
    write_json(folder / "config.json", values)


def find_aliases(specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Name -> the tensor of the first module with equal tensors and the same name up to numbers."""
    modules: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in specs.items():
        modules.setdefault(module_name(name), {})[name.removeprefix(module_name(name))] = spec
    first: dict[tuple[str, frozenset[tuple[str, TensorSpec]]], str] = {}
    aliases: dict[str, str] = {}
    for module, tensors in modules.items():
        stored = first.setdefault((re.sub(r"\d+", "#", module), frozenset(tensors.items())), module)
        if stored != module:
            aliases |= {module + last: stored + last for last in tensors}
    return aliases


def module_name(tensor_name: str) -> str:
    return tensor_name.rpartition(".")[0]


class RandomTiles:
    """Random values: one tile for each number of columns, repeated along the rows."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dense: dict[int, Tensor] = {}
        self.quantized: dict[tuple[int, int, str], QuantTensor] = {}

    def _tile(self, columns: int) -> Tensor:
        if columns not in self.dense:
            tile = torch.randn(TILE_ROWS, columns, generator=self.generator) * STD
            self.dense[columns] = tile
        return self.dense[columns]

    def make_dense(self, tensor: SourceTensor) -> Tensor:
        """Random values; norm weights are about 1."""
        *lead, columns = tensor.shape
        rows = torch.Size(lead).numel()
        tile = self._tile(columns).to(tensor.dtype)
        if tensor.name.endswith("norm.weight"):
            tile = tile + 1
        repeats = -(-rows // TILE_ROWS)
        return tile.repeat(repeats, 1)[:rows].view(tensor.shape)

    def make_quantized(self, shape: tuple[int, ...], format: str) -> QuantTensor:
        rows, columns = shape
        count, rest = divmod(rows, TILE_ROWS)
        parts = [self._quantized_tile(TILE_ROWS, columns, format)] * count
        if rest:
            parts.append(self._quantized_tile(rest, columns, format))
        scale = parts[0].scales.get("tensor_scale")
        if scale is not None:  # one for all rows
            for part in parts:
                part.tensor_scale = scale
        whole: QuantTensor = torch.cat(parts)  # type: ignore[assignment]
        return whole

    def _quantized_tile(self, rows: int, columns: int, format: str) -> QuantTensor:
        key = rows, columns, format
        if key not in self.quantized:
            self.quantized[key] = quantize(self._tile(columns)[:rows], format)
        return self.quantized[key]


def _describe(
    family: ModelFamily, config: ModelConfig, model: CausalLM, values: Mapping[str, object]
) -> Source:
    """The tensors of a checkpoint of this shape: names, shapes and dtypes."""
    parameters = dict(model.named_parameters())
    weights = family.weights
    if family.named_experts:
        targets = {mapping.target for mapping in family.named_experts}
        others = tuple(mapping for mapping in weights if mapping.target not in targets)
        weights = others + family.named_experts
    tensors = {}
    for name, assignments in map_expected_names(weights, config, parameters).items():
        shape = _stored_shape(name, assignments, parameters, config)
        tensors[name] = SourceTensor(
            name, shape, config.dtype, _never_read, tuple(assignments), was_quantized=False
        )
    return Source(Path(), family, config, tensors, dict(values), lambda folder: None)


def _never_read() -> Tensor:
    raise AssertionError("random weights are made, not read")


def _stored_shape(
    name: str,
    assignments: list[WeightAssignment],
    parameters: Mapping[str, Tensor],
    config: ModelConfig,
) -> tuple[int, ...]:
    """The shape of a checkpoint tensor, from the parameters that it fills."""
    views = [a.mapping.target_view(parameters[a.parameter], config, a.expert) for a in assignments]
    shape = tuple(views[0].shape)
    candidates = [shape, (sum(len(view) for view in views), *shape[1:]), (1, *shape)]
    if len(shape) >= 2:
        candidates.append((*shape[:-2], shape[-1], shape[-2]))
        candidates.insert(0, (shape[1], 1, shape[0]))  # of a depthwise convolution
    for candidate in candidates:
        if all(_fits(a, candidate, v, config) for a, v in zip(assignments, views, strict=True)):
            return candidate
    names = ", ".join(sorted({a.mapping.convert.__name__ for a in assignments}))
    raise ArgumentError(
        f"random weights of {config.family} can't be written: {name} is stored by {names}",
        next="give --model a folder with a checkpoint",
    )


def _fits(
    assignment: WeightAssignment, shape: tuple[int, ...], view: Tensor, config: ModelConfig
) -> bool:
    """Whether a tensor of this shape, converted, has the shape of the part that it fills."""
    try:
        converted = assignment.mapping.convert(torch.empty(shape, device="meta"), config)
    except (RuntimeError, IndexError):  # the conversion is a view that this shape does not allow
        return False
    return converted.shape == view.shape
