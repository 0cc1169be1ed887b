"""A failing program → a smaller one that fails in the same way.

Drops outputs, calls and lines; turns lines into inputs; shrinks sizes; simplifies layouts, values, dtypes
and constants. Each step is kept if the category of the failure, and for an error its text, stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from tests.fuzz.check import Discard, Failure
from tests.fuzz.oracle import REFUSALS, Reference
from tests.fuzz.program import Input, Program, live_part, prune

Check = Callable[[Program], Failure | None]
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])")


def shrink(
    program: Program, failure: Failure, check: Check, limit: int = 120
) -> tuple[Program, Failure]:
    """The smallest program found with at most `limit` checks, and its failure."""
    checks = 0
    progress = True
    while progress:
        progress = False
        for candidate in candidates(program):
            if checks == limit:
                return program, failure
            checks += 1
            try:
                found = check(candidate)
            except (Discard, *REFUSALS):
                continue
            if found is not None and same_failure(found, failure):
                program, failure, progress = candidate, found, True
                break
    return program, failure


def same_failure(one: Failure, two: Failure) -> bool:
    return one.category == two.category and (one.category != "raises" or one.what == two.what)


def candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, the most promising first."""
    yield from drop_blocks(program)
    yield from drop_outputs(program)
    yield from drop_calls(program)
    yield from return_operands(program)
    yield from drop_lines(program)
    if program.gradient:
        plain = tuple(replace(given, requires_grad=False) for given in program.inputs)
        yield replace(program, gradient=False, inputs=plain)
    if program.dynamic is not False and len(program.calls) == 1:
        yield replace(program, dynamic=False)
    yield from turn_lines_into_inputs(program)
    yield from simplify_inputs(program)
    yield from simplify_numbers(program)


def without(program: Program, dropped: set[str], kept: list[int]) -> Program | None:
    """The program with only some of its lines; None if a dropped name is needed."""
    lines = tuple(program.lines[number] for number in kept)
    outputs = tuple(name for name in program.outputs if name not in dropped)
    if not outputs or any(line.used & dropped for line in lines):
        return None
    return prune(replace(program, lines=lines, outputs=outputs))


def drop_blocks(program: Program) -> Iterator[Program]:
    """Half of the outputs, with everything that only they need."""
    count = len(program.outputs)
    if count >= 2:
        for half in (program.outputs[: count // 2], program.outputs[count // 2 :]):
            yield live_part(replace(program, outputs=half))


def drop_outputs(program: Program) -> Iterator[Program]:
    for name in program.outputs if len(program.outputs) > 1 else ():
        yield live_part(replace(program, outputs=tuple(o for o in program.outputs if o != name)))


def return_operands(program: Program) -> Iterator[Program]:
    """Return an operand of the last line instead of its result."""
    assigned = {line.target for line in program.lines if line.target}
    for line in program.lines:
        if line.target in program.outputs and not program.raises:
            for operand in sorted(line.used & assigned - set(program.outputs)):
                outputs = tuple(operand if o == line.target else o for o in program.outputs)
                yield live_part(replace(program, outputs=outputs))


def drop_calls(program: Program) -> Iterator[Program]:
    for number in range(len(program.calls)):
        calls = program.calls[:number] + program.calls[number + 1 :]
        if calls:
            yield replace(program, calls=calls)


def drop_lines(program: Program) -> Iterator[Program]:
    """Drop one line and everything that depends on its value, or only an in-place line."""
    for number in reversed(range(len(program.lines))):
        dropped: set[str] = set()
        kept = list(range(number))
        line = program.lines[number]
        dropped |= {line.target} - {""}
        for later in range(number + 1, len(program.lines)):
            if program.lines[later].used & dropped:
                dropped |= {program.lines[later].target} - {""}
            else:
                kept.append(later)
        smaller = without(program, dropped, kept)
        if smaller is not None:
            yield smaller


def turn_lines_into_inputs(program: Program) -> Iterator[Program]:
    """Replace a value by an input of its shape and dtype."""
    if program.raises or program.dynamic is not False:
        return
    try:
        reference = Reference(replace(program, gradient=False), program.calls[0], "cpu").run()
    except REFUSALS:
        return
    for number, line in reversed(list(enumerate(program.lines))):
        value: Any = reference.eager.get(line.target)
        used = any(line.target in later.used for later in program.lines[number + 1 :])
        if type(value) is not Tensor or not used:
            continue
        name = str(value.dtype).removeprefix("torch.")
        given = Input(line.target, tuple(value.shape), name)
        lines = program.lines[:number] + program.lines[number + 1 :]
        yield prune(replace(program, inputs=(*program.inputs, given), lines=lines))


def simplify_inputs(program: Program) -> Iterator[Program]:
    for number, given in enumerate(program.inputs):
        for simpler in simpler_inputs(given):
            inputs = program.inputs[:number] + (simpler,) + program.inputs[number + 1 :]
            yield replace(program, inputs=inputs)
    for name in {size for given in program.inputs for size in given.shape if isinstance(size, str)}:
        for size in (1, 2, 3):
            calls = tuple({**call, name: size} for call in program.calls)
            if all(int(call[name]) > size for call in program.calls):
                yield replace(program, calls=calls)
    sizes = {size for given in program.inputs for size in given.shape if isinstance(size, int)}
    for size in sorted(sizes, reverse=True):  # the same size everywhere
        for smaller in (1, 2, 3, size // 2):
            if smaller < size:
                yield replace(
                    program, inputs=tuple(resize(i, size, smaller) for i in program.inputs)
                )


def resize(given: Input, size: int, smaller: int) -> Input:
    shape = tuple(smaller if s == size else s for s in given.shape)
    return replace(
        given, shape=shape, high=min(given.high, smaller) if given.high == size else given.high
    )


def simpler_inputs(given: Input) -> Iterator[Input]:
    if given.layout not in ("plain", "two"):
        yield replace(given, layout="plain")
    if given.values not in ("quarters", "index", "unique"):
        yield replace(given, values="quarters")
    if given.requires_grad:
        yield replace(given, requires_grad=False)
    if given.memory:
        yield replace(given, memory="", low=0)
    if given.dtype in ("float64", "bfloat16", "float16"):
        yield replace(given, dtype="float32")
    if given.dtype in ("int32", "int16", "int8", "uint8") and given.values == "quarters":
        yield replace(given, dtype="int64")
    for axis, size in enumerate(given.shape):
        if isinstance(size, int) and size > 1:
            for smaller in (1, 2, size // 2):
                if smaller < size:
                    shape = given.shape[:axis] + (smaller,) + given.shape[axis + 1 :]
                    yield replace(given, shape=shape)


def simplify_numbers(program: Program) -> Iterator[Program]:
    """Replace constants by 1, 2 or 0."""
    for number, line in enumerate(program.lines):
        for found in NUMBER.finditer(line.text):
            for simple in ("1", "2", "0"):
                if found[0] in ("0", "1", "-1", "2"):
                    break
                text = line.text[: found.start()] + simple + line.text[found.end() :]
                lines = (
                    program.lines[:number]
                    + (replace(line, text=text),)
                    + program.lines[number + 1 :]
                )
                yield replace(program, lines=lines)
