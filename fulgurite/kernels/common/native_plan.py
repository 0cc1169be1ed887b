"""Launch plans as words for native code (`include/launch_plan.h`), which replays them without Python.

In: a plan, and the call that it was recorded from. Out: `(words, objects)`, or None where only Python can replay it:
kernels with clusters, scratch memory or programmatic dependent launch, arguments of unknown types, quantized tensors.

The words hold what the plan's key holds: dtypes, shapes and strides of tensors, and all other arguments. Native code
compares a call with them, allocates, and launches the kernels by the CUDA driver.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.errors import FulguriteError
from fulgurite.host_api import dtype_code, find_launch_function
from fulgurite.kernels.common.pdl import in_pdl_region
from fulgurite.kernels.common.triton_counters import acquire_counters
from fulgurite.kernels.registry import PLAIN_TENSORS

NativePlan = tuple[bytes, tuple[Any, ...]]
TENSOR, OBJECT, TUPLE = 0, 1, 2  # `PlanValue` of launch_plan.h
WARP_SIZE = 32
FLOATS = {"fp32": "f", "fp64": "d"}  # as Triton passes Python's floats
INTEGERS = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")
# of a launcher: each needs more than a grid, threads and shared memory
LAUNCH_FEATURES = (
    "launch_cooperative_grid",
    "launch_pdl",
    "global_scratch_size",
    "profile_scratch_size",
    "gsan_enabled",
)


class PlannedCall(NamedTuple):
    """The call that a plan was recorded from."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    settings: frozenset[type]  # immutable types without tensors


def is_plain_launch(launcher: Any, function: Any, metadata: Any) -> bool:
    """Whether a compiled kernel's launch needs a grid, threads and shared memory, and nothing else."""
    if not isinstance(function, int) or metadata is None or len(metadata) < 3:
        return False
    return metadata[1] == 1 and not any(getattr(launcher, name, 0) for name in LAUNCH_FEATURES)


class _NotNativeError(Exception):
    """Only Python can replay this plan."""


def write_plan(plan: Any, call: PlannedCall, allocate: Callable[..., Tensor]) -> NativePlan | None:
    """The words of a `LaunchPlan`, and the objects that they refer to."""
    launch = find_launch_function()
    if launch is None:
        return None
    try:
        return _PlanWriter().write(plan, call, allocate, launch)
    except _NotNativeError:
        return None


@dataclass
class _PlanWriter:
    words: list[int] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    num_tensors: int = 0

    def write(
        self, plan: Any, call: PlannedCall, allocate: Callable[..., Tensor], launch: int
    ) -> NativePlan:
        self.words += map(self._keep, call.kwargs)
        values = (*call.args, *call.kwargs.values())
        for value in values:
            self._add_value(value, call.settings)
        self._add_allocations(plan)
        self.words += map(self._keep, plan.counters)
        for planned in plan.launches:
            self._add_launch(planned)
        modes = (in_pdl_region, is_deterministic)
        index = call.device.index if call.device.type == "cuda" else -1
        header = [
            *(index, launch, *map(self._keep, modes), *(id(mode()) for mode in modes)),
            *map(self._keep, (allocate, acquire_counters, call.device, raise_launch_error)),
            0 if plan.kind is Tensor else self._keep(plan.kind),
            *(len(call.kwargs), len(values), self.num_tensors),
            *(len(plan.results) + bool(plan.workspace_bytes), len(plan.results)),
            *(len(plan.counters), len(plan.launches)),
        ]
        return struct.pack(f"{len(header) + len(self.words)}q", *header, *self.words), tuple(
            self.objects
        )

    def _keep(self, value: Any) -> int:
        """The address of an object that lives as long as the plan."""
        self.objects.append(value)
        return id(value)

    def _add_value(self, value: Any, settings: frozenset[type]) -> None:
        kind = type(value)
        if kind in PLAIN_TENSORS:
            code = dtype_code(value.dtype)
            if code is None:
                raise _NotNativeError
            self.num_tensors += 1
            self.words += [TENSOR, code, value.dim(), *value.shape, *value.stride()]
        elif kind in settings:
            self.words += [OBJECT, self._keep(value)]
        elif isinstance(value, tuple):
            self.words += [TUPLE, self._keep(kind), len(value)]
            for item in value:
                self._add_value(item, settings)
        else:
            raise _NotNativeError

    def _add_allocations(self, plan: Any) -> None:
        for sizes, strides, dtype, view in plan.results:
            parts = (sizes, strides, dtype)
            self.words += [*map(self._keep, parts), *(map(self._keep, view) if view else (0, 0, 0))]
        if plan.workspace_bytes:
            parts = ((plan.workspace_bytes,), (1,), torch.uint8)
            self.words += [*map(self._keep, parts), 0, 0, 0]

    def _add_launch(self, planned: Any) -> None:
        function, metadata = planned.tail[:2]
        types = planned.types or ()
        is_known = len(types) == len(planned.arguments)
        if not is_known or not is_plain_launch(planned.run, function, metadata):
            raise _NotNativeError
        origins = {address.position: address for address in planned.addresses}
        parameters: list[int] = []
        for position, (kind, value) in enumerate(zip(types, planned.arguments, strict=True)):
            if position in origins:
                parameters += [1, origins[position].source, origins[position].offset]
            elif kind != "constexpr":
                parameters += [0, _pack_number(kind, value), 0]
        grid = (*planned.head, 1, 1)[:3]
        head = [function, metadata[0] * WARP_SIZE, metadata[2], *grid, len(parameters) // 3]
        self.words += [*head, *parameters]


def _pack_number(kind: Any, value: Any) -> int:
    """A number as the first bytes of a 64-bit word."""
    if kind in FLOATS and isinstance(value, int | float):
        data = struct.pack(f"<{FLOATS[kind]}", value).ljust(8, b"\0")
        return int(struct.unpack("<q", data)[0])
    if kind in INTEGERS and isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return int(value)
    raise _NotNativeError


def raise_launch_error(code: int) -> None:
    raise FulguriteError(
        f"the CUDA driver could not launch a kernel: error {code}",
        next="run with CUDA_LAUNCH_BLOCKING=1 to find the kernel",
    )


def find_parameter_types(kernel: Any) -> Sequence[str] | None:
    """Triton's type of each parameter of a compiled kernel: `*bf16`, `i32`, `constexpr`."""
    signature = getattr(getattr(kernel, "src", None), "signature", None)
    if not isinstance(signature, dict) or not all(isinstance(t, str) for t in signature.values()):
        return None
    return tuple(signature.values())
