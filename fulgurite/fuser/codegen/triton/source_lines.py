"""Where lines of a Triton kernel go: levels of loops, names that are free.

In: lines, with the level at which what they read is known. Out: the text below a kernel's `def`, what does not
change inside a loop before it.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fulgurite.fuser.ir.expression import Load
from fulgurite.fuser.ir.index import Axis

RESERVED = frozenset(
    (
        *("tl", "triton", "libdevice", "float", "range", "part", "program"),
        # functions of triton_functions.py: a local of that name would hide one
        *(
            "again",
            "share",
            "nan_max",
            "nan_min",
            "added",
            "product",
            "log_add_exp",
            "sigmoid",
            "quick_sigmoid",
        ),
        *("quick_tanh", "sign", "signbit", "floored_remainder", "floored_divide", "to_e4m3"),
        *(
            "divided",
            "truncated_divide",
            "to_e5m2",
            "whole_truncated_divide",
            "whole_truncated_remainder",
        ),
        *("whole_floored_remainder", "whole_floored_divide", "shift_left", "shift_right"),
        *("whole_power", "greatest_divisor", "least_multiple"),
        *("random_word", "uniform", "uniform53", "random_integer"),
    )
)


@dataclass
class Loop:
    """A loop of the nest as text: a scalar of the program, or a block."""

    axis: Axis
    block: int  # 0: a scalar
    level: int  # where it is known: 0 in the program, more inside loops
    mask: str | None = None


@dataclass
class Level:
    """Lines inside one loop of the text: where it is, what is read first, and the rest.

    Reads come first so that all are under way before the first reduction waits for the others.
    """

    head: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    loads: dict[tuple[Load, str], str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)

    @property
    def all(self) -> list[str]:
        return [*self.head, *self.reads, *self.lines]


class Lines:
    """The lines written so far, and the names they took."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = set(taken)
        self.levels = [Level()]

    def line(self, text: str, level: int | None = None) -> None:
        self.levels[-1 if level is None else level].lines.append(text)

    def head(self, text: str) -> None:
        self.levels[-1].head.append(text)

    @contextmanager
    def loop(self, head: str) -> Iterator[None]:
        """Lines inside `head`, one level deeper."""
        self.levels.append(Level())
        yield
        inside = self.levels.pop()
        self.line(head)
        for text in inside.all:
            self.line("    " + text)

    @property
    def depth(self) -> int:
        return len(self.levels) - 1

    def fresh(self, base: str) -> str:
        text = "".join(c if c.isalnum() or c == "_" else "_" for c in base)
        if text[:1].isdigit() or keyword.iskeyword(text) or text in RESERVED:
            text = "_" + text
        unique, count = text, 1
        while unique in self.taken:
            count += 1
            unique = f"{text}_{count}"
        self.taken.add(unique)
        return unique
