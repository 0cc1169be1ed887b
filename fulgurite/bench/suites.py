"""The suites of `fulgurite bench`: what each measures, its options, how it runs, how rows are printed."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fulgurite.bench import compile_time, dispatch, host, mla, moe
from fulgurite.bench.fusions import cpu as fusions_cpu
from fulgurite.bench.fusions.report import format_report
from fulgurite.bench.generate import cpu as generate_cpu
from fulgurite.bench.generate import gpu as generate_gpu
from fulgurite.bench.generate import model as generate_model
from fulgurite.bench.models import suite as models_suite
from fulgurite.bench.quant import cpu as quant_cpu
from fulgurite.bench.quant import gpu as quant_gpu
from fulgurite.bench.quant.cpu_quantize import format_cast_table
from fulgurite.bench.serve import suite as serve_suite
from fulgurite.bench.serve.tables import format_tables as format_serve_tables
from fulgurite.bench.train import suite as train_suite
from fulgurite.bench.zoo import suite as zoo_suite

Rows = list[dict[str, Any]]


def _add_no_options(parser: argparse.ArgumentParser) -> None:
    """Most suites have only the options of all."""


@dataclass(frozen=True)
class Suite:
    """`run` measures and saves; the formats print saved rows, of a CPU's file or a GPU's."""

    help: str
    run: Callable[[argparse.Namespace], None]
    format_cpu: Callable[[Rows], str]
    format_gpu: Callable[[Rows], str]
    add_options: Callable[[argparse.ArgumentParser], None] = _add_no_options


def _format_quant_cpu(rows: Rows) -> str:
    linears = [row for row in rows if "cast" not in row]
    casts = [row for row in rows if "cast" in row]
    return f"{quant_cpu.format_table(linears)}\n\n{format_cast_table(casts)}"


def _format_generate_gpu(rows: Rows) -> str:
    groups = itertools.groupby(rows, key=lambda row: row["shape"])
    return "\n\n".join(generate_gpu.format_table(list(group)) for _, group in groups)


def _format_mla(rows: Rows) -> str:
    return "\n\n".join(mla.format_tables(rows))


SUITES: dict[str, Suite] = {
    "compile": Suite(
        "seconds to compile, with cold and warm caches",
        compile_time.run_compile,
        compile_time.format_table,
        compile_time.format_table,
    ),
    "dispatch": Suite(
        "dispatch and combine of expert parallelism",
        dispatch.run_dispatch,
        dispatch.format_cpu_table,
        dispatch.format_gpu_table,
    ),
    "fusions": Suite(
        "generated kernels, beside the copy bandwidth",
        fusions_cpu.run_fusions,
        fusions_cpu.format_table,
        format_report,
    ),
    "generate": Suite(
        "prefill and decode of language models",
        generate_cpu.run_generate,
        generate_cpu.format_table,
        _format_generate_gpu,
        generate_model.add_options,
    ),
    "host": Suite(
        "host time of small calls",
        host.run_host,
        host.format_table,
        host.format_table,
        host.add_options,
    ),
    "mla": Suite("multi-head latent attention", mla.run_mla, _format_mla, _format_mla),
    "models": Suite(
        "training steps and inference of a few models",
        models_suite.run_models,
        models_suite.format_table,
        models_suite.format_table,
    ),
    "moe": Suite("mixture-of-experts layers", moe.run_moe, moe.format_table, moe.format_table),
    "quant": Suite(
        "linears with quantized weights, and casts",
        quant_cpu.run_quant,
        _format_quant_cpu,
        lambda rows: "\n\n".join(quant_gpu.format_tables(rows)),
    ),
    "serve": Suite(
        "a server under load",
        serve_suite.run_serve,
        format_serve_tables,
        format_serve_tables,
        serve_suite.add_options,
    ),
    "train": Suite(
        "training steps of language models",
        train_suite.run_train,
        train_suite.format_tables,
        train_suite.format_tables,
        train_suite.add_options,
    ),
    "zoo": Suite(
        "about 300 models of timm, torchvision and transformers",
        zoo_suite.run_zoo,
        zoo_suite.format_summary,
        zoo_suite.format_summary,
        zoo_suite.add_options,
    ),
}
