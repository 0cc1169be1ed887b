"""Library calls of host programs: ATen ops through torch's C interface.

In: an ATen op with its arguments. Out: the instruction that calls its C function, or `Unsupported`.

torch's C interface has a function for many ops: `aoti_torch_cpu_convolution`. Its parameters follow
from the op's schema. They are compared with the declaration in torch's own header, so a function
whose parameters changed is not called. GEMMs have functions that write to a tensor that is
allocated before.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fulgurite.host.expression import Unsupported, Words
from fulgurite.host.tensors import dtype_code
from fulgurite.host.words import Parameter
from fulgurite.host_api import find_torch_function

aten = torch.ops.aten
# ops whose C function writes to an existing tensor, its first parameter
OUT_FUNCTIONS = {
    aten.mm.default: "mm_out",
    aten.bmm.default: "bmm_out",
    aten.addmm.default: "addmm_out",
    aten.baddbmm.default: "baddbmm_out",
}
MAX_PARAMETERS, MAX_DOUBLES, MAX_OUTPUTS = 24, 4, 12
DECLARATION = re.compile(r"AOTITorchError (aoti_torch_\w+)\(([^)]*)\);")


@functools.cache
def _declarations(device: str) -> dict[str, tuple[str, ...]]:
    """The parameter types of each function, from torch's headers; empty if they are not installed."""
    folder = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch/generated"
    path = folder / f"c_shim_{device}.h"
    if not path.exists():
        return {}
    found = {}
    for name, parameters in DECLARATION.findall(path.read_text()):
        types = [parameter.strip().rpartition(" ")[0] for parameter in parameters.split(",")]
        found[name] = tuple(types)
    return found


@dataclass(frozen=True)
class OpCall:
    """A call of an ATen op, its arguments in the order of the schema."""

    op: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    device: str


def bind_arguments(op: torch._ops.OpOverload, node: fx.Node) -> tuple[Any, ...]:
    """The arguments in the order of the schema, with defaults."""
    values = []
    for position, parameter in enumerate(op._schema.arguments):
        if position < len(node.args) and not parameter.kwarg_only:
            values.append(node.args[position])
        else:
            values.append(node.kwargs.get(parameter.name, parameter.default_value))
    return tuple(values)


class ShimWriter:
    """Collects the parameters of one C function."""

    def __init__(
        self,
        slot_of: Callable[[Any], int],
        operand_of: Callable[[Any], int],
        add_data: Callable[[Sequence[int]], int],
        is_floating: bool,
    ) -> None:
        self.is_floating = is_floating  # whether all tensors hold floats
        self.slot_of = slot_of  # of a tensor
        self.operand_of = operand_of  # of an integer that is no constant
        self.add_data = add_data  # words -> their position
        self.words: Words = []
        self.types: list[str] = []
        self.doubles: list[float] = []

    def add(self, kind: Parameter, value: int, type_: str) -> None:
        self.words += [kind, value]
        self.types.append(type_)

    def add_handle(self, slot: int) -> None:
        self.add(Parameter.HANDLE, slot, "AtenTensorHandle")

    def add_argument(self, type_: str, value: Any) -> None:
        """One argument of a schema's type."""
        is_optional = type_.endswith("?")
        plain = type_.removesuffix("?")
        if plain == "Tensor":
            self._add_tensor(value, is_optional)
        elif plain in ("int", "SymInt", "bool", "ScalarType"):
            self._add_integer(plain, value, is_optional)
        elif plain in ("float", "Scalar", "number"):
            if plain != "float" and not self.is_floating:
                raise Unsupported("a scalar, which the C interface takes as a double, for integers")
            self._add_float(value, is_optional)
        elif re.fullmatch(r"(int|SymInt|bool)\[\d*\]", plain):
            self._add_list(plain.partition("[")[0], value, is_optional)
        else:
            raise Unsupported(f"an argument of type {type_}")

    def _add_tensor(self, value: Any, is_optional: bool) -> None:
        if not is_optional:
            self.add_handle(self.slot_of(value))
        elif value is None:
            self.add(Parameter.WORD, 0, "AtenTensorHandle*")
        else:
            self.add(Parameter.OPTIONAL_HANDLE, self.slot_of(value), "AtenTensorHandle*")

    def _add_integer(self, kind: str, value: Any, is_optional: bool) -> None:
        type_ = "int64_t" if kind in ("int", "SymInt") else "int32_t"
        if isinstance(value, torch.dtype):
            value = dtype_code(value)
        if value is None and is_optional:
            self.add(Parameter.WORD, 0, f"{type_}*")
        elif not isinstance(value, int):
            if is_optional or kind not in ("int", "SymInt"):
                raise Unsupported(f"an argument {value} of type {kind}")
            self.add(Parameter.OPERAND, self.operand_of(value), type_)
        elif is_optional:
            self.add(Parameter.WORDS, self.add_data([int(value)]), f"{type_}*")
        else:
            self.add(Parameter.WORD, int(value), type_)

    def _add_float(self, value: Any, is_optional: bool) -> None:
        if value is None and is_optional:
            self.add(Parameter.WORD, 0, "double*")
        elif not isinstance(value, int | float):
            raise Unsupported(f"an argument {value} of type float")
        elif is_optional:
            bits = struct.unpack("q", struct.pack("d", value))
            self.add(Parameter.WORDS, self.add_data(bits), "double*")
        else:
            self.doubles.append(float(value))
            self.types.append("double")

    def _add_list(self, kind: str, value: Any, is_optional: bool) -> None:
        type_ = "const int32_t*" if kind == "bool" else "const int64_t*"
        if value is None and is_optional:
            self.add(Parameter.WORD, 0, f"{type_}*")
            self.add(Parameter.WORD, 0, "int64_t")
            return
        if not isinstance(value, list | tuple) or not all(isinstance(n, int) for n in value):
            raise Unsupported(f"a list {value} of type {kind}")
        numbers = [int(n) for n in value]
        if kind == "bool":  # two in a word
            padded = [*numbers, 0][: len(numbers) + len(numbers) % 2]
            words = [low | high << 32 for low, high in zip(padded[::2], padded[1::2], strict=True)]
        else:
            words = numbers
        position = self.add_data(words or [0])
        if is_optional:
            self.add(Parameter.WORDS_ADDRESS, position, f"{type_}*")
        else:
            self.add(Parameter.WORDS, position, type_)
        self.add(Parameter.WORD, len(numbers), "int64_t")


