"""Errors of the program: caught by the program, of asserts, and of writes that eager mode refuses."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.errors import GraphBreakError, OpError


def catch_in_place(x):
    x = x.sin()
    try:
        y = x.reshape(7, 7)
    except RuntimeError:
        y = x.sum()
    return y * 2


def square(x):
    return x @ x


def catch_in_callee(x):
    try:
        return square(x)
    except RuntimeError:
        return x + 1


def catch_index_error(x):
    try:
        return x[5]
    except IndexError:
        return x + 1


def catch_around_with(x):
    y = x * 2
    try:
        y = y + 1
        with torch.no_grad():
            y = y.view(5)
    except RuntimeError:
        y = y - 3
    finally:
        y = y * 2
    return y.sin()


def suppress(x):
    with contextlib.suppress(RuntimeError):
        x = x.view(5)
    return x + 1


def read_message(x):
    try:
        return torch.cat([x, x[:, 0]])
    except (TypeError, RuntimeError) as error:
        return x + len(str(error))


def catch_in_loop(x):
    results = []
    for shape in ((5,), (6,), (2, 3)):
        try:
            results.append(x.view(shape).sin())
        except RuntimeError:
            results.append(x.cos())
    return results


ASSERTS = """
def catch_assert(x):
    try:
        assert (x > 5).all(), "small"
    except AssertionError as error:
        return x - len(str(error))
    return x + 1


def assert_positive(x):
    assert (x > 0).all(), "must be positive"
    return x + 1


def assert_plain(x):
    assert x.sum() > 0
    return x + 1
