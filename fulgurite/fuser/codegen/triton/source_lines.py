"""Where lines of a Triton kernel go: nested code blocks, unique names.

In: lines, with the depth at which everything they read is known. Out: the text below a kernel's
`def`, with loop-invariant lines before their loop.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fulgurite.fuser.ir.expression import Load
from fulgurite.fuser.ir.index import Axis

# Functions of device_functions.py: a local of that name would hide one.
DEVICE_FUNCTIONS = """
    atomic_max_float
    div_rn fast_sigmoid fast_tanh floored_divide floored_remainder int_floored_divide
    int_floored_remainder int_gcd int_lcm int_pow int_truncated_divide int_truncated_remainder
    logaddexp min_of_rows nan_max nan_min optimization_barrier philox_word prod_combine random_integer
    select_along_rows shift_left shift_right sigmoid smallest_keys sign signbit softmax_div sum_combine
    sum_of_rows to_e4m3 to_e5m2 truncated_divide uniform uniform53
"""
RESERVED = frozenset(
    ("tl", "triton", "libdevice", "float", "range", "program", "split", *DEVICE_FUNCTIONS.split())
)


@dataclass
class AxisBinding:
    """What a loop is in the text: a scalar of the program, or a dimension of its block."""

    axis: Axis
    block: int  # 0: a scalar
    depth: int  # where it is known: 0 in the program, more inside loops
    mask: str | None = None


@dataclass
class CodeBlock:
    """Lines inside one loop of the text: indices first, then loads, then the rest.

    Loads come first so that all are in flight before the first reduction waits for one of them.
    """

    header: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    loaded: dict[tuple[Load, str], str] = field(default_factory=dict)  # (load, mask) → name
    conditions: dict[str, str] = field(default_factory=dict)  # text → name

    @property
    def all_lines(self) -> list[str]:
        return [*self.header, *self.loads, *self.lines]


class SourceLines:
    """The lines written so far, and the names they use."""

    def __init__(self, used_names: set[str]) -> None:
        self.used_names = set(used_names)
        self.blocks = [CodeBlock()]

    def emit(self, line: str, depth: int | None = None) -> None:
        self.blocks[-1 if depth is None else depth].lines.append(line)

    def emit_header(self, line: str) -> None:
        self.blocks[-1].header.append(line)

    @contextmanager
    def indented(self, head: str) -> Iterator[None]:
        """Lines below `head` (a `for` or an `if`), one level deeper."""
        self.blocks.append(CodeBlock())
        yield
        inner = self.blocks.pop()
        self.emit(head)
        for line in inner.all_lines:
            self.emit("    " + line)

    @property
    def depth(self) -> int:
        return len(self.blocks) - 1

    def unique_name(self, base: str) -> str:
        text = "".join(c if c.isalnum() or c == "_" else "_" for c in base)
        if text[:1].isdigit() or keyword.iskeyword(text) or text in RESERVED:
            text = "_" + text
        unique, count = text, 1
        while unique in self.used_names:
            count += 1
            unique = f"{text}_{count}"
        self.used_names.add(unique)
        return unique
