"""Operand names of elementwise lowerings are arguments of their ops; a wrong one is named."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite.errors import CompileError
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.frontend.pointwise import PointwiseLowering


@pytest.mark.parametrize("name", lower_graph.ELEMENTWISE_LOWERINGS)
def test_operands_are_arguments_of_the_op(name):
    packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.prims, name)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    renamed = lower_graph.PRIM_ARGUMENT_NAMES
    names = {renamed.get(a.name, a.name) for schema in schemas for a in schema.arguments}
    names |= {a.name for schema in schemas for a in schema.arguments}
    assert set(lower_graph.ELEMENTWISE_LOWERINGS[name].operands) <= names


def test_a_wrong_operand_name_is_named(monkeypatch):
    wrong = PointwiseLowering(("self", "othr"), "default", lambda a, b, **_: a)
    monkeypatch.setitem(lower_graph.ELEMENTWISE_LOWERINGS, "hypot", wrong)
    with pytest.raises(CompileError, match="no overload has an argument named othr") as raised:
        fulgurite.compile(torch.hypot)(torch.ones(17), torch.ones(17))
    assert "claiming aten.hypot.default failed" in raised.value.what