"""
asserts: dict = {}
exec(ASSERTS, asserts)  # pytest would rewrite them


CAUGHT = [
    catch_in_place,
    catch_in_callee,
    catch_index_error,
    catch_around_with,
    suppress,
    read_message,
    catch_in_loop,
    asserts["catch_assert"],
]


@pytest.mark.parametrize("f", CAUGHT)
@pytest.mark.parametrize("strict", ["1", "0"])
@pytest.mark.filterwarnings("ignore::fulgurite.errors.FallbackWarning")
def test_errors_that_the_program_catches(f, strict, monkeypatch):
    monkeypatch.setenv("FULGURITE_STRICT", strict)
    compiled = fulgurite.compile(f, executors="torch")
    for _ in range(2):
        x = torch.randn(2, 3)
        torch.testing.assert_close(compiled(x), f(x))
    assert compiled.breaks


def test_other_errors_raise_in_strict_mode():
    def f(x):
        with torch.no_grad():
            return square(x)

    with pytest.raises(OpError, match="matmul"):
        fulgurite.compile(f)(torch.randn(2, 3))


def test_try_without_an_error_is_one_graph():
    def f(x):
        try:
            return x.sin() + 1
        except RuntimeError:
            return x

    x = torch.randn(3)
    torch.testing.assert_close(fulgurite.compile(f, fullgraph=True)(x), f(x))


@pytest.mark.filterwarnings("ignore::fulgurite.errors.FallbackWarning")
def test_index_error_is_eagers(monkeypatch):
    monkeypatch.delenv("FULGURITE_STRICT")
    with pytest.raises(IndexError, match=r"^index 5 is out of bounds for dimension 0 with size 2$"):
        fulgurite.compile(lambda x: x[5])(torch.randn(2, 3))


@pytest.mark.parametrize("f", [asserts["assert_positive"], asserts["assert_plain"]])
@pytest.mark.parametrize("executors", ["torch", "fuser"])
def test_asserts_raise_assertion_errors(f, executors):
    compiled = fulgurite.compile(f, executors=[executors, "torch"], fullgraph=True)
    x = torch.ones(3)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), f(x))
        with pytest.raises(AssertionError) as ours:
            compiled(-x)
        with pytest.raises(AssertionError) as eager:
            f(-x)
        assert ours.value.args == eager.value.args


def test_the_error_of_an_op_that_asserts_is_eagers():
    def f(x):
        torch._assert_async((x > 0).all(), "must be positive")
        return x + 1

    with pytest.raises(RuntimeError, match="must be positive"):
        fulgurite.compile(f)(-torch.ones(3))


def set_row_of_expanded(x):
    x.expand(3, 3)[1] = 4
    return x


OVERLAPPING = {  # refused by eager mode
    "expand": (lambda x: x.expand(3, 3).add_(1), (1, 3)),
    "relu": (lambda x: F.relu(x.expand(3, 3), inplace=True), (1, 3)),
    "setitem": (set_row_of_expanded, (3, 1)),
    "shifted": (lambda x: x[1:].add_(x[:-1]), (4,)),
    "copy": (lambda x: x[1:].copy_(x[:-1]), (4,)),
    "transposed": (lambda x: x.add_(x.t()), (3, 3)),
    "scatter": (lambda x: x.scatter_(0, torch.zeros(4, dtype=torch.int64), x), (4,)),
    "out": (lambda x: torch.add(x, 1, out=x[:1].expand(4)), (4,)),
    "foreach": (lambda x: torch._foreach_add_([x[:2], x[2:].expand(2, 2)], 1), (3,)),
}


@pytest.mark.parametrize("name", OVERLAPPING)
@pytest.mark.parametrize("dynamic", [False, True])
def test_overlapping_writes_raise_eagers_error(name, dynamic):
    f, shape = OVERLAPPING[name]
    with pytest.raises(RuntimeError) as eager:
        f(torch.ones(shape))
    with pytest.raises(RuntimeError) as ours:
        fulgurite.compile(f, dynamic=dynamic)(torch.ones(shape))
    assert str(ours.value) == str(eager.value)


@pytest.mark.filterwarnings("ignore:Use of masked_fill_")
def test_an_overlapping_write_that_eager_runs():
    def f(x):
        return x.expand(3, 3).masked_fill_(x > 0, 2) * 1

    compiled = fulgurite.compile(f)
    torch.testing.assert_close(compiled(torch.ones(1, 3)), f(torch.ones(1, 3)))
    assert "several elements share" in str(compiled.explain())


def test_overlapping_fills():
    """Eager mode takes them. torch's functionalization sums what is written through `expand`."""

    def f(x, y):
        return x.expand(3, 3).fill_(2), x * 1, y.expand(3, 3).zero_(), y * 1

    ours, eager = [torch.ones(1, 3), torch.ones(1, 3)], [torch.ones(1, 3), torch.ones(1, 3)]
    torch.testing.assert_close(fulgurite.compile(f)(*ours), f(*eager))
    torch.testing.assert_close(ours, eager)


def test_an_overlapping_write_is_a_graph_break():
    with pytest.raises(GraphBreakError, match="several elements share"):
        fulgurite.compile(OVERLAPPING["expand"][0], fullgraph=True)(torch.ones(1, 3))


def add_halves(x, n):
    x[:n].add_(x[6 : 6 + n])
    return x * 1


def test_overlap_that_depends_on_a_size():
    compiled = fulgurite.compile(add_halves)
    for n in (2, 3, 4):
        torch.testing.assert_close(compiled(torch.ones(20), n), add_halves(torch.ones(20), n))
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        compiled(torch.ones(20), 8)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.add_(x),
        lambda x: x[:2].copy_(x[:2]),
        lambda x: x[:2].add_(x[2:4]),
        lambda x: x[::2].add_(x[1::2]),
        lambda x: x.expand(3, 4)[:, :1].mul(2),
    ],
)
def test_other_writes_stay_in_the_graph(f):
    ours, eager = torch.arange(4.0), torch.arange(4.0)
    compiled = fulgurite.compile(f, fullgraph=True)
    torch.testing.assert_close(compiled(ours), f(eager))
    torch.testing.assert_close(ours, eager)
