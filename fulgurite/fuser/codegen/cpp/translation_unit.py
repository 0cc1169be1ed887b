"""The C++ of a region: one translation unit, one function a kernel, one entry that runs them all.

In: named schedules in the order they run. Out: a `Unit`: the source text and, for each kernel, which
buffers and sizes it takes. The text needs no headers but ours, which are part of it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fulgurite import native
from fulgurite.fuser.codegen.cpp.columns import Columns
from fulgurite.fuser.codegen.cpp.expressions import identifier, storage_type
from fulgurite.fuser.codegen.cpp.grid_reductions import GridSums
from fulgurite.fuser.codegen.cpp.kernel import Kernel
from fulgurite.fuser.codegen.cpp.parallel_rows import SharedRows
from fulgurite.fuser.codegen.cpp.rows import Rows
from fulgurite.fuser.codegen.cpp.scan import write_scan
from fulgurite.fuser.codegen.cpp.split_columns import write_split
from fulgurite.fuser.codegen.cpp.transpose import write_transpose
from fulgurite.fuser.ir.index import Symbol
from fulgurite.fuser.schedule.cpu.base import Schedule


def write_rows(kernel: Kernel) -> None:
    kernel.open()
    over_grid = any(x.role in ("colsum", "scalar") for x in kernel.nest.locals.values())
    kind = SharedRows if kernel.schedule.split else GridSums if over_grid else Rows
    kind(kernel).write()
    kernel.close()


def write_columns(kernel: Kernel) -> None:
    kernel.open()
    columns = Columns(kernel)
    if kernel.schedule.split:
        write_split(columns)
    else:
        columns.write()
    kernel.close()


WRITERS: dict[str, Callable[[Kernel], None]] = {
    "pointwise": write_rows,
    "rows": write_rows,
    "columns": write_columns,
    "transpose": write_transpose,
    "scan": write_scan,
}
NUMBERS = "numbers.h"
HEADERS = (
    "math.h",
    "trigonometry.h",
    "functions.h",
    "traffic.h",
    "tile.h",
)  # where a kernel uses them


@functools.cache
def _first_header() -> str:
    """What every kernel starts with."""
    large = torch.tensor(1e4).to(torch.float8_e4m3fn).view(torch.uint8)
    overflow = f"#define E4M3_OVERFLOW {int(large):#x}u"
    allocate = 'extern "C" void* malloc(unsigned long);\nextern "C" void free(void*);\n'
    return "\n".join([overflow, (native.INCLUDE / NUMBERS).read_text(), allocate])


@functools.cache
def _header(name: str) -> tuple[str, frozenset[str]]:
    """A header's text and the names it defines."""
    text = (native.INCLUDE / name).read_text()
    return text, frozenset(re.findall(r"^(?:template.*)?(?:INLINE|struct) ?\w* (\w+)", text, re.M))


def header(text: str) -> str:
    """Our own headers as text, those that a kernel uses: what is not there need not be compiled."""
    parts, words = [_first_header()], set(re.findall(r"[A-Za-z_]\w*", text))
    for name in HEADERS:
        content, defined = _header(name)
        if words & defined:
            parts.append(content)
    return "\n".join(parts)


@dataclass(frozen=True)
class KernelText:
    """One function: its text and its arguments."""

    name: str
    text: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    symbols: tuple[Symbol, ...]
    updates: tuple[str, ...] = ()  # those of the writes that are read, too


@dataclass(frozen=True)
class Unit:
    """A translation unit. `slots` are the names that the entry takes, in order."""

    kernels: tuple[KernelText, ...]
    slots: tuple[str, ...]
    text: str

    @property
    def source(self) -> str:
        return header(self.text) + "\n" + self.text


def write_kernel(name: str, schedule: Schedule) -> KernelText:
    kernel = Kernel(name, schedule)
    WRITERS[schedule.kind](kernel)
    return KernelText(
        name,
        "\n".join(kernel.write.lines),
        tuple(kernel.reads),
        tuple(kernel.writes),
        tuple(kernel.symbols),
        tuple(kernel.updates),
    )


def write_unit(kernels: list[KernelText], memory: dict) -> Unit:  # type: ignore[type-arg]
    """All kernels, and `run`, which calls them with addresses from one array of integers."""
    tensors = dict.fromkeys(name for k in kernels for name in (*k.reads, *k.writes))
    symbols = dict.fromkeys(symbol.name for k in kernels for symbol in k.symbols)
    slots = (*tensors, *symbols)
    place = {name: position for position, name in enumerate(slots)}
    calls: list[str] = []
    entries: list[str] = []
    for k in kernels:
        given = [f"(const {storage_type(memory[name].dtype)}*)a[{place[name]}]" for name in k.reads]
        given += [f"({storage_type(memory[name].dtype)}*)a[{place[name]}]" for name in k.writes]
        given += [f"a[{place[symbol.name]}]" for symbol in k.symbols]
        call = f"{k.name}({', '.join([*given, '&bad', 'threads'])});"
        calls.append("  " + call)
        entries.append(
            f"EXPORT int64_t only_{k.name}(const int64_t* a) {{\n"
            f"  int64_t bad = 0;\n  const int threads = (int)a[{len(slots)}];\n"
            f"  {call}\n  return bad;\n}}"
        )
    run = [
        "// every kernel in turn; a holds addresses, then sizes, then the number of threads",
        "EXPORT int64_t run(const int64_t* a) {",
        "  int64_t bad = 0;",
        f"  const int threads = (int)a[{len(slots)}];",
        *calls,
        "  return bad;",
        "}",
    ]
    body = "\n".join(k.text for k in kernels)
    return Unit(tuple(kernels), slots, body + "\n" + "\n".join(run) + "\n" + "\n".join(entries))


__all__ = ["KernelText", "Unit", "header", "identifier", "write_kernel", "write_unit"]
