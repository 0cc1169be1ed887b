"""Tensor subclasses as inputs, outputs and intermediate values of compiled functions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,
    return_and_correct_aliasing,
)

import fulgurite
from fulgurite.capture.subclasses import specialize_symbols
from fulgurite.errors import FallbackWarning
from fulgurite.quant import FORMATS, quantize
from tests.capture.subclass_cases import (
    FUNCTIONS,
    TRAINING,
    Labelled,
    Scaled,
    Shifted,
    jagged,
    two,
    two_of_two,
)

OFTEN = [  # checked in every mode
    *("made inside", "made inside, context", "quantize inside", "jagged made inside"),
    *("input and plain", "labelled", "containers", "write, context"),
]
WITH_OUTER_STRIDES = ("made inside", "input and plain", "containers")  # TwoTensor passes them on
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def assert_same(found: Any, expected: Any, where: str = "result") -> None:
    """Types, values, gradients, metadata and the inner tensors must agree."""
    assert type(found) is type(expected), (where, type(found), type(expected))
    if isinstance(expected, (tuple, list)):
        assert len(found) == len(expected), where
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{k}]")
    elif isinstance(expected, dict):
        assert_same([*found.items()], [*expected.items()], where)
    elif isinstance(expected, Tensor):
        assert_same_tensor(found, expected, where)
    else:
        assert found == expected, where


def assert_same_tensor(found: Tensor, expected: Tensor, where: str) -> None:
    for name in ("dtype", "device", "layout", "requires_grad", "is_nested"):
        assert getattr(found, name) == getattr(expected, name), (where, name)
    assert found.is_inference() == expected.is_inference(), where
    if isinstance(expected, Labelled):
        assert getattr(found, "label", None) == getattr(expected, "label", None), where
        found, expected = found.as_subclass(Tensor), expected.as_subclass(Tensor)
    if not is_traceable_wrapper_subclass(expected):
        assert found.stride() == expected.stride(), where
        torch.testing.assert_close(found, expected, msg=lambda text: f"{where}: {text}")
        return
    names, context = expected.__tensor_flatten__()
    found_names, found_context = found.__tensor_flatten__()
    assert found_names == names, where
    if expected.is_nested:
        assert found.dim() == expected.dim() and found._ragged_idx == expected._ragged_idx
    else:
        assert found.shape == expected.shape and found.stride() == expected.stride(), where
        assert found_context == context, where
    for name in names:
        inner = getattr(found, name), getattr(expected, name)
        assert_same(*inner, f"{where}.{name}")


def make_twice(makers: list[Any]) -> tuple[list[Any], list[Any]]:
    """Two equal sets of inputs."""
    sets = []
    for _ in range(2):
        torch.manual_seed(0)
        sets.append([make() for make in makers])
    return sets[0], sets[1]


def check(name: str, mode: str = "no_grad", **options: Any) -> Any:
    """Compare a function of `FUNCTIONS` with eager: its results, and what it wrote into its inputs."""
    function, makers = FUNCTIONS[name]
    compiled = fulgurite.compile(function, **options)
    for _ in range(2):  # the second call does not go through TorchDynamo
        ours, theirs = make_twice(makers)
        with MODES[mode]():
            expected = function(*theirs)
            found = compiled(*ours)
        assert_same(found, expected)
        assert_same(ours, theirs, "inputs")
    return compiled


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_subclasses(name):
    compiled = check(name)
    assert (compiled.graphs or name == "unchanged") and not compiled.breaks


@pytest.mark.parametrize("mode", ["grad", "inference"])
@pytest.mark.parametrize("name", OFTEN)
def test_functions_of_subclasses_in_other_modes(name, mode):
    check(name, mode, executors=["torch"])


@pytest.mark.parametrize("name", OFTEN)
def test_functions_of_subclasses_with_dynamic_shapes(name):
    if name in WITH_OUTER_STRIDES and TorchVersion(torch.__version__) < (2, 13):
        pytest.skip("torch 2.11 gives a wrapper of dynamic sizes a size as its stride")
    check(name, dynamic=True)


@pytest.mark.parametrize("name", TRAINING)
def test_gradients_of_subclasses(name):
    function, makers = TRAINING[name]
    compiled = fulgurite.compile(function)
    for _ in range(2):
        ours, theirs = make_twice(makers)
        expected = function(*theirs)
        found = compiled(*ours)
        assert_same(found, expected)
        backward(expected), backward(found)
        assert_same(gradients(ours), gradients(theirs), "gradients")
    assert not compiled.breaks


def backward(result: Any) -> None:
    """Backward with a gradient of each result's own class."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    torch.autograd.backward(leaves, [torch.full_like(leaf, 0.5) for leaf in leaves])


