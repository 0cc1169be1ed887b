"""Gathers: positions out of range raise eager's error, whatever the memory of the source looks like."""

from __future__ import annotations

import pytest
import torch

import fulgurite

F = torch.nn.functional
CASES = {
    "index": lambda x, i: x[i] * 2,
    "unsafe index": lambda x, i: torch.ops.aten._unsafe_index(x, [i]) * 2,
    "index_select": lambda x, i: x.index_select(0, i) * 2,
    "gather": lambda x, i: x.gather(0, i[:, None].expand(len(i), 4)) * 2,
    "take": lambda x, i: x.take(i * 4) + 1,
    "embedding": lambda x, i: F.embedding(i, x) + 1,
    "computed position": lambda x, i: x[i + 1] * 2,
}
SOURCES = {
    "rows": lambda: torch.randn(3, 4),
    "one row": lambda: torch.randn(1, 4),
    "an expanded row": lambda: torch.randn(1, 4).expand(3, 4),
}


def result_of(function, *arguments):
    """A result, or the type and text of the error."""
    try:
        return function(*arguments)
    except (IndexError, RuntimeError) as error:
        return type(error), str(error)


@pytest.mark.covering
@pytest.mark.parametrize("position", [0, 2, 7, -1])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", CASES)
def test_positions_are_checked_as_in_eager(name, source, position):
    function, x = CASES[name], SOURCES[source]()
    index = torch.tensor([0, position])
    expected, actual = (
        result_of(function, x, index),
        result_of(fulgurite.compile(function), x, index),
    )
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected)
    else:
        assert actual == expected


COMPUTED = {
    "one row": lambda x: x.sum(0, keepdim=True) + 1,
    "ones": lambda x: torch.ones(3, 4),
    "equal rows": lambda x: x[0].expand(3, 4).abs(),
    "a function of equal rows": lambda x: torch.zeros(3, 4).exp() + x[0].sin(),
    "positions": lambda x: torch.arange(3)[:, None].expand(3, 4),
    "other rows": lambda x: x.flip(0) * 2,
}


@pytest.mark.covering
@pytest.mark.parametrize("source", COMPUTED)
@pytest.mark.parametrize("name", [name for name in CASES if name != "embedding"])
def test_positions_in_a_value_that_the_graph_computes(name, source):
    def function(x, index):
        return CASES[name](COMPUTED[source](x), index)

    x = torch.randn(3, 4)
    compiled = fulgurite.compile(function)
    for position in (-1, 0, 2, 3):
        index = torch.tensor([0, position])
        expected, actual = result_of(function, x, index), result_of(compiled, x, index)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(actual, expected)
        else:
            assert actual[0] == expected[0]


def test_masked_scatter_with_too_few_constants():
    def function(x, mask):
        return x.masked_scatter(mask, torch.ones(2)) + 1

    compiled = fulgurite.compile(function)
    x = torch.randn(4)
    for count in (0, 2, 3):
        mask = torch.arange(4) < count
        expected, actual = result_of(function, x, mask), result_of(compiled, x, mask)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(actual, expected)
        else:
            assert actual[0] == expected[0]


@pytest.mark.parametrize("position", [1, 7])
@pytest.mark.parametrize("name", ["index", "index_select", "embedding"])
def test_positions_of_an_empty_result_are_checked_as_in_eager(name, position):
    function, x, index = CASES[name], torch.randn(3, 0), torch.tensor([0, position])
    expected = result_of(function, x, index)
    actual = result_of(fulgurite.compile(function), x, index)
    if isinstance(expected, torch.Tensor):
        assert actual.shape == expected.shape
    else:
        assert actual == expected
