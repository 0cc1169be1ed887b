"""Expressions and indices of the IR as C++ text.

In: expressions over a nest's axes. Out: text. `Names` knows how a local, a tensor and an axis are
called at the place the text goes to.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fulgurite.fuser.codegen.cpp.op_table import BOOL_SPELLING, SPELLING
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    Bound,
    Constant,
    Expression,
    Guard,
    Load,
    Operation,
    Position,
    value_type,
)
from fulgurite.fuser.ir.index import Axis, Index, Loaded, Quotient, Remainder, Symbol

TYPES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.uint16: "uint16_t",
    torch.uint32: "uint32_t",
    torch.uint64: "uint64_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.float32: "float",
    torch.float64: "double",
}
SMALL_INTEGERS = {torch.uint8, torch.uint16, torch.int8, torch.int16}
RESERVED = {spelling.split("(")[0] for spelling in SPELLING.values() if spelling[:1].isalpha()}
# names that mean something in C++ or in our kernels
KEYWORDS = """
    wrapped turn constexpr decltype nullptr alignas alignof noexcept static_cast const_cast
    reinterpret_cast dynamic_cast thread_local wchar_t typedef typeid export import module concept
    requires static_assert main unix linux EXPORT INLINE SPECIAL STRING REDUCTIONS
    bits widen store split checked least sign abs fma lowest highest uniform threads
    team bad and or xor not int float double long short char bool auto new delete this
    if else for while do return switch case default break continue static const struct
    class union enum template typename using namespace public private protected virtual
    operator true false void signed unsigned sizeof goto try catch throw inline extern
    register volatile mutable explicit friend bf16 f16 f8e4m3 f8e5m2 f8e4m3z f8e5m2z f8e8m0 round_bf16
    round_f16 malloc free lane lanes chunk chunks first block from to me rows_done omp
    asm typeof near far all stream fetch fetch_rows inverse Inverse group
"""
RESERVED |= set(KEYWORDS.split())


# what kernels append to a name for its buffers and partial sums
APPENDED = """
    _row _rows _part _parts _total _some _all _out _tile _long _block _kept _mine _inverse _before
"""
SUFFIXES = tuple(APPENDED.split())


def identifier(name: str) -> str:
    """A C++ name that reads like the program's and means nothing else here."""
    text = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    loop = len(text) == 2 and text[1] in "01"  # the ends of a tile
    if (
        text in RESERVED
        or text.endswith(SUFFIXES)
        or len(text) == 1
        or loop
        or text[0].isdigit()
        or text.startswith("__")
    ):
        text += "_"
    return text


def storage_type(dtype: torch.dtype) -> str:
    """The type of an element in memory."""
    if dtype == torch.bool:
        return "uint8_t"
    return NARROW_FLOATS.get(dtype) or TYPES[value_type(dtype)]


def value_ctype(dtype: torch.dtype) -> str:
    return TYPES[value_type(dtype)]


def constant(value: int | float | bool, dtype: torch.dtype) -> str:
    dtype = value_type(dtype)
    if dtype == torch.bool:
        return "true" if value else "false"
    if dtype.is_floating_point:
        suffix = "f" if dtype == torch.float32 else ""
        number = float(value)
        if math.isnan(number):
            return f'__builtin_nan{suffix}("")'
        if dtype == torch.float32 and not math.isinf(number):
            number = _float32(number)
        if math.isinf(number):
            return f"{'-' if number < 0 else ''}__builtin_inf{suffix}()"
        text = repr(number)
        if dtype == torch.float32:
            text = _short(number)
        if number < 0 or text.startswith("-"):
            return f"({text}{suffix})"
        return text + suffix
    number = int(value)
    if dtype == torch.int64 and number == -(1 << 63):
        return "lowest<int64_t>()"
    if dtype == torch.int64 and number == (1 << 63) - 1:
        return "highest<int64_t>()"
    text = f"({TYPES[dtype]}){number}"
    if dtype == torch.uint64:
        text += "ul"
    elif dtype == torch.int64:
        text = f"{number}l"
    elif dtype == torch.int32:
        text = str(number) if number != -(1 << 31) else "lowest<int32_t>()"
    elif dtype == torch.uint32:
        text = f"{number}u"
    return f"({text})" if number < 0 or text.startswith("(") else text


