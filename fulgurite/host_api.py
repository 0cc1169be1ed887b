"""The library that runs host programs, direct calls and training graphs, compiled once, with its table of addresses.

In: nothing. Out: `load_library()`, or None where this process can't use it: no C++ compiler, a function of torch's
C interface that is missing, a Python tensor with another layout than expected, a build of Python without a GIL. Traces
then run as Python. `unavailable_reason()` says why. The sources are in `include/`: `SOURCES`.

The layout of a Python tensor is not part of any interface. It is checked here, once, with tensors whose
addresses are known.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import _guards
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import eval_frame
from torch.autograd import forward_ad, profiler
from torch.nn.modules import module as module_hooks

from fulgurite import native, replay
from fulgurite.config import read_env
from fulgurite.errors import FulguriteError

# functions of Python's C API, in the order of `Api` in host_program.h
PYTHON_FUNCTIONS = (
    "Py_IncRef",
    "Py_DecRef",
    "PyList_Size",
    "PyList_GetItem",
    "PyList_SetSlice",
    "PyTuple_New",
    "PyTuple_SetItem",
    "PyTuple_GetItem",
    "PyTuple_Size",
    "PySequence_GetItem",
    "PyLong_FromLongLong",
    "PyLong_AsLongLong",
    "PyObject_Vectorcall",
    "PyErr_Occurred",
    "PyErr_Clear",
    "PyBytes_AsString",
    "PyDict_GetItem",
    "PyList_New",
    "PyList_SetItem",
    "PyObject_GetAttr",
    "PyObject_Size",
    "PyObject_GenericGetDict",
    "PyFunction_GetCode",
    "PyFunction_GetDefaults",
    "PyFunction_GetKwDefaults",
    "PyCFunction_GetFunction",
    "PyCFunction_GetSelf",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
    "PyObject_SetAttr",
    "PySequence_Tuple",
    "PyObject_VectorcallMethod",
    "PyContext_Copy",
    "PyContext_Enter",
    "PyContext_Exit",
    "PyObject_RichCompareBool",
    "PyErr_Fetch",
    "PyErr_Restore",
    "PyDict_New",
    "PyDict_SetItem",
)
TORCH_FUNCTIONS = (
    "aoti_torch_empty_strided",
    "aoti_torch__reinterpret_tensor",
    "aoti_torch_new_tensor_handle",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_storage_offset",
    "aoti_torch_get_dtype",
    "aoti_torch_get_device_type",
    "aoti_torch_get_device_index",
    "aoti_torch_copy_",
)
# `THPVariable_Wrap` takes a reference in new versions of torch, and a value, which is an address too, in old ones
WRAP_FUNCTIONS = (
    "_Z16THPVariable_WrapRKN2at10TensorBaseE",
    "_Z16THPVariable_WrapN2at10TensorBaseE",
)
NUM_THREADS = "_ZN2at15get_num_threadsEv"
NUM_DISPATCH_MODES = "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv"
INCLUDES_DISPATCH_KEY = "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"
GRAD_MODE = ("aoti_torch_grad_mode_is_enabled", "aoti_torch_grad_mode_set_enabled")
CURRENT_STREAM = "aoti_torch_get_current_cuda_stream"
# flags of PyMethodDef
METH_KEYWORDS, METH_NOARGS, METH_O, METH_FASTCALL = 0x0002, 0x0004, 0x0008, 0x0080
METHODS = {
    "run_program": METH_O,
    "run_graphed": METH_O,
    "call_directly": METH_FASTCALL | METH_KEYWORDS,
    "call_graph": METH_FASTCALL,
    "may_trace": METH_NOARGS,
    "has_no_saved_tensor_hooks": METH_O,
    "call_training": METH_FASTCALL,
    "run_training_forward": METH_FASTCALL,
    "run_training_backward": METH_FASTCALL,
    "call_planned": METH_FASTCALL | METH_KEYWORDS,
}
GLOBAL_HOOKS = (
    module_hooks._global_backward_pre_hooks,
    module_hooks._global_backward_hooks,
    module_hooks._global_forward_pre_hooks,
    module_hooks._global_forward_hooks,
    module_hooks._global_forward_hooks_always_called,
    module_hooks._global_forward_hooks_with_kwargs,
)
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# each continues the one before
SOURCES = (
    "host_program.h",
    "graph_replay.h",
    "direct_call.h",
    "training_call.h",
    "launch_plan.h",
)
MAX_HEADER = 64  # bytes of a Python tensor in which its at::Tensor is looked for


class _MethodDefinition(ctypes.Structure):
    """PyMethodDef of the stable ABI."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


