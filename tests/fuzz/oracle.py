"""What a program must give: eager, float64, and how far rounding may move the results.

In: a program and one of its calls. Out: `Reference`: results in eager and float64, which of them are
exact, and on demand the spread of results when every rounding is perturbed. A value is *exact* if eager
equals float64 and every op on its way is exact: results are then compared bit for bit.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.fuzz.exclusions import SUMS, is_excluded
from tests.fuzz.inputs import make_arguments
from tests.fuzz.program import NAMES, Line, Number, Program
from tests.fuzz.values import (
    comparable,
    fits_float32,
    is_float,
    is_same,
    is_tame,
    parts_of,
    storages,
    value_eps,
)

NARROW = re.compile(r"torch\.(float32|float16|bfloat16|float8_\w+)\b|\.(float|half|bfloat16)\(\)")
PERTURBED_RUNS = 4
# what eager raises for a line that it refuses
REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError, ZeroDivisionError)


def widen_text(text: str) -> str:
    """The line in float64."""

    def wide(found: re.Match[str]) -> str:
        return "torch.float64" if found[1] else ".double()"

    return NARROW.sub(wide, text).replace("torch.complex64", "torch.complex128")


@contextmanager
def evaluation(wide: bool) -> Iterator[None]:
    """float64 is the default dtype in the wide run. Warnings are not for us."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if wide else usual)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(usual)


def run_line(line: Line, scope: dict[str, Any], wide: bool) -> None:
    names = NAMES | scope | {"__name__": "program"}  # a lambda of the line sees globals only
    exec(widen_text(str(line)) if wide else str(line), names)
    if line.target:
        scope[line.target] = names[line.target]


