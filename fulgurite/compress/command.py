"""`fulgurite quantize MODEL --format nvfp4 --output FOLDER`: options in, a checkpoint folder out."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from fulgurite.compress.gguf_source import open_gguf_source
from fulgurite.compress.pipeline import QuantizeOptions, quantize_checkpoint
from fulgurite.compress.source import Source, open_safetensors_source
from fulgurite.compress.texts import HELP_TEXT, python_help_text, read_text, tokenize_text
from fulgurite.compress.weights import plan_weights
from fulgurite.device import resolve_device
from fulgurite.errors import ArgumentError
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import open_checkpoint
from fulgurite.models.loading.loader import build_model
from fulgurite.models.tokenizer import find_tokenizer, load_tokenizer
from fulgurite.quant.files.compressed_tensors_writer import SCHEMES, CompressionScheme, get_scheme
from fulgurite.quant.files.safetensors_writer import check_output_folder

SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
MIN_SEQUENCE = 32


def add_options(command: argparse.ArgumentParser) -> None:
    formats = "\n".join(f"  {name:<12}{scheme.summary}" for name, scheme in SCHEMES.items())
    command.epilog = f"formats:\n{formats}"
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument(
        "model", help="folder, .safetensors or .gguf file, smollm2, or owner/model on the hub"
    )
    command.add_argument("--format", required=True, metavar="NAME", help="see below")
    command.add_argument("--output", required=True, metavar="FOLDER", help="must not exist")
    command.add_argument(
        "--calibrate",
        metavar="TEXT",
        help="text file, or - for stdin: static input scales, and second-order rounding (GPTQ) "
        "of 4-bit weights",
    )
    command.add_argument(
        "--eval", metavar="TEXT", help=f"text file for perplexity (default: {HELP_TEXT})"
    )
    command.add_argument(
        "--no-eval", action="store_true", help="measure no perplexity: less memory and time"
    )
    for name, default, text in (
        ("calibration-tokens", 32768, "tokens of --calibrate that are used"),
        ("eval-tokens", 8192, "tokens of --eval that are used"),
        ("sequence", 512, "tokens of a sequence of both"),
    ):
        command.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})"
        )
    command.add_argument("--group-size", type=int, metavar="N", help="of int4: 32, 64 or 128")
    command.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="linears that stay dense: a glob, or re: and a regular expression; may be repeated",
    )
    command.add_argument("--kv", choices=["fp8"], help="also calibrate scales of an FP8 KV cache")
    command.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    command.add_argument(
        "--max-shard-size", default="5G", metavar="SIZE", help="of a file: 500M, 5G (default)"
    )
    command.add_argument("--json", metavar="FILE", help="also write the figures as JSON")


def quantize(options: argparse.Namespace) -> None:
    """Quantize a checkpoint, write it and print its quality beside the original's."""
    scheme = get_scheme(options.format, options.group_size)
    _check_options(options, scheme)
    output, device = Path(options.output).expanduser(), resolve_device(options.device)
    check_output_folder(output, needed_bytes=0)  # before anything is downloaded or read
    source, model = open_source(options.model, device)
    plan = plan_weights(source, model, scheme, options.ignore, kv_cache=options.kv is not None)
    calibration, evaluation = _read_texts(options, source)
    console = Console(stderr=True)
    bar = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*bar, console=console, transient=True) as progress:
        report = quantize_checkpoint(
            source,
            model,
            plan,
            QuantizeOptions(
                output, device, calibration, evaluation, parse_size(options.max_shard_size)
            ),
            progress,
        )
    Console(soft_wrap=not sys.stdout.isatty()).print(report.render(options.eval or HELP_TEXT))
    print(f"\nwritten to {output}")
    if options.json:
        Path(options.json).write_text(json.dumps(report.to_json(), indent=2) + "\n")


def open_source(name: str, device: torch.device) -> tuple[Source, CausalLM]:
    """Open a checkpoint: its tensors, and its modules on the meta device."""
    checkpoint = open_checkpoint(hub.resolve_model_path(name), implementation="fulgurite")
    dtype = torch.float32 if device.type == "cpu" else checkpoint.config.dtype
    model = build_model(checkpoint.config, checkpoint.family, dtype).eval()
    is_gguf = checkpoint.path.suffix == ".gguf"
    return (open_gguf_source if is_gguf else open_safetensors_source)(checkpoint, model), model


def _check_options(options: argparse.Namespace, scheme: CompressionScheme) -> None:
    if scheme.input_scale and options.calibrate is None:
        raise ArgumentError(
            f"--format {scheme.name} has static input scales, which need a calibration text",
            next="add --calibrate TEXT, a text file like the prompts the model will see",
        )
    if options.kv and options.calibrate is None:
        raise ArgumentError("--kv fp8 needs a calibration text", next="add --calibrate TEXT")
    if options.eval and options.no_eval:
        raise ArgumentError("--eval and --no-eval exclude each other")
    if options.calibrate == options.eval == "-":
        raise ArgumentError("only one of --calibrate and --eval can be read from stdin")
    for name in ("calibration_tokens", "eval_tokens", "sequence"):
        if getattr(options, name) < MIN_SEQUENCE:
            raise ArgumentError(f"--{name.replace('_', '-')} must be at least {MIN_SEQUENCE}")
    parse_size(options.max_shard_size)


def _read_texts(options: argparse.Namespace, source: Source) -> tuple[Tensor | None, Tensor | None]:
    """Token ids for calibration and for perplexity."""
    if options.calibrate is None and options.no_eval:
        return None, None
    if options.calibrate is None and options.eval is None and find_tokenizer(source.path) is None:
        print("no tokenizer.json: perplexity is not measured", file=sys.stderr)
        return None, None
    tokenizer = load_tokenizer(source.path)
    length = min(options.sequence, source.config.max_positions)
    calibration = evaluation = None
    if options.calibrate is not None:
        text = read_text(options.calibrate, "--calibrate")
        calibration = tokenize_text(
            text,
            tokenizer,
            max_tokens=options.calibration_tokens,
            length=length,
            option="--calibrate",
        )
    if not options.no_eval:
        text = read_text(options.eval, "--eval") if options.eval else python_help_text()
        evaluation = tokenize_text(
            text, tokenizer, max_tokens=options.eval_tokens, length=length, option="--eval"
        )
    return calibration, evaluation


def parse_size(text: str) -> int:
    """`500M` -> 500,000,000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    size = int(float(match.group(1)) * SIZE_UNITS[match.group(2).upper()]) if match else 0
    if not size:
        raise ArgumentError(f"--max-shard-size {text!r} is not a size", next="such as 500M or 5G")
    return size