@dataclass(frozen=True)
class HostLibrary:
    """The loaded library. `methods` and `keep_alive` must live as long as any callable."""

    library: ctypes.CDLL
    methods: dict[str, _MethodDefinition]
    keep_alive: tuple[Any, ...]

    def make_method(self, method: str, state: tuple[Any, ...]) -> Any:
        """A built-in function that binds to its object as a class attribute."""
        new = ctypes.pythonapi.PyInstanceMethod_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.py_object]
        return new(self.make_callable(method, state))

    def make_callable(self, method: str, state: tuple[Any, ...]) -> Any:
        """A built-in function. It holds `state`: the words that it reads, and what they refer to."""
        new = ctypes.pythonapi.PyCFunction_NewEx
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
        return new(ctypes.addressof(self.methods[method]), state, None)


class HostUnavailable(FulguriteError):
    """Host programs can't run in this process."""


def _load() -> HostLibrary | HostUnavailable:
    if native.find_compiler() is None:  # not remembered: the environment may name one later
        return HostUnavailable("host programs run as Python: there is no C++ compiler")
    return _load_once()


@functools.cache
def _load_once() -> HostLibrary | HostUnavailable:
    try:
        return _load_and_check()
    except FulguriteError as problem:
        return HostUnavailable(f"host programs run as Python: {problem}")


@functools.cache
def _source() -> str:
    files = [native.INCLUDE / name for name in SOURCES]
    return "\n".join(file.read_text() for file in files)


def start_build() -> None:
    """Start to compile the library in the background: the first graph needs it."""
    is_loaded = bool(_load_once.cache_info().currsize)
    if is_loaded or read_env("FULGURITE_HOST_PROGRAM") == "0" or native.find_compiler() is None:
        return
    native.start_build(_source())


def load_library() -> HostLibrary | None:
    """The library, or None where host programs can't run."""
    found = _load()
    return found if isinstance(found, HostLibrary) else None


def unavailable_reason() -> str | None:
    """Why traces run as Python here; None if they don't."""
    found = _load()
    return found.what if isinstance(found, HostUnavailable) else None


@functools.cache
def _torch_libraries() -> tuple[ctypes.CDLL, ...]:
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    names = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so", "libtorch_cuda.so")
    paths = [os.path.join(folder, name) for name in names]
    return tuple(ctypes.CDLL(path) for path in paths if os.path.exists(path))


