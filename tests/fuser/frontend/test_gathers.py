"""Gathers: positions out of range raise eager's error, whatever the memory of the source looks like."""

from __future__ import annotations

import pytest
import torch

import fulgurite

F = torch.nn.functional
CASES = {
    "index": lambda x, i: x[i] * 2,
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


def test_a_row_that_the_graph_computes():
    def function(x, index):
        return (x.sum(0, keepdim=True) + 1).index_select(0, index) * 2

    x = torch.randn(3, 4)
    compiled = fulgurite.compile(function)
    torch.testing.assert_close(compiled(x, torch.tensor([0, 0])), function(x, torch.tensor([0, 0])))
    with pytest.raises(IndexError, match="out of range"):
        compiled(x, torch.tensor([0, 1]))


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
