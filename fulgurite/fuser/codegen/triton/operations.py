"""Operations of the IR as Triton text: which function, with which literals, and conversions between types.

In: operations whose arguments are expressions. Out: text. `Operations` knows no loops and no memory: what its arguments
are is the text that `expression` gives, which `triton_expressions.Body` has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from fulgurite.fuser.codegen.triton import op_table as spelling
from fulgurite.fuser.codegen.triton.source_lines import Lines
from fulgurite.fuser.codegen.triton.values import (
    TO_FLOAT8,
    TYPES,
    bare,
    is_power_of_two,
    one_plus_tanh,
    saturates,
    typed,
    within,
)
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    Constant,
    Expression,
    Load,
    Operation,
    value_type,
    walk,
)
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.cpu.base import needed

# what a last place of its argument may decide
JUMPS = frozenset(
    (
        *("floor", "ceil", "trunc", "round", "floor_divide", "truncated_divide"),
        *("remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge"),
    )
)
OFTEN_WHOLE = frozenset(("div", "share", "reciprocal", "sqrt"))  # 49 / 49, the root of 49


def jumps(part: Expression) -> bool:
    whole = not (part.dtype.is_floating_point or part.dtype == torch.bool)
    return isinstance(part, Operation) and (part.name in JUMPS or (part.name == "cast" and whole))


def decisive(nest: Nest) -> set[Expression]:
    """Quotients and roots that something looks at which jumps: they are rounded to the nearest number."""
    values = [local.expression for local in nest.locals.values()] + [s.value for s in nest.stores]
    steps = [part for value in values for part in walk(value) if jumps(part)]
    seen = [argument for step in steps for argument in step.parts()]
    seen += [local.expression for local in needed(nest, seen) if local.reduction is None]
    parts = (part for value in seen for part in walk(value))
    return {part for part in parts if isinstance(part, Operation) and part.name in OFTEN_WHOLE}


class Operations(Lines, ABC):
    """What is computed of values."""

    def __init__(self, nest: Nest, taken: set[str]) -> None:
        super().__init__(taken)
        self.nest = nest
        self.functions: set[str] = set()  # of triton_functions.py, that the text calls
        read = [t for t, _, stores in nest.accesses() if not stores]
        floats = {t.dtype for t in read if t.dtype.is_floating_point}
        # integers are exact; a product that nothing else is read beside is of narrow floats
        self.fast = bool(floats or not read) and floats <= set(NARROW_FLOATS)
        self.decisive = decisive(nest) if self.fast else set()

    @abstractmethod
    def expression(self, expression: Expression) -> str:
        """The text of a value."""

    def typed_expression(self, expression: Expression) -> str:
        """The same where nothing beside it says of which type a number is."""
        if isinstance(expression, Constant):
            return typed(expression.value, expression.dtype)
        return self.expression(expression)

    def operation(self, operation: Operation) -> str:
        if operation.name == "cast":
            return self.cast(operation.arguments[0], operation.dtype)
        if operation.name == "bitcast":
            return self.bitcast(operation.arguments[0], operation.dtype)
        inner = one_plus_tanh(operation)
        if inner is not None:
            self.functions.add(self.spelled("sigmoid", torch.float32))
            doubled = f"2.0 * {self.expression(inner)}"
            return f"(2.0 * {self.spelled('sigmoid', torch.float32)}({doubled}))"
        source = value_type(operation.arguments[-1].dtype)
        texts = [self.expression(a) for a in operation.arguments]
        chosen = self.spelled(operation.name, source, operation in self.decisive)
        if operation.name == "exp" and source == torch.float32 and self.is_narrow(operation):
            chosen = spelling.FAST_SPELLING["exp"]
        if operation.name == "div" and is_power_of_two(operation.arguments[1]):
            chosen = "({0} / {1})"  # which is exact in any case
        call = "{" not in chosen
        start = 1 if operation.name == "where" else 0
        rest = operation.arguments[start:]
        fits = chosen.startswith("tl.") or operation.name in ("maximum", "minimum")
        # before Triton 3.7 tl.maximum takes a literal for a float32 or an int32, and so rounds or widens
        fits = fits and source in (torch.float32, torch.int32, torch.int64)
        if all(isinstance(a, Constant) for a in rest) or (call and not fits):
            for k, argument in enumerate(operation.arguments):
                if isinstance(argument, Constant):
                    texts[k] = typed(argument.value, argument.dtype)
        if not call:
            return chosen.format(*texts)
        if "." not in chosen:
            self.functions.add(chosen)
        return f"{chosen}({', '.join(bare(t) for t in texts)})"

    def is_narrow(self, operation: Operation) -> bool:
        """Was its argument just rounded to a narrow float? A last place of a float32 is nothing beside that."""
        (argument,) = operation.arguments
        while isinstance(argument, Operation) and argument.name == "cast":
            if argument.dtype in NARROW_FLOATS:
                return True
            (argument,) = argument.arguments
        local = isinstance(argument, Load) and not argument.index
        return local and argument.dtype in NARROW_FLOATS

    def spelled(self, name: str, source: torch.dtype, decides: bool = False) -> str:
        """The text of a primitive for arguments of this value type; to the last place where that decides."""
        general = spelling.SPELLING.get(name)
        if source == torch.bool:
            found = spelling.BOOL_SPELLING.get(name, general)
        elif not source.is_floating_point:
            found = spelling.INTEGER_SPELLING.get(name, general)
        elif source == torch.float64:
            found = spelling.DOUBLE_SPELLING.get(name, general)
        elif self.fast and not decides:
            found = spelling.FAST_SPELLING.get(name, general)
        else:
            found = general
        assert found is not None, f"{name} has no spelling for {source}"
        return found

    def cast(self, argument: Expression, target: torch.dtype) -> str:
        source = argument.dtype
        have, want = value_type(source), value_type(target)
        text = self.typed_expression(argument)
        if want == torch.bool:
            return text if have == torch.bool else f"({text} != 0)"
        if have != want:
            small = not want.is_floating_point and want not in (torch.int32, torch.int64)
            if have.is_floating_point and small:
                # so that what doesn't fit wraps, as torch's conversion does
                text += ".to(tl.int64)"
            text += f".to(tl.{TYPES[want]})"
        if target in NARROW_FLOATS and source != target:
            text = f"{self.narrowed(text, argument, target)}.to(tl.float32)"
        return text

    def bitcast(self, argument: Expression, target: torch.dtype) -> str:
        """The bits of a value, as it is stored, in another type of that width."""
        text, source = self.typed_expression(argument), argument.dtype
        if source in NARROW_FLOATS or source == torch.bool:
            text += f".to(tl.{'uint8' if source == torch.bool else TYPES[source]})"
        if target == torch.bool:
            return f"({text}.to(tl.uint8, bitcast=True) != 0)"
        text += f".to(tl.{TYPES[target]}, bitcast=True)"
        return f"{text}.to(tl.float32)" if target in NARROW_FLOATS else text

    def narrowed(self, text: str, value: Expression, target: torch.dtype) -> str:
        """A float32 rounded to a narrow type."""
        while isinstance(value, Load) and not value.index:
            local = self.nest.locals[value.name]
            if local.reduction is not None:
                break
            value = local.expression
        function = TO_FLOAT8.get(target)
        if function is None or within(value, torch.finfo(target).max) or saturates(target):
            return f"{text}.to(tl.{TYPES[target]})"
        self.functions.add(function)
        return f"{function}({bare(text)})"
