"""Random programs of cats, their parts and their readers: split wherever that is possible."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fulgurite.fuser.segment import choose_slices
from tests.fuser.support import check_fused

RUNS_ON_TRITON = True
SHAPES = ((4, 6), (5, 7), (8, 16), (2, 3, 4))
MAX_SIZE, MAX_RANK = 80, 4


class Program:
    """Lines of Python over named values of known shapes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.shape = self.random.choice(SHAPES)
        self.shapes: dict[str, tuple[int, ...]] = {"x": self.shape, "y": self.shape}
        self.lines: list[str] = []
        steps = (self.unary, self.binary, self.cat, self.cat, self.cat, self.stack, self.narrow)
        others = (self.rotate, self.pad, self.transpose, self.reduce, self.scatter)
        others += (self.constant, self.index_add)
        for _ in range(self.random.randint(4, 9)):
            name = self.random.choice(list(self.shapes)[-4:])
            found = self.random.choice(steps + others)(name, self.shapes[name])
            if found is not None and max(found[1]) <= MAX_SIZE and len(found[1]) <= MAX_RANK:
                result = f"v{len(self.lines)}"
                self.lines.append(f"    {result} = {found[0]}")
                self.shapes[result] = found[1]
        results = [name for name in self.shapes if self.random.random() < 0.4]
        results = [*results, list(self.shapes)[-1]]
        self.text = "\n".join(["def f(x, y):", *self.lines, f"    return {', '.join(results)},"])

    def compile(self) -> Callable[..., Any]:
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(self.text, scope)
        return scope["f"]

    def pick(self, shape: tuple[int, ...], dim: int | None = None) -> str:
        """A value of this shape, in all dimensions but one."""
        return self.random.choice(
            [
                name
                for name, other in self.shapes.items()
                if len(other) == len(shape)
                and all(a == b or k == dim for k, (a, b) in enumerate(zip(other, shape)))
            ]
        )

    def dim(self, shape: tuple[int, ...]) -> int:
        return self.random.randrange(len(shape))

    def unary(self, a: str, shape: tuple[int, ...]) -> Any:
        function = self.random.choice(("tanh", "sin", "relu", "neg", "exp"))
        return f"torch.{function}({a}).clamp(-3, 3)", shape

    def binary(self, a: str, shape: tuple[int, ...]) -> Any:
        return f"torch.tanh({a} {self.random.choice('+-*')} {self.pick(shape)})", shape

    def cat(self, a: str, shape: tuple[int, ...]) -> Any:
        dim = self.dim(shape)
        parts = [a, *(self.pick(shape, dim) for _ in range(self.random.randint(1, 2)))]
        total = sum(self.shapes[part][dim] for part in parts)
        if self.random.random() < 0.3:
            parts.append(f"{a}.new_zeros({a}.shape)")
            total += shape[dim]
        text = f"torch.cat(({', '.join(parts)}), {dim})"
        text = f"torch.sigmoid({text})" if self.random.random() < 0.5 else text
        return text, (*shape[:dim], total, *shape[dim + 1 :])

    def stack(self, a: str, shape: tuple[int, ...]) -> Any:
        dim = self.random.randint(0, len(shape))
        return f"torch.stack(({a}, {self.pick(shape)}), {dim})", (*shape[:dim], 2, *shape[dim:])

    def narrow(self, a: str, shape: tuple[int, ...]) -> Any:
        dim = self.dim(shape)
        start = self.random.randrange(shape[dim])
        size = self.random.randint(1, shape[dim] - start)
        return f"{a}.narrow({dim}, {start}, {size})", (*shape[:dim], size, *shape[dim + 1 :])

    def rotate(self, a: str, shape: tuple[int, ...]) -> Any:
        dim = self.dim(shape)
        first, second = (f"{a}.chunk(2, {dim})[{k}]" for k in range(2))
        return None if shape[dim] < 2 else (f"torch.cat((-{second}, {first}), {dim})", shape)

    def pad(self, a: str, shape: tuple[int, ...]) -> Any:
        before, after = (self.random.randint(0, 2) for _ in range(2))
        return f"F.pad({a}, ({before}, {after}), value=0.5)", (
            *shape[:-1],
            shape[-1] + before + after,
        )

    def transpose(self, a: str, shape: tuple[int, ...]) -> Any:
        return f"{a}.transpose(0, -1).contiguous()", (shape[-1], *shape[1:-1], shape[0])

    def reduce(self, a: str, shape: tuple[int, ...]) -> Any:
        dim = self.dim(shape)
        kind = self.random.choice(("softmax({})", "cumsum({}) * 0.1", "sum({}, True) * 0.1"))
        sizes = (*shape[:dim], 1, *shape[dim + 1 :]) if "sum({}, " in kind else shape
        return f"{a}.{kind.format(dim)}", sizes

    def constant(self, a: str, shape: tuple[int, ...]) -> Any:
        return f"torch.full_like({a}, {self.random.choice((0, 1, -0.5))})", shape

    def index_add(self, a: str, shape: tuple[int, ...]) -> Any:
        """To a value, or to a constant: its initial values are then numbers."""
        dim = self.dim(shape)
        base = a if self.random.random() < 0.3 else f"torch.zeros_like({a})"
        index = f"torch.arange({a}.shape[{dim}], device={a}.device) * 2 % {max(1, shape[dim] - 1)}"
        return f"{base}.index_add({dim}, {index}, {self.pick(shape)}) * 0.5", shape

    def scatter(self, a: str, shape: tuple[int, ...]) -> Any:
        dim = self.dim(shape)
        if shape[dim] < 3:
            return None
        start = self.random.randrange(shape[dim] - 2)
        source = f"{self.pick(shape)}.narrow({dim}, 0, 2) * 2"
        return f"{a}.slice_scatter({source}, {dim}, {start}, {start + 2})", shape


@pytest.mark.covering
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(
    "seed", [*range(8), 5195, 5211]
)  # in these an indexed store copies numbers
def test_random_cats(seed: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_GAIN", "MIN_GAIN_CPU"):
        monkeypatch.setattr(choose_slices, name, float("-inf"))
    monkeypatch.setattr(choose_slices, "_shares_memory", lambda name, segments: True)
    program = Program(seed)
    torch.manual_seed(seed)
    arguments = torch.randn(program.shape), torch.randn(program.shape)
    try:
        check_fused(program.compile(), *arguments, mode=mode)
    except Exception as error:
        error.add_note(program.text)
        raise
