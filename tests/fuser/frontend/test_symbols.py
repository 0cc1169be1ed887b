"""Integer and float arguments of either sign: starts, positions, steps, sizes, shifts and scalars.

Programs are captured by TorchDynamo, which makes an argument symbolic once it changes. Each call is
compared with eager: the results, or that both raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fulgurite
from fulgurite import fuser
from tests.fuser import support
from tests.fuser.symbol_programs import make_program

RUNS_ON_TRITON = True
F = torch.nn.functional


@pytest.fixture(autouse=True)
def generate_for_target(monkeypatch: pytest.MonkeyPatch, target: None) -> Iterator[None]:
    """Generates kernels for the target of the test, also for Triton's interpreter."""
    lower = fuser.lower_region
    if support.TARGET == "triton":
        monkeypatch.setattr(fuser, "lower_region", lambda m, **_: lower(m, use_triton=True))
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return support.as_tuple(function(*arguments))
    except (RuntimeError, IndexError, ValueError) as error:
        return error


def check_calls(
    function: Callable[..., Any], calls: list[tuple[Any, ...]], dynamic: bool | None = None
) -> None:
    torch._dynamo.reset()
    with support.target_device():
        compiled = fulgurite.compile(function, dynamic=dynamic)
        for arguments in calls:
            given = tuple(map(support.to_target, arguments))
            want, got = run(function, given), run(compiled, given)
            if isinstance(want, Exception):
                assert isinstance(got, Exception), f"eager raises {want!r} for {arguments[1:]}"
                continue
            assert not isinstance(got, Exception), f"{got!r} for {arguments[1:]}"
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs, equal_nan=True)


