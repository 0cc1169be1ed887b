"""Expressions and indices of the IR as C++ text.

In: expressions over a nest's axes. Out: text. An `ExpressionPrinter` knows what locals, axes and
indirect indices are called where the text goes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fulgurite.fuser.codegen.cpp.op_table import BOOL_OPS, OP_TABLE
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    BoundsCheck,
    Constant,
    Expression,
    IndexValue,
    Load,
    Masked,
    Operation,
    opmath_dtype,
    walk,
)
from fulgurite.fuser.ir.index import Axis, FloorDiv, Index, IndirectIndex, Mod, Symbol

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
# Names that mean something in C++, in our headers or in generated kernels.
KEYWORDS = """
    alignas alignof and asm auto bool break case catch char class concept const const_cast constexpr
    continue decltype default delete do double dynamic_cast else enum explicit export extern false
    far float for friend goto if import inline int linux long main module mutable namespace near new
    noexcept not nullptr operator or private protected public register reinterpret_cast requires
    return short signed sizeof static static_assert static_cast struct switch template this
    thread_local throw true try typedef typeid typename typeof union unix unsigned using virtual
    void volatile wchar_t while xor
"""
HEADER_NAMES = """
    EXPORT INLINE Maximum Minimum Product REDUCTIONS SPECIAL STRING Sum SortKey SortPair align_64 bf16 bits
    check_index combine_blocks choose_num_threads f16 f8e4m3 f8e4m3z f8e5m2 f8e5m2z f8e8m0 fma free highest log_add_exp lowest
    malloc min_i64 nan_max nan_max_scalar nan_min nan_min_scalar narrow_block omp
    pack_sort_key prefetch prefetch_rows reduce_block reduce_blocks round_bf16 round_f16 select sort_ranks sorted_position split
    store store_nontemporal to_integer transpose_tile widen widen_block wrap_index
"""
KERNEL_NAMES = """
    begin block blocks chunk chunk0 chunks chunk_rows end error first free_scratch group lane lane0 lanes max_threads num_threads rest row rows rows_end
    scratch started tid
"""
RESERVED = {text.split("(")[0] for text in OP_TABLE.values() if text[:1].isalpha()}
RESERVED |= {*KEYWORDS.split(), *HEADER_NAMES.split(), *KERNEL_NAMES.split()}
# What kernels append to a name, for buffers, accumulators and partials.
APPENDED = """
    _acc _buffer _combined _keys _keys_other _out _partial _partials _prefix _row
    _chunk _group _running _staging _table _tile _total _totals _values _wide
"""
SUFFIXES = tuple(APPENDED.split())
# Names that become one of those with a suffix: the tile of `transpose` is `transpose_tile`.
RESERVED |= {name.removesuffix(s) for name in RESERVED for s in SUFFIXES if name.endswith(s)}


def identifier(name: str) -> str:
    """A C++ identifier that reads like the program's name and clashes with no other."""
    text = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    # sin is sin_ in C++, so that sin_ has to be sin__
    return f"{text}_" if _has_meaning(text.rstrip("_") or text) else text


def _has_meaning(text: str) -> bool:
    """Whether a name is one of C++, of our headers or of the generated kernels."""
    is_tile_bound = len(text) == 2 and text[1] in "01"  # i0, i1: the bounds of a tile
    is_symbol = re.fullmatch(r"(s|u|zf|zuf)\d+", text) is not None  # torch's names of symbols
    return (
        text in RESERVED
        or text.endswith(SUFFIXES)
        or len(text) == 1
        or is_tile_bound
        or is_symbol
        or text[0].isdigit()
        or text.startswith("__")
    )


def storage_type(dtype: torch.dtype) -> str:
    """The type of an element in memory."""
    if dtype == torch.bool:
        return "uint8_t"
    return NARROW_FLOATS.get(dtype) or TYPES[opmath_dtype(dtype)]


def value_ctype(dtype: torch.dtype) -> str:
    """The type that an element is computed in."""
    return TYPES[opmath_dtype(dtype)]