def _float32(number: float) -> float:
    """The nearest float32; infinity past the largest."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return math.copysign(math.inf, number)


def _short(number: float) -> str:
    """The fewest digits that give the same float32."""
    for digits in range(1, 10):
        text = f"{number:.{digits}g}"
        if _float32(float(text)) == number:
            break
    return text if any(c in text for c in ".e") else text + ".0"


@dataclass
class Names:
    """How things are called where the text is used."""

    local: Callable[[str], str]
    axes: Mapping[Axis, str] = field(default_factory=dict)
    gathered: dict[Loaded, str] = field(default_factory=dict)  # positions already looked up

    # indices

    def index(self, index: Index) -> str:
        parts: list[str] = []
        for monomial, coefficient in index.terms:
            factors = [self.atom(atom) for atom in monomial]
            if coefficient == -1:
                parts.append("-" + " * ".join(factors))
            else:
                if coefficient != 1:
                    factors.append(str(coefficient))
                parts.append(" * ".join(factors))
        if index.constant or not parts:
            parts.append(str(index.constant))
        return " + ".join(parts).replace("+ -", "- ")

    def atom(self, atom: Axis | Symbol | Quotient | Remainder | Loaded) -> str:
        if isinstance(atom, Axis):
            return self.axes.get(atom, atom.name)
        if isinstance(atom, Symbol):
            return atom.name
        if isinstance(atom, Loaded):
            return self.gathered.get(atom) or self.lookup(atom)
        top, bottom = self.index(atom.numerator), self.index(atom.denominator)
        low, _ = atom.numerator.bounds()
        quotient = isinstance(atom, Quotient)
        if low is not None and low >= 0:
            return f"(({top}) {'/' if quotient else '%'} ({bottom}))"
        return f"{'floor_quotient' if quotient else 'floor_remainder'}({top}, {bottom})"

    def lookup(self, atom: Loaded) -> str:
        check = "wrapped" if atom.wraps else "checked"
        return f"{check}({self.expression(atom.value)}, {self.index(atom.size)}, bad)"

    # values

    def expression(self, expression: Expression) -> str:
        if isinstance(expression, Constant):
            return constant(expression.value, expression.dtype)
        if isinstance(expression, Position):
            ctype = value_ctype(expression.dtype)
            text = self.index(expression.index)
            return f"({text})" if ctype == "int64_t" else f"({ctype})({text})"
        if isinstance(expression, Load):
            return self.load(expression)
        if isinstance(expression, Guard):
            test = " && ".join(self.bound(b) for b in expression.bounds)
            inside = self.expression(expression.inside)
            return f"({test} ? {inside} : {self.expression(expression.outside)})"
        return self.operation(expression)

    def load(self, load: Load) -> str:
        if not load.index:
            return self.local(load.name)
        return self.widened(load, f"{identifier(load.name)}[{self.index(load.index[0])}]")

    def widened(self, load: Load, text: str) -> str:
        """An element in memory as a value."""
        if load.dtype in NARROW_FLOATS:
            return f"widen({text})"
        return f"({text} != 0)" if load.dtype == torch.bool else text

    def bound(self, bound: Bound) -> str:
        low, high = bound.index.bounds()
        text, size = self.index(bound.index), self.index(bound.size)
        tests = []
        if low is None or low < 0:
            tests.append(f"{text} >= 0")
        if high is None or not bound.size.is_constant or high >= bound.size.constant:
            tests.append(f"{text} < {size}")
        return " && ".join(tests) or "true"

    def operation(self, operation: Operation) -> str:
        if operation.name == "bitcast":
            return self.bitcast(operation.arguments[0], operation.dtype)
        texts = [self.expression(argument) for argument in operation.arguments]
        if operation.name == "cast":
            return self.cast(texts[0], operation.arguments[0].dtype, operation.dtype)
        source = value_type(operation.arguments[-1].dtype)
        spelling = SPELLING[operation.name]
        if source == torch.bool:
            spelling = BOOL_SPELLING.get(operation.name, spelling)
        text = spelling.format(*texts)
        if value_type(operation.dtype) in SMALL_INTEGERS:
            return f"({TYPES[value_type(operation.dtype)]}){text}"
        return text

    def bitcast(self, argument: Expression, target: torch.dtype) -> str:
        """The bits of a value as another type; what is in memory as it is there, NaNs and all."""
        text = self.bits_of(argument)
        unsigned = f"uint{8 * target.itemsize}_t"
        if target in NARROW_FLOATS:
            return f"widen({NARROW_FLOATS[target]}{{({unsigned}){text}}})"
        if target.is_floating_point and value_type(target) == target:
            return f"__builtin_bit_cast({TYPES[target]}, ({unsigned}){text})"
        return f"({text} != 0)" if target == torch.bool else f"({TYPES[value_type(target)]}){text}"

    def bits_of(self, argument: Expression) -> str:
        kind = NARROW_FLOATS.get(argument.dtype)
        if kind is not None:
            assert isinstance(argument, Operation), (
                "a narrow float's bits are those of a cast to it"
            )
            inner = argument.arguments[0]
            if isinstance(inner, Load) and inner.index and inner.dtype == argument.dtype:
                return f"{identifier(inner.name)}[{self.index(inner.index[0])}].code"
            return f"{kind}_code({self.expression(inner)})"
        text = self.expression(argument)
        unsigned = f"uint{8 * argument.dtype.itemsize}_t"
        if argument.dtype.is_floating_point and value_type(argument.dtype) == argument.dtype:
            return f"__builtin_bit_cast({unsigned}, {text})"
        return f"({unsigned}){text}"

    def cast(self, text: str, source: torch.dtype, target: torch.dtype) -> str:
        have, want = value_type(source), value_type(target)
        if want == torch.bool:
            return text if have == torch.bool else f"({text} != 0)"
        if have == torch.bool and want.is_floating_point:
            # a choice, which compilers keep in vectors of the wider type, as they don't a converted bool
            text = f"({text} ? {constant(1, want)} : {constant(0, want)})"
        elif have != want:
            small = want in SMALL_INTEGERS or want in (torch.uint32, torch.uint64)
            if have.is_floating_point and small:
                # through a wide integer, so that what doesn't fit wraps as torch's conversion does;
                # floats past 32 bits are multiples of 256, so for a byte those are wide enough
                byte = have == torch.float32 and want.itemsize == 1
                text = f"({TYPES[want]})({'int32_t' if byte else 'int64_t'}){text}"
            elif have.is_floating_point and want in (torch.int32, torch.int64):
                text = f"whole<{TYPES[want]}>({text})"
            else:
                text = f"({TYPES[want]}){text}"
        if target in NARROW_FLOATS and source != target:
            return f"round_{NARROW_FLOATS[target]}({text})"
        return text
