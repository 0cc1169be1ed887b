"""`save_pretrained`: a trained model in, a folder in its published layout out.

    config.json                     the fields of the run, with architectures, model_type and dtype
    model.safetensors               or model-00001-of-0000N.safetensors and an index
    tokenizer.json, ...             copied from the run's tokenizer folder

Our loader, transformers and other engines read the folder. Every family of `ARCHITECTURES` is written
(`published_layout.py`).

**Ranks.** All ranks call it. Parameters may be DTensors: each is gathered by itself, and rank 0 writes
one file at a time. So rank 0 needs memory for one file, the others for one parameter.

**Whole or not there.** Files go to a temporary folder beside the output, are synced to disk, and the
folder is renamed. A failure removes it and is raised on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fulgurite.errors import ArgumentError
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.registry import ARCHITECTURES
from fulgurite.models.loading.checkpoint import (
    get_language_model_fields,
    strip_multimodal_prefix,
)
from fulgurite.models.loading.load_plan import build_model
from fulgurite.models.loading.safetensors_checkpoint import SINGLE_FILE, SafetensorsCheckpoint
from fulgurite.quant import QuantTensor
from fulgurite.train.export_files import (
    FolderWriter,
    check_output,
    is_writer,
    run_on_every_rank,
)
from fulgurite.train.published_layout import (
    MODEL_TYPES,
    PublishedTensor,
    build_tensor,
    plan_tensors,
    publish_name,
)

MAX_SHARD_BYTES = 5 * 10**9
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WRAPPER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")
Gather = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class ExportOptions:
    """How a model is written.

    Attributes:
        dtype: of the weights; None: that of the model. Weights that a family always keeps in float32
            stay float32.
        max_shard_bytes: of one file; a larger tensor has a file of its own.
        tokenizer: a folder whose tokenizer files and generation_config.json are copied.
        base: the checkpoint that training started from. Its tensors that our modules have no
            parameter for (an image encoder) are copied, and names follow it.
        gather: a parameter of this rank -> the whole; None: DTensors are gathered, others are whole.
    """

    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    tokenizer: Path | str | None = None
    base: Path | str | None = None
    gather: Gather | None = None


def save_pretrained(
    model: nn.Module,
    family: ModelFamily,
    fields: Mapping[str, Any],
    output: Path | str,
    options: ExportOptions | None = None,
) -> Path:
    """Write the model to a new folder, which it returns; `fields` are those of its config.json."""
    output, options = Path(output), options or ExportOptions()
    tokenizer = None if options.tokenizer is None else Path(options.tokenizer)
    plan = run_on_every_rank(lambda: _plan(model, family, fields, options, output))
    with FolderWriter(output) as writer:
        run_on_every_rank(lambda: _write_shards(plan, writer, options.gather or _gather_dtensor))
        run_on_every_rank(lambda: writer.finish(plan.fields, tokenizer) if is_writer() else None)
    return output


@dataclass(frozen=True)
class _Plan:
    """What is written: fields of config.json, and the tensors of each file."""

    fields: dict[str, Any]
    config: ModelConfig
    shards: tuple[tuple[PublishedTensor, ...], ...]
    parameters: dict[str, Tensor]
    names: dict[str, str]  # of a tensor in weight mappings -> in the file
    base: SafetensorsCheckpoint | None

    @property
    def files(self) -> list[str]:
        if len(self.shards) == 1:
            return [SINGLE_FILE]
        count = len(self.shards)
        return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _plan(
    model: nn.Module,
    family: ModelFamily,
    fields: Mapping[str, Any],
    options: ExportOptions,
    output: Path,
) -> _Plan:
    """Check everything before the first byte is written."""
    if is_writer():
        check_output(output)
    parameters = name_parameters(model)
    dtype = _choose_dtype(parameters, options.dtype)
    architecture = find_architecture(family, fields)
    complete = complete_fields(fields, architecture, dtype)
    config = family.read_config(
        get_language_model_fields(ConfigFields(complete, "the fields of the model"))
    )
    expected = dict(build_model(config, family, dtype).named_parameters())
    _check_parameters(parameters, expected)
    tensors = plan_tensors(family, config, expected)
    base = None if options.base is None else SafetensorsCheckpoint(Path(options.base))
    names = {tensor.name: publish_name(tensor.name, architecture) for tensor in tensors}
    if base is not None:
        tensors += _find_other_tensors(base, family, config, names)
    shards = tuple(split_shards(tensors, options.max_shard_bytes))
    return _Plan(complete, config, shards, parameters, names, base)


def _find_other_tensors(
    base: SafetensorsCheckpoint, family: ModelFamily, config: ModelConfig, names: dict[str, str]
) -> list[PublishedTensor]:
    """Tensors of the base that the family ignores; `names` of the others become those of the base."""
    patterns = [
        pattern.replace("{num_layers}", str(len(config.layers))) for pattern in family.ignored
    ]
    others = []
    for name, stored in base.stored.items():
        plain = strip_multimodal_prefix(name)
        if plain in names:
            names[plain] = name
        elif any(re.fullmatch(pattern, plain) for pattern in patterns):
            elements = torch.Size(stored.shape).numel()
            others.append(PublishedTensor(name, (), elements, stored.dtype))
    return others


def _write_shards(plan: _Plan, writer: FolderWriter, gather: Gather) -> None:
    """Gather the tensors of each file and write it. A failed writer still takes part in gathering."""
    uses = _count_uses(plan)
    held: dict[str, Tensor] = {}
    failure: OSError | None = None
    for file, tensors in zip(plan.files, plan.shards, strict=True):
        content: dict[str, Tensor] = {}
        for tensor in tensors:
            for name in tensor.parameters:
                if name not in held:
                    whole = gather(name, plan.parameters[name].detach())
                    held[name] = whole.cpu() if is_writer() else whole.new_empty(0)
            try:
                if is_writer():
                    content[plan.names.get(tensor.name, tensor.name)] = _build(plan, tensor, held)
            except OSError as error:  # of the base
                failure = failure or error
            for name in tensor.parameters:
                uses[name] -= 1
                if not uses[name]:
                    del held[name]
        try:
            if is_writer() and failure is None:
                writer.write_weights(file, content)
        except OSError as error:  # other ranks wait in the next gather: go on, and raise at the end
            failure = failure or error
    if failure is not None:
        raise failure


def _build(plan: _Plan, tensor: PublishedTensor, parameters: Mapping[str, Tensor]) -> Tensor:
    if tensor.parts:
        return build_tensor(tensor, parameters, plan.config)
    assert plan.base is not None, f"{tensor.name} has no parameter"
    return plan.base.read_tensor(tensor.name).clone()


def _count_uses(plan: _Plan) -> dict[str, int]:
    uses: dict[str, int] = {}
    for tensors in plan.shards:
        for tensor in tensors:
            for name in tensor.parameters:
                uses[name] = uses.get(name, 0) + 1
    return uses


def split_shards(
    tensors: Sequence[PublishedTensor], max_bytes: int
) -> Iterator[tuple[PublishedTensor, ...]]:
    """Tensors in files of at most `max_bytes`, in order."""
    if max_bytes < 1:
        raise ArgumentError(f"max_shard_bytes={max_bytes}", next="use a positive number of bytes")
    shard: list[PublishedTensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.num_bytes > max_bytes:
            yield tuple(shard)
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    yield tuple(shard)


# ---- config.json ---------------------------------------------------------------------------------


def find_architecture(family: ModelFamily, fields: Mapping[str, Any]) -> str:
    """The architecture that the fields name, or the first of the family."""
    own = [name for name, other in ARCHITECTURES.items() if other.name == family.name]
    if not own:
        raise ArgumentError(
            f"{family.name} has no published layout of ours",
            next="export models of fulgurite.models.ARCHITECTURES",
        )
    named = [name for name in fields.get("architectures") or () if name in own]
    return (named or own)[0]


def complete_fields(
    fields: Mapping[str, Any], architecture: str, dtype: torch.dtype
) -> dict[str, Any]:
    """The fields of config.json, with architectures, model_type and the dtype that is written."""
    name = str(dtype).removeprefix("torch.")
    types = {"torch_dtype": name, "dtype": name}
    result = {key: value for key, value in fields.items() if key != "quantization_config"}
    result |= {"architectures": [architecture], **types}
    result.setdefault("model_type", MODEL_TYPES[architecture])
    if isinstance(result.get("text_config"), Mapping):
        result["text_config"] = {**result["text_config"], **types}
    return result


# ---- parameters ----------------------------------------------------------------------------------


def name_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by their plain names: without those of wrappers."""
    result: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantTensor):
            raise ArgumentError(
                f"{name} is quantized to {parameter.format.name}",
                next="merge or dequantize it first; fulgurite.quantize.save writes quantized models",
            )
        plain = ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)
        result[plain] = parameter
    return result


def _choose_dtype(parameters: Mapping[str, Tensor], dtype: torch.dtype | None) -> torch.dtype:
    """The dtype asked for, or that of the final norm, which is the compute dtype of a model."""
    chosen = dtype or parameters.get("norm.weight", torch.empty(0)).dtype
    if chosen not in DTYPES:
        raise ArgumentError(
            f"dtype={chosen}", next=f"use one of {', '.join(str(d) for d in DTYPES)}"
        )
    return chosen


def _check_parameters(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The fields must describe this very model."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unknown" for name in found if name not in expected]
    problems += [
        f"{name} is {list(found[name].shape)}; config.json gives {list(parameter.shape)}"
        for name, parameter in expected.items()
        if name in found and found[name].shape != parameter.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ArgumentError(
            f"the fields don't describe this model: {'; '.join(problems[:3])}{more}",
            next="pass the fields that the model was built from, and merge adapters first",
        )


def _gather_dtensor(name: str, parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
