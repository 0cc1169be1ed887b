"""Operations of the IR as Triton text: functions, literals, and casts.

In: operations whose arguments are expressions. Out: text. `OperationPrinter` knows no loops and no
memory: `expressions.KernelBody` prints the arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from fulgurite.fuser.codegen.triton import op_table
from fulgurite.fuser.codegen.triton.source_lines import SourceLines
from fulgurite.fuser.codegen.triton.values import (
    TO_FLOAT8,
    TYPES,
    cast_saturates,
    is_clamped,
    is_power_of_two,
    match_one_plus_tanh,
    strip_parentheses,
    typed_literal,
)
from fulgurite.fuser.ir.expression import (
    NARROW_FLOATS,
    Constant,
    Expression,
    Load,
    Operation,
    opmath_dtype,
    walk,
)
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.analysis import find_required_locals, iter_expressions

# Operations whose result 1 ulp of an argument may change entirely.
DISCONTINUOUS = frozenset(
    (
        *("floor", "ceil", "trunc", "round", "floor_divide", "trunc_divide"),
        *("remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge"),
    )
)
# Operations whose exact result is often an integer: 49 / 49, the square root of 49.
OFTEN_INTEGER = frozenset(("div", "softmax_div", "reciprocal", "sqrt"))


def is_discontinuous(part: Expression) -> bool:
    to_integer = not (part.dtype.is_floating_point or part.dtype == torch.bool)
    if not isinstance(part, Operation):
        return False
    return part.name in DISCONTINUOUS or (part.name == "cast" and to_integer)


def find_exact_operations(nest: LoopNest) -> set[Expression]:
    """Divisions and roots that a discontinuous operation reads: these must be correctly rounded."""
    parts = (part for value in iter_expressions(nest) for part in walk(value))
    arguments = [a for part in parts if is_discontinuous(part) for a in part.children()]
    required = find_required_locals(nest, arguments)
    arguments += [local.expression for local in required if local.reduction is None]
    read = (part for value in arguments for part in walk(value))
    return {part for part in read if isinstance(part, Operation) and part.name in OFTEN_INTEGER}


class OperationPrinter(SourceLines, ABC):
    """Prints operations on values."""

    def __init__(self, nest: LoopNest, used_names: set[str]) -> None:
        super().__init__(used_names)
        self.nest = nest
        self.functions: set[str] = set()  # of device_functions.py, that the text calls
        read = [t for t, _, stores in nest.accesses() if not stores]
        floats = {t.dtype for t in read if t.dtype.is_floating_point}
        # integers are exact; a GEMM without other inputs has narrow floats
        self.fast_math = bool(floats or not read) and floats <= set(NARROW_FLOATS)
        self.exact_operations = find_exact_operations(nest) if self.fast_math else set()

    @abstractmethod
    def print_expression(self, expression: Expression) -> str:
        """The text of a value."""

    def print_typed(self, expression: Expression) -> str:
        """The same where nothing else decides the type of a literal."""
        if isinstance(expression, Constant):
            return typed_literal(expression.value, expression.dtype)
        return self.print_expression(expression)

    def print_operation(self, operation: Operation) -> str:
        if operation.name == "cast":
            return self.print_cast(operation.arguments[0], operation.dtype)
        if operation.name == "bitcast":
            return self.print_bitcast(operation.arguments[0], operation.dtype)
        tanh_argument = match_one_plus_tanh(operation)
        if tanh_argument is not None:
            sigmoid = self.lookup_op("sigmoid", torch.float32)
            self.functions.add(sigmoid)
            return f"(2.0 * {sigmoid}(2.0 * {self.print_expression(tanh_argument)}))"
        source = opmath_dtype(operation.arguments[-1].dtype)
        texts = [self.print_expression(a) for a in operation.arguments]
        template = self.lookup_op(operation.name, source, operation in self.exact_operations)
        is_exp = operation.name == "exp" and source == torch.float32
        if is_exp and self.has_narrow_argument(operation):
            template = op_table.FAST_MATH_OPS["exp"]
        if operation.name == "div" and is_power_of_two(operation.arguments[1]):
            template = "({0} / {1})"  # which is exact
        is_call = "{" not in template
        if self._needs_typed_literals(operation, template, source):
            for k, argument in enumerate(operation.arguments):
                if isinstance(argument, Constant):
                    texts[k] = typed_literal(argument.value, argument.dtype)
        if not is_call:
            return template.format(*texts)
        if "." not in template:
            self.functions.add(template)
        return f"{template}({', '.join(strip_parentheses(t) for t in texts)})"

    def _needs_typed_literals(
        self, operation: Operation, template: str, source: torch.dtype
    ) -> bool:
        """Does nothing else give the literals among the arguments their type?"""
        values = operation.arguments[1 if operation.name == "where" else 0 :]
        if all(isinstance(a, Constant) for a in values):
            return True
        takes_literals = template.startswith("tl.") or operation.name in ("maximum", "minimum")
        # before Triton 3.7 a literal of tl.maximum is a float32 or an int32: it rounds or widens
        # the others
        takes_literals = takes_literals and source in (torch.float32, torch.int32, torch.int64)
        return "{" not in template and not takes_literals

    def has_narrow_argument(self, operation: Operation) -> bool:
        """Was the argument just rounded to a narrow float? Then fast math is accurate enough."""
        (argument,) = operation.arguments
        while isinstance(argument, Operation) and argument.name == "cast":
            if argument.dtype in NARROW_FLOATS:
                return True
            (argument,) = argument.arguments
        is_local = isinstance(argument, Load) and not argument.index
        return is_local and argument.dtype in NARROW_FLOATS

    def lookup_op(self, name: str, source: torch.dtype, exact: bool = False) -> str:
        """The table entry of a primitive for arguments of this type; `exact` forbids fast math."""
        general = op_table.OP_TABLE.get(name)
        if source == torch.bool:
            found = op_table.BOOL_OPS.get(name, general)
        elif not source.is_floating_point:
            found = op_table.INTEGER_OPS.get(name, general)
        elif source == torch.float64:
            found = op_table.FLOAT64_OPS.get(name, general)
        elif self.fast_math and not exact:
            found = op_table.FAST_MATH_OPS.get(name, general)
        else:
            found = general
        assert found is not None, f"the op table has no {name} for {source}"
        return found

    def print_cast(self, argument: Expression, target: torch.dtype) -> str:
        source = argument.dtype
        have, want = opmath_dtype(source), opmath_dtype(target)
        text = self.print_typed(argument)
        if want == torch.bool:
            return text if have == torch.bool else f"({text} != 0)"
        if have != want:
            is_small = not want.is_floating_point and want not in (torch.int32, torch.int64)
            if have.is_floating_point and is_small:
                text += ".to(tl.int64)"  # so that overflow wraps, as in torch
            text += f".to(tl.{TYPES[want]})"
        if target in NARROW_FLOATS and source != target:
            text = f"{self.print_narrowed(text, argument, target)}.to(tl.float32)"
        return text

    def print_bitcast(self, argument: Expression, target: torch.dtype) -> str:
        """The bits of a value, as it is stored, in another type of that width."""
        text, source = self.print_typed(argument), argument.dtype
        if source in NARROW_FLOATS or source == torch.bool:
            text += f".to(tl.{'uint8' if source == torch.bool else TYPES[source]})"
        if target == torch.bool:
            return f"({text}.to(tl.uint8, bitcast=True) != 0)"
        text += f".to(tl.{TYPES[target]}, bitcast=True)"
        return f"{text}.to(tl.float32)" if target in NARROW_FLOATS else text

    def print_narrowed(self, text: str, value: Expression, target: torch.dtype) -> str:
        """A float32 rounded to a narrow float; `value` is the expression of `text`."""
        while isinstance(value, Load) and not value.index:
            local = self.nest.locals[value.name]
            if local.reduction is not None:
                break
            value = local.expression
        function = TO_FLOAT8.get(target)
        fits = is_clamped(value, torch.finfo(target).max) or cast_saturates(target)
        if function is None or fits:
            return f"{text}.to(tl.{TYPES[target]})"
        self.functions.add(function)
        return f"{function}({strip_parentheses(text)})"
