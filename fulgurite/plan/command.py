"""`fulgurite plan`: command-line options in, the meshes that a model fits on out. No GPU is needed.

A model is a preset (models/families/presets.py), a folder with a config.json, with or without
weights, or a GGUF file. A GGUF file is planned in the formats that an `LLM` keeps on a GPU.
"""

from __future__ import annotations

import argparse
import difflib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.presets import MODEL_PRESETS, find_preset
from fulgurite.models.families.registry import find_family
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import (
    get_language_model_fields,
    open_checkpoint,
    read_config_file,
)
from fulgurite.models.loading.loader import build_meta_model
from fulgurite.models.loading.quantization_config import read_quantization
from fulgurite.parallel.experts.transport import (
    AUTO,
    MICRO_BATCHES,
    TRANSPORTS,
    WIRES,
    ExpertOptions,
)
from fulgurite.parallel.mesh import MeshShape
from fulgurite.plan.cluster import GPUS, MeasuredSpeeds, parse_cluster
from fulgurite.plan.expert_load import format_expert_load
from fulgurite.plan.kv_cache import KV_CACHE_DTYPES
from fulgurite.plan.search import (
    ClusterPlan,
    MeshConstraint,
    PlanQuery,
    has_fitting_mesh,
    make_shard_spec,
    search_meshes,
    suggest_alternatives,
)
from fulgurite.plan.shard import FormatLookup, build_model_shard, uniform_format
from fulgurite.plan.text import (
    format_capacity,
    format_choice,
    format_headline,
    format_memory,
    format_other_meshes,
    format_steps,
    to_json,
)
from fulgurite.quant import QuantTensor
from fulgurite.quant.format import Format, resolve_format
from fulgurite.units import format_bytes

DEFAULT_CONTEXT = 8192
MAX_OPTION_VALUE = 10**9  # a larger number of requests, tokens or ranks is a typing error
UNQUANTIZED_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True)
class ModelSource:
    """A model by name, and the number format of its weights; fields as in `PlanQuery`."""

    name: str
    family: ModelFamily
    config: ModelConfig
    format_lookup: FormatLookup
    format: str


