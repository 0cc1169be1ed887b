"""`@fulgurite.op`: schemas from hints, fake functions, backward, invalid operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import List, Optional  # noqa: UP035

import pytest
import torch
from torch import Tensor

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.op import infer_schema


@pytest.mark.parametrize(
    ("hints", "schema"),
    [
        (dict(x=Tensor), "(Tensor x) -> Tensor"),
        (dict(x=Optional[Tensor]), "(Tensor? x) -> Tensor"),
        (dict(x=Tensor | None, n=int), "(Tensor? x, SymInt n) -> Tensor"),
        (dict(x=list[Tensor], f=list[float]), "(Tensor[] x, float[] f) -> Tensor"),
        (dict(x=Tensor, f=Optional[list[float]]), "(Tensor x, float[]? f) -> Tensor"),
        (dict(x=Tensor, o=list[int] | None), "(Tensor x, SymInt[]? o) -> Tensor"),
        (dict(x=Tensor, o=Optional[List[Tensor]]), "(Tensor x, Tensor[]? o) -> Tensor"),  # noqa: UP006
        (dict(x=list[Tensor | None]), "(Tensor?[] x) -> Tensor"),
        (dict(x=Sequence[bool], s=str), "(bool[] x, str s) -> Tensor"),
        (
            dict(x=Tensor, d=torch.dtype, v=torch.device | None),
            "(Tensor x, ScalarType d, Device? v) -> Tensor",
        ),
        (dict(x=Tensor, s=int | float), "(Tensor x, Scalar s) -> Tensor"),
    ],
)
def test_schema_from_hints(hints, schema):
    names = ", ".join(hints)
    namespace = {}
    exec(f"def function({names}): ...", namespace)
    function = namespace["function"]
    function.__annotations__ = {**hints, "return": Tensor}
    assert infer_schema(function) == schema


def test_defaults_tuples_and_keyword_only():
    def function(
        x: Tensor, *, scale: float = 2.0, name: str = "a", sizes: tuple[int, ...] = (1, 2)
    ) -> tuple[Tensor, int]: ...

    assert infer_schema(function) == (
        '(Tensor x, *, float scale=2.0, str name="a", SymInt[] sizes=[1, 2]) -> (Tensor, SymInt)'
    )


@fulgurite.op("fulgurite_test::weighted")
def weighted(x: Tensor, weights: list[float] | None = None, bias: Tensor | None = None) -> Tensor:
    total = x * (sum(weights) if weights else 1.0)
    return total if bias is None else total + bias


@weighted.fake
def _(x, weights=None, bias=None):
    return torch.empty_like(x)


@weighted.backward
def _(inputs, output, grad):
    x, weights, bias = inputs
    return grad * (sum(weights) if weights else 1.0), None, None if bias is None else grad.sum(0)


def test_op_is_opaque_and_differentiable():
    f = fulgurite.compile(lambda x, b: weighted(x, [2.0, 3.0], b).relu(), fullgraph=True)
    x, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    out = f(x, b)
    torch.testing.assert_close(out, (x * 5 + b).relu())
    out.sum().backward()
    mask = (x * 5 + b > 0).float()
    torch.testing.assert_close(x.grad, mask * 5)
    torch.testing.assert_close(b.grad, mask.sum(0))
    assert "torch.ops.fulgurite_test.weighted" in str(f.last_trace("forward"))
    torch.testing.assert_close(weighted(x.detach()), x.detach() * 1.0)


def test_optional_list_of_tensors():
    @fulgurite.op("fulgurite_test::add_all")
    def add_all(x: Tensor, others: list[Tensor] | None = None) -> Tensor:
        return x.clone() if others is None else torch.stack([x, *others]).sum(0)

    @add_all.reference
    def _(x, others=None):
        return x + 0

    f = fulgurite.compile(lambda x: add_all(x, [x, x]) + add_all(x))
    assert torch.equal(f(torch.ones(3)), torch.full((3,), 4.0))


def test_mutating_or_returning_an_argument_raises():
    @fulgurite.op("fulgurite_test::rude")
    def rude(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return x + y

    with pytest.raises(ArgumentError) as caught:
        rude(torch.ones(2), torch.ones(2))
    assert "mutated its argument y" in str(caught.value) and "y.clone()" in str(caught.value)
    assert "test_op.py" in caught.value.details["where"]

    @fulgurite.op("fulgurite_test::echo")
    def echo(x: Tensor) -> Tensor:
        return x.view(-1)

    with pytest.raises(ArgumentError, match="returned its argument x"):
        echo(torch.ones(2, 2))


def test_missing_fake_function_raises():
    @fulgurite.op("fulgurite_test::opaque")
    def opaque(x: Tensor) -> Tensor:
        return x * 2

    assert torch.equal(opaque(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(Exception, match="no fake .meta. function"):
        fulgurite.compile(lambda x: opaque(x))(torch.ones(2))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(x): ...", "x has no type hint"),
        ("def f(x: Tensor): ...", "its result has no type hint"),
        ("def f(x: Tensor) -> None: ...", "must return a result"),
        ("def f(x: set) -> Tensor: ...", "which an operator can't take"),
        ("def f(*x: Tensor) -> Tensor: ...", "any number"),
    ],
)
def test_unsupported_signatures_raise(source, message):
    namespace = {"Tensor": Tensor}
    exec(source, namespace)
    with pytest.raises(ArgumentError, match=message):
        infer_schema(namespace["f"])


def test_invalid_names_raise():
    for name in ("scale", "a::b::c", "my-lib::scale"):
        with pytest.raises(ArgumentError, match="name"):
            fulgurite.op(name)


def test_backward_with_keyword_only_parameters():
    @fulgurite.op("test_op::weighted")
    def weighted(xs: list[Tensor], y: Tensor, *, factor: float = 2.0) -> tuple[Tensor, Tensor]:
        return sum(xs) * y * factor, y + 1

    @weighted.fake
    def _(xs, y, *, factor=2.0):
        return torch.empty_like(y), torch.empty_like(y)

    @weighted.backward
    def _(inputs, output, first, second):
        xs, y, factor = inputs
        return [first * y * factor for _ in xs], first * sum(xs) * factor + second, None

    def run(call):
        xs = [torch.ones(3, requires_grad=True) for _ in range(2)]
        y = torch.full((3,), 5.0, requires_grad=True)
        first, second = call(xs, y)
        (first.sum() + second.sum()).backward()
        return [x.grad.tolist() for x in (*xs, y)]

    def f(xs, y):
        return weighted(xs, y, factor=3.0)

    expected = [[15.0] * 3, [15.0] * 3, [7.0] * 3]
    assert run(f) == expected
    assert run(fulgurite.compile(f, fullgraph=True)) == expected


def test_defaults_of_every_type():
    @fulgurite.op("test_op::defaults")
    def defaults(
        x: Tensor,
        name: str = 'say "hi"\n',
        dtype: torch.dtype = torch.float64,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        sizes: tuple[int, ...] = (1, 2),
        scale: int | float | None = None,
    ) -> Tensor:
        return torch.full_like(x, len(name) + sum(sizes), dtype=dtype, device=device)

    assert defaults(torch.zeros(2)).tolist() == [12.0, 12.0]

    def infinite(x: Tensor, most: float = float("inf")) -> Tensor:
        return x * most

    with pytest.raises(ArgumentError, match="has the default inf"):
        fulgurite.op("test_op::infinite")(infinite)


@pytest.mark.parametrize("thing", [3, len, dict, torch.nn.ReLU()])
def test_only_functions_can_be_operators(thing):
    with pytest.raises(ArgumentError, match="can't be an operator"):
        fulgurite.op(thing)


def test_returning_a_view_inside_a_list_raises():
    @fulgurite.op("test_op::pieces")
    def pieces(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x * 2, [x[:1]]

    with pytest.raises(ArgumentError, match="returned its argument x"):
        pieces(torch.ones(2))


@fulgurite.op("test_op::writes_second")
def writes_second(x: Tensor, y: Tensor) -> Tensor:
    y.add_(1)
    return x * 2


@writes_second.fake
def _(x, y):
    return torch.empty_like(x)


@pytest.mark.parametrize("in_inference_mode", [False, True])
@pytest.mark.parametrize("made_in_inference_mode", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_mutation_is_caught_in_every_mode(in_inference_mode, made_in_inference_mode, is_compiled):
    function = fulgurite.compile(lambda x, y: writes_second(x, y) + 1)
    function = function if is_compiled else writes_second
    with torch.inference_mode(made_in_inference_mode):
        x, y = torch.randn(3), torch.randn(6).view(2, 3)[1]
    with torch.inference_mode(in_inference_mode), torch.no_grad():
        for _ in range(2):
            with pytest.raises(ArgumentError, match="mutated its argument y"):
                function(x, y)


def test_operators_take_tensors_of_inference_mode():
    @fulgurite.op("test_op::row_sum")
    def row_sum(x: Tensor, more: list[Tensor]) -> Tensor:
        return sum((part.sum(-1) for part in more), x.sum(-1))

    @row_sum.fake
    def _(x, more):
        return x.new_empty(x.shape[:-1])

    with torch.inference_mode():
        x = torch.randn(4, 6).t()
        expected = x.sum(-1) * 3
        torch.testing.assert_close(row_sum(x, [x, x]), expected)
        compiled = fulgurite.compile(lambda x: row_sum(x, [x, x]) + 1)
        torch.testing.assert_close(compiled(x), expected + 1)
