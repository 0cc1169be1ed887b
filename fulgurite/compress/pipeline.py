"""`quantize_checkpoint`: a source and a plan in, a folder and a `QualityReport` out.

    for each layer:   load ─ run texts, record inputs ─▶ quantize and write each weight
                      ─▶ fill in the quantized weights ─ run texts again ─ unload
    then:             write the other tensors, config.json, tokenizer; perplexity; rename the folder

So memory is bounded by one layer and the hidden states of the texts; without texts by one tensor.
The inputs of a layer come from the quantized layers before it, as they will when the model runs.
"""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from fulgurite.compress.layers import LayerRunner, TextStates
from fulgurite.compress.observe import (
    InputRecord,
    LayerRecords,
    ObservedKVCache,
    RoundInputs,
    make_rounding,
    record_inputs,
    simulate_inputs,
)
from fulgurite.compress.report import QualityReport, WeightQuality
from fulgurite.compress.source import Source, write_json
from fulgurite.compress.weights import PlannedWeight, WeightPlan, scale_dtype
from fulgurite.errors import FormatError
from fulgurite.models.layers import CausalLM
from fulgurite.quant.codecs.blocks import amax_over_dims
from fulgurite.quant.files.compressed_tensors_writer import (
    build_quantization_config,
    encode_input_scale,
    encode_kv_scales,
    encode_weight,
)
from fulgurite.quant.files.safetensors_writer import (
    ShardWriter,
    check_output_folder,
    open_output_folder,
)
from fulgurite.quant.format import E4M3
from fulgurite.quant.rounding import (
    round_second_order,
    round_to_nearest,
    supports_second_order,
)
from fulgurite.quant.scale_search import compute_tensor_scale
from fulgurite.quant.tensor import QuantTensor

TEXT_FILES_BYTES = 64 << 20  # room for tokenizer and config.json


@dataclass(frozen=True)
class QuantizeOptions:
    """How a checkpoint is quantized.

    Attributes:
        output: the folder that is written.
        device: where weights are quantized and texts run.
        calibration_ids: token ids [B, T]. None: not calibrated.
        eval_ids: token ids [B, T] for perplexity. None: not measured.
        max_shard_bytes: the largest size of a safetensors file.
    """

    output: Path
    device: torch.device
    calibration_ids: Tensor | None = None
    eval_ids: Tensor | None = None
    max_shard_bytes: int = 5_000_000_000


@torch.inference_mode()
def quantize_checkpoint(
    source: Source,
    model: CausalLM,
    plan: WeightPlan,
    options: QuantizeOptions,
    progress: Progress | None = None,
) -> QualityReport:
    """Write the quantized checkpoint. The folder appears when it is complete."""
    size = sum(spec.nbytes for spec in plan.specs.values())
    check_output_folder(options.output, size + TEXT_FILES_BYTES)
    with open_output_folder(options.output) as folder:
        writer = ShardWriter(folder, plan.specs, options.max_shard_bytes)
        try:
            report = CheckpointQuantizer(source, model, plan, options, writer).run(progress)
            writer.close()
        finally:
            writer.abort()
        source.write_files(folder)
        config = build_quantization_config(plan.scheme, [*plan.ignored], bool(plan.kv_bases))
        values = {**source.config_values, "quantization_config": config}
        write_json(folder / "config.json", values)
        report_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return report.with_sizes(source_bytes(source.path), report_bytes)


def source_bytes(path: Path) -> int:
    """Bytes of the weights on disk."""
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


