"""`fulgurite plan`: words of the command line in, what fits where out. No GPU is needed.

A model is a well-known name (models/published.py), a folder with a config.json (weights or not), or a GGUF
file; the last is planned in the formats that an `LLM` keeps its weights in on a GPU.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.kernels.dispatch.wire_format import WIRES
from fulgurite.models import hub
from fulgurite.models.checkpoint import language_fields, open_checkpoint, read_config_file
from fulgurite.models.config import Fields, ModelConfig
from fulgurite.models.family import Family
from fulgurite.models.published import PUBLISHED, published_fields
from fulgurite.models.registry import family_of
from fulgurite.parallel.mesh import MeshShape
from fulgurite.plan.cluster import Fixed, Question, Split, advice, fits, make_cut, search
from fulgurite.plan.expert_load import load_text
from fulgurite.plan.gpus import GPUS, read_cluster
from fulgurite.plan.memory import size
from fulgurite.plan.rank_model import FormatOf, build_rank, format_everywhere, refusal
from fulgurite.plan.text import as_json, headline, others_text, room_text, split_text, why
from fulgurite.quant import QuantTensor
from fulgurite.quant.format import Format, resolve
from fulgurite.serve.engine.kv_cache import DTYPES
from fulgurite.serve.llm import shapes_of

CONTEXT = 8192  # tokens of a request, where nobody says how many
MOST = 10**9  # requests, tokens or ranks: more are a slip of the finger
PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}  # not packed


@dataclass(frozen=True)
class Source:
    """What a name stands for, and the format its weights are published or stored in."""

    name: str
    family: Family
    config: ModelConfig
    format_of: FormatOf
    format: str
    step: int = 1  # packed weights are cut at multiples of this


def add_options(command: argparse.ArgumentParser) -> None:
    model = command.add_argument_group("model")
    model.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a well-known name (deepseek-v3), a folder, or a .gguf file",
    )
    model.add_argument(
        "--format", help="of weights: bf16, fp8, nvfp4, int4, q4_k, … (default: as published)"
    )
    model.add_argument("--kv", default="auto", choices=["auto", *DTYPES], help="cached keys")
    gpus = command.add_argument_group("GPUs")
    gpus.add_argument("--gpus", default="1", help="8, or 8x2 for two nodes of eight")
    gpus.add_argument("--gpu", default="h200", help=f"which (default h200): {', '.join(GPUS)}")
    gpus.add_argument("--memory", type=float, metavar="GIB", help="of each, where it differs")
    for axis, text in (
        ("data", "ranks with requests of their own"),
        ("tensor", "ranks that share each weight"),
        ("expert", "ranks that share the experts"),
    ):
        gpus.add_argument(f"--{axis}", type=int, metavar="N", help=f"{text} (default: searched)")
    use = command.add_argument_group("use")
    use.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens of a request (default: {CONTEXT:,}, or the model's most)",
    )
    use.add_argument("--batch", type=int, metavar="N", help="requests at once (default: what fits)")
    use.add_argument("--step-tokens", type=int, metavar="N", help="of a step of one data rank")
    experts = command.add_argument_group("experts")
    experts.add_argument(
        "--wire", choices=[*WIRES], help="how tokens travel (default: fp8 or bf16)"
    )
    experts.add_argument(
        "--redundant", type=int, default=0, metavar="N", help="extra places for hot ones"
    )
    experts.add_argument(
        "--load", metavar="FILE", help="recorded visits [layers, experts]: .json, .npy or .csv"
    )
    experts.add_argument("--placement", metavar="FILE", help="where to write the best places")
    command.add_argument("--json", action="store_true", help="the same for programs")


def plan(options: argparse.Namespace) -> None:
    """Print what fits where."""
    question = read_question(options)
    fixed = (options.data, options.tensor, options.expert)
    _check_fixed(question, *fixed)
    splits = search(question, *fixed)
    if not splits:
        raise ArgumentError(
            f"{question.name} can't be cut for {question.cluster.count} GPUs",
            next="another number of GPUs; powers of two go best",
        )
    if options.json:
        print(json.dumps(as_json(question, splits), indent=2))
        return
    best = splits[0]
    loaded = ""
    if options.load and best.fits:  # read before anything is printed: it may not be there
        loaded = load_text(question, best, Path(options.load), options.placement)
    print(headline(question, _whole_bytes(question)))
    print()
    print(split_text(question, best))
    print()
    if not best.fits:
        raise _too_large(options, question, best)
    print(room_text(question, best))
    if question.batch is not None and best.requests < question.batch:
        print(_waiting(question, best, fixed))
    print(why(splits))
    if len(splits) > 1:
        print()
        print(others_text(splits[1:]))
    if loaded:
        print()
        print(loaded)


def _whole_bytes(question: Question) -> int:
    rank = build_rank(question.config, question.family, make_cut(question, MeshShape()))
    return sum(rank.weights(question.format_of).values())


def _waiting(question: Question, best: Split, fixed: Fixed) -> str:
    """What becomes of requests that have no room."""
    text = f"of the {question.batch:,} asked for the others wait"
    if question.kv_dtype.itemsize > 1:
        small = search(replace(question, kv_dtype=DTYPES["fp8"]), *fixed)[0]
        text += f"; --kv fp8 has room for {small.requests:,}"
    return text


def _too_large(options: argparse.Namespace, question: Question, best: Split) -> CapacityError:
    plan, fixed = best.plan, (options.data, options.tensor, options.expert)
    if plan.total > plan.available:
        what = f"the best split needs {size(plan.total)} on each GPU and no cache yet"
    else:
        left = size(plan.available - plan.total)
        what = f"{left} are left for a cache, too little for one request of {question.context:,} tokens"
    tips = list(advice(question, *fixed))
    for name in ("fp8", "nvfp4"):
        smaller = read_question(argparse.Namespace(**(vars(options) | {"format": name})))
        if smaller.format != question.format and fits(smaller, fixed):
            tips.append(f"a smaller format: --format {name}")
            break
    return CapacityError(
        f"{question.name} does not fit on {question.cluster}: {what}",
        next="\n".join(tips) or "GPUs with more memory, or a smaller model",
    )


def read_question(options: argparse.Namespace) -> Question:
    """The options, checked."""
    source = read_source(options.model)
    config = source.config
    if options.format is not None:
        source = _in_format(source, options.format)
        config = source.config
    context = min(CONTEXT, config.max_positions) if options.context is None else options.context
    if not 2 <= context <= config.max_positions:
        raise ArgumentError(
            f"a context of {context:,} tokens is not possible",
            next=f"{source.name} takes --context 2 to {config.max_positions}",
        )
    for name in ("batch", "step_tokens", "data", "tensor", "expert"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= MOST:
            raise ArgumentError(
                f"--{name.replace('_', '-')} {value} must be 1 or more, up to {MOST:,}"
            )
    if options.redundant < 0:
        raise ArgumentError(f"--redundant {options.redundant} must be 0 or more")
    if (options.load or options.redundant) and config.experts is None:
        raise ArgumentError(
            f"{source.name} has no experts", next="leave out --load and --redundant"
        )
    fp8 = source.format.startswith("fp8")
    return Question(
        name=source.name,
        family=source.family,
        config=config,
        format_of=source.format_of,
        format=source.format,
        step=source.step,
        cluster=read_cluster(options.gpus, options.gpu, options.memory),
        context=context,
        kv_dtype=config.dtype if options.kv == "auto" else DTYPES[options.kv],
        batch=options.batch,
        step_tokens=options.step_tokens,
        wire=options.wire or ("fp8" if fp8 else "bf16"),
        redundant=options.redundant,
    )


def read_source(name: str) -> Source:
    """A path, a well-known name, or a model that a package carries."""
    path = Path(name).expanduser()
    if not path.exists() and name in hub.EMBEDDED:
        path = hub.embedded(name)
    if path.suffix == ".gguf" and path.exists():
        return _from_gguf(name, path)
    if path.is_file() and path.suffix == ".safetensors":
        path = path.parent
    if path.is_dir():
        return _from_fields(name, read_config_file(path))
    if path.suffix in hub.FILES:
        raise ArgumentError(
            f"there is no file {name!r}", next="check the path; fulgurite plan reads .gguf files"
        )
    fields = published_fields(name)
    if fields is not None:
        return _from_fields(name.rsplit("/", 1)[-1].lower(), fields)
    near = difflib.get_close_matches(name.lower(), PUBLISHED, n=4, cutoff=0.4)
    raise ArgumentError(
        f"there is no model {name!r}: no folder, no .gguf file, no well-known name",
        next=f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(PUBLISHED)}",
    )


def _from_fields(name: str, fields: Fields) -> Source:
    family = family_of(fields)
    config = family.read_config(language_fields(fields))
    method = fields.section("quantization_config").text("quant_method", "")
    plain = str(config.dtype).removeprefix("torch.")
    source = Source(name, family, config, format_everywhere(None), plain)
    if method == "fp8":
        return _packed(source, resolve("fp8_e4m3_128x128"))
    if method == "mxfp4":
        return replace(
            _packed(source, resolve("mxfp4")),
            format_of=format_everywhere(resolve("mxfp4"), experts_only=True),
            format=f"mxfp4 experts, {plain}",
        )
    return source


def _packed(source: Source, format: Format) -> Source:
    return replace(
        source, format_of=format_everywhere(format), format=format.name, step=_step([format])
    )


def _step(formats: Iterable[Format]) -> int:
    """Where weights of these formats may be cut: at multiples of each block."""
    return math.lcm(*(size or 1 for format in formats for size in format.block))


def _from_gguf(name: str, path: Path) -> Source:
    checkpoint = open_checkpoint(path)
    config = replace(checkpoint.config, dtype=torch.bfloat16)  # of what is not packed
    model = shapes_of(checkpoint, config.dtype, packed=True, place="cuda")
    formats = {
        key: tensor.format
        for key, tensor in model.named_parameters()
        if isinstance(tensor, QuantTensor)
    }
    stored = {tensor.format.lower() for _, tensor in checkpoint.tensors()}
    kept = {format.name for format in formats.values()}
    return Source(
        name=Path(name).name,
        family=checkpoint.family,
        config=config,
        format_of=formats.get,
        format=f"{_listed(stored - {'dense'})} as {_listed(kept)}",
        step=_step(formats.values()),
    )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "bfloat16"


def _in_format(source: Source, name: str) -> Source:
    """A format by name; the published one where it is of the kind that was asked for."""
    if name.lower() in PLAIN:
        config = replace(source.config, dtype=PLAIN[name.lower()])
        plain = format_everywhere(None)
        return replace(source, config=config, format_of=plain, format=name.lower(), step=1)
    format = resolve(name)
    kind = source.format.split(maxsplit=1)[0].split("_", maxsplit=1)[0]
    return source if name.lower() == kind else _packed(source, format)


def _check_fixed(
    question: Question, data: int | None, tensor: int | None, expert: int | None
) -> None:
    """A split that was asked for and can't be is an error with the whole equation."""
    world = question.cluster.count
    if tensor is None:
        tensor = 1 if data is None else max(1, world // data)
    if data is None:
        data = max(1, world // tensor)
    shape = MeshShape(data, tensor, expert or 1)
    if shape.ranks != world:
        raise ArgumentError(
            f"data {data} x tensor {tensor} = {shape.ranks} ranks, but there are {world} GPUs",
            next="leave one of them out, and it takes what the other leaves",
        )
    problem = refusal(question.config, make_cut(question, shape))
    if problem:
        raise ArgumentError(problem, where=str(shape), next="another axis, or leave it open")
