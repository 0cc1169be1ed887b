"""Symbols that the launcher computes: integers that no polynomial of other symbols can express.

In: indices without axes, such as a slice's start of either sign. Out: an `Index` that is one symbol
with a `Definition`, or a plain index where bounds decide. Kernels get the value as an argument.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.index_atoms import Definition, FloorDiv, Mod, Symbol


def float_bits(number: float) -> int:
    """Returns the bits of a double as an integer: how a float reaches a kernel."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def _choose(condition: bool, yes: Any, no: Any) -> Any:
    return yes if condition else no


def checked_position(position: int, size: int) -> int:
    """Returns a position from the front, or raises torch's error."""
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of bounds for dimension with size {size}")
    return position + size if position < 0 else position


# what the text of a definition may call
HOST_SCOPE: dict[str, Any] = {
    "checked_position": checked_position,
    "float_bits": float_bits,
    "math": math,
    "torch": torch,
    "Where": _choose,
}


def define_symbol(
    kind: str,
    text: str,
    symbols: Iterable[Symbol],
    low: int | None = None,
    high: int | None = None,
    is_64_bit: bool = False,
) -> Symbol:
    """Creates the symbol of a Python expression. Equal expressions give equal symbols."""
    ordered = tuple(sorted(symbols, key=lambda symbol: symbol.name))
    name = f"{kind}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return Symbol(name, low, high, Definition(text, ordered), is_64_bit)


def maximum(a: Index, b: Index) -> Index:
    """Returns the larger of two indices without axes."""
    low, high = (a - b).bounds()
    if low is not None and low >= 0:
        return a
    if high is not None and high <= 0:
        return b
    (a_low, a_high), (b_low, b_high) = a.bounds(), b.bounds()
    lows = [n for n in (a_low, b_low) if n is not None]
    most = None if a_high is None or b_high is None else max(a_high, b_high)
    text = f"max({index_to_python(a)}, {index_to_python(b)})"
    least = max(lows) if lows else None
    return indices.from_atom(define_symbol("max", text, a.symbols() | b.symbols(), least, most))


def minimum(a: Index, b: Index) -> Index:
    """Returns the smaller of two indices without axes."""
    low, high = (a - b).bounds()
    if high is not None and high <= 0:
        return a
    if low is not None and low >= 0:
        return b
    (a_low, a_high), (b_low, b_high) = a.bounds(), b.bounds()
    highs = [n for n in (a_high, b_high) if n is not None]
    least = None if a_low is None or b_low is None else min(a_low, b_low)
    text = f"min({index_to_python(a)}, {index_to_python(b)})"
    most = min(highs) if highs else None
    return indices.from_atom(define_symbol("min", text, a.symbols() | b.symbols(), least, most))


def choose_by_sign(index: Index, if_negative: Index, otherwise: Index) -> Index:
    """Returns one of two indices without axes. Neither is negative where it is chosen."""
    if _is_never_negative(index):
        return otherwise
    if _is_never_negative(-index - 1):
        return if_negative
    texts = [index_to_python(part) for part in (if_negative, index, otherwise)]
    text = "({} if {} < 0 else {})".format(*texts)
    highs = (if_negative.bounds()[1], otherwise.bounds()[1])
    most = None if highs[0] is None or highs[1] is None else max(highs[0], highs[1])
    symbols = index.symbols() | if_negative.symbols() | otherwise.symbols()
    return indices.from_atom(define_symbol("position", text, symbols, 0, most))


def wrap_position(position: Index, size: Index) -> Index:
    """Returns a position from the front. A negative one counts from the end.

    The launcher raises an IndexError for a position out of range, where bounds don't exclude it.
    """
    if _is_never_negative(position) and _is_never_negative(size - position - 1):
        return position
    if _is_never_negative(-position - 1) and _is_never_negative(position + size):
        return position + size
    text = f"checked_position({index_to_python(position)}, {index_to_python(size)})"
    _, high = (size - 1).bounds()
    symbols = position.symbols() | size.symbols()
    return indices.from_atom(define_symbol("position", text, symbols, 0, high))


def _is_never_negative(index: Index) -> bool:
    low, _ = index.bounds()
    return low is not None and low >= 0


def clamp_slice_start(start: Index, size: Index) -> Index:
    """Returns a slice's start as a position from the front, in [0, size]."""
    from_end = maximum(start + size, indices.ZERO)
    return choose_by_sign(start, from_end, minimum(start, size))


def remainder(index: Index, by: Index) -> Index:
    """Returns `index % by` for indices without axes, with the sign of `by`; 0 if `by` is 0."""
    if by.is_constant and by.constant > 0:
        found = indices.modulo(index, by)
        if not any(isinstance(atom, Mod) for atom in found.atoms()):
            return found
    top, bottom = index_to_python(index), index_to_python(by)
    text = f"(({top}) % ({bottom}) if {bottom} else 0)"
    low, high = by.bounds()
    is_positive = low is not None and low >= 0
    return indices.from_atom(
        define_symbol(
            "remainder",
            text,
            index.symbols() | by.symbols(),
            0 if is_positive else None,
            None if high is None or not is_positive else max(high - 1, 0),
        )
    )


def index_to_python(index: Index) -> str:
    """Prints an index over symbols as a Python expression."""
    parts = []
    for monomial, coefficient in index.terms:
        factors = [str(coefficient)]
        for atom in monomial:
            if isinstance(atom, FloorDiv | Mod):
                sign = "//" if isinstance(atom, FloorDiv) else "%"
                top, bottom = index_to_python(atom.numerator), index_to_python(atom.denominator)
                factors.append(f"(({top}) {sign} ({bottom}))")
            else:
                factors.append(str(atom))
        parts.append("*".join(factors))
    return " + ".join([*parts, str(index.constant)])


def solve_for_symbol(index: Index) -> tuple[Symbol, Callable[[str], str]] | None:
    """Returns the symbol of `coefficient * symbol + constant`, and how its value is computed.

    The function converts the text of the index's value to the text of the symbol's value.
    """
    if len(index.terms) != 1:
        return None
    monomial, coefficient = index.terms[0]
    if len(monomial) != 1 or not isinstance(monomial[0], Symbol):
        return None

    def solve(text: str) -> str:
        term = f"({text} - {index.constant})" if index.constant else text
        return term if coefficient == 1 else f"{term} // {coefficient}"

    return monomial[0], solve


def order_definitions(
    needed: Iterable[Symbol], sources: Mapping[str, str]
) -> dict[str, str | None]:
    """Returns the text of each needed symbol, after those it depends on.

    `sources` has the symbols that an argument gives. The text is None where nothing gives it.
    """
    texts: dict[str, str | None] = {}

    def visit(symbol: Symbol) -> None:
        if symbol.name in texts:
            return
        if symbol.name in sources:
            texts[symbol.name] = sources[symbol.name]
        elif symbol.definition is None:
            texts[symbol.name] = None
        else:
            for other in symbol.definition.symbols:
                visit(other)
            texts[symbol.name] = symbol.definition.text

    for symbol in sorted(needed, key=lambda symbol: symbol.name):
        visit(symbol)
    return texts


def evaluate_symbol(symbol: Symbol, values: Mapping[str, int]) -> int:
    """Returns the value of a symbol, from the values of those that arguments give."""
    if symbol.name in values:
        return values[symbol.name]
    assert symbol.definition is not None, f"the symbol {symbol} has no value"
    scope = {other.name: evaluate_symbol(other, values) for other in symbol.definition.symbols}
    # the text was written by this module or by torch's printer of sizes
    return int(eval(symbol.definition.text, {**HOST_SCOPE, **scope}))
