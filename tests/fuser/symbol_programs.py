"""Random programs over integer arguments of either sign, as source text.

In: a seed. Out: a `Program`: a function of a tensor and two ints, and the arguments of several calls.
Its lines are views, slices, indices, assignments and arithmetic whose starts, positions, steps, sizes
and scalars are expressions of the ints. Every line runs in eager for the first call. Later calls may
raise, and then the compiled program must raise too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HEAD = "def program(x, n, m):"
SCOPE: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
DTYPES = ("torch.float32", "torch.float64", "torch.int64", "torch.int32", "torch.int8")


@dataclass(frozen=True)
class Program:
    """A program, and the arguments of its calls."""

    source: str
    calls: tuple[tuple[torch.Tensor, int, int], ...]

    def load(self) -> Callable[..., Any]:
        scope = dict(SCOPE)
        exec(self.source, scope)  # text of this module
        return scope["program"]  # type: ignore[no-any-return]


def make_program(seed: int, num_lines: int = 4) -> Program:
    """Draws a program."""
    draw = random.Random(seed)
    writer = _Writer(draw, _make_calls(draw, seed))
    while len(writer.lines) < num_lines + writer.num_setup:
        writer.add_line()
    return Program(writer.finish(), writer.calls)


def _make_calls(draw: random.Random, seed: int) -> tuple[tuple[torch.Tensor, int, int], ...]:
    generator = torch.Generator().manual_seed(seed)
    rank = draw.choice((1, 2, 2, 2, 3))
    sizes = [draw.choice((2, 3, 4, 5, 7, 8, 12)) for _ in range(rank)]
    keeps_sizes = draw.random() < 0.5
    calls = []
    for k in range(draw.choice((3, 4, 5))):
        if k and not keeps_sizes:
            sizes = [max(2, size + draw.choice((-1, 0, 1, 3))) for size in sizes]
        x = torch.randint(-9, 10, sizes, generator=generator).float()
        if draw.random() < 0.2:
            x = x.t().contiguous().t() if rank == 2 else x
        calls.append((x, draw.choice(NUMBERS), draw.choice(NUMBERS)))
    return tuple(calls)


NUMBERS = (1, 2, 3, 2, 3, 4, 5, 6, 0, -1, -2, -3, -4, -6, 9, -13, 20)


class _Writer:
    def __init__(
        self, draw: random.Random, calls: tuple[tuple[torch.Tensor, int, int], ...]
    ) -> None:
        self.draw = draw
        self.calls = calls
        self.lines: list[str] = []
        self.num_setup = 0
        self.values = {"x": calls[0][0]}

    def add_line(self) -> None:
        """Adds a line that runs in eager."""
        source = self.draw.choice(list(self.values)[-2:])
        name = f"v{len(self.lines)}"
        line = f"{name} = {self.write_expression(source)}"
        if self.draw.random() < 0.25:
            line = self.write_assignment(source, name)
        scope = {**SCOPE, **self.values, "n": self.calls[0][1], "m": self.calls[0][2]}
        try:
            exec(line, scope)
        except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError):
            return
        result = scope[name]
        if not isinstance(result, torch.Tensor) or result.numel() > 4096 or result.dim() > 4:
            return
        if result.numel() == 0 and self.draw.random() < 0.8:
            return
        self.lines.append(line)
        self.values[name] = result

    def finish(self) -> str:
        results = list(self.values)[1:]
        picked = [results[-1], *self.draw.sample(results, min(2, len(results)))]
        kept = ", ".join(dict.fromkeys(picked))
        body = [line for text in self.lines for line in text.split("; ")]
        return "\n    ".join([HEAD, *body, f"return ({kept},)"]) + "\n"

    # integers

    def number(self, source: str) -> str:
        """Writes an integer expression of the arguments and sizes."""
        rank = self.values[source].dim()
        size = f"{source}.shape[{self.draw.randrange(rank)}]" if rank else "5"
        forms = ("n", "-n", "m", "-m", "n", "-n", "n + 1", "n - m", "2 * n", "n // 2", "n % 3")
        forms += ("-n // 2", f"{size} - n", f"{size} // 2", "n * m", "max(n, 0)", "min(n, m)")
        forms += ("abs(n)", "-n % 4", f"n % {size}", f"{size} + n", "m // -2", "(n + m) // 3")
        return self.draw.choice(forms)

    def positive(self, source: str) -> str:
        return self.draw.choice(("abs(n) + 1", "n % 3 + 1", "max(m, 1)", "2", "abs(n - m) + 1"))

    def dim(self, source: str) -> int:
        rank = self.values[source].dim()
        return self.draw.randrange(-rank, rank)

    def slice(self, source: str) -> str:
        start = self.number(source) if self.draw.random() < 0.7 else ""
        end = self.number(source) if self.draw.random() < 0.5 else ""
        step = f":{self.positive(source)}" if self.draw.random() < 0.3 else ""
        return f"{start}:{end}{step}"

    def subscript(self, source: str) -> str:
        """Writes a subscript: slices and positions of the first dimensions, or of the last one."""
        rank = self.values[source].dim()
        one = self.number(source) if self.draw.random() < 0.25 else self.slice(source)
        if rank == 0:
            return "..."
        if rank > 1 and self.draw.random() < 0.3:
            return f"{self.slice(source)}, {one}"
        return f"..., {one}" if self.draw.random() < 0.5 else one

    # lines

    def write_assignment(self, source: str, name: str) -> str:
        value = self.draw.choice((self.number(source), "1.5", f"{source}.flatten()[0]"))
        operator = self.draw.choice(("=", "=", "+=", "*="))
        where = self.subscript(source)
        return f"{name} = {source} * 1; {name}[{where}] {operator} {value}"

    def write_expression(self, source: str) -> str:
        rank = self.values[source].dim()
        forms = [self.scalar_operation] if rank == 0 else SOURCES
        return self.draw.choice(forms)(self, source)  # type: ignore[call-arg, arg-type]

    def scalar_operation(self, *arguments: Any) -> str:
        source, number = arguments[-1], self.number(arguments[-1])
        form = self.draw.choice(
            ("{} + {}", "{} * ({})", "({1}) - {0}", "{}.clamp(max={})", "torch.where({0} > {1}, {0}, {1})",
             "{0}.masked_fill({0} < 0, {1})", "{}.to({dtype}) // ({})", "{}.to({dtype}) % ({})",
             "{}.to({dtype}) * ({})", "torch.full_like({}, {})", "{} / ({})", "({1}) // {0}.to({dtype})")
        )  # fmt: skip
        return form.format(source, number, dtype=self.draw.choice(DTYPES))

    def view(self, source: str) -> str:
        rank, d = self.values[source].dim(), self.dim(source)
        size = f"{source}.shape[{d}]"
        forms = [
            f"{source}.select({d}, {self.number(source)})",
            f"{source}.narrow({d}, {self.number(source)}, {self.positive(source)})",
            f"{source}.transpose({d}, 0)",
            f"{source}.reshape(-1)",
            f"{source}.reshape({size}, -1)",
            f"{source}.reshape(-1, {self.positive(source)})",
            f"{source}.flatten()[:{self.positive(source)} * 2].view({self.positive(source)}, -1)",
            f"{source}.unfold({d}, {self.positive(source)}, {self.positive(source)})",
            f"{source}.unsqueeze({d}).expand({'-1, ' * (d % (rank + 1))}{self.positive(source)}, "
            f"{'-1, ' * (rank - (d % (rank + 1)))})",
            f"{source}.contiguous().as_strided((2, {self.positive(source)}), "
            f"({self.positive(source)}, 1), max(n, 0))",
            f"{source}.split({self.positive(source)}, {d})[-1]",
            f"{source}.chunk({self.positive(source)}, {d})[0]",
            f"{source}.tensor_split({self.positive(source)}, {d})[0]",
            f"{source}.tensor_split([{self.number(source)}], {d})[1]",
            f"{source}.unbind({d})[-1]",
        ]
        if rank > 1:
            forms.append(f"{source}.diagonal({self.number(source)})")
        return self.draw.choice(forms)

    def movement(self, source: str) -> str:
        rank, d = self.values[source].dim(), self.dim(source)
        number, other = self.number(source), self.number(source)
        forms = [
            f"{source}.roll({number}, {d})",
            f"{source}.roll({number})",
            f"F.pad({source}, ({number}, {other}))",
            f"F.pad({source}, ({number}, {other}), value=n)",
            f"{source}.flip({d})",
            f"{source}.repeat({self.positive(source)}, {'1, ' * (rank - 1)})",
            f"torch.cat([{source}[:{number}], {source}[{other}:]])",
            f"torch.stack([{source}, {source} * ({number})], {d})",
            f"{source}.tril({number})" if rank > 1 else f"{source}.flip(0)",
            f"{source}.triu({number})" if rank > 1 else f"{source}.flip(0)",
            f"torch.slice_scatter({source}, {source}[{self.slice(source)}] * 2, 0, {number})",
            f"torch.select_scatter({source}, {source}.select({d}, 0) * 2, {d}, {number})",
            f"{source}.index_select({d}, torch.arange({self.positive(source)}, device=x.device) % "
            f"{source}.shape[{d}])",
            f"{source}[torch.arange({self.positive(source)}, device=x.device) - 1]",
            f"{source} + torch.arange({source}.shape[-1], device=x.device) * ({number})",
            f"{source} + torch.arange({number}, {number} + {source}.shape[-1], device=x.device)",
            f"{source}.flatten()[0] + torch.arange({number}, {other}, {self.positive(source)}, device=x.device)",
            f"{source}.flatten()[0] + torch.arange({number}, {other}, -({self.positive(source)}), device=x.device)",
            f"{source}.new_full(({self.positive(source)}, 2), {number}) + {source}.flatten()[0]",
            f"torch.linspace({number}, {other}, {self.positive(source)}, device=x.device) + {source}.flatten()[0]",
            f"{source}.sum({d})",
            f"{source}.cumsum({d})",
            f"{source}.amax({d}, keepdim=True) * {source}",
        ]
        return self.draw.choice(forms)

    def indexing(self, source: str) -> str:
        return f"{source}[{self.subscript(source)}]"


SOURCES = (
    _Writer.indexing,
    _Writer.indexing,
    _Writer.indexing,
    _Writer.view,
    _Writer.view,
    _Writer.movement,
    _Writer.movement,
    _Writer.scalar_operation,
)