def add_options(command: argparse.ArgumentParser) -> None:
    model = command.add_argument_group("model")
    model.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a preset such as deepseek-v3, a folder, or a .gguf file",
    )
    model.add_argument(
        "--format",
        help="number format of the weights: bf16, fp8, nvfp4, int4, q4_k, … (default: as published)",
    )
    model.add_argument(
        "--kv-dtype",
        default="auto",
        choices=["auto", *KV_CACHE_DTYPES],
        help="dtype of the KV cache",
    )
    gpus = command.add_argument_group("GPUs")
    gpus.add_argument("--gpus", default="1", help="number: 8, or 8x2 for two nodes of eight")
    gpus.add_argument("--gpu", default="h200", help=f"type (default h200): {', '.join(GPUS)}")
    gpus.add_argument(
        "--memory", type=float, metavar="GIB", help="memory of a GPU (default: of its type)"
    )
    for axis, text in (
        ("data", "data-parallel replicas, each with its own requests"),
        ("tensor", "ranks over which each weight is sharded"),
        ("expert", "ranks over which experts are distributed"),
    ):
        gpus.add_argument(f"--{axis}", type=int, metavar="N", help=f"{text} (default: searched)")
    for axis, text in (
        ("pipeline", "pipeline stages: ranks over which layers are distributed"),
        ("context-parallel", "ranks over which the KV cache of a request is distributed"),
    ):
        gpus.add_argument(
            f"--{axis}", type=int, default=1, metavar="N", help=f"{text} (default: 1)"
        )
    links = command.add_argument_group("links", "measured speeds, instead of the datasheet's")
    links.add_argument("--nodes", type=int, metavar="N", help="number of nodes of these GPUs")
    for name, unit, text in (
        ("link", "GB/s", "bandwidth of a GPU to the others of its node"),
        ("network", "GB/s", "bandwidth of a GPU to other nodes"),
        ("latency", "US", "µs of a small collective inside a node"),
        ("network-latency", "US", "µs of a small collective between nodes"),
    ):
        links.add_argument(f"--{name}", type=float, metavar=unit, help=text)
    use = command.add_argument_group("use")
    use.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens of a request (default: {DEFAULT_CONTEXT:,}, or the model's maximum)",
    )
    use.add_argument(
        "--batch", type=int, metavar="N", help="requests at once (default: as many as fit)"
    )
    use.add_argument(
        "--max-batched-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens of a step, per replica",
    )
    experts = command.add_argument_group("experts")
    experts.add_argument(
        "--transport",
        choices=(AUTO, *TRANSPORTS),
        default=AUTO,
        help="how tokens go to experts of other ranks (default auto: by topology)",
    )
    experts.add_argument(
        "--wire",
        choices=WIRES,
        default=AUTO,
        help="wire format of these tokens (default auto: the model's dtype)",
    )
    experts.add_argument(
        "--expert-capacity",
        type=int,
        metavar="N",
        help="most tokens from one rank to another in a step; bounds the memory of a rank",
    )
    experts.add_argument(
        "--micro-batches",
        type=int,
        default=1,
        choices=MICRO_BATCHES,
        help="2: large steps in two halves, one sent while the other is computed",
    )
    experts.add_argument(
        "--redundant-experts", type=int, default=0, metavar="N", help="extra slots for busy experts"
    )
    experts.add_argument(
        "--expert-load",
        metavar="FILE",
        help="recorded tokens by [layer, expert]: .json, .npy or .csv",
    )
    experts.add_argument(
        "--placement", metavar="FILE", help="write the best placement to this file"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def plan(options: argparse.Namespace) -> None:
    """Print the meshes that the model fits on, best first."""
    query = read_query(options)
    constraint = read_constraint(options)
    _check_mesh_constraint(query, constraint)
    plans = search_meshes(query, constraint)
    if not plans:
        raise ArgumentError(
            f"{query.name} can't be sharded over {query.cluster.num_gpus} GPUs",
            next="choose another number of GPUs; powers of two work best",
        )
    if options.json:
        print(json.dumps(to_json(query, plans), indent=2))
        return
    best = plans[0]
    expert_load = ""
    if options.expert_load and best.fits:  # before anything is printed: the file may be missing
        path = Path(options.expert_load)
        expert_load = format_expert_load(query, best, path, options.placement)
    print(format_headline(query, _model_bytes(query)))
    print()
    print(format_memory(query, best))
    print()
    if not best.fits:
        raise _capacity_error(options, query, best)
    print(format_capacity(query, best))
    if query.batch is not None and best.max_requests < query.batch:
        print(_explain_waiting(query, constraint))
    print(format_choice(plans))
    print()
    print(format_steps(query, best))
    if len(plans) > 1:
        print()
        print(format_other_meshes(plans[1:]))
    if expert_load:
        print()
        print(expert_load)


def _model_bytes(query: PlanQuery) -> int:
    spec = make_shard_spec(query, MeshShape())
    shard = build_model_shard(query.config, query.family, spec, query.format_lookup)
    return sum(shard.component_bytes().values())


def _explain_waiting(query: PlanQuery, constraint: MeshConstraint) -> str:
    """A line for batches that are larger than the capacity."""
    text = f"the rest of the {query.batch:,} requests waits"
    if query.kv_dtype.itemsize > 1:
        fp8_cache = replace(query, kv_dtype=KV_CACHE_DTYPES["fp8"])
        if not has_fitting_mesh(fp8_cache, constraint):
            return text
        best = search_meshes(fp8_cache, constraint)[0]
        text += f"; with --kv-dtype fp8 {best.max_requests:,} fit"
    return text


def _capacity_error(
    options: argparse.Namespace, query: PlanQuery, best: ClusterPlan
) -> CapacityError:
    memory = best.memory
    constraint = read_constraint(options)
    name, size = max(best.weights.items(), key=lambda part: part[1])
    others = {part: count for part, count in memory.parts.items() if part != "weights"}
    other, count = max(others.items(), key=lambda part: part[1])
    if count > size:
        name, size = other, count
    if memory.total > memory.available:
        reason = f"the best mesh needs {format_bytes(memory.total)} a GPU without a KV cache"
    else:
        left = format_bytes(memory.available - memory.total)
        reason = (
            f"{left} are left for a KV cache, too little for one request of "
            f"{query.context:,} tokens"
        )
    reason += f"; the largest part: {name}, {format_bytes(size)}"
    suggestions = list(suggest_alternatives(query, constraint))
    for name in ("fp8", "nvfp4"):
        smaller = read_query(argparse.Namespace(**(vars(options) | {"format": name})))
        if smaller.format != query.format and has_fitting_mesh(smaller, constraint):
            suggestions.append(f"a smaller format: --format {name}")
            break
    return CapacityError(
        f"{query.name} does not fit on {query.cluster}: {reason}",
        next="\n".join(suggestions) or "use GPUs with more memory, or a smaller model",
    )


def read_query(options: argparse.Namespace) -> PlanQuery:
    """Check the options."""
    source = resolve_model(options.model)
    if options.format is not None:
        source = _override_format(source, options.format)
    config = source.config
    context = options.context
    if context is None:
        context = min(DEFAULT_CONTEXT, config.max_positions)
    if not 2 <= context <= config.max_positions:
        raise ArgumentError(
            f"a context of {context:,} tokens is not possible",
            next=f"{source.name} takes --context 2 to {config.max_positions}",
        )
    axes = ("data", "tensor", "expert", "pipeline", "context_parallel")
    for name in ("batch", "max_batched_tokens", *axes):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= MAX_OPTION_VALUE:
            raise ArgumentError(
                f"--{name.replace('_', '-')} {value} must be 1 or more, up to {MAX_OPTION_VALUE:,}"
            )
    if options.redundant_experts < 0:
        raise ArgumentError(f"--redundant-experts {options.redundant_experts} must be 0 or more")
    if (options.expert_load or options.redundant_experts) and config.moe is None:
        raise ArgumentError(
            f"{source.name} has no experts", next="omit --expert-load and --redundant-experts"
        )
    return PlanQuery(
        name=source.name,
        family=source.family,
        config=config,
        format_lookup=source.format_lookup,
        format=source.format,
        cluster=parse_cluster(
            options.gpus,
            options.gpu,
            options.memory,
            nodes=options.nodes,
            measured=MeasuredSpeeds(
                options.link, options.network, options.latency, options.network_latency
            ),
        ),
        context=context,
        kv_dtype=config.dtype if options.kv_dtype == "auto" else KV_CACHE_DTYPES[options.kv_dtype],
        batch=options.batch,
        max_batched_tokens=options.max_batched_tokens,
        expert_options=ExpertOptions(
            options.transport, options.wire, options.expert_capacity, options.micro_batches
        ),
        redundant_experts=options.redundant_experts,
    )


def resolve_model(name: str) -> ModelSource:
    """A model by path, by preset name, or from an installed package."""
    path = Path(name).expanduser()
    if not path.exists() and name in hub.PACKAGED_MODELS:
        path = hub.find_packaged_model(name)
    if path.suffix == ".gguf" and path.exists():
        return _from_checkpoint(name, path)
    if path.is_file() and path.suffix == ".safetensors":
        path = path.parent
    if path.is_dir():
        config = read_config_file(path)
        is_quantized = bool(read_quantization(config, path).method)
        if is_quantized and any(path.glob("*.safetensors")):
            return _from_checkpoint(name, path)
        return _from_fields(name, config)
    if path.suffix in hub.MODEL_SUFFIXES:
        raise ArgumentError(
            f"there is no file {name!r}", next="check the path; fulgurite plan reads .gguf files"
        )
    fields = find_preset(name)
    if fields is not None:
        return _from_fields(name.rsplit("/", 1)[-1].lower(), fields)
    similar = difflib.get_close_matches(name.lower(), MODEL_PRESETS, n=4, cutoff=0.4)
    hint = (
        f"did you mean {', '.join(similar)}?" if similar else f"known: {', '.join(MODEL_PRESETS)}"
    )
    raise ArgumentError(
        f"there is no model {name!r}: no folder, no .gguf file, no known name", next=hint
    )


def _from_fields(name: str, fields: ConfigFields) -> ModelSource:
    family = find_family(fields)
    config = family.read_config(get_language_model_fields(fields))
    method = fields.get_section("quantization_config").get_str("quant_method", "")
    dtype = str(config.dtype).removeprefix("torch.")
    source = ModelSource(name, family, config, uniform_format(None), dtype)
    if method == "fp8":
        return _quantize_source(source, resolve_format("fp8_e4m3_128x128"))
    if method == "mxfp4":
        return replace(
            _quantize_source(source, resolve_format("mxfp4")),
            format_lookup=uniform_format(resolve_format("mxfp4"), experts_only=True),
            format=f"mxfp4 experts, {dtype}",
        )
    return source


def _quantize_source(source: ModelSource, format: Format) -> ModelSource:
    return replace(
        source,
        format_lookup=uniform_format(format),
        format=format.name,
    )


def _from_checkpoint(name: str, path: Path) -> ModelSource:
    """The source of a GGUF file or a quantized folder: formats come from the headers."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if path.suffix == ".gguf":
        config = replace(config, dtype=torch.bfloat16)  # of weights that are not quantized
    model = build_meta_model(checkpoint, config.dtype, keep_quantized=True, device="cuda")
    formats = {
        key: tensor.format
        for key, tensor in model.named_parameters()
        if isinstance(tensor, QuantTensor)
    }
    stored = {entry.format.name for entry in checkpoint.entries().values() if entry.format}
    loaded = {format.name for format in formats.values()}
    changed = f" as {_join_names(loaded)}" if loaded != stored else ""
    return ModelSource(
        name=Path(name).name,
        family=checkpoint.family,
        config=config,
        format_lookup=formats.get,
        format=f"{_join_names(stored)}{changed}",
    )


def _join_names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "bfloat16"


def _override_format(source: ModelSource, name: str) -> ModelSource:
    """The source in a format; as published if it is published in a format of this kind."""
    if name.lower() in UNQUANTIZED_DTYPES:
        return replace(
            source,
            config=replace(source.config, dtype=UNQUANTIZED_DTYPES[name.lower()]),
            format_lookup=uniform_format(None),
            format=name.lower(),
        )
    format = resolve_format(name)
    published = source.format.split(maxsplit=1)[0].split("_", maxsplit=1)[0]
    return source if name.lower() == published else _quantize_source(source, format)


def read_constraint(options: argparse.Namespace) -> MeshConstraint:
    """The axes that the user has fixed."""
    return MeshConstraint(
        options.data, options.tensor, options.expert, options.pipeline, options.context_parallel
    )


def _check_mesh_constraint(query: PlanQuery, constraint: MeshConstraint) -> None:
    """ArgumentError if no mesh satisfies the constraint, with the whole equation."""
    data, tensor, expert, pipeline, context = constraint
    world, stages = query.cluster.num_gpus, pipeline * context
    if tensor is None:
        tensor = 1 if data is None else max(1, world // (data * stages))
    if data is None:
        data = max(1, world // (tensor * stages))
    mesh_shape = MeshShape(data, tensor, expert or 1, pipeline, context)
    if mesh_shape.world_size != world:
        equation = str(mesh_shape).split(",", maxsplit=1)[0]
        raise ArgumentError(
            f"{equation}, but there are {world} GPUs",
            next="omit --data or --tensor; it is then computed from the other",
        )