def assign(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    first, second, third = x.clone(), x.clone(), x.clone()
    first[:, -n:] = 1
    first[n] = 2.5
    second[:, n] += x[:, 0]
    second[n:] *= 2
    third[:: abs(n), n::2] = n
    return first, second, third, torch.select_scatter(x, x[0] * 2, 0, -n)


def take_views(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    return (
        x[:, -n:] * 2,
        x[:, n:] + 1,
        x[:, :n] + x[:, :1],
        x[n] * x[-n],
        x.narrow(1, -abs(n), 2) * 2,
        x[:, n : -n : abs(n) + 1] * 2,
        x[:, n : n + 2].sum(1),
        x.tensor_split([n, -n], 1)[1] * 2,
    )


def move(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    return (
        x.roll(n, 1),
        x.roll((-n, n), (0, 1)) * 2,
        x.roll(n),
        F.pad(x, (n, -n)),
        F.pad(x, (-n, n, 1, -1), value=n),
        torch.cat([x[:n], x[n:] * 2]),
        x.tril(n) + x.triu(-n),
        x.flip(1)[:, n:].flip(0),
        x[:, torch.arange(3, device=x.device) - abs(n)] * 2,
    )


def use_scalars(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    i = (x * 3).long()
    small = i.to(torch.int8)
    return (
        i // n + i % n + torch.div(i, n, rounding_mode="trunc") + torch.fmod(i, n),
        n // (2 * i + 1) + n % (2 * i + 1),
        small * n + small,
        x * (n // 2) + (n % 3) - (-n // 3) + abs(n) + max(n, -1) + min(n, 2) + n**2,
        x * (n / 3) + math.floor(n / 2) + math.ceil(n / 3),
        torch.where(i > n, i, n) + i.clamp(min(n, 0), max(n, 0)),
        torch.arange(8, device=x.device) * n + torch.arange(n, n + 8, device=x.device),
        torch.arange(10, n, -2, device=x.device) + x[0, 0],
        torch.linspace(-n, n, 7, device=x.device) + x[0, 0],
        x.var(1, correction=n),
    )


def use_sizes(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    return (
        (x * 2).reshape(x.shape[1], x.shape[0]) + 1,
        (x * 2).reshape(n, -1).sum(0),
        (x + 1).unflatten(1, (-1, n)).movedim(2, 0).reshape(n, -1) * 2,
        x.repeat(n, 2),
        (x[:, None] + 1).expand(-1, n, -1) * 2,
        x.new_full((n, 2), -n) + x[0, 0],
        x[:, ::n].softmax(-1),
        x.split(n, 1)[-1] * 2,
    )


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "assign": (assign, (2, 3, -2, -3)),
    "views": (take_views, (2, 3, -2, 30, -30)),
    "move": (move, (2, 3, -2, -3)),
    "scalars": (use_scalars, (2, 3, -2, -7)),
    "sizes": (use_sizes, (2, 4, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_integer_arguments(name: str) -> None:
    function, numbers = CASES[name]
    x = torch.arange(40.0).reshape(5, 8) - 17
    check_calls(function, [(x, n) for n in numbers])


def test_integer_arguments_and_sizes_are_dynamic_from_the_start() -> None:
    sizes = [(5, 8, 2), (6, 9, 3), (5, 7, -2), (4, 6, -4)]
    calls = [(torch.randn(rows, columns), n) for rows, columns, n in sizes]
    check_calls(lambda x, n: (x[:, -n:] * 2, x[n:].roll(n, 1), x[-n]), calls, dynamic=True)


def test_integers_beyond_32_bits() -> None:
    def f(i: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
        line = torch.arange(8, device=i.device)
        return i * n, line * n + n, i.roll(n), i.tril(n), i[:, : min(n, 3)]

    i = torch.arange(40).reshape(5, 8) - 17
    check_calls(f, [(i, n) for n in (3, 5, 1 << 33, -(1 << 40), (1 << 31) - 1, 1 << 31)])


def test_float_arguments() -> None:
    def f(x: torch.Tensor, a: float) -> tuple[torch.Tensor, ...]:
        return (
            x * a,
            x.bfloat16().float() + a,
            x.double() * a,
            x.masked_fill(x > 0, a),
            x * (a * 2 + 1) / 3,
        )

    numbers = (0.3, 1.7, -2.5, 0.1, math.inf, math.nan, 1e30)
    check_calls(f, [(torch.randn(5, 8), number) for number in numbers])


def test_position_out_of_range_raises() -> None:
    x = torch.randn(4, 3)
    check_calls(
        lambda x, n: torch.select_scatter(x, x[0] * 2, 0, n), [(x, n) for n in (1, 2, 4, -5, -4)]
    )


@pytest.mark.parametrize("seed", [2, 3, 17, 29])
def test_random_programs(seed: int) -> None:
    program = make_program(seed, num_lines=3)
    check_calls(program.load(), list(program.calls), dynamic=True if seed % 2 else None)


def test_index_computed_from_data_is_not_timed_on_made_up_inputs() -> None:
    def f(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return x.gather(1, (q * 7).long()) * 2

    check_calls(f, [(torch.randn(4, 8), torch.rand(4, 8) * 0.99)])
    check_calls(torch.quantile, [(torch.randn(5, 7), torch.tensor([0.0, 0.25, 1.0]))])


def test_a_size_that_is_only_a_factor_of_a_stride() -> None:
    def f(x, y, k):
        row = x[:, -1:].select(0, k % x.size(0))  # the stride of rows is n*m, their number m
        return row, y[1:, -1].as_strided((3,), (1,), 0).argmin(0, keepdim=True)

    compiled = fulgurite.compile(f, dynamic=True)
    for n, m, k in ((3, 2, 3), (4, 3, -2), (5, 4, 9)):
        x = torch.randn(n * m * m).as_strided((m, n), (n * m, m))
        y = torch.arange(n * n).view(n, 1, n)
        for _ in range(2):
            assert all(map(torch.equal, compiled(x, y, k), f(x, y, k)))


@pytest.mark.parametrize("position", [1, -1])
def test_writes_at_a_position_that_is_an_argument(position: int) -> None:
    """g++ 12 computed the address of the row that is read in each round of the loop over rows."""

    def double_row(x: torch.Tensor, n: int) -> torch.Tensor:
        x[position * n].mul_(2)
        return x.new_ones(2)

    compiled = fulgurite.compile(double_row)
    for n in (1, 2, 3, -2):
        found, expected = torch.arange(16.0).view(4, 4), torch.arange(16.0).view(4, 4)
        compiled(found, n)
        double_row(expected, n)
        assert torch.equal(found, expected), n
