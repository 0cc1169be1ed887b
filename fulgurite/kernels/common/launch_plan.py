"""Launch plans: the launches of an operator, recorded once for its shapes and replayed afterwards.

    @planned(GatedActivation)                   immutable classes, without tensors, of its arguments
    def fused_experts(x, routes, ...): ...      checks, chooses launch parameters, allocates, launches

In: a function that launches cached kernels on the current CUDA device. Out: the same function. A call
with the same dtypes, shapes, strides and numbers launches the same kernels with other addresses. The
host code between the launches takes far longer than they do, so the second call of a kind is recorded:
its allocations, and its launches with the origin of each address. Later calls allocate and launch only,
in native code where the kernels allow it (`native_plan.py`).

A function that does anything else stays as it is: an op of torch that is no allocation or view, a kernel
launched through Triton (with tensor descriptors), an address of unknown origin. Results must be new.
Plans are not used for CPU tensors, under capture, in dispatch modes, and where gradients are recorded.
Nor for large inputs: a plan holds all temporaries at once, and the host is not what such a call waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from fulgurite.determinism import is_deterministic
from fulgurite.host_api import load_library
from fulgurite.kernels.common.launch_recorder import LaunchPlan, Recorder, allocate
from fulgurite.kernels.common.native_plan import NativePlan, PlannedCall, write_plan
from fulgurite.kernels.common.pdl import in_pdl_region
from fulgurite.kernels.common.triton_import import HAS_TRITON, INTERPRETED, triton
from fulgurite.kernels.registry import PLAIN_TENSORS
from fulgurite.quant import QuantTensor

Function = TypeVar("Function", bound=Callable[..., Any])
MAX_PLANS = 256  # of a function; lengths of batches change all the time
MAX_RECENT_PLANS = 8  # that native code compares a call with, 0.3 µs each
MAX_ATTEMPTS = 3  # to record: the first calls compile kernels
MAX_BYTES = 4 << 20  # of the first tensor: 256 tokens of a large model


def planned(*settings: type) -> Callable[[Function], Function]:
    """Record and replay the launches of a function; see the top of this file.

    settings   classes of arguments that are immutable, hashable and hold no tensors
    """

    def decorate(function: Function) -> Function:
        return _PlannedFunction(function, settings) if CAN_PLAN else function  # type: ignore[return-value]

    return decorate


def _can_plan() -> bool:
    if not HAS_TRITON or INTERPRETED or torch.version.hip:
        return False
    return hasattr(triton.knobs.runtime.launch_enter_hook, "add")


CAN_PLAN = _can_plan()


class _PlannedFunction:
    """A function with its plans. A number instead of a plan: failed attempts to record."""

    def __init__(self, function: Callable[..., Any], settings: tuple[type, ...]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.hashable: frozenset[type] = frozenset((int, float, bool, str, type(None), *settings))
        self.plans: dict[Any, LaunchPlan | int] = {}
        self._native_plans: dict[Any, NativePlan | None] = {}  # None: only Python can replay it
        self._recent: list[NativePlan] = []  # those that native code compares a call with
        self._native: Callable[..., Any] | None = None  # it calls `_find_plan` for others
        _planned_functions.append(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.function(*args, **kwargs)
        if self._native is not None:
            return self._native(*args, **kwargs)
        return self._find_plan(*args, **kwargs)

    def _find_plan(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if (
            type(first) not in PLAIN_TENSORS
            or _len_torch_dispatch_stack()
            or not _is_on_current_gpu(first)
            or first.nbytes > MAX_BYTES
        ):
            return self.function(*args, **kwargs)
        tensors: list[Tensor] = []
        key: list[Any] = [first.device.index, in_pdl_region(), is_deterministic(), *kwargs]
        if not self._add_to_key((*args, *kwargs.values()), key, tensors):
            return self.function(*args, **kwargs)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if _has_unaligned(addresses) or _records_gradients(tensors):
            return self.function(*args, **kwargs)
        whole_key = tuple(key)
        plan = self.plans.get(whole_key, 0)
        if isinstance(plan, LaunchPlan):
            call = PlannedCall(args, kwargs, first.device, self.hashable)
            self._use_native(whole_key, plan, call)
            return plan.replay(addresses, first.device)
        if plan >= MAX_ATTEMPTS:
            return self.function(*args, **kwargs)
        return self._record(whole_key, plan, tensors, args, kwargs)

    def _record(
        self,
        key: tuple[Any, ...],
        attempts: int,
        tensors: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if len(self.plans) >= MAX_PLANS:
            self.clear()
        recorder = Recorder(tensors)
        with recorder.active():
            result = self.function(*args, **kwargs)
        self.plans[key] = recorder.make_plan(result) or attempts + 1
        return result

    def _use_native(self, key: tuple[Any, ...], plan: LaunchPlan, call: PlannedCall) -> None:
        """Let native code replay the next calls of this kind, where it can."""
        library = load_library()
        if library is None:
            return
        if key not in self._native_plans:
            self._native_plans[key] = write_plan(plan, call, allocate)
        words = self._native_plans[key]
        if words is None or any(words is known for known in self._recent):
            return
        self._recent.insert(0, words)
        del self._recent[MAX_RECENT_PLANS:]
        if self._native is None:
            self._native = library.make_callable("call_planned", (self._recent, self._find_plan))

    def clear(self) -> None:
        """Forget all plans."""
        self.plans.clear()
        self._native_plans.clear()
        self._recent.clear()

    def _add_to_key(self, values: tuple[Any, ...], key: list[Any], tensors: list[Tensor]) -> bool:
        """Add what launches depend on besides addresses. False if that is unknown."""
        for value in values:
            kind = type(value)
            if kind in PLAIN_TENSORS:
                tensors.append(value)
                key += (value.dtype, value.shape, value.stride())
            elif kind in self.hashable:
                key += (kind, value)
            elif isinstance(value, tuple):
                key += (kind, len(value))
                if not self._add_to_key(value, key, tensors):
                    return False
            elif kind is QuantTensor:
                key += (value.format.name, value.dtype, value.shape)
                if not self._add_to_key((value.packed, *value.scales.values()), key, tensors):
                    return False
            else:
                return False
        return True


_planned_functions: list[_PlannedFunction] = []


def clear_plans() -> None:
    """Forget all plans: after launch parameters were changed."""
    for function in _planned_functions:
        function.clear()


def _is_on_current_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.device.index == torch._C._cuda_getDevice()


def _has_unaligned(addresses: list[int]) -> bool:
    """Whether an address is no multiple of 16: kernels are compiled for those that are."""
    bits = 0
    for address in addresses:
        bits |= address
    return bool(bits & 15)


def _records_gradients(tensors: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
