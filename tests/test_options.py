"""Invalid options raise an error that lists what is allowed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite.errors import ArgumentError


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"executors": ["nvfuser"]}, "torch"),
        ({"executors": []}, "torch"),
        ({"executors": [3]}, "Executor"),
        ({"transforms": [3]}, "Trace -> Trace"),
        ({"transforms": print}, "list"),
        ({"remat": "some"}, "mincut"),
        ({"granularity": "layers"}, "blocks"),
        ({"dynamic": "yes"}, "True"),
        ({"fullgraph": True, "granularity": "blocks"}, "drop"),
    ],
)
def test_invalid_options_list_what_is_allowed(options, hint):
    with pytest.raises(ArgumentError) as caught:
        fulgurite.compile(lambda x: x, **options)
    assert hint in caught.value.details["next"]


def test_objects_that_cannot_be_compiled_raise():
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