def write_call(call: OpCall, outputs: Sequence[int], writer: ShimWriter, out: int | None) -> Words:
    """The words of a `CALL`: the op's C function with its parameters.

    outputs   slots of the results; -1: nobody reads it
    out       the slot of the tensor that a function of `OUT_FUNCTIONS` writes to
    """
    schema, name = call.op._schema, _function_name(call, out)
    if len(schema.returns) != len(outputs):
        raise Unsupported("a tuple that is not unpacked")
    if any(a.alias_info is not None for a in (*schema.arguments, *schema.returns)):
        raise Unsupported(f"{call.op} returns views or writes to its arguments")
    if out is not None:
        writer.add_handle(out)
    for parameter, value in zip(schema.arguments, call.arguments, strict=True):
        writer.add_argument(_type_name(parameter), value)
    if out is None:
        for position, result in enumerate(schema.returns):
            kind = str(result.type)
            if kind not in ("Tensor", "int", "SymInt"):
                raise Unsupported(f"a result of type {kind}")
            type_ = "AtenTensorHandle*" if kind == "Tensor" else "int64_t*"
            writer.add(Parameter.OUTPUT, position, type_)
    address = find_torch_function(name)
    declared = _declarations(call.device).get(name)
    if address is None or declared != tuple(writer.types):
        raise Unsupported(f"torch's C interface has no {name} with these parameters")
    num_integers = len(writer.words) // 2
    kinds = [str(result.type) == "Tensor" for result in schema.returns]
    results = [slot << 1 | kind for slot, kind in zip(outputs, kinds, strict=True)]
    results = [] if out is not None else results
    if max(num_integers - MAX_PARAMETERS, len(writer.doubles) - MAX_DOUBLES) > 0:
        raise Unsupported(f"{name} has too many parameters")
    if len(results) > MAX_OUTPUTS:
        raise Unsupported(f"{name} has too many results")
    doubles = [int(struct.unpack("q", struct.pack("d", number))[0]) for number in writer.doubles]
    head = [address, num_integers, len(doubles), len(results), *results]
    return [*head, *writer.words, *doubles]


def write_copy(target: int, source: int, non_blocking: bool = False) -> Words:
    """The words of a `CALL` that copies one tensor into another."""
    address = find_torch_function("aoti_torch_copy_")
    if address is None:
        raise Unsupported("torch's C interface has no copy_")
    handles = [Parameter.HANDLE, target, Parameter.HANDLE, source]
    return [address, 3, 0, 0, *handles, Parameter.WORD, int(non_blocking)]


def _function_name(call: OpCall, out: int | None) -> str:
    if out is not None:
        return f"aoti_torch_{call.device}_{OUT_FUNCTIONS[call.op]}"
    namespace, _, name = call.op._schema.name.partition("::")
    if namespace != "aten":
        raise Unsupported(f"{call.op} is not in torch's C interface")
    overload = call.op._schema.overload_name
    return f"aoti_torch_{call.device}_{name}" + (f"_{overload}" if overload else "")


def _type_name(parameter: Any) -> str:
    """The type of a schema's argument, as `native_functions.yaml` writes it."""
    name = str(parameter.real_type if hasattr(parameter, "real_type") else parameter.type)
    match = re.fullmatch(r"Optional\[(.*)\]", name)
    inner, mark = (match[1], "?") if match else (name, "")
    match = re.fullmatch(r"List\[(.*)\]", inner)
    return f"{match[1]}[]{mark}" if match else f"{inner}{mark}"