def literal(value: int | float | bool, dtype: torch.dtype) -> str:
    dtype = opmath_dtype(dtype)
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
            text = _shortest_digits(number)
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


def _reads_memory(expression: Expression) -> bool:
    return any(isinstance(part, Load) and part.index for part in walk(expression))


def _float32(number: float) -> float:
    """The nearest float32; infinity beyond the largest."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return math.copysign(math.inf, number)


def _shortest_digits(number: float) -> str:
    """The fewest digits that give the same float32."""
    for digits in range(1, 10):
        text = f"{number:.{digits}g}"
        if _float32(float(text)) == number:
            break
    return text if any(c in text for c in ".e") else text + ".0"


@dataclass
class ExpressionPrinter:
    """Prints expressions and indices as C++."""

    print_local: Callable[[str], str]
    axes: Mapping[Axis, str] = field(
        default_factory=dict
    )  # those with another text than their name
    lookups: dict[IndirectIndex, str] = field(default_factory=dict)  # indices already looked up

    # indices

    def print_index(self, index: Index) -> str:
        parts: list[str] = []
        for monomial, coefficient in index.terms:
            factors = [self.print_atom(atom) for atom in monomial]
            if coefficient == -1:
                parts.append("-" + " * ".join(factors))
            else:
                if coefficient != 1:
                    factors.append(str(coefficient))
                parts.append(" * ".join(factors))
        if index.constant or not parts:
            parts.append(str(index.constant))
        return " + ".join(parts).replace("+ -", "- ")

    def print_atom(self, atom: Axis | Symbol | FloorDiv | Mod | IndirectIndex) -> str:
        if isinstance(atom, Axis):
            return self.axes.get(atom, atom.name)
        if isinstance(atom, Symbol):
            return atom.name
        if isinstance(atom, IndirectIndex):
            return self.lookups.get(atom) or self.print_lookup(atom)
        top, bottom = self.print_index(atom.numerator), self.print_index(atom.denominator)
        low, _ = atom.numerator.bounds()
        is_division = isinstance(atom, FloorDiv)
        if low is not None and low >= 0:
            return f"(({top}) {'/' if is_division else '%'} ({bottom}))"
        return f"{'floor_divide_i64' if is_division else 'floor_mod_i64'}({top}, {bottom})"

    def print_lookup(self, atom: IndirectIndex) -> str:
        """An index that a tensor holds, checked against its range."""
        value, size = self.print_expression(atom.value), self.print_index(atom.size)
        if not atom.is_checked:
            return value
        check = "wrap_index" if atom.wraps_negative else "check_index"
        return f"{check}({value}, {size}, error)"

    # values

    def print_expression(self, expression: Expression) -> str:
        if isinstance(expression, Constant):
            return literal(expression.value, expression.dtype)
        if isinstance(expression, IndexValue):
            if expression.index.is_constant:
                return literal(expression.index.constant, expression.dtype)
            ctype = value_ctype(expression.dtype)
            text = self.print_index(expression.index)
            return f"({text})" if ctype == "int64_t" else f"({ctype})({text})"
        if isinstance(expression, Load):
            return self.print_load(expression)
        if isinstance(expression, Masked):
            test = " && ".join(self.print_bounds(b) for b in expression.bounds)
            inside = self.print_expression(expression.inside)
            return f"({test} ? {inside} : {self.print_expression(expression.outside)})"
        return self.print_operation(expression)

    def print_load(self, load: Load) -> str:
        if not load.index:
            return self.print_local(load.name)
        index = self.print_index(load.index[0])
        return self.print_widened(load, f"{identifier(load.name)}[{index}]")

    def print_widened(self, load: Load, text: str) -> str:
        """An element in memory, converted to the type it is computed in."""
        if load.dtype in NARROW_FLOATS:
            return f"widen({text})"
        return f"({text} != 0)" if load.dtype == torch.bool else text

    def print_bounds(self, bound: BoundsCheck) -> str:
        low, high = bound.index.bounds()
        text, size = self.print_index(bound.index), self.print_index(bound.size)
        tests = []
        if low is None or low < 0:
            tests.append(f"{text} >= 0")
        if high is None or not bound.size.is_constant or high >= bound.size.constant:
            tests.append(f"{text} < {size}")
        return " && ".join(tests) or "true"

    def print_operation(self, operation: Operation) -> str:
        if operation.name == "bitcast":
            return self.print_bitcast(operation.arguments[0], operation.dtype)
        texts = [self.print_expression(argument) for argument in operation.arguments]
        if operation.name == "cast":
            return self.print_cast(texts[0], operation.arguments[0].dtype, operation.dtype)
        source = opmath_dtype(operation.arguments[-1].dtype)
        template = OP_TABLE[operation.name]
        if operation.name == "where" and any(map(_reads_memory, operation.arguments[1:])):
            # both sides are loaded: a branch stops SIMD. In C++, a | b of two bools is an int
            is_bool = operation.dtype == torch.bool
            template = f"select{'<bool>' if is_bool else ''}({{0}}, {{1}}, {{2}})"
        if source == torch.bool:
            template = BOOL_OPS.get(operation.name, template)
        text = template.format(*texts)
        if opmath_dtype(operation.dtype) in SMALL_INTEGERS:
            return f"({TYPES[opmath_dtype(operation.dtype)]}){text}"
        return text

    def print_bitcast(self, argument: Expression, target: torch.dtype) -> str:
        """The bits of a value as another type; bits in memory stay as they are, NaN payloads too."""
        text = self.print_bits(argument)
        unsigned = f"uint{8 * target.itemsize}_t"
        if target in NARROW_FLOATS:
            return f"widen({NARROW_FLOATS[target]}{{({unsigned}){text}}})"
        if target.is_floating_point and opmath_dtype(target) == target:
            return f"__builtin_bit_cast({TYPES[target]}, ({unsigned}){text})"
        if target == torch.bool:
            return f"({text} != 0)"
        return f"({TYPES[opmath_dtype(target)]}){text}"

    def print_bits(self, argument: Expression) -> str:
        kind = NARROW_FLOATS.get(argument.dtype)
        if kind is not None:
            assert isinstance(argument, Operation), "the bits of a narrow float come from a cast"
            inner = argument.arguments[0]
            if isinstance(inner, Load) and inner.index and inner.dtype == argument.dtype:
                return f"{identifier(inner.name)}[{self.print_index(inner.index[0])}].code"
            return f"{kind}_code({self.print_expression(inner)})"
        text = self.print_expression(argument)
        unsigned = f"uint{8 * argument.dtype.itemsize}_t"
        if argument.dtype.is_floating_point and opmath_dtype(argument.dtype) == argument.dtype:
            return f"__builtin_bit_cast({unsigned}, {text})"
        return f"({unsigned}){text}"

    def print_cast(self, text: str, source: torch.dtype, target: torch.dtype) -> str:
        have, want = opmath_dtype(source), opmath_dtype(target)
        if want == torch.bool:
            return text if have == torch.bool else f"({text} != 0)"
        if have == torch.bool and want.is_floating_point:
            # compilers keep a selection in vectors of the wider type, but not a converted bool
            text = f"({text} ? {literal(1, want)} : {literal(0, want)})"
        elif have != want:
            is_small = want in SMALL_INTEGERS or want in (torch.uint32, torch.uint64)
            if have.is_floating_point and is_small:
                # through a wide integer, so that overflow wraps as in torch; int32 is wide enough
                # for a byte, because floats beyond 32 bits are multiples of 256
                is_byte = have == torch.float32 and want.itemsize == 1
                text = f"({TYPES[want]})({'int32_t' if is_byte else 'int64_t'}){text}"
            elif have.is_floating_point and want in (torch.int32, torch.int64):
                text = f"to_integer<{TYPES[want]}>({text})"
            else:
                text = f"({TYPES[want]}){text}"
        if target in NARROW_FLOATS and source != target:
            return f"round_{NARROW_FLOATS[target]}({text})"
        return text
