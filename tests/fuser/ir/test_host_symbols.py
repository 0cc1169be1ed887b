"""Symbols that the launcher computes: equal to Python's arithmetic, and within their bounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from fulgurite.fuser.ir import host_symbols
from fulgurite.fuser.ir.index import Index, Symbol, from_atom

RANGE = range(-7, 8)


def python_slice_start(start: int, size: int) -> int:
    return slice(start, None).indices(size)[0]


CASES: dict[str, tuple[Callable[[Index, Index], Index], Callable[[int, int], int]]] = {
    "maximum": (host_symbols.maximum, max),
    "minimum": (host_symbols.minimum, min),
    "clamp_slice_start": (host_symbols.clamp_slice_start, python_slice_start),
    "wrap_position": (host_symbols.wrap_position, lambda n, size: n + size if n < 0 else n),
    "remainder": (host_symbols.remainder, lambda n, by: n % by if by else 0),
}


def evaluate(index: Index, values: dict[str, int]) -> int:
    def value_of(atom: object) -> int:
        assert isinstance(atom, Symbol)
        return host_symbols.evaluate_symbol(atom, values)

    return index.evaluate(value_of)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bounds", [(None, None), (-7, 7), (0, 7), (-7, -1), (0, None)])
def test_equal_to_python_for_both_signs(name: str, bounds: tuple[int | None, int | None]) -> None:
    build, expected = CASES[name]
    n, size = Symbol("n", *bounds), Symbol("size", 0)
    sizes = range(8)
    for second in (from_atom(size), Index(5), from_atom(size) * 2 + 1):
        index = build(from_atom(n), second)
        low, high = index.bounds()
        for a, b in itertools.product(RANGE, sizes):
            if not (bounds[0] or -7) <= a <= (7 if bounds[1] is None else bounds[1]):
                continue
            if bounds[0] is not None and a < bounds[0]:
                continue
            other = evaluate(second, {"size": b})
            if name == "wrap_position" and not -other <= a < other:
                continue
            value = evaluate(index, {"n": a, "size": b})
            assert value == expected(a, other), f"{name}({a}, {other})"
            assert low is None or low <= value
            assert high is None or value <= high


def test_position_out_of_range_raises_the_error_of_torch() -> None:
    index = host_symbols.wrap_position(from_atom(Symbol("n", None)), Index(4))
    with pytest.raises(IndexError, match="index 4 is out of bounds"):
        evaluate(index, {"n": 4})


def test_equal_expressions_are_one_symbol() -> None:
    n = from_atom(Symbol("n", None))
    assert host_symbols.maximum(n, Index(0)) == host_symbols.maximum(n, Index(0))
    assert host_symbols.maximum(n, Index(0)) != host_symbols.maximum(n, Index(1))


def test_definitions_come_after_what_they_read() -> None:
    n, size = from_atom(Symbol("n", None)), from_atom(Symbol("size", 0))
    start = host_symbols.clamp_slice_start(n, size)
    texts = host_symbols.order_definitions(start.symbols(), {"n": "a0", "size": "a1.shape[0]"})
    names = list(texts)
    assert names.index("n") < names.index(str(start)) > names.index("size")
    scope = {"a0": -9, **host_symbols.HOST_SCOPE}
    for name, text in texts.items():
        scope[name] = 6 if name == "size" else eval(text or "", scope)
    assert scope[str(start)] == 0
    assert host_symbols.order_definitions([Symbol("m")], {}) == {"m": None}


@pytest.mark.parametrize("coefficient", [1, 2, -1, -3])
def test_solve_for_a_symbol_of_either_sign(coefficient: int) -> None:
    solved = host_symbols.solve_for_symbol(from_atom(Symbol("n", None)) * coefficient + 5)
    assert solved is not None
    symbol, solve = solved
    for n in RANGE:
        assert eval(solve("value"), {"value": coefficient * n + 5}) == n
    assert symbol.name == "n"
    assert host_symbols.solve_for_symbol(from_atom(symbol) * from_atom(symbol)) is None
