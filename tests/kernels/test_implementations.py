"""Kernels that hand a case over to plain torch: by design, and visible."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite.kernels import registry
from fulgurite.kernels.quantize.ops import quantize_parts, reference


@pytest.fixture(autouse=True)
def forget():
    registry._handovers.clear()
    yield
    registry._handovers.clear()


def takes_nothing(*_):
    return NotImplemented


def plain(x, name):
    return x + 1


def test_a_case_is_noted_with_what_it_was_about():
    table = {"cpu": f"{__name__}:takes_nothing"}
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    for _ in range(3):
        assert torch.equal(registry.run(table, x.device, plain, x, "q4_k"), x + 1)
    registry.run({}, x.device, plain, x, None)
    first, second = registry.handovers().items()
    assert first[1] == 3 and second[1] == 1
    assert str(first[0]) == (
        f"{__name__}.plain on cpu: {__name__}:takes_nothing does not take these "
        "(bfloat16[2, 3], 'q4_k')"
    )
    assert "there is no kernel for this device (bfloat16[2, 3], None)" in str(second[0])


def test_what_a_kernel_takes_is_not_noted():
    quantize_parts(torch.randn(2, 256), "int8", None)
    assert not registry.handovers()


def test_a_loop_over_shapes_does_not_fill_memory():
    for size in range(registry.MOST_NOTED + 50):
        registry.run({}, torch.device("cpu"), plain, torch.zeros(size), "")
    assert len(registry.handovers()) == registry.MOST_NOTED


def test_explain_and_the_trace_say_so():
    def function(x):
        return quantize_parts(x + 1, "q4_k")

    x = torch.randn(2, 256)
    compiled = fulgurite.compile(function)
    with torch.no_grad():
        got = compiled(x)
    assert torch.equal(got[0], reference(x + 1, "q4_k")[0])
    text = str(compiled.explain())
    line = next(line for line in text.splitlines() if line.startswith("plain torch"))
    assert "quantize on cpu: fulgurite.kernels.quantize.cpu:quantize does not take these" in line
    assert "float32[2, 256], 'q4_k', None" in line
    assert "plain torch: fulgurite.kernels.quantize.cpu" in str(compiled.last_trace())
    assert "plain torch" not in str(fulgurite.compile(lambda x: x + 1).explain())