@functools.cache
def find_torch_function(name: str) -> int | None:
    """The address of an exported function of torch, or None."""
    for library in _torch_libraries():
        function = getattr(library, name, None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


@functools.cache
def dtype_code(dtype: torch.dtype) -> int | None:
    """torch's number of a dtype, by `aoti_torch_dtype_float32` and its like; None if it has none."""
    address = find_torch_function(f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")
    return None if address is None else int(ctypes.CFUNCTYPE(ctypes.c_int32)(address)())


def _require(name: str, *others: str) -> int:
    for candidate in (name, *others):
        address = find_torch_function(candidate)
        if address is not None:
            return address
    raise HostUnavailable(f"torch {torch.__version__} does not export {name}")


def _python_function(name: str) -> int:
    function = getattr(ctypes.pythonapi, name, None)
    address = ctypes.cast(function, ctypes.c_void_p).value if function is not None else None
    if address is None:
        raise HostUnavailable(f"Python does not export {name}")
    return address


@functools.cache
def find_driver_function(name: str) -> int | None:
    """The address of a function of the CUDA driver, or None without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return ctypes.cast(getattr(driver, name), ctypes.c_void_p).value


def find_launch_function() -> int | None:
    return find_driver_function("cuLaunchKernel")


def _load_and_check() -> HostLibrary:
    if read_env("FULGURITE_HOST_PROGRAM") == "0":
        raise HostUnavailable("FULGURITE_HOST_PROGRAM=0")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise HostUnavailable("this Python has no GIL")
    library = native.load(_source())
    values = _table_values()
    table = [
        *map(_python_function, PYTHON_FUNCTIONS),
        *map(_require, TORCH_FUNCTIONS),
        _require(*WRAP_FUNCTIONS),
        *map(_require, (NUM_THREADS, NUM_DISPATCH_MODES, INCLUDES_DISPATCH_KEY, *GRAD_MODE)),
        *(_cuda_functions() if torch.cuda.is_available() else (0, 0, 0)),
        _find_cdata_offset(),
        *(id(torch.Tensor), id(torch.nn.Parameter), id(None), id(True)),
        *(value if type(value) is int else _address(value) for value in values),
    ]
    library.api_size.restype = library.set_timing.restype = ctypes.c_int64
    library.set_timing.argtypes = [ctypes.c_int64]
    assert library.api_size() == len(table), "host_api.py and host_program.h list different values"
    library.set_api((ctypes.c_int64 * len(table))(*table), ctypes.c_int64(len(table)))
    methods = {}
    for name, flags in METHODS.items():
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        methods[name] = _MethodDefinition(name.encode(), address, flags, None)
    return HostLibrary(library, methods, tuple(values))


def _cuda_functions() -> tuple[int, int, int]:
    functions = (
        find_torch_function(CURRENT_STREAM),
        find_launch_function(),
        find_driver_function("cuMemcpyDtoDAsync_v2"),
    )
    return tuple(function or 0 for function in functions)  # type: ignore[return-value]


def _address(value: Any) -> int:
    return 0 if value is None else id(value)


def _table_values() -> list[Any]:
    """The objects and numbers at the end of `Api` in host_program.h."""
    has_cuda = torch.cuda.is_available()
    stance = eval_frame._stance if eval_frame._stance.stance == "default" else None
    return [
        vars(profiler),
        "_is_profiler_enabled",
        ctypes.addressof(replay.num_recordings),
        torch._C._cuda_getDevice if has_cuda else None,
        _create_cuda_context if has_cuda else None,
        torch.as_strided,
        type(len),
        vars(torch.compiler),
        "_is_exporting_flag",
        _guards._TLS,
        "__dict__",
        "tracing_context",
        vars(forward_ad),
        "_current_level",
        int(torch._C.DispatchKey.PreDispatch),
        get_eval_frame_callback,
        torch._C._get_tracing_state,
        vars(eval_frame),
        "_stance",
        stance,
        *GLOBAL_HOOKS,
        *MODULE_HOOKS,
        "forward",
        "cache_entry",
        "run",
        *_training_values(),
    ]


def _training_values() -> list[Any]:
    """What include/training_call.h, launch_plan.h and graph_replay.h need."""
    return [
        *(False, list, tuple),
        *("_version", "call_inputs", "to_save", "sizes", "saved_tensors", "non_differentiable"),
        *("_materialize_non_diff_grads", "materialize_grads"),
        *("maybe_clear_saved_tensors", "backward", "context"),
        torch._C._are_functorch_transforms_active,
        torch._C._functorch.peek_interpreter_stack,
        torch._C._is_any_autocast_enabled,
        torch._C._get_deterministic_algorithms,
        torch._C._autograd._get_current_graph_task_keep_graph,
        torch.Tensor._is_view,
        torch.Tensor.detach,
        make_unsafe_view,
        torch._C._is_key_in_tls,
        torch._C._get_obj_in_tls,
        "requires_grad",  # for include/launch_plan.h
        *("words", "plan", "successor"),  # for include/graph_replay.h
        torch._C._cuda_isCurrentStreamCapturing if torch.cuda.is_available() else None,
        *(torch.clone, int),
    ]


def make_unsafe_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as autograd knows it if it is no view: with a version counter of its own."""
    return torch.ops.aten._unsafe_view.default(tensor, tensor.shape)


def _create_cuda_context(device: int) -> None:
    """Make this thread's CUDA context. Autograd's threads start without one, and the driver needs it."""
    torch.cuda.current_stream(device).query()


def _find_cdata_offset() -> int:
    """Where a Python tensor holds its at::Tensor, which is the address of a TensorImpl."""
    samples = [
        torch.empty(2),
        torch.empty((), dtype=torch.int64),
        torch.nn.Parameter(torch.empty(1)),
    ]
    for sample in samples:
        if ctypes.c_void_p.from_address(id(sample) + 8).value != id(type(sample)):
            raise HostUnavailable("objects of this Python have an unknown layout")
    offsets = set.intersection(*(set(_cdata_offsets(sample)) for sample in samples))
    if len(offsets) != 1:
        raise HostUnavailable(f"tensors of torch {torch.__version__} have an unknown layout")
    return offsets.pop()


def _cdata_offsets(tensor: torch.Tensor) -> Iterator[int]:
    for offset in range(16, MAX_HEADER, 8):
        if ctypes.c_void_p.from_address(id(tensor) + offset).value == tensor._cdata:
            yield offset