class CheckpointQuantizer:
    """The state of one run: the texts at the current layer, and the figures so far."""

    def __init__(
        self,
        source: Source,
        model: CausalLM,
        plan: WeightPlan,
        options: QuantizeOptions,
        writer: ShardWriter,
    ) -> None:
        self.source, self.model, self.plan, self.writer = source, model, plan, writer
        self.device = options.device
        self.options = options
        self.qualities: list[WeightQuality] = []
        needs_runner = options.calibration_ids is not None or options.eval_ids is not None
        self.runner = LayerRunner(source, model, options.device) if needs_runner else None
        self.calibration: TextStates | None = None
        self.original: TextStates | None = None
        self.quantized: TextStates | None = None
        self.kv_cache = ObservedKVCache()
        self.kv_scales: dict[int, tuple[Tensor, Tensor]] = {}
        self.layers: dict[int, list[str]] = {}
        for name in plan.quantized:
            self.layers.setdefault(layer_index(source, name), []).append(name)

    def run(self, progress: Progress | None) -> QualityReport:
        self._embed_texts()
        count = len(self.model.layers)
        task = None if progress is None else progress.add_task("quantizing", total=count)
        for index in range(count):
            self._quantize_layer(index)
            if progress is not None and task is not None:
                progress.update(task, completed=index + 1, description=f"layer {index + 1}/{count}")
        for name in self.layers.get(-1, ()):
            self._quantize_weight(self.plan.quantized[name], None)
        for name, tensor in self.plan.dense.items():
            self.writer.write(name, tensor.read().to(tensor.dtype))
        before, after = self._compute_perplexities()
        parts = self.plan.specs.keys() - self.plan.dense.keys()
        return QualityReport(
            scheme=self.plan.scheme.name,
            num_weights=self.plan.num_weights,
            weight_bits=8 * sum(self.plan.specs[name].nbytes for name in parts),
            weights=tuple(self.qualities),
            ignored=dict(self.plan.ignored),
            perplexity_before=before,
            perplexity_after=after,
            eval_tokens=0 if self.original is None else self.original.num_tokens,
            calibration_tokens=0 if self.calibration is None else self.calibration.num_tokens,
        )

    # ---- texts ---------------------------------------------------------------------------------

    def _embed_texts(self) -> None:
        if self.runner is None:
            return
        with self.runner.loaded("embed_tokens"):
            if self.options.calibration_ids is not None:
                self.calibration = self.runner.embed(self.options.calibration_ids)
            if self.options.eval_ids is not None:
                self.original = self.runner.embed(self.options.eval_ids)
                self.quantized = self.original.copy()

    def _compute_perplexities(self) -> tuple[float | None, float | None]:
        if self.runner is None or self.original is None or self.quantized is None:
            return None, None
        head = "embed_tokens" if self.model.lm_head is None else "lm_head"
        with self.runner.loaded("norm"), self.runner.loaded(head):
            return (
                self.runner.compute_perplexity(self.original),
                self.runner.compute_perplexity(self.quantized),
            )

    # ---- one layer -----------------------------------------------------------------------------

    def _quantize_layer(self, index: int) -> None:
        path, runner = f"layers.{index}", self.runner
        weights = [self.plan.quantized[name] for name in self.layers.get(index, ())]
        with nullcontext() if runner is None else runner.loaded(path) as layer:
            records = None
            if runner is not None and layer is not None:
                if self.original is not None:
                    runner.run(index, self.original)
                records = self._record(index, layer)
            quantized: dict[str, QuantTensor] = {}
            for weight in weights:
                value = self._quantize_weight(weight, records)
                if runner is not None:
                    quantized[weight.tensor.name] = value
            self._write_kv_scales(index)
            if runner is None or layer is None:
                return
            for weight in weights:
                value = quantized.pop(weight.tensor.name).dequantize(torch.float32)
                weight.tensor.fill(self.model, value, self.source.config)
            self._run_quantized(index, layer, weights, records)

    def _record(self, index: int, layer: nn.Module) -> LayerRecords | None:
        """Run the calibration text; the layer still has its original weights."""
        if self.calibration is None or self.runner is None:
            return None
        needs_hessian = supports_second_order(self.plan.scheme.format)
        with record_inputs(layer, f"layers.{index}.", needs_hessian) as records:
            self.runner.run(index, self.calibration.copy(), self.kv_cache)
        return records

    def _run_quantized(
        self,
        index: int,
        layer: nn.Module,
        weights: list[PlannedWeight],
        records: LayerRecords | None,
    ) -> None:
        assert self.runner is not None, "texts need a runner"
        cache = ObservedKVCache(scales=self.kv_scales) if self.kv_scales else None
        rounding = self._input_rounding(weights, records)
        with simulate_inputs(layer, f"layers.{index}.", rounding):
            for states in (self.calibration, self.quantized):
                if states is not None:
                    self.runner.run(index, states, cache)

    def _input_rounding(
        self, weights: list[PlannedWeight], records: LayerRecords | None
    ) -> dict[str, RoundInputs]:
        """How the scheme rounds inputs: by linear, or by parameter of stacked experts."""
        scheme = self.plan.scheme
        amax: dict[str, Tensor | None] = {}
        for weight in weights:
            key = weight.module if weight.expert is None else weight.parameter
            found = None
            if scheme.input_scale:
                assert records is not None, "static scales are calibrated"
                found = records.find(weight.module, weight.parameter, weight.expert).amax
                before = amax.get(key)
                found = found if before is None else torch.maximum(before, found)
            amax[key] = found
        rounding = {key: make_rounding(scheme.inputs, value) for key, value in amax.items()}
        return {key: value for key, value in rounding.items() if value is not None}

    def _write_kv_scales(self, index: int) -> None:
        base = self.plan.kv_bases.get(index)
        if base is None:
            return
        found = self.kv_cache.records[self._cache_index(index)]
        for name, tensor in encode_kv_scales(base, found.key, found.value, torch.float32).items():
            self.writer.write(name, tensor)
        scales = found.key / E4M3.max_value, found.value / E4M3.max_value
        self.kv_scales[self._cache_index(index)] = scales

    def _cache_index(self, index: int) -> int:
        """The number of a layer in the KV cache."""
        layer: Any = self.model.layers[index]
        return int(layer.attention.spec.layer_index)

    # ---- one weight ----------------------------------------------------------------------------

    def _quantize_weight(self, weight: PlannedWeight, records: LayerRecords | None) -> QuantTensor:
        """Quantize, write and rate one weight."""
        scheme, dtype = self.plan.scheme, scale_dtype(weight.tensor)
        values = self._read(weight)
        if not bool(values.isfinite().all()):
            raise FormatError(
                "the weight has a NaN or an infinity",
                where=weight.tensor.name,
                next="check the checkpoint, or add the layer to --ignore",
            )
        record = None
        if records is not None:
            record = records.find(weight.module, weight.parameter, weight.expert)
        scale = self._shared_tensor_scale(weight)
        hessian = None if record is None else record.hessian_KK
        if hessian is None:
            quantized = round_to_nearest(
                values, scheme.format, scale_dtype=dtype, tensor_scale=scale
            )
        else:
            quantized = round_second_order(
                values, scheme.format, hessian, scale_dtype=dtype, tensor_scale=scale
            )
        tensors = encode_weight(weight.base, quantized, scheme, dtype)
        if scheme.input_scale:
            assert record is not None, "static scales are calibrated"
            tensors |= encode_input_scale(weight.base, record.amax, scheme, dtype)
        for name, tensor in tensors.items():
            self.writer.write(name, tensor)
        self.qualities.append(_rate(weight.base, values, quantized, record))
        return quantized

    def _read(self, weight: PlannedWeight) -> Tensor:
        return weight.tensor.read().to(self.device, torch.float32)

    def _shared_tensor_scale(self, weight: PlannedWeight) -> Tensor | None:
        """NVFP4: one scale for all weights that other engines run as one matmul."""
        format = self.plan.scheme.format
        if format.family != "nvfp4":
            return None
        index = layer_index(self.source, weight.tensor.name)
        members = (self.plan.quantized[name] for name in self.layers[index])
        largest = [
            amax_over_dims(self._read(member), (0, 1), keep_nan=False)
            for member in members
            if member.fused == weight.fused
        ]
        return compute_tensor_scale(torch.stack(largest).amax().reshape(1, 1), format)


def layer_index(source: Source, name: str) -> int:
    """The layer of a tensor; -1 if it belongs to none."""
    for assignment in source.tensors[name].assignments:
        match = re.match(r"layers\.(\d+)\.", assignment.parameter)
        if match:
            return int(match.group(1))
    return -1


def _rate(
    name: str, values: Tensor, quantized: QuantTensor, record: InputRecord | None
) -> WeightQuality:
    """SQNR of the weight, and of the outputs on the calibration text if it has a Hessian."""
    error = values - quantized.dequantize(torch.float32)
    signal, noise = (float(x.double().square().sum()) for x in (values, error))
    output = None
    if record is not None and record.hessian_KK is not None:
        h = record.hessian_KK
        output = _decibels(*(float(((x @ h) * x).double().sum()) for x in (values, error)))
    return WeightQuality(name, tuple(values.shape), _decibels(signal, noise), output)


def _decibels(signal: float, noise: float) -> float:
    if noise <= 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
