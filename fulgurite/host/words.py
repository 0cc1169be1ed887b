"""The words of a host program: slots, registers, constants, steps.

In: what each step does, as instructions. Out: one array of 64-bit words in the layout of `include/host_program.h`,
and the Python objects that it refers to.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from fulgurite.host.expression import Code, Lookup, Words, compile_expression, constant_value

HEADER_WORDS = 12
END_OF_STEPS = 0


class Kind(IntEnum):
    """What a slot holds; `Kind` of host_program.h."""

    TENSOR = 0
    INTEGER = 1
    OBJECT = 2


class Op(IntEnum):
    """Instructions; `Op` of host_program.h."""

    END = 0
    EVALUATE = 1
    CHECK = 2
    ALLOCATE = 3
    RUN = 4
    VARIANT = 5
    LAUNCH = 6
    VIEW = 7
    CALL = 8
    ALIAS = 9
    SET_INTEGER = 10
    PYTHON = 11
    CALL_INTEGER = 12
    ALLOCATE_BY = 13


class Argument(IntEnum):
    """Arguments of kernels; `Argument` of host_program.h."""

    ADDRESS = 0
    VALUE = 1
    THREADS = 2


class Parameter(IntEnum):
    """Parameters of torch's C functions; `Parameter` of host_program.h."""

    WORD = 0
    HANDLE = 1
    OPTIONAL_HANDLE = 2
    OUTPUT = 3
    OPERAND = 4
    WORDS = 5
    WORDS_ADDRESS = 6


@dataclass
class Program:
    """A program being written."""

    kinds: list[Kind] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    constants: list[tuple[int, int]] = field(default_factory=list)  # slot, object
    num_registers: int = 0
    steps: list[Words] = field(default_factory=list)
    data: Words = field(default_factory=list)  # arrays that instructions refer to

    def new_slot(self, kind: Kind) -> int:
        self.kinds.append(kind)
        return len(self.kinds) - 1

    def new_register(self) -> int:
        self.num_registers += 1
        return self.num_registers - 1

    def add_object(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def add_data(self, values: Sequence[int]) -> int:
        """Store an array; returns its position among the data, which follow the header."""
        self.data += values
        return HEADER_WORDS + len(self.data) - len(values)

    def pack(self, num_inputs: int, outputs: Sequence[int], device: int, python_form: Any) -> Any:
        """The words, with the objects that must live as long as they are used."""
        form = self.add_object(python_form)
        objects = (ctypes.c_int64 * len(self.objects))(*map(id, self.objects))
        body: Words = list(self.data)
        start = HEADER_WORDS + len(body)
        body += [n for step in self.steps for n in step] + [END_OF_STEPS]
        positions = []
        constants = [n for pair in self.constants for n in pair]
        for part in (list(outputs), constants, list(self.kinds)):
            positions.append(HEADER_WORDS + len(body))
            body += part
        header = [
            len(self.kinds),
            num_inputs,
            self.num_registers,
            start,
            len(outputs),
            positions[0],
            len(self.constants),
            positions[1],
            positions[2],
            ctypes.addressof(objects),
            device,
            form,
        ]
        assert len(header) == HEADER_WORDS, "the header of host_program.h has other fields"
        words = header + body
        return (struct.pack(f"{len(words)}q", *words), objects, tuple(self.objects))


@dataclass
class StepWriter:
    """The instructions of one step. Slots that it makes for itself are released at its end."""

    program: Program
    words: Words = field(default_factory=list)
    temporaries: list[int] = field(default_factory=list)

    def add(self, op: Op, words: Sequence[int]) -> None:
        self.words += [op, len(words) + 2, *words]

    def new_temporary(self) -> int:
        slot = self.program.new_slot(Kind.TENSOR)
        self.temporaries.append(slot)
        return slot

    def operand(self, text: str, lookup: Lookup) -> int:
        """An operand of an instruction: the constant or register of an integer expression."""
        return self.operand_of(compile_expression(text, lookup))

    def operand_of(self, code: Words) -> int:
        value = constant_value(code)
        if value is not None and abs(value) < 1 << 62:
            return value << 1
        if len(code) == 2 and code[0] == Code.REGISTER:
            return code[1] << 1 | 1
        register = self.program.new_register()
        self.add(Op.EVALUATE, [register, len(code) // 2, *code])
        return register << 1 | 1
