"""A random program as text: inputs, lines, outputs.

In: nothing. Out: `Program`, a value: its function, its arguments, and its text. One program may be
called with several sets of sizes and scalars (`calls`). Two programs merge into one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from tests.fuzz import functions

# the scope of a program's lines
FUNCTIONS = (
    functions.mixed_precision, functions.without_gradient, functions.with_gradient, functions.with_out,
    functions.with_new_out, functions.recomputed, functions.hooked, functions.square, functions.product,
    functions.doubled, functions.partly_written, functions.gradient_inside,
)  # fmt: skip
NAMES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "math": math,
    "TwoTensor": TwoTensor,
    **{function.__name__: function for function in FUNCTIONS},
}
IDENTIFIER = re.compile(r"\b[abijknpstuv]\d+(?:_\d+)?\b")
Number = int | float


@dataclass(frozen=True)
class Input:
    """A tensor argument. A size is a number or the name of one of a call's numbers.

    values   the kind of its numbers, see `inputs.draw_numbers`; "index" has `low` <= number < `high`
    layout   its strides, see `inputs.make_tensor`; "two" is a TwoTensor
    memory   a name: inputs of equal memory and dtype are views of it, which start at element `low`
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    layout: str = "plain"
    values: str = "quarters"
    seed: int = 0
    requires_grad: bool = False
    low: int = 0
    high: int = 1
    memory: str = ""


@dataclass(frozen=True)
class Line:
    """A statement. `target` is the name that it assigns; empty for an in-place statement.

    discrete      an ulp of its operands may change its result by more than an ulp
    approximate   its results are correct to a few ulp only, even if they are representable
    bitwise       it reads the bits of its operands: float64 says nothing about its results
    """

    target: str
    text: str
    discrete: bool = False
    approximate: bool = False
    bitwise: bool = False

    def __str__(self) -> str:
        return f"{self.target} = {self.text}" if self.target else self.text

    @property
    def used(self) -> set[str]:
        return set(IDENTIFIER.findall(self.text))


@dataclass(frozen=True)
class Program:
    """Inputs, lines and outputs. `calls` has the numbers of each call: sizes and scalar arguments."""

    seed: int
    kind: str
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    calls: tuple[dict[str, Number], ...] = ({},)
    scalars: tuple[str, ...] = ()  # the numbers of a call that are arguments
    dynamic: bool | None = False
    gradient: bool = False
    raises: bool = False  # eager refuses the last line

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*(given.name for given in self.inputs), *self.scalars)

    def __str__(self) -> str:
        body = [f"    {line}" for line in self.lines]
        returned = "".join(f"{name}, " for name in self.outputs)
        return "\n".join(
            [f"def program({', '.join(self.arguments)}):", *body, f"    return ({returned})"]
        )

    def function(self) -> Callable[..., tuple[Any, ...]]:
        scope = dict(NAMES, __name__="program")  # functools.wraps reads the name
        exec(compile(str(self), f"<fuzz {self.seed}>", "exec"), scope)
        return scope["program"]  # type: ignore[no-any-return]


def prune(program: Program) -> Program:
    """Without the inputs and scalars that no line or output uses."""
    used = set(program.outputs).union(*(line.used for line in program.lines))
    inputs = tuple(given for given in program.inputs if given.name in used)
    scalars = tuple(name for name in program.scalars if name in used)
    sizes = {size for given in inputs for size in given.shape if isinstance(size, str)}
    kept = sizes.union(scalars)
    calls = tuple({k: v for k, v in call.items() if k in kept} for call in program.calls)
    return replace(program, inputs=inputs, scalars=scalars, calls=calls)


def live_part(program: Program) -> Program:
    """Without assignments that no output needs. In-place lines on values that remain stay."""
    live = set(program.outputs)
    kept = []
    for line in reversed(program.lines):
        if not line.target or line.target in live:
            kept.append(line)
            live |= line.used
    return prune(replace(program, lines=tuple(reversed(kept))))


def rename(program: Program, suffix: str) -> Program:
    """The same program with a suffix on every name."""

    def text(old: str) -> str:
        return IDENTIFIER.sub(lambda found: found[0] + suffix, old)

    def size(old: int | str) -> int | str:
        return text(old) if isinstance(old, str) else old

    inputs = [
        replace(
            given,
            name=text(given.name),
            shape=tuple(map(size, given.shape)),
            memory=given.memory and given.memory + suffix,
        )
        for given in program.inputs
    ]
    lines = [replace(x, target=text(x.target), text=text(x.text)) for x in program.lines]
    return replace(
        program,
        inputs=tuple(inputs),
        lines=tuple(lines),
        outputs=tuple(map(text, program.outputs)),
        calls=tuple({text(k): v for k, v in call.items()} for call in program.calls),
        scalars=tuple(map(text, program.scalars)),
    )


def merge(programs: Sequence[Program]) -> Program:
    """One program that computes all of them. Its seed is the first one's."""
    if len(programs) == 1:
        return programs[0]
    parts = [rename(program, f"_{number}") for number, program in enumerate(programs)]
    count = max(len(part.calls) for part in parts)
    calls: list[dict[str, Number]] = [{} for _ in range(count)]
    for part in parts:
        for number, call in enumerate(calls):
            call.update(part.calls[number % len(part.calls)])
    first = programs[0]
    return Program(
        seed=first.seed,
        kind=first.kind,
        inputs=tuple(given for part in parts for given in part.inputs),
        lines=tuple(line for part in parts for line in part.lines),
        outputs=tuple(name for part in parts for name in part.outputs),
        calls=tuple(calls),
        scalars=tuple(name for part in parts for name in part.scalars),
        dynamic=first.dynamic,
        gradient=any(part.gradient for part in parts),
    )
