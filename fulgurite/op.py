"""@fulgurite.op: a user's own operator, opaque to capture.

In: a Python function with type hints. Out: a torch custom operator, with its schema from the hints, a rule for
FakeTensors, and, if given, a backward.

    @fulgurite.op("mine::scale")
    def scale(x: Tensor, factors: list[float] | None = None) -> Tensor:
        ...

    @scale.fake
    def _(x, factors=None): return torch.empty_like(x)

    @scale.backward
    def _(inputs, output, grad): return grad * ..., None

    @scale.pieces                       # what generated kernels may compute instead, fused with neighbours
    def _(x, factors=None): return ...

An operator must not write to its arguments, and must not return one: capture relies on it.
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

_BASE = {
    torch.Tensor: "Tensor",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    torch.device: "Device",
    complex: "Scalar",
}
_LISTS = (list, tuple, Sequence, collections.abc.Sequence)
_pieces: dict[Any, Callable[..., Any]] = {}  # overload -> the same in smaller ops


def pieces_of(target: Any) -> Callable[..., Any] | None:
    """The operator as smaller ops, where it has such a rule."""
    return _pieces.get(target)


class Op:
    """An operator. Call it like the function it was made of."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        _check_function(function)
        self.name = name
        self.function = function
        self.schema = schema_of(function)
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self._custom = torch.library.custom_op(
            name, self._checked, mutates_args=(), schema=self.schema
        )
        self._custom.register_fake(self._no_fake_rule)

    @property
    def overload(self) -> Any:
        """The `OpOverload`, as it stands in traces."""
        namespace, name = self.name.split("::")
        return getattr(getattr(torch.ops, namespace), name).default

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._custom(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Op:
        return self  # as a function is: a copied module calls the same operator

    def __repr__(self) -> str:
        return f"<fulgurite.op {self.name}{self.schema}>"

    def fake(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Register what the result looks like (dtype, shape, strides), computed on FakeTensors."""
        self._custom.register_fake(rule)
        return rule

    def reference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register a plain-torch version: the test oracle, and the rule for FakeTensors."""
        self._custom.register_fake(function)
        return function

    def pieces(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Register the operator in terms of torch's own, for executors that fuse: it is taken apart where all
        its pieces end in generated kernels, and runs whole elsewhere. `NotImplemented`: not these arguments."""
        _pieces[self.overload] = rule
        return rule

    def backward(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Register `rule(inputs, output, *gradients)`, which returns a gradient or None per input."""
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
            result = rule(inputs, output, *gradients)
            result = result if isinstance(result, tuple) else (result,)
            if len(result) != len(parameters):
                raise ArgumentError(
                    f"the backward of {self.name} returned {len(result)} gradients",
                    next=f"return one per parameter ({', '.join(parameters)}), None where there is none",
                )
            return result[: ctx.positional]  # torch wants none of keyword-only parameters

        self._custom.register_autograd(run, setup_context=setup)
        return rule

    def _checked(self, *args: Any, **kwargs: Any) -> Any:
        """The function, refused if it wrote to an argument or returned one."""
        named = _tensor_arguments(self.function, args, kwargs)
        versions = [(name, tensor, tensor._version) for name, tensor in named if _counts(tensor)]
        result = self.function(*args, **kwargs)
        for name, tensor, version in versions:
            if tensor._version != version:
                raise ArgumentError(
                    f"{self.name} wrote to its argument {name}",
                    where=_place(self.function),
                    next=f"work on a copy and return it: {name} = {name}.clone(); …; return {name}",
                )
        storages = {t.untyped_storage()._cdata: name for name, t in named if _has_storage(t)}
        for value in filter(_has_storage, pytree.tree_leaves(result)):
            owner = storages.setdefault(value.untyped_storage()._cdata, "")
            if owner:
                raise ArgumentError(
                    f"{self.name} returned its argument {owner}, or a view of it",
                    where=_place(self.function),
                    next=f"return a new tensor: {owner}.clone()",
                )
        return result

    def _no_fake_rule(self, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(
            f"{self.name} has no rule for FakeTensors, so it can't be captured",
            where=_place(self.function),
            next=f"add one: @{self.__name__}.fake, a function of the same arguments that returns "
            "torch.empty(...) of the result's shape; or @….reference with a plain-torch version",
        )


@overload
def op(function: Callable[..., Any], /) -> Op: ...
@overload
def op(name: str, /) -> Callable[[Callable[..., Any]], Op]: ...
def op(name_or_function: str | Callable[..., Any], /) -> Op | Callable[[Callable[..., Any]], Op]:
    """Make an operator of a function; `"namespace::name"` names it, otherwise its own names do."""
    if isinstance(name_or_function, str):
        name = name_or_function
        if name.count("::") != 1 or not all(part.isidentifier() for part in name.split("::")):
            raise ArgumentError(f"{name!r} is not an operator's name", next='"namespace::name"')
        return lambda function: Op(name, function)
    function = name_or_function
    _check_function(function)
    namespace = function.__module__.rpartition(".")[2].strip("_") or "fulgurite_user"
    return Op(f"{namespace}::{function.__name__}", function)


def _check_function(function: Any) -> None:
    if not isinstance(function, types.FunctionType):
        raise ArgumentError(
            f"{function!r} can't be an operator", next="pass a function made with def, with hints"
        )


# ---- schema --------------------------------------------------------------------------------------


def schema_of(function: Callable[..., Any]) -> str:
    """`(Tensor x, float[]? factors=None) -> Tensor` from a function's hints."""
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        _refuse(function, "its hints", f"name something that its module does not have: {error}")
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            _refuse(function, parameter.name, "takes any number of arguments")
        if parameter.name not in hints:
            _refuse(function, parameter.name, "has no type hint")
        text = _type_text(function, parameter.name, hints[parameter.name])
        text = f"{text} {parameter.name}"
        if parameter.default is not parameter.empty:
            text += f"={_default_text(parameter.default)}"
            if not _parses(f"f({text}) -> Tensor"):
                why = f"has the default {parameter.default!r}, which a schema can't hold (None can be)"
                _refuse(function, parameter.name, why)
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        parameters.append(text)
    if "return" not in hints:
        _refuse(function, "its result", "has no type hint")
    returns = _returns_text(function, hints["return"])
    return f"({', '.join(parameters)}) -> {returns}"


def _type_text(function: Callable[..., Any], name: str, hint: Any) -> str:
    if hint in _BASE:
        return _BASE[hint]
    if hint in (int | float, float | int):
        return "Scalar"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = tuple(a for a in arguments if a is not type(None))
        if inner and len(inner) < len(arguments):
            return f"{_type_text(function, name, typing.Union[inner])}?"  # noqa: UP007
    if origin in _LISTS and arguments and all(a in (arguments[0], Ellipsis) for a in arguments):
        return f"{_type_text(function, name, arguments[0])}[]"
    return _refuse(function, name, f"has the type {hint}, which an operator can't take")


def _returns_text(function: Callable[..., Any], hint: Any) -> str:
    if hint is None or hint is type(None):
        _refuse(function, "its result", "is None: an operator returns what it made")
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        return f"({', '.join(_type_text(function, 'its result', item) for item in items)})"
    return _type_text(function, "its result", hint)


def _default_text(value: Any) -> str:
    if isinstance(value, (str, torch.device)):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_default_text, value))}]"
    return str(value).removeprefix("torch.")


def _parses(schema: str) -> bool:
    try:
        torch._C.parse_schema(schema)
    except RuntimeError:
        return False
    return True


def _refuse(function: Callable[..., Any], name: str, why: str) -> typing.NoReturn:
    allowed = "Tensor, int, float, bool, str, torch.dtype, torch.device, Optional and list of these"
    raise ArgumentError(
        f"{function.__name__} can't be an operator: {name} {why}",
        where=_place(function),
        next=f"hints may be {allowed}",
    )


def _tensor_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, value in _signature(function).bind(*args, **kwargs).arguments.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        found += [(name, item) for item in items if isinstance(item, torch.Tensor)]
    return found


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _counts(tensor: torch.Tensor) -> bool:
    return not tensor.is_inference()


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() > 0


def _place(function: Callable[..., Any]) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno}, in {function.__name__}"
