"""Kernel registries: which function runs, and which calls fall back to plain torch."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite.kernels import registry
from fulgurite.kernels.quantize.ops import quantize_op
from fulgurite.kernels.quantize.reference import quantize as reference


@pytest.fixture(autouse=True)
def no_fallbacks():
    registry._fallbacks.clear()
    yield
    registry._fallbacks.clear()


def supports_nothing(*_):
    return NotImplemented


def plain(x, name):
    return x + 1


def test_fallback_is_recorded_with_its_arguments():
    table = {"cpu": supports_nothing}
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    for _ in range(3):
        assert torch.equal(registry.dispatch(table, x.device, plain, x, "q4_k"), x + 1)
    registry.dispatch({}, x.device, plain, x, None)
    first, second = registry.fallbacks().items()
    assert first[1] == 3 and second[1] == 1
    assert str(first[0]) == (
        f"{__name__}.plain on cpu: {__name__}.supports_nothing does not support these arguments "
        "(bfloat16[2, 3], 'q4_k')"
    )
    assert "no kernel for this device (bfloat16[2, 3], None)" in str(second[0])


def test_supported_call_is_not_a_fallback():
    quantize_op(torch.randn(2, 256), "int8", None)
    assert not registry.fallbacks()


def test_number_of_recorded_fallbacks_is_bounded():
    for size in range(registry.MAX_FALLBACKS + 50):
        registry.dispatch({}, torch.device("cpu"), plain, torch.zeros(size), "")
    assert len(registry.fallbacks()) == registry.MAX_FALLBACKS


def test_explain_and_trace_show_fallbacks():
    def function(x):
        return quantize_op(x + 1, "q4_k")

    x = torch.randn(2, 256)
    compiled = fulgurite.compile(function)
    with torch.no_grad():
        got = compiled(x)
    assert torch.equal(got[0], reference(x + 1, "q4_k")[0])
    text = str(compiled.explain())
    line = next(line for line in text.splitlines() if line.startswith("fallback"))
    assert "quantize on cpu: fulgurite.kernels.quantize.cpu.quantize does not support these" in line
    assert "float32[2, 256], 'q4_k', None" in line
    assert "fallback to torch: fulgurite.kernels.quantize.cpu" in str(compiled.last_trace())
    assert "fallback" not in str(fulgurite.compile(lambda x: x + 1).explain())