@dataclass
class Reference:
    """Values by name after all lines, in eager and float64.

    exact     names of exact values
    tainted   names that depend on an approximate op
    eps       by name, the eps of the coarsest float dtype on the way
    """

    program: Program
    call: Mapping[str, Number]
    device: str
    eager: dict[str, Any] = field(default_factory=dict)
    wide: dict[str, Any] = field(default_factory=dict)
    exact: set[str] = field(default_factory=set)
    tainted: set[str] = field(default_factory=set)
    eps: dict[str, float] = field(default_factory=dict)
    gradients: list[Tensor | None] = field(default_factory=list)
    wide_gradients: list[Tensor | None] = field(default_factory=list)

    def arguments(self, wide: bool = False) -> list[Any]:
        program = self.program
        return make_arguments(program.inputs, self.call, program.scalars, self.device, wide)

    def start(self) -> None:
        names = self.program.arguments
        self.eager = dict(zip(names, self.arguments(), strict=True))
        self.wide = dict(zip(names, self.arguments(wide=True), strict=True))
        self.exact = set(names)
        self.eps = {name: value_eps(value) for name, value in self.eager.items()}

    def add(self, line: Line) -> bool:
        """Run a line. False if it has no place in a program: then `start` again."""
        used = line.used & self.eager.keys()
        is_sum = SUMS.search(line.text) is not None
        is_tame_sum = not is_sum or all(is_tame(self.eager[n]) for n in used)
        are_all_tame = is_tame_sum and all(not is_sum or is_tame(self.eager[n], True) for n in used)
        if (line.discrete or line.bitwise) and not used <= self.exact:
            return False
        if is_excluded(line, self.program, self.eager):
            return False
        with evaluation(False):
            run_line(line, self.eager, False)
        if line.bitwise:
            self.wide[line.target] = self.eager[line.target]
        else:
            with evaluation(True):
                run_line(line, self.wide, True)
        changed = [line.target] if line.target else self._written(used)
        results = [part for name in changed for part in parts_of(self.eager[name])]
        is_tame_sum = are_all_tame if any(map(is_float, results)) else is_tame_sum
        tainted = line.approximate or not is_tame_sum or bool(used & self.tainted)
        eps = max((self.eps.get(name, 0.0) for name in used), default=0.0)
        judged = [self._judge(name, tainted, eps) for name in changed]
        return all(judged)

    def _written(self, used: set[str]) -> list[str]:
        """The names that an in-place line may have changed: all that share memory with its operands."""
        memory = set().union(*(storages(self.eager[name]) for name in used))
        tensors = {n: v for n, v in self.eager.items() if isinstance(v, Tensor)}
        return [name for name, value in tensors.items() if storages(value) & memory]

    def _judge(self, name: str, tainted: bool, eps: float) -> bool:
        value, wide = self.eager[name], self.wide[name]
        if isinstance(value, bool | int | float):
            self.exact.add(name)
            return bool(value == wide)
        ours, theirs = parts_of(value), parts_of(wide)
        if [p.shape for p in ours] != [p.shape for p in theirs]:
            return False
        if any(p.numel() > 4096 or p.layout != torch.strided for p in ours):
            return False
        self.eps[name] = max(value_eps(value), eps, self.eps.get(name, 0.0))
        self.exact.discard(name)
        if tainted:
            self.tainted.add(name)
        same = is_same(value, wide)
        if not any(map(is_float, ours)):
            self.exact.add(name)
            return same
        if name not in self.tainted and same and fits_float32(value):
            self.exact.add(name)
        return True

    def run(self) -> Reference:
        """Run the whole program; raises what eager raises."""
        self.start()
        for line in self.program.lines:
            if not self.add(line):
                raise ValueError(f"excluded, or float64 decides otherwise: {line}")
        if self.program.gradient:
            self.gradients = gradients(self.program, self.eager)
            self.wide_gradients = gradients(self.program, self.wide)
        return self

    # ---- perturbed runs ----------------------------------------------------------------------------

    def perturbed(self) -> list[tuple[dict[str, Any], list[Tensor | None]]]:
        """Values and gradients of runs in float64 in which every inexact number is off by an eps.

        In the last run, what is left of a cancellation is 0: rounding may hit the pole of the next op.
        """
        return [self._perturbed_run(number) for number in range(PERTURBED_RUNS + 1)]

    def _perturbed_run(self, number: int) -> tuple[dict[str, Any], list[Tensor | None]]:
        generator = torch.Generator().manual_seed(number)
        scope = dict(zip(self.program.arguments, self.arguments(wide=True), strict=True))
        eps = max(self.eps.values(), default=0.0)
        with evaluation(True):
            for line in self.program.lines:
                self._perturbed_line(line, scope, eps, generator)
                if number == PERTURBED_RUNS and line.target and line.target not in self.exact:
                    scope[line.target] = self._cancel(line, scope, eps)
        ends = gradients(self.program, scope) if self.program.gradient else []
        return scope, ends

    def _perturbed_line(
        self, line: Line, scope: dict[str, Any], eps: float, generator: Any
    ) -> None:
        if line.bitwise:
            scope[line.target] = self.eager[line.target]
            return
        if line.discrete or not line.target:
            run_line(line, scope, True)
        else:
            noisy = {
                k: self._perturb(v, eps, generator) for k, v in scope.items() if k in line.used
            }
            local = {**scope, **noisy}
            run_line(line, local, True)
            scope[line.target] = local[line.target]
        for name in [line.target] if line.target else []:
            value = scope[name]
            if (
                name in self.exact
                and isinstance(value, Tensor)
                and not is_same(value, self.wide[name])
            ):
                is_whole = not all(map(is_float, parts_of(value)))
                right = self.wide[name]
                scope[name] = right if is_whole else value + (right - value).detach()

    def _cancel(self, line: Line, scope: Mapping[str, Any], eps: float) -> Any:
        """The result of a line without the numbers that are below the rounding of its operands."""
        value = scope[line.target]
        if not isinstance(value, Tensor) or isinstance(value, TwoTensor) or not is_float(value):
            return value
        operands = [part for name in line.used & scope.keys() for part in parts_of(scope[name])]
        sizes = [comparable(part).double().abs().nan_to_num(0, 0, 0) for part in operands]
        largest = max((float(size.max()) for size in sizes if size.numel()), default=0.0)
        rest = torch.where(value.abs() <= 2 * eps * largest, value, 0).detach()
        return value - rest

    def _perturb(self, value: Any, eps: float, generator: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, TwoTensor) or not is_float(value):
            return value
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return value * (1 + eps * noise.to(value.device))


def cotangent(result: Tensor) -> Tensor:
    """Multiples of 1/4, the same for every dtype."""
    numbers = (torch.arange(result.numel(), device=result.device) * 7 % 13 - 6) / 4
    plain = numbers.view(result.shape).to(result.dtype)
    return TwoTensor(plain, plain.clone()) if isinstance(result, TwoTensor) else plain


def gradients(program: Program, values: Mapping[str, Any]) -> list[Tensor | None]:
    """Gradients of the outputs with respect to the inputs that require one."""
    leaves = [values[given.name] for given in program.inputs if given.requires_grad]
    return gradients_of([values[name] for name in program.outputs], leaves)


def gradients_of(results: Sequence[Any], leaves: list[Tensor]) -> list[Tensor | None]:
    # a view that was made without gradients requires one, too, and passes none on
    ends = [
        r
        for r in results
        if isinstance(r, Tensor) and (r.grad_fn is not None or any(r is x for x in leaves))
    ]
    if not ends or not leaves:
        return []
    given = [cotangent(end.detach()) for end in ends]
    return list(torch.autograd.grad(ends, leaves, given, allow_unused=True))
