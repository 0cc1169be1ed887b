"""The suites of `fulgurite bench`: how each runs, and how its rows are printed."""

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
from fulgurite.bench.models import suite as models_suite
from fulgurite.bench.quant import cpu as quant_cpu
from fulgurite.bench.quant import gpu as quant_gpu
from fulgurite.bench.quant.cpu_quantize import format_cast_table
from fulgurite.bench.serve import suite as serve_suite
from fulgurite.bench.serve.tables import format_tables as format_serve_tables
from fulgurite.bench.train import suite as train_suite
from fulgurite.bench.zoo import suite as zoo_suite

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Suite:
    """`run` measures and saves; the other two print saved rows, of a CPU's file or a GPU's."""

    run: Callable[[argparse.Namespace], None]
    format_cpu: Callable[[Rows], str]
    format_gpu: Callable[[Rows], str]


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
        compile_time.run_compile, compile_time.format_table, compile_time.format_table
    ),
    "dispatch": Suite(dispatch.run_dispatch, dispatch.format_cpu_table, dispatch.format_gpu_table),
    "fusions": Suite(fusions_cpu.run_fusions, fusions_cpu.format_table, format_report),
    "generate": Suite(generate_cpu.run_generate, generate_cpu.format_table, _format_generate_gpu),
    "host": Suite(host.run_host, host.format_table, host.format_table),
    "mla": Suite(mla.run_mla, _format_mla, _format_mla),
    "models": Suite(models_suite.run_models, models_suite.format_table, models_suite.format_table),
    "moe": Suite(moe.run_moe, moe.format_table, moe.format_table),
    "quant": Suite(
        quant_cpu.run_quant,
        _format_quant_cpu,
        lambda rows: "\n\n".join(quant_gpu.format_tables(rows)),
    ),
    "serve": Suite(serve_suite.run_serve, format_serve_tables, format_serve_tables),
    "train": Suite(train_suite.run_train, train_suite.format_tables, train_suite.format_tables),
    "zoo": Suite(zoo_suite.run_zoo, zoo_suite.format_summary, zoo_suite.format_summary),
}
