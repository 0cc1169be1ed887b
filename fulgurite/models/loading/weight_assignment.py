"""Weight assignments: weight mappings, parameters and tensor headers in; what fills what out.

    assign_weights   tensor name -> the parameters that it fills
    find_sources     parameter -> the tensors that fill it
    find_transformers_sources   the same for linears of transformers' modules that may stay packed

Names and shapes are checked before any weight is read. One error lists everything that is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fulgurite.errors import WeightsError
from fulgurite.models import weight_mapping
from fulgurite.models.config import ModelConfig
from fulgurite.models.loading.checkpoint import Checkpoint
from fulgurite.models.loading.checkpoint_tensor import Shape, TensorEntry
from fulgurite.models.weight_mapping import Convert, WeightAssignment, WeightMapping

TRANSFORMERS_PREFIX = "module."  # of parameters in a `TransformersModel`
LM_HEAD_NAMES = ("lm_head.weight", "output.weight")
WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# A quantized weight has K last. So the conversions of families that store dense weights transposed
# lose their transpose.
K_LAST_CONVERSIONS: dict[Convert, Convert] = {
    weight_mapping.transpose: weight_mapping.identity,
    weight_mapping.orient_gate_up: weight_mapping.identity,
    weight_mapping.orient_down: weight_mapping.identity,
    weight_mapping.transpose_deinterleave_gate_up: weight_mapping.deinterleave_gate_up,
}


@dataclass(frozen=True)
class ParameterSource:
    """A checkpoint tensor that fills a parameter, or a part of it."""

    entry: TensorEntry
    assignment: WeightAssignment


def find_sources(checkpoint: Checkpoint, model: nn.Module) -> dict[str, list[ParameterSource]]:
    """The checkpoint tensors that fill each parameter."""
    entries = checkpoint.entries()
    sources: dict[str, list[ParameterSource]] = {name: [] for name, _ in model.named_parameters()}
    for name, assignments in assign_weights(checkpoint, model).items():
        for assignment in assignments:
            sources[assignment.parameter].append(ParameterSource(entries[name], assignment))
    return sources


def find_transformers_sources(
    checkpoint: Checkpoint, model: nn.Module
) -> tuple[dict[str, list[ParameterSource]], dict[str, str]]:
    """The quantized tensors that fill a linear of transformers' modules as they are; and why not.

    The names must be equal: transformers' loader may rename, merge and stack all others.
    """
    modules = dict(model.named_modules())
    tables = {id(module.weight) for module in modules.values() if type(module) is nn.Embedding}
    sources: dict[str, list[ParameterSource]] = {}
    reasons: dict[str, str] = {}
    for name, entry in checkpoint.source.entries().items():
        if not entry.is_quantized:
            continue
        parameter = TRANSFORMERS_PREFIX + name
        linear = modules.get(parameter.removesuffix(".weight"))
        if linear is None or type(linear) is not nn.Linear or linear.weight.shape != entry.shape:
            reasons[parameter] = "transformers' modules have no linear of this name and shape"
        elif id(linear.weight) in tables:
            reasons[parameter] = "transformers' modules tie it to the embedding"
        else:
            assignment = WeightAssignment(WeightMapping(name, parameter), parameter, 0)
            sources[parameter] = [ParameterSource(entry, assignment)]
    return sources, reasons


def assign_weights(checkpoint: Checkpoint, model: nn.Module) -> dict[str, list[WeightAssignment]]:
    """Map each checkpoint tensor to the parameters it fills.

    One error lists every missing, unexpected and mismatched tensor.
    """
    config = checkpoint.config
    parameters = dict(model.named_parameters())
    expected = map_expected_names(checkpoint.weights, config, parameters)
    present = checkpoint.entries()
    for name in expected.keys() & present.keys():
        entry = present[name]
        check_dtype(entry, checkpoint.path)
        if entry.is_quantized:
            expected[name] = [_drop_transpose(assignment) for assignment in expected[name]]
    mismatched = [
        problem
        for name, assignments in expected.items()
        if name in present
        for assignment in assignments
        if (
            problem := describe_shape_mismatch(
                assignment, name, present[name].shape, parameters, config
            )
        )
    ]
    missing = [name for name in expected if name not in present]
    unexpected = [
        name
        for name in present
        if name not in expected
        and not _is_ignored(checkpoint, name)
        and not _is_zero_bias(name, present, expected)
    ]
    if missing or unexpected or mismatched:
        counts = (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched))
        what = ", ".join(f"{len(names)} {kind}" for kind, names in counts if names)
        raise WeightsError(
            f"the checkpoint does not match the {checkpoint.family.name} architecture: {what}",
            where=str(checkpoint.path),
            missing="\n".join(missing),
            unexpected="\n".join(unexpected),
            mismatched="\n".join(mismatched),
            next="check that config.json belongs to these weights",
        )
    return expected


def _is_zero_bias(
    name: str, present: Mapping[str, TensorEntry], expected: Mapping[str, list[WeightAssignment]]
) -> bool:
    """Whether a tensor is the bias of a linear without one, and all zeros.

    GPTQ's libraries wrote one for every linear.
    """
    module = name.removesuffix(".bias")
    if module == name or f"{module}.weight" not in expected:
        return False
    return not bool(present[name].load().read_all().any())


def _drop_transpose(assignment: WeightAssignment) -> WeightAssignment:
    mapping = assignment.mapping
    convert = K_LAST_CONVERSIONS.get(mapping.convert, mapping.convert)
    return replace(assignment, mapping=replace(mapping, convert=convert))


def check_dtype(entry: TensorEntry, path: Path) -> None:
    """Raise for numbers that are no weights by themselves: FP8 or integers without scales."""
    if entry.dtype is not None and entry.dtype not in WEIGHT_DTYPES:
        raise WeightsError(
            f"tensor {entry.name} has dtype {entry.dtype} and no scales, so it is not a weight",
            where=str(path),
            next="a quantized checkpoint also stores scales, and names its format in config.json",
        )


def map_expected_names(
    weights: tuple[WeightMapping, ...], config: ModelConfig, parameters: dict[str, Tensor]
) -> dict[str, list[WeightAssignment]]:
    """Every tensor name that the checkpoint should contain, with its assignments."""
    result: dict[str, list[WeightAssignment]] = {}
    by_target: dict[str, list[WeightMapping]] = {}
    for mapping in weights:
        by_target.setdefault(mapping.target, []).append(mapping)
    for parameter in parameters:
        match = re.match(r"layers\.(\d+)\.", parameter)
        layer = match.group(1) if match else ""
        target = re.sub(r"^layers\.\d+\.", "layers.{layer}.", parameter)
        assert target in by_target, f"{config.family} has no weight mapping for {parameter}"
        for mapping in by_target[target]:
            num_experts = 1
            if "{expert}" in mapping.source:
                assert config.moe is not None, f"{mapping.source} needs a model with experts"
                num_experts = config.moe.num_experts
            for expert in range(num_experts):
                source = mapping.source.replace("{layer}", layer).replace("{expert}", str(expert))
                result.setdefault(source, []).append(WeightAssignment(mapping, parameter, expert))
    return result


def describe_shape_mismatch(
    assignment: WeightAssignment,
    name: str,
    shape: Shape,
    parameters: dict[str, Tensor],
    config: ModelConfig,
) -> str:
    """What is wrong with a tensor's shape, or "". The mapping is applied on the meta device."""
    mapping, parameter = assignment.mapping, parameters[assignment.parameter]
    target = mapping.target_view(parameter, config, assignment.expert).shape
    text = f"{name}: shape {list(shape)}; {assignment.parameter} needs {list(target)}"
    try:
        converted = mapping.convert(torch.empty(shape, device="meta"), config).shape
    except (RuntimeError, IndexError):  # the conversion is a view that this shape does not allow
        return f"{text} after conversion"
    if converted == target:
        return ""
    return text + (f", converted it is {list(converted)}" if converted != shape else "")


def _is_ignored(checkpoint: Checkpoint, name: str) -> bool:
    if checkpoint.config.tie_word_embeddings and name in LM_HEAD_NAMES:
        return True
    num_layers = str(len(checkpoint.config.layers))
    patterns = (pattern.replace("{num_layers}", num_layers) for pattern in checkpoint.ignored)
    return any(re.fullmatch(pattern, name) for pattern in patterns)
