"""Trace → host program: each line as instructions, or as a call of Python.

In: the steps of a final trace whose kernels are compiled. Out: a `LoweredTrace`: the program's words, and for each step
how it runs: `kernel`, `library`, `view`, `size` or `python (reason)`.

Sizes and strides come from the trace's metadata. Where memory must have the recorded strides, the program checks them.
Symbols of dynamic sizes are read from the inputs once, at the start.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

from fulgurite.cudagraph.attention_seeds import SEEDED_FUNCTIONS
from fulgurite.host.escaping import find_escaping, find_sole_views
from fulgurite.host.expression import Code, Unsupported, Words
from fulgurite.host.packed_call import PACKED_OPS, write_packed_call
from fulgurite.host.region import RegionWriter, as_fused_region
from fulgurite.host.shims import (
    OUT_FUNCTIONS,
    OpCall,
    ShimWriter,
    bind_arguments,
    write_call,
    write_copy,
)
from fulgurite.host.tensors import DEVICE_TYPES, write_allocation
from fulgurite.host.words import Kind, Op, Program, StepWriter
from fulgurite.trace.cost import is_view
from fulgurite.trace.node_meta import aten_op, fake_value, has_fake_value, storage_offset
from fulgurite.trace.region import Region
from fulgurite.trace.steps import Step, StepList

Function = Callable[..., Any]
aten = torch.ops.aten


@dataclass
class LoweredTrace:
    """A program, and how each of its steps runs."""

    program: Program
    outputs: list[int]
    device: int  # of CUDA, or -1
    runs: list[str] = field(default_factory=list)

    @property
    def num_native(self) -> int:
        return sum(not run.startswith("python") for run in self.runs)


def lower_steps(steps: StepList, functions: Sequence[Function]) -> LoweredTrace:
    """Write the program of a trace. `functions` run its steps as Python."""
    return _Lowering(steps).lower(functions)


class _Lowering:
    def __init__(self, steps: StepList) -> None:
        self.steps = steps
        self.program = Program()
        self.slots: dict[fx.Node, int] = {}
        self.registers: dict[str, int] = {}  # of symbols
        self.escaping = find_escaping(steps)
        self.tracked = self.escaping - find_sole_views(steps)
        for node in steps.inputs:
            self._add_slot(node)

    def lower(self, functions: Sequence[Function]) -> LoweredTrace:
        device = self._find_device()
        self._read_symbols()
        runs = []
        for step, function in zip(self.steps.steps, functions, strict=True):
            for node in step.outputs:
                if node is not None:
                    self._add_slot(node)
            writer = StepWriter(self.program)
            try:
                how, on_error = self._write_step(step, writer)
            except Unsupported as reason:
                writer, how, on_error = StepWriter(self.program), f"python ({reason})", None
                writer.add(Op.PYTHON, [])
            runs.append(how)
            self._finish_step(step, function, on_error, writer)
        returned = self.steps.outputs
        if not isinstance(returned, list | tuple):
            raise Unsupported("a trace that returns no tuple")
        outputs = [self._output_slot(value) for value in returned]
        return LoweredTrace(self.program, outputs, device, runs)

    # ---- slots -----------------------------------------------------------------------------------

    def _add_slot(self, node: fx.Node) -> int:
        value = fake_value(node) if has_fake_value(node) else None
        kind = Kind.OBJECT
        if isinstance(value, torch.Tensor):
            kind = Kind.TENSOR
        elif isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
            kind = Kind.INTEGER
        self.slots[node] = self.program.new_slot(kind)
        return self.slots[node]

    def _slot(self, node: Any) -> int:
        """The slot of a node; of a constant of the module, too."""
        if not isinstance(node, fx.Node):
            raise Unsupported(f"{node} where a tensor is expected")
        if node not in self.slots:
            assert node.op == "get_attr", f"{node} is used before it is computed"
            self._add_constant(self._add_slot_of_attribute(node), self._attribute(node))
        return self.slots[node]

    def _add_slot_of_attribute(self, node: fx.Node) -> int:
        is_tensor = isinstance(self._attribute(node), torch.Tensor)
        self.slots[node] = self.program.new_slot(Kind.TENSOR if is_tensor else Kind.OBJECT)
        return self.slots[node]

    def _attribute(self, node: fx.Node) -> Any:
        value: Any = self.steps.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value

    def _add_constant(self, slot: int, value: Any) -> None:
        self.program.constants.append((slot, self.program.add_object(value)))

    def _output_slot(self, value: Any) -> int:
        if isinstance(value, fx.Node):
            return self._slot(value)
        slot = self.program.new_slot(Kind.OBJECT)
        self._add_constant(slot, value)
        return slot

    def _tensor(self, node: fx.Node) -> torch.Tensor:
        """The metadata of a strided tensor."""
        value = fake_value(node)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise Unsupported(f"{node} is no strided tensor")
        if value.is_conj() or value.is_neg():
            raise Unsupported(f"{node} is lazily conjugated or negated")
        return value

    def _find_device(self) -> int:
        """The one GPU that the trace uses, or -1."""
        devices = set()
        for node in self.steps.module.graph.nodes:
            value = fake_value(node) if has_fake_value(node) else None
            if isinstance(value, torch.Tensor):
                devices.add((value.device.type, value.device.index))
        indices = {index for kind, index in devices if kind == "cuda"}
        if len(indices) > 1 or not {kind for kind, _ in devices} <= set(DEVICE_TYPES):
            raise Unsupported("several GPUs, or devices of another kind")
        return indices.pop() if indices else -1

    # ---- integers --------------------------------------------------------------------------------

    def _read_symbols(self) -> None:
        """Store the symbols of the inputs in registers."""
        sources: dict[str, Words] = {}
        for node in self.steps.inputs:
            value = fake_value(node) if has_fake_value(node) else None
            if isinstance(value, torch.SymInt):
                _add_source(sources, value, [Code.SLOT, self.slots[node]])
        for node in self.steps.inputs:
            value = fake_value(node) if has_fake_value(node) else None
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                for code, numbers in ((Code.SIZE, value.shape), (Code.STRIDE, value.stride())):
                    for dim, number in enumerate(numbers):
                        words = [int(code), self.slots[node] << 16 | dim]
                        _add_source(sources, number, words)
        writer = StepWriter(self.program)
        for name, words in sources.items():
            register = self.registers[name] = self.program.new_register()
            writer.add(Op.EVALUATE, [register, 1, *words])
        if sources:
            self._finish_step(None, _raise_unreadable_sizes, None, writer)

    def _lookup(self, name: str) -> Words | None:
        return [Code.REGISTER, self.registers[name]] if name in self.registers else None

    def _operand(self, value: Any, writer: StepWriter) -> int:
        if type(value) is int:
            return value << 1 if abs(value) < 1 << 61 else writer.operand_of([Code.CONSTANT, value])
        if isinstance(value, fx.Node):
            value = fake_value(value)
        if isinstance(value, torch.SymInt):
            return writer.operand(PythonPrinter().doprint(value.node.expr), self._lookup)
        if not isinstance(value, int):
            raise Unsupported(f"{value} where an integer is expected")
        return writer.operand_of([Code.CONSTANT, int(value)])

    def _operands(self, values: Sequence[Any], writer: StepWriter) -> list[int]:
        return [self._operand(value, writer) for value in values]

    # ---- steps -----------------------------------------------------------------------------------

    def _write_step(self, step: Step, writer: StepWriter) -> tuple[str, Function | None]:
        """Write a step's instructions: how it runs, and what raises the errors of its kernels."""
        node = step.node
        if node.op != "call_function":
            raise Unsupported(node.op)
        outputs = [-1 if n is None else self.slots[n] for n in step.outputs]
        if isinstance(node.target, Region):
            return "kernel", self._write_region(step, node.target, outputs, writer)
        if node.target in SEEDED_FUNCTIONS.values():
            raise Unsupported("a seed that may be on the device")
        if isinstance(fake_value(node), int | torch.SymInt) and not step.is_tuple:
            self._write_size(node, writer)
            return "size", None
        op = aten_op(node)
        if not isinstance(op, torch._ops.OpOverload):
            raise Unsupported(str(getattr(node.target, "__name__", node.target)))
        if is_view(node) and node.target is not operator.getitem:
            self._write_views(step, op, writer)
            return "view", None
        if op is aten.copy_.default:
            self._write_copy(node, outputs, writer)
            return "library", None
        if op in PACKED_OPS and outputs:
            out = (node, outputs[0])
            error = write_packed_call(self, op, bind_arguments(op, node), out, writer)
            return "kernel", error
        self._write_library_call(step, op, outputs, writer)
        return "library", None

    def _write_region(
        self, step: Step, target: Region, outputs: list[int], writer: StepWriter
    ) -> Function:
        fused = as_fused_region(target.call)
        if fused is None:
            raise Unsupported(f"a region of {target.executor}")
        arguments = step.node.args
        inputs = [self._slot(a) if isinstance(a, fx.Node) else None for a in arguments]
        if not step.is_tuple:
            if outputs or fused.region.outputs:
                raise Unsupported("a tuple that is not unpacked")
        escaping = {self.slots[n] for n in step.outputs if n in self.escaping}
        RegionWriter(writer, fused, inputs, outputs, escaping).write()
        positions = [
            step.inputs.index(a) if a in step.inputs else None
            for a in arguments
            if isinstance(a, fx.Node)
        ]
        constants = [
            None if p is not None else self._attribute(a)
            for p, a in zip(positions, arguments, strict=True)
            if isinstance(a, fx.Node)
        ]

        def raise_error(status: int, *values: Any) -> None:
            pairs = zip(positions, constants, strict=True)
            fused.raise_kernel_error(status, tuple(c if p is None else values[p] for p, c in pairs))

        return raise_error

    def _write_size(self, node: fx.Node, writer: StepWriter) -> None:
        if node not in self.slots:
            raise Unsupported(f"{node}, which nothing reads")
        writer.add(Op.SET_INTEGER, [self.slots[node], self._operand(node, writer)])

    def _write_views(self, step: Step, op: Any, writer: StepWriter) -> None:
        source = bind_arguments(op, step.node)[0]
        if not isinstance(source, fx.Node):
            raise Unsupported(f"a view of {source}")
        base = self._tensor(source)
        slot = self._slot(source)
        numbers = [*base.stride(), *base.shape]
        layout = self._operands(numbers, writer)
        writer.add(Op.CHECK, [slot, base.dim(), 1, *layout])
        for node in step.outputs:
            if node is None:
                continue
            result = self._tensor(node)
            if result.dtype != base.dtype or result.device != base.device:
                raise Unsupported("a view with another dtype")
            offset = self._operand(storage_offset(node) - storage_offset(source), writer)
            layout = self._operands([*result.shape, *result.stride()], writer)
            tracked = int(node in self.tracked and op is not aten._unsafe_view.default)
            writer.add(Op.VIEW, [self.slots[node], slot, result.dim(), offset, tracked, *layout])

    def _write_copy(self, node: fx.Node, outputs: list[int], writer: StepWriter) -> None:
        target, source, *rest = bind_arguments(aten.copy_.default, node)
        self._tensor(target), self._tensor(source)
        words = write_copy(self._slot(target), self._slot(source), bool(rest[0]))
        writer.add(Op.CALL, words)
        if outputs:
            writer.add(Op.ALIAS, [outputs[0], self._slot(target)])

    def _write_library_call(
        self, step: Step, op: Any, outputs: list[int], writer: StepWriter
    ) -> None:
        node = step.node
        tensors = [self._tensor(n) for n in node.all_input_nodes if _is_tensor(n)]
        devices = {tensor.device.type for tensor in tensors}
        if len(devices) != 1:
            raise Unsupported(f"{op} on several devices, or without tensors")
        for result in step.outputs:
            if result is not None and _is_tensor(result):
                self._tensor(result)
        call = OpCall(op, bind_arguments(op, node), devices.pop())
        shim = ShimWriter(
            self._slot,
            lambda value: self._operand(value, writer),
            self.program.add_data,
            is_floating=all(tensor.is_floating_point() for tensor in tensors),
        )
        out = None
        if op in OUT_FUNCTIONS:
            out = self.slots[node] if outputs else writer.new_temporary()
            self._write_allocation(self._tensor(node), out, writer)
            outputs = [out]
        writer.add(Op.CALL, write_call(call, outputs, shim, out))

    def _write_allocation(self, result: torch.Tensor, slot: int, writer: StepWriter) -> None:
        sizes, strides = (self._operands(n, writer) for n in (result.shape, result.stride()))
        write_allocation(writer, slot, (sizes, strides), result.dtype, result.device)

    def _finish_step(
        self, step: Step | None, function: Function, on_error: Function | None, writer: StepWriter
    ) -> None:
        program = self.program
        inputs = [] if step is None else [self.slots[n] for n in step.inputs]
        outputs = [-1 if n is None else self.slots[n] for n in step.outputs] if step else []
        dead = [self.slots[n] for n in step.dead] if step is not None else []
        dead += writer.temporaries
        head = [
            program.add_object(function),
            -1 if on_error is None else program.add_object(on_error),
            int(step is not None and step.is_tuple),
            len(inputs),
            len(outputs),
            len(dead),
            0,  # whether it runs as Python from now on
        ]
        body = [*head, *inputs, *outputs, *dead, *writer.words, Op.END, 2]
        program.steps.append([len(body) + 1, *body])


def _is_tensor(node: fx.Node) -> bool:
    return has_fake_value(node) and isinstance(fake_value(node), torch.Tensor)


def _add_source(sources: dict[str, Words], number: Any, words: Words) -> None:
    """Note where a symbol is read, if the number is just that symbol."""
    if isinstance(number, torch.SymInt) and number.node.expr.is_symbol:
        sources.setdefault(str(number.node.expr), words)


def _raise_unreadable_sizes() -> None:
    raise AssertionError("the sizes of a program's inputs can't be read")
