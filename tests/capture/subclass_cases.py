"""Tensor subclasses and functions of them, for the tests of compiled subclasses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

import fulgurite
from fulgurite.quant import quantize


class Labelled(Tensor):
    """A subclass with `__torch_function__` only: the label of the first argument stays."""

    label: str

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, Labelled):
            owner = next(a for a in pytree.tree_leaves(args) if isinstance(a, Labelled))
            result.label = getattr(owner, "label", "")
        return result


def label(x: Tensor, text: str) -> Labelled:
    result = x.as_subclass(Labelled)
    result.label = text
    return result


class Shifted(Tensor):
    """`base + shift`. Its context holds an int, a string and None; its second tensor is optional."""

    @staticmethod
    def __new__(cls, base, extra=None, shift=0, label="shifted", note=None):
        return Tensor._make_wrapper_subclass(
            cls,
            base.shape,
            strides=base.stride(),
            dtype=base.dtype,
            device=base.device,
            requires_grad=base.requires_grad,
        )

    def __init__(self, base, extra=None, shift=0, label="shifted", note=None):
        self.base, self.extra = base, extra
        self.shift, self.label, self.note = shift, label, note

    def __repr__(self, *, tensor_contents=None):
        return f"Shifted({self.base!r}, {self.extra!r}, {self.shift}, {self.label!r})"

    def __tensor_flatten__(self):
        tensors = ["base"] if self.extra is None else ["base", "extra"]
        return tensors, (self.shift, self.label, self.note)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return Shifted(inner["base"], inner.get("extra"), *context)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        owner = next(a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Shifted))

        def run(part):
            values = pytree.tree_map_only(Shifted, part, (args, kwargs or {}))
            return op(*values[0], **values[1])

        base = run(lambda one: one.base)
        extra = None if owner.extra is None else run(lambda one: one.extra)
        if not isinstance(base, Tensor):
            return base
        result = Shifted(base, extra, owner.shift + 1, owner.label, owner.note)
        return return_and_correct_aliasing(op, args, kwargs or {}, result)


# ---- inputs: functions of a random source, so that eager and compiled get equal ones --------------


def plain(*shape: int, grad: bool = False) -> Any:
    return lambda: torch.randn(shape, requires_grad=grad)


def two(*shape: int, grad: bool = False) -> Any:
    return lambda: TwoTensor(torch.randn(shape), torch.randn(shape)).requires_grad_(grad)


def two_of_two(*shape: int, grad: bool = False) -> Any:
    return lambda: TwoTensor(two(*shape)(), two(*shape)()).requires_grad_(grad)


def shifted(*shape: int, extra: bool = True, grad: bool = False) -> Any:
    def make():
        second = torch.randn(shape) if extra else None
        return Shifted(torch.randn(shape), second, 3, "mine").requires_grad_(grad)

    return make


def quantized(*shape: int, format: str = "int8") -> Any:
    return lambda: quantize(torch.randn(shape), format)


def labelled(*shape: int) -> Any:
    return lambda: label(torch.randn(shape), "mine")


def jagged(*lengths: int, width: int = 4, grad: bool = False) -> Any:
    def make():
        parts = [torch.randn(length, width) for length in lengths]
        return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=grad)

    return make


# ---- functions --------------------------------------------------------------------------------------


def write(x):
    x.mul_(2)
    return x + 1


def write_and_return(x):
    x.add_(1)
    return x


def write_a_view(x):
    x[0].mul_(3)
    return x.sum(), x


def write_plain_from(x, y):
    y.add_(x.a)
    return x * y.sum()


def conditional(x):
    if isinstance(x, TwoTensor):
        return x * 2
    return x * 3


def same_twice(x):
    y = x * 2
    return y, y


def views_of_one(x):
    y = TwoTensor(x, x + 1)
    return y, y.view(-1), y.t()


def quantize_inside(x):
    return fulgurite.quant.quantize(x, "int8"), x + 1


def dequantize_inside(q):
    return q.dequantize() * 2


def round_trip(x):
    return quantize(x, "int8").dequantize() + x


def nested_inside(x):
    offsets = torch.tensor([0, 2, 3, x.shape[0]], device=x.device)
    return torch.nested.nested_tensor_from_jagged(x * 2, offsets), x + 1


FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    # made inside
    "made inside": (lambda x: (TwoTensor(x, x * 2) * 3, x + 1), [plain(3, 4)]),
    "made inside, last": (lambda x: (x + 1, TwoTensor(x, x * 2) * 3), [plain(3, 4)]),
    "made inside, alone": (lambda x: TwoTensor(x, x * 2) * 3, [plain(3, 4)]),
    "made inside, of inputs": (lambda x, y: TwoTensor(x, y), [plain(3, 4), plain(3, 4)]),
    "made inside, not returned": (lambda x: (TwoTensor(x, x * 2) * 3).b.sum(), [plain(3, 4)]),
    "made inside, nested": (
        lambda x: TwoTensor(TwoTensor(x, x + 1), TwoTensor(x * 2, x - 1)) * 3,
        [plain(3, 4)],
    ),
    "made inside, views": (views_of_one, [plain(3, 4)]),
    "made inside, context": (lambda x: (Shifted(x, None, 2, "a") + x, x * 2), [plain(3, 4)]),
    "made inside, two tensors": (lambda x: Shifted(x, x * 2, 2, "a", None).exp(), [plain(3, 4)]),
    "quantize inside": (quantize_inside, [plain(4, 8)]),
    "quantize inside, nvfp4": (lambda x: quantize(x, "nvfp4"), [plain(4, 32)]),
    "quantize inside, round trip": (round_trip, [plain(4, 8)]),
    "two of quantized": (
        lambda x: TwoTensor(quantize(x, "int8"), quantize(x * 2, "int8")),
        [plain(4, 8)],
    ),
    "jagged made inside": (nested_inside, [plain(6, 4)]),
    # inputs
    "input": (lambda x: x * 2 + 1, [two(3, 4)]),
    "input and plain": (lambda x, y: (x * y, y + 1), [two(3, 4), plain(3, 4)]),
    "input of inputs": (lambda x: x.a + x.b * 2, [two(3, 4)]),
    "two inputs": (lambda x, y: x @ y.t(), [two(3, 4), two(2, 4)]),
    "input, nested": (lambda x: (x * 2, x.a + 1), [two_of_two(3, 4)]),
    "input by type": (conditional, [two(3, 4)]),
    "input, context": (lambda x: (x * 2, x.base + x.shift), [shifted(3, 4)]),
    "input, one tensor": (lambda x: x.sigmoid() + 1, [shifted(3, 4, extra=False)]),
    "reduction": (lambda x: (x.sum(), x.softmax(-1)), [two(3, 4)]),
    "quantized input": (dequantize_inside, [quantized(4, 8)]),
    "quantized input and output": (lambda q: (q.clone(), q.dequantize()), [quantized(4, 8)]),
    "quantized slice": (lambda q: q[1:3], [quantized(4, 8)]),
    "labelled": (lambda x: (x * 2, x.sum()), [labelled(3, 4)]),
    "labelled and plain": (lambda x, y: (x + y, y * 2), [labelled(3, 4), plain(3, 4)]),
    "labelled made inside": (lambda x: x.as_subclass(Labelled) * 2, [plain(3, 4)]),
    # outputs
    "unchanged": (lambda x: x, [two(3, 4)]),
    "unchanged and plain": (lambda x, y: (y + 1, x, y), [two(3, 4), plain(3, 4)]),
    "view": (lambda x: x.view(2, 6), [two(3, 4)]),
    "views": (lambda x: (x.t(), x[1:], x[0], x.unsqueeze(0)), [two(3, 4)]),
    "inner tensors": (lambda x: (x.a, x.b, x.a.view(-1)), [two(3, 4)]),
    "same twice": (same_twice, [two(3, 4)]),
    "same input twice": (lambda x: (x, x, x.detach()), [two(3, 4)]),
    "chunks": (lambda x: (x * 2).chunk(2, 1), [two(3, 4)]),
    "containers": (lambda x: {"a": [x * 2], "b": (x, None, 3)}, [two(3, 4)]),
    # writes
    "write": (write, [two(3, 4)]),
    "write and return": (write_and_return, [two(3, 4)]),
    "write a view": (write_a_view, [two(3, 4)]),
    "write plain": (write_plain_from, [two(3, 4), plain(3, 4)]),
    "write nested": (write, [two_of_two(3, 4)]),
    "write, context": (write, [shifted(3, 4)]),
    "copy_": (lambda x, y: x.copy_(y * 2), [two(3, 4), two(3, 4)]),
    # jagged nested tensors
    "jagged": (lambda x: x * 2 + 1, [jagged(2, 3, 1)]),
    "jagged values": (lambda x: (x.sin(), x.values() + 1), [jagged(2, 3, 1)]),
    "jagged matmul": (lambda x, w: torch.relu(x @ w), [jagged(2, 3, 1), plain(4, 5)]),
    "jagged sum": (lambda x: x.sum(-1), [jagged(2, 3, 1)]),
    "jagged to padded": (lambda x: x.to_padded_tensor(0.0) * 2, [jagged(2, 3, 1)]),
    "jagged pair": (lambda x: x + x.cos(), [jagged(2, 3, 1)]),
}

TRAINING: dict[str, tuple[Any, list[Any]]] = {
    "input": (lambda x: (x * 2).sin(), [two(3, 4, grad=True)]),
    "input and plain": (lambda x, y: (x * y, y.exp()), [two(3, 4, grad=True), plain(3, 4)]),
    "plain input only": (lambda x, y: x * y.sin(), [two(3, 4), plain(3, 4, grad=True)]),
    "made inside": (lambda x: (TwoTensor(x, x * 2).sin(), x + 1), [plain(3, 4, grad=True)]),
    "nested": (lambda x: (x * 2).sin(), [two_of_two(3, 4, grad=True)]),
    "context": (lambda x: (x * 2).sin(), [shifted(3, 4, grad=True)]),
    "matmul": (lambda x, w: (x @ w).relu(), [two(3, 4, grad=True), two(4, 5, grad=True)]),
    "matmul by plain": (lambda x, w: (x @ w).relu(), [two(3, 4), plain(4, 5, grad=True)]),
    "view": (lambda x: x.sin().view(-1)[1:], [two(3, 4, grad=True)]),
    "view of input": (lambda x: (x.t(), x * 2), [two(3, 4, grad=True)]),
    "same twice": (same_twice, [two(3, 4, grad=True)]),
    "some without gradient": (lambda x: (x.sin(), x.detach() * 2), [two(3, 4, grad=True)]),
    "norm": (
        lambda x, w: F.layer_norm(x, (4,), w, None),
        [two(3, 4, grad=True), two(4, grad=True)],
    ),
    "jagged": (lambda x: (x * 2).sin(), [jagged(2, 3, 1, grad=True)]),
    "jagged linear": (
        lambda x, w, b: F.linear(x, w, b).relu(),
        [jagged(2, 3, 1, grad=True), plain(5, 4, grad=True), plain(5, grad=True)],
    ),
    "jagged norm": (
        lambda x, w: F.layer_norm(x, (4,), w, None) + x,
        [jagged(2, 3, 1, grad=True), plain(4, grad=True)],
    ),
    "labelled": (lambda x: x.sin() * 2, [labelled(3, 4)]),
}


class Scaled(Tensor):
    """`base * scale`. Views keep the subclass; any other op, `as_strided` too, returns a plain tensor."""

    @staticmethod
    def __new__(cls, base, scale):
        return Tensor._make_wrapper_subclass(
            cls, base.shape, strides=base.stride(), dtype=base.dtype, device=base.device
        )

    def __init__(self, base, scale):
        self.base, self.scale = base, scale

    def __tensor_flatten__(self):
        return ["base"], self.scale

    @staticmethod
    def __tensor_unflatten__(inner, scale, outer_size, outer_stride):
        return Scaled(inner["base"], scale)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            result = Scaled(op(args[0].base, *args[1:]), args[0].scale)
            return return_and_correct_aliasing(op, args, kwargs or {}, result)
        unwrap = pytree.tree_map_only(Scaled, lambda x: x.base * x.scale, (args, kwargs or {}))
        return op(*unwrap[0], **unwrap[1])