def gradients(inputs: list[Any]) -> list[Any]:
    return [value.grad for value in inputs if isinstance(value, Tensor)]


def add_to_symbols(x, n):
    return Shifted(x, None, n, "a") * 2, Shifted(x, None, x.shape[0], "b") + n


def make_format(x, n):
    return quantize(x, "int8"), x * n


@pytest.mark.parametrize(
    ("function", "dynamic"), [(add_to_symbols, None), (add_to_symbols, True), (make_format, True)]
)
def test_symbols_in_the_context_of_a_result(function, dynamic):
    compiled = fulgurite.compile(function, dynamic=dynamic, executors=["torch"])
    for rows, n in ((3, 2), (3, 3), (5, 7), (3, 2), (5, -1)):
        x = torch.randn(rows, 8)
        assert_same(compiled(x, n), function(x, n))


def test_a_float_in_the_context_of_a_result():
    compiled = fulgurite.compile(lambda x, s: Shifted(x, None, s) * s, executors=["torch"])
    for s in (0.5, 1.5, 2.5):
        found = compiled(torch.ones(2), s)
        assert type(found.shift) is float and found.shift == s + 1
        assert found.base.tolist() == [s, s]


def test_specialized_context_keeps_what_holds_no_symbol():
    context = {"a": (1, [2.0, None]), "b": FORMATS["int8"], "c": torch.Size([3])}
    assert specialize_symbols(context) is context


def write_and_add(x, y):
    x.mul_(2)
    return x + y


MEMORY = {  # two inputs, of which the first is written
    "disjoint": lambda a, b: (TwoTensor(a, b), a.clone()),
    "inner tensor": lambda a, b: (TwoTensor(a, b), a),
    "part of an inner tensor": lambda a, b: (TwoTensor(a, b), b[1:2]),
    "written by the first": lambda a, b: (a, TwoTensor(a, b)),
    "nested": lambda a, b: (TwoTensor(TwoTensor(a, b), TwoTensor(b * 2, a * 2)), b),
}
MEMORY_THAT_AOT_REFUSES = {
    "same inner tensors": lambda a, b: (TwoTensor(a, a), b),
    "view": lambda a, b: _with_view(TwoTensor(a, b)),
}


def _with_view(x):
    return x, x.view(-1)


def check_memory(compiled: Any, name: str) -> None:
    results = []
    for function in (compiled, write_and_add):
        x, y = (MEMORY | MEMORY_THAT_AOT_REFUSES)[name](torch.arange(4.0), torch.ones(4))
        results.append((function(x, y), x, y))
    assert_same(*results, name)


@pytest.mark.parametrize("first", ["disjoint", "inner tensor"])
def test_inner_tensors_that_share_memory_with_other_inputs(first):
    compiled = fulgurite.compile(write_and_add, executors=["torch"])
    for name in (first, *MEMORY):
        check_memory(compiled, name)


@pytest.mark.parametrize("name", MEMORY_THAT_AOT_REFUSES)
def test_shared_memory_that_aot_autograd_refuses_runs_op_by_op(name, monkeypatch):
    monkeypatch.setenv("FULGURITE_STRICT", "0")
    compiled = fulgurite.compile(write_and_add, executors=["torch"])
    with pytest.warns(FallbackWarning):
        check_memory(compiled, name)
    check_memory(compiled, "disjoint")


@pytest.mark.filterwarnings("ignore::fulgurite.errors.FallbackWarning")
def test_views_of_a_subclass_whose_as_strided_is_plain(monkeypatch):
    monkeypatch.setenv("FULGURITE_STRICT", "0")
    base = torch.arange(6.0).view(2, 3)
    view, product = fulgurite.compile(lambda x: (x.view(-1), x * 3))(Scaled(base, 2.0))
    assert type(view) is Scaled and view.scale == 2.0 and type(product) is Tensor
    assert view.base.data_ptr() == base.data_ptr()
    torch.testing.assert_close(product, base * 6)


class WithoutOffset(TwoTensor):
    """Its wrapper says nothing of where in memory its parts begin."""

    @staticmethod
    def __new__(cls, a, b, outer_size=None, outer_stride=None):
        size = a.shape if outer_size is None else outer_size
        stride = a.stride() if outer_stride is None else outer_stride
        return Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=a.dtype)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return WithoutOffset(inner["a"], inner["b"], outer_size, outer_stride)

    @classmethod
    def __torch_dispatch__(cls, op, types, args, kwargs):
        parts = [
            op(*pytree.tree_map_only(WithoutOffset, lambda x, name=name: getattr(x, name), args))
            for name in ("a", "b")
        ]
        return return_and_correct_aliasing(op, args, kwargs or {}, WithoutOffset(*parts))


