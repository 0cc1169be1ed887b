"""Options are checked once, and a wrong one says what is allowed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite.errors import ArgumentError


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"executors": ["nvfuser"]}, "torch"),
        ({"executors": []}, "torch"),
        ({"executors": [3]}, "Executor"),
        ({"transforms": [3]}, "Trace -> Trace"),
        ({"transforms": print}, "list"),
        ({"remat": "some"}, "mincut"),
        ({"regions": "layers"}, "blocks"),
        ({"dynamic": "yes"}, "True"),
        ({"fullgraph": True, "regions": "blocks"}, "drop"),
    ],
)
def test_bad_options_say_what_is_allowed(options, says):
    with pytest.raises(ArgumentError) as caught:
        fulgurite.compile(lambda x: x, **options)
    assert says in caught.value.rows["next"]


def test_what_cannot_be_compiled_says_so():
    for thing in (3, nn.Linear, None.__class__):
        with pytest.raises(ArgumentError, match="can't be compiled"):
            fulgurite.compile(thing)
    compiled = fulgurite.compile(lambda x: x + 1)
    with pytest.raises(ArgumentError, match="nothing is compiled"):
        compiled.last_trace()
    compiled(torch.zeros(2))
    with pytest.raises(ArgumentError, match="no graph 4"):
        compiled.last_trace(graph=4)
    with pytest.raises(ArgumentError, match="no backward"):
        compiled.last_trace("backward")
