"""The C++ of a region: one translation unit, one function a kernel, one entry point for all.

In: named schedules in the order they run. Out: a `TranslationUnit`: the source text and, for each
kernel, which buffers and sizes it takes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fulgurite import native
from fulgurite.fuser.codegen.cpp.columns import ColumnWriter
from fulgurite.fuser.codegen.cpp.expressions import storage_type
from fulgurite.fuser.codegen.cpp.grid_reductions import GridReductionWriter
from fulgurite.fuser.codegen.cpp.kernel import KernelWriter
from fulgurite.fuser.codegen.cpp.row_program import write_row_program
from fulgurite.fuser.codegen.cpp.rows import RowWriter
from fulgurite.fuser.codegen.cpp.scan import write_scan
from fulgurite.fuser.codegen.cpp.scatter import write_scatter
from fulgurite.fuser.codegen.cpp.split_columns import write_split_columns
from fulgurite.fuser.codegen.cpp.split_rows import SplitRowWriter
from fulgurite.fuser.codegen.cpp.transpose import write_transpose
from fulgurite.fuser.ir.index import Symbol
from fulgurite.fuser.ir.statement import Tensor
from fulgurite.fuser.schedule.cpu.base import CpuSchedule

BASE_HEADER = "numbers.h"  # every kernel includes it
# Other headers are included where a kernel uses them.
OPTIONAL_HEADERS = (
    "math.h",
    "trigonometry.h",
    "math_via_double.h",
    "memory_traffic.h",
    "lanes.h",
    "float16.h",
    "reductions.h",
    "transpose.h",
    "sort.h",
)
HEADERS_OF_HEADERS = {"transpose.h": "lanes.h", "reductions.h": "lanes.h", "float16.h": "lanes.h"}
GUARDED_LOAD = re.compile(r"\?[^\n]*\[|\bif \(")  # in the text of kernels


def write_rows(kernel: KernelWriter) -> None:
    kernel.open_function()
    roles = {x.role for x in kernel.nest.locals.values()}
    writer = RowWriter
    if kernel.schedule.splits_body:
        writer = SplitRowWriter
    elif roles & {"column_reduction", "full_reduction"}:
        writer = GridReductionWriter
    writer(kernel).write()
    kernel.close_function()


def write_columns(kernel: KernelWriter) -> None:
    kernel.open_function()
    columns = ColumnWriter(kernel)
    if kernel.schedule.splits_body:
        write_split_columns(columns)
    else:
        columns.write()
    kernel.close_function()


WRITERS: dict[str, Callable[[KernelWriter], None]] = {
    "pointwise": write_rows,
    "rows": write_rows,
    "columns": write_columns,
    "transpose": write_transpose,
    "scan": write_scan,
    "row_program": write_row_program,
    "scatter": write_scatter,
}


@functools.cache
def _base_header() -> str:
    """What every kernel starts with."""
    large = torch.tensor(1e4).to(torch.float8_e4m3fn).view(torch.uint8)
    overflow = f"#define E4M3_OVERFLOW {int(large):#x}u"
    allocate = 'extern "C" void* malloc(unsigned long);\nextern "C" void free(void*);\n'
    return "\n".join([overflow, (native.INCLUDE / BASE_HEADER).read_text(), allocate])


@functools.cache
def _read_header(name: str) -> tuple[str, frozenset[str]]:
    """A header's text and the names it defines."""
    text = (native.INCLUDE / name).read_text()
    return text, frozenset(re.findall(r"^(?:template.*)?(?:INLINE|struct) ?\w* (\w+)", text, re.M))


def collect_headers(text: str) -> str:
    """The text of the headers that a kernel uses: an unused header would only cost compile time."""
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    used = {name for name in OPTIONAL_HEADERS if words & _read_header(name)[1]}
    used |= {HEADERS_OF_HEADERS[name] for name in used if name in HEADERS_OF_HEADERS}
    headers = [_read_header(name)[0] for name in OPTIONAL_HEADERS if name in used]
    return "\n".join([_base_header(), *headers])


@dataclass(frozen=True)
class CppKernelSource:
    """One C++ function: its text and its arguments."""

    name: str
    text: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    symbols: tuple[Symbol, ...]
    updates: tuple[str, ...] = ()  # those of the writes that are also read


@dataclass(frozen=True)
class TranslationUnit:
    """A translation unit. `slots` are the names that the entry point takes, in order."""

    kernels: tuple[CppKernelSource, ...]
    slots: tuple[str, ...]
    text: str

    @property
    def source(self) -> str:
        """The text with its headers."""
        parts = [collect_headers(self.text), self.text]
        if GUARDED_LOAD.search(self.text):
            parts.insert(0, native.GUARDED_LOADS)
        return "\n".join(parts)


def write_kernel(name: str, schedule: CpuSchedule) -> CppKernelSource:
    kernel = KernelWriter(name, schedule)
    WRITERS[schedule.kind](kernel)
    return CppKernelSource(
        name,
        "\n".join(kernel.emit.lines),
        tuple(kernel.reads),
        tuple(kernel.writes),
        tuple(kernel.symbols),
        tuple(kernel.updates),
    )


def write_translation_unit(
    kernels: list[CppKernelSource], tensors: Mapping[str, Tensor]
) -> TranslationUnit:
    """All kernels, `run`, which calls them in order, and `run_<name>`, which calls one of them."""
    names = dict.fromkeys(name for k in kernels for name in (*k.reads, *k.writes))
    symbols = dict.fromkeys(symbol.name for k in kernels for symbol in k.symbols)
    slots = (*names, *symbols)
    slot = {name: position for position, name in enumerate(slots)}
    calls: list[str] = []
    entries: list[str] = []
    for k in kernels:
        arguments = [
            f"(const {storage_type(tensors[name].dtype)}*)args[{slot[name]}]" for name in k.reads
        ]
        arguments += [
            f"({storage_type(tensors[name].dtype)}*)args[{slot[name]}]" for name in k.writes
        ]
        arguments += [f"args[{slot[symbol.name]}]" for symbol in k.symbols]
        call = f"{k.name}({', '.join([*arguments, '&error', 'max_threads'])});"
        calls.append("  " + call)
        entries.append(
            f"EXPORT int64_t run_{k.name}(const int64_t* args) {{\n"
            f"  int64_t error = 0;\n  const int max_threads = (int)args[{len(slots)}];\n"
            f"  {call}\n  return error;\n}}"
        )
    run = [
        "// Runs every kernel in order. args: addresses, then sizes, then the number of threads.",
        "EXPORT int64_t run(const int64_t* args) {",
        "  int64_t error = 0;",
        f"  const int max_threads = (int)args[{len(slots)}];",
        *calls,
        "  return error;",
        "}",
    ]
    text = "\n".join([*(k.text for k in kernels), *run, *entries])
    return TranslationUnit(tuple(kernels), slots, text)