@pytest.mark.filterwarnings("ignore::fulgurite.errors.FallbackWarning")
def test_views_of_a_subclass_without_an_offset():
    base = torch.arange(12.0).view(3, 4)
    value = WithoutOffset(base, base * 2)
    view, same = fulgurite.compile(lambda x: (x[1:], x.view(-1)))(value)
    torch.testing.assert_close(view.a, base[1:])
    torch.testing.assert_close(view.b, base[1:] * 2)
    torch.testing.assert_close(same.a, base.view(-1))
    assert view.a.data_ptr() == base[1:].data_ptr()


class Named(Tensor):
    """A subclass without `__torch_dispatch__`."""


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[1:],
        lambda x: (x, x.t(), x.unbind()),
        lambda x: x.add_(1),
        lambda x: (y := x.sin(), y[1:]),
        lambda x: x.detach(),
    ],
)
def test_a_subclass_without_torch_dispatch(function):
    inputs = [torch.arange(6.0).view(2, 3).as_subclass(Named) for _ in range(2)]
    compiled = fulgurite.compile(function)
    for _ in range(2):
        found, expected = compiled(inputs[0]), function(inputs[1])
        assert pytree.tree_map(type, found) == pytree.tree_map(type, expected)
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*inputs)


def test_the_same_subclass_as_two_inputs():
    compiled = fulgurite.compile(write_and_add, executors=["torch"])
    for equal in (True, False, True):
        results = []
        for function in (compiled, write_and_add):
            x, other = two(4)(), two(4)()
            y = x if equal else other
            results.append((function(x, y), x, y))
            torch.manual_seed(0)
        torch.manual_seed(0)
    assert_same(*results)


def test_jagged_tensors_of_changing_batches():
    def function(x):
        y = x * 2
        return y, (y + x).sin(), x.values().sum()

    compiled = fulgurite.compile(function)
    for each in ((2, 3, 1), (4, 1), (2, 0, 3), (7, 8, 9)):
        (x,), (other,) = make_twice([jagged(*each)])
        found = compiled(x)
        assert_same(found, function(other))
        assert found[0].shape == x.shape == found[1].shape  # the same ragged size
        assert torch.equal((found[0] + x).values(), 3 * x.values())


class Affine(nn.Module):
    """A module whose weight is a subclass; the bias and a buffer are plain."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.bias + self.offset


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Affine(two(4, 4)())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu() + x


@pytest.mark.parametrize("weight", [two(4, 4), two_of_two(4, 4)], ids=["two", "nested"])
def test_training_of_subclass_parameters(weight):
    eager = Affine(weight())
    compiled = fulgurite.compile(copy.deepcopy(eager))
    results = []
    batches = [torch.randn(3, 4) for _ in range(3)]
    for model in (compiled, eager):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        outputs = []
        for x in batches:
            optimizer.zero_grad()
            outputs.append(model(x).sin())
            backward(outputs[-1])
            optimizer.step()
        parameters = [parameter.detach() for parameter in model.parameters()]
        results.append((outputs, parameters, gradients([*model.parameters()])))
    assert_same(*results)
    assert not compiled.breaks and all(isinstance(p, nn.Parameter) for p in compiled.parameters())


def test_repeated_layers_with_subclass_parameters():
    model = nn.Sequential(*[Block() for _ in range(5)])
    compiled = fulgurite.compile(model, granularity="blocks")
    x = two(3, 4)()
    assert_same(compiled(x), model(x))
    with torch.no_grad():
        assert_same(compiled(x), model(x))
    assert len(compiled.graphs) < 4


def test_quantized_parameters():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            weight = quantize(torch.randn(8, 16), "int8")
            self.weight = nn.Parameter(weight, requires_grad=False)

        def forward(self, x):
            return F.linear(x, self.weight.dequantize()), self.weight

    model = Linear()
    compiled = fulgurite.compile(model)
    x = torch.randn(3, 16, requires_grad=True)
    found, weight = compiled(x)
    assert_same(found, model(x)[0])
    assert weight is model.weight
    found.sum().backward()
    torch.testing.assert_close(x.grad, model.weight.dequantize().sum(0).expand(3, -1))
