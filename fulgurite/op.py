"""`@fulgurite.op`: a custom operator, opaque to capture.

In: a Python function with type hints. Out: a torch custom operator. Its schema comes from the hints;
a fake (meta) function, a backward and a decomposition are registered with decorators.

    @fulgurite.op("mine::scale")
    def scale(x: Tensor, factors: list[float] | None = None) -> Tensor:
        ...

    @scale.fake
    def _(x, factors=None): return torch.empty_like(x)

    @scale.backward
    def _(inputs, output, grad): return grad * ..., None

    @scale.decomposition                # lets the fuser fuse the operator with its neighbours
    def _(x, factors=None): return ...

An operator must neither mutate its arguments nor return one of them: capture relies on it.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch.utils import _pytree as pytree

from fulgurite.errors import ArgumentError

_SCHEMA_TYPES = {
    torch.Tensor: "Tensor",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    torch.device: "Device",
    complex: "Scalar",
}
_LIST_TYPES = (list, tuple, Sequence, collections.abc.Sequence)
_decompositions: dict[Any, Callable[..., Any]] = {}  # OpOverload → the same in smaller ops
_modules: dict[str, str] = {}  # name of an operator → the module that defines it


def find_module(target: Any) -> str | None:
    """The module that defines an operator of `op`; None for other ops."""
    return _modules.get(target._schema.name) if isinstance(target, torch._ops.OpOverload) else None


def get_decomposition(target: Any) -> Callable[..., Any] | None:
    """The registered decomposition of an operator, if any."""
    return _decompositions.get(target)


class Op:
    """A custom operator. Call it like the function it was made from."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        _check_function(function)
        self.name = name
        self.function = function
        _modules[name] = function.__module__
        self.is_built_in = name.startswith(
            "fulgurite::"
        )  # tested; decode steps have no time for more
        self.schema = infer_schema(function)
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self._custom = torch.library.custom_op(
            name, self._checked, mutates_args=(), schema=self.schema
        )
        self._custom.register_fake(self._raise_no_fake)

    @property
    def overload(self) -> Any:
        """The `OpOverload`, as it appears in traces."""
        namespace, name = self.name.split("::")
        return getattr(getattr(torch.ops, namespace), name).default

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._custom(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Op:
        return self  # like a function: a copied module calls the same operator

    def __repr__(self) -> str:
        return f"<fulgurite.op {self.name}{self.schema}>"

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the fake (meta) function: the result's dtype, shape and strides."""
        self._custom.register_fake(function)
        return function

    def reference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register a plain-torch version: the reference of tests, and the fake function."""
        self._custom.register_fake(function)
        return function

    def decomposition(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the operator in terms of torch's ops, for executors that fuse.

        The operator is decomposed if all its ops end in generated kernels, and called as it is
        otherwise. The function returns `NotImplemented` for arguments it does not support.
        """
        _decompositions[self.overload] = function
        return function

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register `function(inputs, output, *gradients)`, which returns a gradient or None per input."""
        parameters = list(inspect.signature(self.function).parameters)

        def setup(
            ctx: Any,
            inputs: tuple[Any, ...],
            output: Any,
            keyword_only_inputs: dict[str, Any] | None = None,
        ) -> None:
            ctx.positional = len(inputs)
            inputs = (*inputs, *(keyword_only_inputs or {}).values())
            leaves, ctx.structure = pytree.tree_flatten((inputs, output))
            ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
            ctx.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            ctx.is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]

        def run(ctx: Any, *gradients: Any) -> Any:
            saved = iter(ctx.saved_tensors)
            pairs = zip(ctx.leaves, ctx.is_tensor, strict=True)
            leaves = [next(saved) if is_tensor else leaf for leaf, is_tensor in pairs]
            inputs, output = pytree.tree_unflatten(leaves, ctx.structure)
            result = function(inputs, output, *gradients)
            result = result if isinstance(result, tuple) else (result,)
            if len(result) != len(parameters):
                raise ArgumentError(
                    f"the backward of {self.name} returned {len(result)} gradients",
                    next=f"return one per parameter ({', '.join(parameters)}), or None for it",
                )
            return result[: ctx.positional]  # torch takes no gradients of keyword-only parameters

        self._custom.register_autograd(run, setup_context=setup)
        return function

    def _checked(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and raise if it mutated an argument or returned one."""
        named = _tensor_arguments(self.function, args, kwargs)
        if any(tensor.is_inference() for _, tensor in named) and not self.is_built_in:
            aliases = pytree.tree_map_only(torch.Tensor, _with_version_counter, (args, kwargs))
            args, kwargs = aliases
            named = _tensor_arguments(self.function, args, kwargs)
        versions = [
            (name, tensor, tensor._version)
            for name, tensor in named
            if _has_version_counter(tensor)
        ]
        result = self._call_counting_versions(*args, **kwargs)
        for name, tensor, version in versions:
            if tensor._version != version:
                raise ArgumentError(
                    f"{self.name} mutated its argument {name}",
                    where=_location(self.function),
                    next=f"work on a copy and return it: {name} = {name}.clone(); …; return {name}",
                )
        storages = {t.untyped_storage()._cdata: name for name, t in named if _has_storage(t)}
        for value in filter(_has_storage, pytree.tree_leaves(result)):
            owner = storages.setdefault(value.untyped_storage()._cdata, "")
            if owner:
                raise ArgumentError(
                    f"{self.name} returned its argument {owner}, or a view of it",
                    where=_location(self.function),
                    next=f"return a new tensor: {owner}.clone()",
                )
        return result

    def _call_counting_versions(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; in a compiled graph, torch would not count the writes to tensors."""
        if self.is_built_in:
            return self.function(*args, **kwargs)
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return self.function(*args, **kwargs)

    def _raise_no_fake(self, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(
            f"{self.name} has no fake (meta) function, so it can't be captured",
            where=_location(self.function),
            next=f"add one with @{self.__name__}.fake: a function of the same arguments that returns "
            "torch.empty(...) of the result's shape; or @….reference with a plain-torch version",
        )


@overload
def op(function: Callable[..., Any], /) -> Op: ...
@overload
def op(name: str, /) -> Callable[[Callable[..., Any]], Op]: ...
def op(name_or_function: str | Callable[..., Any], /) -> Op | Callable[[Callable[..., Any]], Op]:
    """Make an operator from a function.

    `@op("namespace::name")` names it; plain `@op` uses the names of the module and the function.
    """
    if isinstance(name_or_function, str):
        name = name_or_function
        if name.count("::") != 1 or not all(part.isidentifier() for part in name.split("::")):
            raise ArgumentError(f"{name!r} is not a valid operator name", next='"namespace::name"')
        return lambda function: Op(name, function)
    function = name_or_function
    _check_function(function)
    namespace = function.__module__.rpartition(".")[2].strip("_") or "fulgurite_user"
    return Op(f"{namespace}::{function.__name__}", function)


def _check_function(function: Any) -> None:
    if not isinstance(function, types.FunctionType):
        raise ArgumentError(
            f"{function!r} can't be an operator",
            next="pass a function made with def and type hints",
        )


# ---- schema --------------------------------------------------------------------------------------


def infer_schema(function: Callable[..., Any]) -> str:
    """The schema of a function, from its hints: `(Tensor x, float[]? factors=None) -> Tensor`."""
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        _raise_unsupported(function, "its hints", f"use a name unknown to its module: {error}")
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            _raise_unsupported(function, parameter.name, "takes any number of arguments")
        if parameter.name not in hints:
            _raise_unsupported(function, parameter.name, "has no type hint")
        text = _schema_type(function, parameter.name, hints[parameter.name])
        text = f"{text} {parameter.name}"
        if parameter.default is not parameter.empty:
            text += f"={_schema_default(parameter.default)}"
            if not _is_valid_schema(f"f({text}) -> Tensor"):
                reason = (
                    f"has the default {parameter.default!r}, which a schema can't hold (use None)"
                )
                _raise_unsupported(function, parameter.name, reason)
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        parameters.append(text)
    if "return" not in hints:
        _raise_unsupported(function, "its result", "has no type hint")
    returns = _schema_returns(function, hints["return"])
    return f"({', '.join(parameters)}) -> {returns}"


def _schema_type(function: Callable[..., Any], name: str, hint: Any) -> str:
    if hint in _SCHEMA_TYPES:
        return _SCHEMA_TYPES[hint]
    if hint in (int | float, float | int):
        return "Scalar"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = tuple(a for a in arguments if a is not type(None))
        if inner and len(inner) < len(arguments):
            return f"{_schema_type(function, name, typing.Union[inner])}?"  # noqa: UP007
    if (
        origin in _LIST_TYPES
        and arguments
        and all(a in (arguments[0], Ellipsis) for a in arguments)
    ):
        return f"{_schema_type(function, name, arguments[0])}[]"
    return _raise_unsupported(function, name, f"has the type {hint}, which an operator can't take")


def _schema_returns(function: Callable[..., Any], hint: Any) -> str:
    if hint is None or hint is type(None):
        _raise_unsupported(function, "its result", "is None: an operator must return a result")
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        return f"({', '.join(_schema_type(function, 'its result', item) for item in items)})"
    return _schema_type(function, "its result", hint)


def _schema_default(value: Any) -> str:
    if isinstance(value, (str, torch.device)):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_schema_default, value))}]"
    return str(value).removeprefix("torch.")


def _is_valid_schema(schema: str) -> bool:
    try:
        torch._C.parse_schema(schema)
    except RuntimeError:
        return False
    return True


def _raise_unsupported(function: Callable[..., Any], name: str, reason: str) -> typing.NoReturn:
    allowed = "Tensor, int, float, bool, str, torch.dtype, torch.device, Optional and list of these"
    raise ArgumentError(
        f"{function.__name__} can't be an operator: {name} {reason}",
        where=_location(function),
        next=f"hints may be {allowed}",
    )


def _tensor_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, value in _cached_signature(function).bind(*args, **kwargs).arguments.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        found += [(name, item) for item in items if isinstance(item, torch.Tensor)]
    return found


@functools.cache
def _cached_signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _with_version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or for one made in inference mode an alias of it that counts its versions."""
    if not tensor.is_inference() or type(tensor) is not torch.Tensor or not _has_storage(tensor):
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        layout = (tensor.storage_offset(), tensor.size(), tensor.stride())
        return alias.set_(tensor.untyped_storage(), *layout)  # type: ignore[call-overload]


def _has_version_counter(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference()


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 0


def _location(function: Callable[..., Any]) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno}, in {function.__name__}"
