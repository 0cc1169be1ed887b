"""Seed → program.

Draws inputs and lines, running each line in eager and float64; a line that eager refuses is drawn
again. The same seed gives the same program on every machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fulgurite.fuser.frontend.lower_graph import ELEMENTWISE_LOWERINGS
from tests.fuzz.oracle import REFUSALS, Reference
from tests.fuzz.program import Input, Line, Number, Program, prune
from tests.fuzz.templates import ERRORS, KINDS, TABLES, WEIGHTS
from tests.fuzz.values import is_float

SIZES = (0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 9, 16, 17, 33, 0, 1, 2, 3, 2, 5, 7, 65, 257)
DYNAMIC_SIZES = (2, 3, 4, 5, 7, 8, 17, 33)
MAX_ELEMENTS = 600
DTYPES = {
    **{"float32": 12, "float64": 2, "bfloat16": 3, "float16": 2, "int64": 4, "int32": 2},
    **{"int16": 1, "int8": 1, "uint8": 1, "bool": 2, "complex64": 1, "complex128": 0.3},
    **{"float8_e4m3fn": 0.3, "float8_e5m2": 0.2},
}
LAYOUTS = "plain plain plain plain transposed stepped expanded offset odd_offset last_channel windows".split()
FLOAT_VALUES = "quarters quarters quarters normal normal odd odd unit extreme".split()
INT_VALUES = "quarters quarters quarters extreme".split()
CONSTANTS = (2, -3, 1, 0, 0.5, -1.5, 2.0, 3, -1, True)
# ops of the fuser's tables whose results jump or are positions
DISCRETE_OPS = set(
    """eq ne lt le gt ge floor ceil round trunc sign sgn floor_divide fmod remainder frac signbit isinf isnan
    logical_and logical_or logical_xor logical_not nextafter threshold threshold_backward copysign div
    hardtanh_backward leaky_relu_backward gelu_backward angle""".split()
)
ELEMENTWISE_OPS = sorted(ELEMENTWISE_LOWERINGS)  # some are prims only
EXACT_OPS = set(
    "add sub rsub mul neg abs maximum minimum fmax fmin clamp clamp_min clamp_max relu positive where".split()
)
WRITING_TABLES = ("inplace", "symbolic write", "foreach", "out write")
PLACEHOLDER = re.compile(r"\{(\w+)\}")


class Builder:
    """Draws one program."""

    def __init__(self, seed: int, kinds: Sequence[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.kind = rng.choices(kinds, [WEIGHTS.get(kind, 1) for kind in kinds])[0]
        self.dynamic: bool | None = self.kind == "symbol" or rng.random() < 0.04
        if self.dynamic and rng.random() < 0.15:
            self.dynamic = None  # sizes become symbols in the second call
        share = 0.5 if self.kind == "resize" else 0.2  # many of its gradients are ops of their own
        no_gradients = ("error", "complex", "symbol", "shared")
        self.gradient = self.kind not in no_gradients and rng.random() < share
        self.gradient |= self.kind == "symbol" and rng.random() < 0.1
        self.gradient |= self.kind in ("grad mode", "autograd")
        self.call: dict[str, Number] = {}
        self.inputs: list[Input] = []
        self.scalars: list[str] = []
        self.lines: list[Line] = []
        self.refused = 0
        self._draw_sizes()
        for number in range(rng.choice((1, 1, 2, 2, 3))):
            self.inputs.append(self._draw_input(f"a{number}"))
        if self.kind == "shared":
            self.inputs = self._draw_shared_inputs()
        self._draw_scalars()
        self.restart()

    # ---- inputs ------------------------------------------------------------------------------------

    def _draw_sizes(self) -> None:
        choices = DYNAMIC_SIZES if self.dynamic else SIZES
        for name in ("s0", "s1", "s2"):
            self.call[name] = self.rng.choice(choices)
        if self.kind in ("resize", "matmul", "layer"):
            for name in ("s0", "s1", "s2"):
                self.call[name] = self.rng.choice((1, 2, 3, 4, 5, 7, 8))

    def _draw_input(self, name: str) -> Input:
        rng = self.rng
        ranks = (3, 4, 4, 5, 5) if self.kind == "resize" else (0, 1, 1, 2, 2, 2, 2, 3, 3, 4)
        shape: list[int | str] = []
        for _ in range(100):
            shape = [rng.choice(("s0", "s1", "s1", "s2", "s2")) for _ in range(rng.choice(ranks))]
            if self.numel(shape) <= MAX_ELEMENTS:
                break
        else:
            shape = ["s0"]
        if not self.dynamic:
            shape = [int(self.call[str(size)]) for size in shape]
        dtype = rng.choices(list(DTYPES), list(DTYPES.values()))[0]
        if self.gradient or self.kind in ("resize", "matmul", "layer"):
            dtype = rng.choice(("float32", "float32", "float64", "float32", "bfloat16"))
        if self.kind == "complex" and name == "a0":
            dtype = rng.choice(("complex64", "complex64", "complex128"))
        layout = rng.choice(LAYOUTS)
        if self.kind == "subclass" and name == "a0":
            layout, dtype = "two", rng.choice(("float32", "float32", "bfloat16", "int64"))
        kind: torch.dtype = getattr(torch, dtype)
        values = rng.choice(FLOAT_VALUES if kind.is_floating_point else INT_VALUES)
        grad = self.gradient and kind in (torch.float32, torch.float64) and rng.random() < 0.8
        if grad and values in ("odd", "extreme"):
            values = "normal"
        grad = grad and layout not in ("expanded", "windows")
        return Input(
            name, tuple(shape), dtype, layout, values, self.seed * 8 + len(self.inputs), grad
        )

    def _draw_shared_inputs(self) -> list[Input]:
        """Two or three views of one memory, most of which overlap."""
        rng, inputs = self.rng, [*self.inputs]
        while len(inputs) < 2:
            inputs.append(self._draw_input(f"a{len(inputs)}"))
        dtype = rng.choice(("float32", "float32", "float64", "int64", "bfloat16"))
        return [
            replace(
                given,
                dtype=dtype,
                layout=rng.choice(("plain", "plain", "transposed")),
                values="quarters",
                low=rng.choice((0, 0, 1, 2, 3, 5)),
                memory="b0",
            )
            for given in inputs
        ]

    def numel(self, shape: Sequence[int | str]) -> int:
        count = 1
        for size in shape:
            count *= int(self.call[size]) if isinstance(size, str) else size
        return count

    def _draw_scalars(self) -> None:
        for name in ("k0", "k1", "p0"):
            if self.dynamic or self.rng.random() < 0.15:
                whole = self.rng.choice((-3, -2, -1, 0, 1, 2, 3))
                self.call[name] = whole if name[0] == "k" else self.rng.choice((0.5, -1.5, 2.0))
                self.scalars.append(name)

    # ---- lines -------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        return Program(
            self.seed,
            self.kind,
            tuple(self.inputs),
            tuple(self.lines),
            (),
            (dict(self.call),),
            tuple(self.scalars),
            self.dynamic,
            self.gradient,
        )

    def restart(self) -> None:
        """Run the lines so far again."""
        self.reference = Reference(self.program, self.call, "cpu")
        self.reference.start()
        for line in self.lines:
            assert self.reference.add(line), f"{line} was fine before"

    def values(self, wanted: str) -> list[str]:
        known = {n: v for n, v in self.reference.eager.items() if isinstance(v, Tensor)}
        known = {n: v for n, v in known.items() if n[0] in "at"}
        if wanted == "float":
            return [n for n, v in known.items() if v.is_floating_point()]
        if wanted == "whole":
            return [n for n, v in known.items() if not is_float(v) and v.dtype != torch.bool]
        if wanted == "bool":
            return [n for n, v in known.items() if v.dtype == torch.bool]
        if wanted == "complex":
            return [n for n, v in known.items() if v.is_complex()]
        return list(known)

    def pick(self, wanted: str, like: str | None = None) -> str:
        """A value of a kind; a new input if there is none. Mostly one that broadcasts with `like`."""
        names = self.values(wanted)
        if like is not None and self.rng.random() < 0.85:
            shape = self.reference.eager[like].shape
            fitting = [n for n in names if broadcasts(self.reference.eager[n].shape, shape)]
            names = fitting or names
        if not names:
            return self._new_value(wanted, like)
        return names[-1] if self.rng.random() < 0.4 else self.rng.choice(names)

    def _new_value(self, wanted: str, like: str | None) -> str:
        dtype = {"float": "float32", "whole": "int64", "bool": "bool", "complex": "complex64"}[
            wanted
        ]
        shape = self.inputs[0].shape
        if like is not None and not self.dynamic:
            shape = tuple(self.reference.eager[like].shape)
        return self.add_input(Input(f"a{len(self.inputs)}", shape, dtype))

    def add_input(self, given: Input) -> str:
        given = replace(given, seed=self.seed * 8 + len(self.inputs))
        self.inputs.append(given)
        self.restart()
        return given.name

    def draw_index(self, size: int, shape: tuple[int, ...], low: int, unique: bool = False) -> str:
        values = "unique" if unique else "index"
        name = f"i{len(self.inputs)}"
        return self.add_input(Input(name, shape, "int64", "plain", values, low=low, high=size))

    def integer(self) -> str:
        names = [name for name in self.scalars if name[0] == "k"]
        if names and self.rng.random() < 0.6:
            name = self.rng.choice(names)
            return self.rng.choice((name, name, f"-{name}", f"({name} + 1)"))
        return str(self.rng.choice((-3, -2, -1, 0, 0, 1, 1, 2, 3, -5)))

    def number(self) -> str:
        if self.scalars and self.rng.random() < 0.5:
            return self.rng.choice(self.scalars)
        return str(self.rng.choice(CONSTANTS))

    def fill(self, template: str) -> str:
        """A template with its placeholders filled in."""
        wanted = {"f": "float", "w": "whole", "o": "bool", "c": "complex"}
        first = next((f for f in PLACEHOLDER.findall(template) if f in "xfcwo"), "x")
        chosen: dict[str, str] = {first: self.pick(wanted.get(first, "any"))}
        x = chosen[first]
        chosen.setdefault("x", x)
        value = self.reference.eager[x]
        rank = max(value.dim(), 1)
        d = self.rng.randrange(-rank, rank)
        chosen["d"], chosen["e"] = str(d), str(self.rng.randrange(-rank, rank))
        size = value.shape[d] if value.dim() else 1

        def one(found: re.Match[str]) -> str:
            key = found[1]
            if key in chosen:
                return chosen[key]
            if key in ("k", "p", "q", "s"):  # drawn anew at every place
                small = {"p": (0, 1, 2, 3), "q": (1, 2, 2, 3)}.get(key)
                if small:
                    return str(self.rng.choice(small))
                return self.integer() if key == "k" else self.number()
            if key in ("n", "n2", "m", "u"):
                length = self.rng.choice((0, 1, 2, 3, 5, 9)) if size else 0
                shape: tuple[int, ...] = (length, 2) if key == "n2" else (length,)
                if key == "u":
                    shape = (min(length, size),)
                low = -size if key in ("n", "n2") else 0
                chosen[key] = self.draw_index(size, shape, low, key == "u")
            elif key in ("h", "hu"):
                shape = tuple(max(s - self.rng.choice((0, 0, 1)), 0) for s in value.shape)
                if key == "hu":  # no duplicates: the same positions for each row
                    length = shape[d] if shape else 1
                    name = self.draw_index(size, (length,), 0, True)
                    view = [1] * value.dim()
                    if view:
                        view[d] = -1
                    return f"{name}.view({view}).expand({list(shape)})"
                chosen[key] = self.draw_index(size, shape, 0)
            else:
                like = None if key == "z" and self.rng.random() < 0.2 else x
                name = self.pick(wanted.get({"g": "f"}.get(key, key), "any"), like)
                chosen[key] = name
            return chosen[key]

        return PLACEHOLDER.sub(one, template)

    def draw_line(self) -> Line:
        tables = KINDS[self.kind]
        table = self.rng.choices(list(tables), list(tables.values()))[0]
        if table == "table":
            return self.draw_table_line()
        return self.line_of(self.rng.choice(TABLES[table]), table in WRITING_TABLES)

    def line_of(self, template: str, in_place: bool) -> Line:
        marks = template[: len(template) - len(template.lstrip("!~="))]
        text = self.fill(template[len(marks) :])
        target = "" if in_place else f"t{len(self.lines)}"
        return Line(target, text, "!" in marks, "~" in marks, "=" in marks)

    def draw_table_line(self) -> Line:
        """A call of an op of the fuser's tables, with arguments by its schema."""
        name = self.rng.choice([n for n in ELEMENTWISE_OPS if hasattr(torch.ops.aten, n)])
        packet = getattr(torch.ops.aten, name)
        overloads = [getattr(packet, o) for o in packet.overloads() if "out" not in o]
        overloads = [o for o in overloads if not o._schema.is_mutable and o._schema.returns]
        overloads = [
            o for o in overloads if any(str(a.type) == "Tensor" for a in o._schema.arguments)
        ]
        op = self.rng.choice(sorted(overloads, key=str))
        x = self.pick("any")
        arguments = []
        for argument in op._schema.arguments:
            text = self.draw_argument(argument, x)
            if not argument.has_default_value():
                arguments.append(text)
            elif self.rng.random() < 0.5:
                arguments.append(f"{argument.name}={text}")
        return Line(
            f"t{len(self.lines)}",
            f"torch.ops.{op}({', '.join(arguments)})",
            discrete=name in DISCRETE_OPS,
            approximate=name not in EXACT_OPS | DISCRETE_OPS,
        )

    def draw_argument(self, argument: Any, x: str) -> str:
        """An argument of the type that a schema asks for."""
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if kind == "Tensor":
            return x if argument.name in ("self", "x", "input") else self.pick("any", x)
        if kind in ("number", "Scalar", "float"):
            return self.number()
        if kind == "int":
            return self.integer()
        if kind == "bool":
            return str(self.rng.random() < 0.5)
        choices = {"rounding_mode": ("floor", "trunc"), "approximate": ("none", "tanh")}
        if argument.name in choices:
            return repr(self.rng.choice(choices[argument.name]))
        return "None"

    def try_line(self, line: Line) -> bool:
        """Add a line if eager runs it."""
        try:
            if self.reference.add(line):
                self.lines.append(line)
                return True
        except REFUSALS:
            pass
        self.refused += 1
        if not line.target:
            self.restart()
        else:
            self.reference.eager.pop(line.target, None)
            self.reference.wide.pop(line.target, None)
        return False

    # ---- the program -------------------------------------------------------------------------------

    def build(self) -> Program | None:
        """The program; None if there is nothing to compare."""
        wanted = self.rng.choice((1, 2, 3, 3, 4, 5, 7))
        for _ in range(60):
            if len(self.lines) >= wanted:
                break
            try:
                line = self.draw_line()
            except REFUSALS:
                continue
            self.try_line(line)
        if self.kind == "error":
            return self.build_error()
        names = [line.target for line in self.lines if line.target]
        names = [n for n in names if isinstance(self.reference.eager[n], Tensor)]
        chosen = set(self.rng.sample(names, min(len(names), self.rng.choice((1, 2, 3)))))
        outputs = [name for name in names if name in chosen or name == names[-1]]
        if any(not line.target for line in self.lines):
            outputs += [given.name for given in self.inputs if given.name[0] == "a"][:2]
        if not outputs:
            return None
        return self.finish(replace(self.program, outputs=tuple(outputs)))

    def finish(self, program: Program) -> Program | None:
        """Without gradients if there are none; with more calls if sizes are dynamic."""
        program = prune(program)
        try:
            Reference(program, program.calls[0], "cpu").run()
        except REFUSALS:  # the backward needs a value that a later line overwrites
            program = replace(program, gradient=False)
            program = replace(
                program, inputs=tuple(replace(i, requires_grad=False) for i in program.inputs)
            )
            try:
                Reference(program, program.calls[0], "cpu").run()
            except REFUSALS:
                return None
        if self.dynamic is not False:
            program = self.with_more_calls(program)
        return program

    def with_more_calls(self, program: Program) -> Program:
        calls = list(program.calls)
        for _ in range(6):
            if len(calls) == 3:
                break
            call = {name: self._other_number(name) for name in calls[0]}
            try:
                Reference(program, call, "cpu").run()
            except REFUSALS:
                continue
            calls.append(call)
        return replace(program, calls=tuple(calls))

    def _other_number(self, name: str) -> Number:
        if name[0] == "s":
            return self.rng.choice(DYNAMIC_SIZES[:6])
        if name[0] == "k":
            return self.rng.choice((-3, -2, -1, 0, 1, 2, 3))
        return self.rng.choice((0.5, -1.5, 2.0, -0.0, 3.25))

    def build_error(self) -> Program | None:
        """A program whose last line eager refuses because of an index."""
        for _ in range(20):
            try:
                line = self.line_of(self.rng.choice(ERRORS), False)
            except REFUSALS:
                continue
            program = replace(
                self.program, lines=(*self.lines, line), outputs=(line.target,), raises=True
            )
            program = prune(program)
            try:
                Reference(replace(program, raises=False), program.calls[0], "cpu").run()
            except (IndexError, RuntimeError) as error:
                message = str(error)
                if (
                    "out of" in message
                    or "range" in message
                    or "bounds" in message
                    or "Class values" in message
                ):
                    return program
            except REFUSALS:
                pass
        return None


def broadcasts(one: Sequence[int], two: Sequence[int]) -> bool:
    pairs = zip(reversed(one), reversed(two), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def draw_program(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Program | None:
    """The program of a seed; None if eager refuses all that was drawn."""
    return Builder(seed, kinds).build()
