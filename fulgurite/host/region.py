"""A fused region as instructions: what its launcher does, without Python.

In: a `FusedRegion` or `TritonRegion` whose kernels are compiled, and the slots of its arguments and results. Out:
instructions, or `Unsupported` for what only the Python launcher does: complex and negated arguments.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch

from fulgurite.config import read_env
from fulgurite.device import num_cpu_threads
from fulgurite.fuser.ir.host_symbols import index_to_python, order_definitions
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.random_seed import SEED, draw_seed
from fulgurite.fuser.ir.statement import Tensor
from fulgurite.fuser.runtime.cpu_region import FusedRegion, find_symbol_sources
from fulgurite.fuser.runtime.kernel_table import KernelTable
from fulgurite.fuser.runtime.memory_pool import assign_offsets
from fulgurite.fuser.runtime.triton_region import TritonRegion
from fulgurite.host.expression import Code, Unsupported, Words
from fulgurite.host.shims import write_copy
from fulgurite.host.tensors import write_allocation
from fulgurite.host.words import Argument, Op, StepWriter

Address = tuple[int, int]  # a tensor's slot, and an offset in bytes


class RegionWriter:
    """Writes the instructions of one region."""

    def __init__(
        self,
        step: StepWriter,
        region: FusedRegion,
        inputs: Sequence[int | None],
        outputs: Sequence[int],
        escaping: Set[int],
    ) -> None:
        self.step = step
        self.escaping = escaping  # slots of results that leave the program
        self.fused = region
        self.region = region.region
        self.inputs = inputs  # slots; None: a constant that is no tensor
        self.outputs = outputs  # slots; -1: nobody reads it
        self.registers: dict[str, int] = {}
        self.addresses: dict[str, Address] = {}
        self.slots: dict[str, int] = {}  # of arguments and of what is allocated
        self.draws_seed = False

    def write(self) -> None:
        self._check_supported()
        self._read_symbols()
        self._check_arguments()
        results = self._allocate()
        self._run_kernels()
        self._copy_into_arguments(results)
        self._return(results)

    # ---- arguments -------------------------------------------------------------------------------

    def _check_supported(self) -> None:
        region = self.region
        if any(t.is_negated or t.is_view_as_real for t in region.inputs):
            raise Unsupported("complex or negated arguments")
        if any(o.is_view_as_real or o.is_conj or o.is_neg for o in region.outputs):
            raise Unsupported("complex or negated results")
        for argument, slot in zip(region.arguments, self.inputs, strict=True):
            if slot is None:
                raise Unsupported(f"the argument {argument} is a constant")

    def _lookup(self, text: str) -> Words | None:
        """How a name of the launcher is read: a symbol, or a size or stride of an argument."""
        if text in self.registers:
            return [Code.REGISTER, self.registers[text]]
        name, _, rest = text.partition(".")
        if not name.startswith("a") or not name[1:].isdecimal():
            return None
        slot = self.inputs[int(name[1:])]
        assert slot is not None, "constant arguments are not supported"
        if not rest:
            return [Code.SLOT, slot]
        kind, dim = rest.rstrip(")]").replace("(", "[").split("[")
        return [Code.SIZE if kind == "shape" else Code.STRIDE, slot << 16 | int(dim)]

    def _operand(self, index: Index | str) -> int:
        if not isinstance(index, str):
            if index.is_constant:
                return self.step.operand_of([Code.CONSTANT, index.constant])
            index = index_to_python(index)
        return self.step.operand(index, self._lookup)

    def _read_symbols(self) -> None:
        needed = self.fused.needed_symbols()
        self.draws_seed = SEED in needed
        definitions = order_definitions(needed - {SEED}, find_symbol_sources(self.region))
        for name, text in definitions.items():
            if text is None:
                raise Unsupported(f"the size {name} has no source")
            operand = self._operand(text)
            if not operand & 1:  # a constant
                register = self.step.program.new_register()
                self.step.add(Op.EVALUATE, [register, 1, Code.CONSTANT, operand >> 1])
                operand = register << 1 | 1
            self.registers[name] = operand >> 1

    def _draw_seed(self) -> None:
        """Draw the seed last: if the step falls back to Python, that draws one."""
        if self.draws_seed:
            program = self.step.program
            register = self.registers[SEED.name] = program.new_register()
            self.step.add(Op.CALL_INTEGER, [register, program.add_object(draw_seed)])

    def _check_arguments(self) -> None:
        for argument, slot in zip(self.region.arguments, self.inputs, strict=True):
            if not isinstance(argument, Tensor):
                continue
            assert slot is not None, "constant arguments are not supported"
            self.slots.setdefault(argument.name, slot)
            if argument.name in self.fused.unit.slots:
                strides = [self._operand(stride) for stride in argument.strides]
                self.step.add(Op.CHECK, [slot, len(strides), 0, *strides])
                self.addresses[argument.name] = (slot, 0)

    # ---- memory ----------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return getattr(self.fused, "device", torch.device("cpu"))

    def _allocate(self) -> dict[str, int]:
        """Allocate outputs and temporaries; temporaries of static size share one arena."""
        fused = self.fused
        allocated = fused.allocated_tensors()
        lifetimes = dict(fused.find_temporaries(allocated))
        table = isinstance(fused, TritonRegion)
        if isinstance(fused, TritonRegion):
            lifetimes |= fused.find_partials()
        offsets, total = assign_offsets(list(lifetimes.values()))
        if total:
            arena = self.step.new_temporary()
            self._add_allocation(arena, [total << 1], [2], torch.uint8)
            for name, offset in zip(lifetimes, offsets, strict=True):
                self.addresses[name] = (arena, offset)
        if table:
            self._allocate_partials(set(lifetimes))
        order = {name: k for k, name in enumerate(self.region.tensors)}
        made: dict[str, int] = {}
        for name in sorted(allocated - set(lifetimes), key=order.__getitem__):
            tensor = self.region.tensors[name]
            layout = fused.full_buffer_layout(name) or (tensor.sizes, tensor.strides)
            sizes, strides = ([self._operand(n) for n in part] for part in layout)
            slot = self._result_slot(name)
            self._add_allocation(slot, sizes, strides, tensor.dtype)
            made[name] = self.slots[name] = slot
            self.addresses[name] = (slot, 0)
        return made

    def _allocate_partials(self, in_arena: set[str]) -> None:
        assert isinstance(self.fused, TritonRegion), "partial results are Triton's"
        for kernel in self.fused.kernel_module.kernels:
            for partial in kernel.partials:
                if partial.name not in in_arena:
                    slot = self.step.new_temporary()
                    count = self._operand(partial.sizes[0] * partial.sizes[1])
                    self._add_allocation(slot, [count], [2], partial.dtype)
                    self.addresses[partial.name] = (slot, 0)

    def _result_slot(self, name: str) -> int:
        """The slot of the result that is all of a buffer; a temporary one if there is none."""
        for output, slot in zip(self.region.outputs, self.outputs, strict=True):
            if slot >= 0 and output.name == name and self.fused.is_whole_buffer(output):
                return slot
        return self.step.new_temporary()

    def _add_allocation(
        self, slot: int, sizes: list[int], strides: list[int], dtype: torch.dtype
    ) -> None:
        write_allocation(self.step, slot, (sizes, strides), dtype, self._device)

    # ---- kernels ---------------------------------------------------------------------------------

    def _run_kernels(self) -> None:
        if isinstance(self.fused, TritonRegion):
            self._launch_kernels(self.fused)
        elif self.fused.unit.slots:
            self._draw_seed()
            arguments = [n for name in self.fused.unit.slots for n in self._argument(name)]
            arguments += self._threads()
            count = len(self.fused.unit.slots) + 1
            self.step.add(Op.RUN, [self.fused.kernel_address, 0, count, *arguments])

    def _argument(self, name: str) -> list[int]:
        if name in self.addresses:
            return [Argument.ADDRESS, *self.addresses[name]]
        return [Argument.VALUE, self.registers[name] << 1 | 1, 0]

    def _threads(self) -> list[int]:
        if read_env("FULGURITE_NUM_THREADS") is None:
            return [Argument.THREADS, 0, 0]
        return [Argument.VALUE, num_cpu_threads() << 1, 0]

    def _launch_kernels(self, fused: TritonRegion) -> None:
        kernels = fused.kernel_module.kernels
        if not kernels:
            return
        table = KernelTable(fused.variants, len(kernels))
        if not table.is_usable:
            raise Unsupported("kernels with scratch memory or clusters")
        self.step.program.add_object(table)  # keeps it alive
        sizes = list(dict.fromkeys(s for k in kernels for s in k.symbols if not s.is_64_bit))
        wide = 0
        if fused.int64_indices is None:
            wide = self._operand(fused.wide_condition(sizes))
        dynamic = (
            [self.registers[s.name] << 1 | 1 for s in sizes] if fused.int64_indices is None else []
        )
        fixed = 4 if fused.int64_indices else 0
        arguments = {a.name for a in self.region.inputs}
        used = {t.name for kernel in kernels for t in kernel.tensors}
        pointers = [self.addresses[name][0] for name in used if name in arguments]
        register = self.step.program.new_register()
        head = [register, table.address, len(kernels), fixed, wide]
        self.step.add(Op.VARIANT, [*head, len(pointers), *pointers, len(dynamic), *dynamic])
        self._draw_seed()
        overwrites = bool(self.region.writes or self.region.donated)
        for number, kernel in enumerate(kernels):
            grid = [self._operand(n) for n in kernel.grid]
            names = [t.name for t in kernel.tensors] + [s.name for s in kernel.symbols]
            values = [n for name in names for n in self._argument(name)]
            can_rerun = number == 0 or not overwrites
            self.step.add(Op.LAUNCH, [register, number, *grid, int(can_rerun), len(names), *values])

    def _copy_into_arguments(self, made: dict[str, int]) -> None:
        """Copy into mutated arguments what no kernel stored there."""
        arguments = {a.name: a for a in self.region.inputs}
        for name, target in self.region.writes:
            if target in self.fused.stored_tensors():
                continue
            argument, slot = arguments[target], self.step.new_temporary()
            layout = [self._operand(n) for n in (*argument.sizes, *argument.strides)]
            self.step.add(Op.VIEW, [slot, made[name], len(argument.sizes), 0, 0, *layout])
            self.step.add(Op.CALL, write_copy(self.slots[target], slot))

    # ---- results ---------------------------------------------------------------------------------

    def _return(self, made: dict[str, int]) -> None:
        for output, slot in zip(self.region.outputs, self.outputs, strict=True):
            if slot < 0 or (output.name in made and made[output.name] == slot):
                continue
            if output.size is not None:
                self.step.add(Op.SET_INTEGER, [slot, self._operand(output.size)])
            elif output.name is not None:
                self._return_view(output, slot)

    def _return_view(self, output: Any, slot: int) -> None:
        source = self.slots[output.name]
        if self.fused.is_whole_buffer(output):
            self.step.add(Op.ALIAS, [slot, source])
            return
        sizes = [self._operand(n) for n in output.sizes]
        strides = [self._operand(n) for n in output.strides]
        offset = self._operand(output.offset)
        tracked = int(slot in self.escaping)
        self.step.add(Op.VIEW, [slot, source, len(sizes), offset, tracked, *sizes, *strides])


def as_fused_region(call: Any) -> FusedRegion | None:
    """The fused region whose launcher a region's call runs.

    None if it is no fused region, if it fell back to torch, or if it does more than launch its kernels
    (library GEMMs with an epilogue, whose arguments are others).
    """
    if getattr(call, "runs_torch", False):
        return None
    lowered = getattr(call, "lowered", call)
    if not isinstance(lowered, FusedRegion) or lowered.cached_launch is None:
        return None
    return lowered
