"""Casts to FP8 and int8 fused with what comes before them: one kernel, the oracle's bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite import fuser
from fulgurite.executors.fuser import kernels_of
from fulgurite.kernels.gemm import modules
from fulgurite.kernels.quantize.ops import quantize_parts, reference
from fulgurite.op import pieces_of
from fulgurite.quant import quantize as oracle
from fulgurite.quant.format import resolve
from tests.fuser import support

FORMATS = ["fp8_e4m3_row", "fp8_e5m2_row", "fp8_e4m3_1x128", "fp8_e5m2_1x128", "int8"]


def norm(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


def gate(x, w):
    return F.silu(x) * (x + w)


def kernels_needed(before, format, width):
    """A norm is over a row and its blocks' maxima are not: two kernels, as the fuser has no nested rows."""
    return 2 if before is norm and resolve(format).block[1] and width > 128 else 1


def same(got, hidden, format):
    """Equal bits, except that those of a NaN may differ."""
    for ours, wanted in zip(got, reference(hidden, format), strict=True):
        ours = ours.cpu()
        assert ours.dtype == wanted.dtype and ours.shape == wanted.shape
        if wanted.is_floating_point():
            nan = wanted.float().isnan()
            assert torch.equal(ours.float().isnan(), nan)
            ours, wanted = (t.float().masked_fill(nan, 0.0) for t in (ours, wanted))
            assert torch.equal(torch.signbit(ours), torch.signbit(wanted))
        assert torch.equal(ours, wanted)


def rows(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(count, width) * torch.randn(count, 1).exp()
    x[0] = 0.0
    if count > 3:
        x[1, 5], x[2, 7], x[3, 9] = torch.nan, torch.inf, -torch.inf
    return x, torch.randn(width)


@pytest.mark.parametrize("before", [norm, gate])
@pytest.mark.parametrize("format", FORMATS)
def test_norm_and_gate_with_a_cast_are_one_kernel(before, format):
    """In C++, in Triton's interpreter and on a GPU: the pieces of the operator on generated kernels."""
    pieces = pieces_of(quantize_parts.overload)

    def function(x, w):
        hidden = before(x, w)
        return (hidden, *pieces(hidden, format))

    arguments = tuple(map(support.placed, rows(7, 256)))
    region = fuser.lower(support.trace(function, arguments), use_triton=support.TARGET == "triton")
    hidden, *cast = region(*arguments)
    same(cast, hidden.cpu(), format)
    needed = kernels_needed(before, format, 256)
    assert len(region.kernels) == needed, [str(k.schedule) for k in region.kernels]


@pytest.mark.parametrize("count, width", [(1, 128), (5, 384), (3, 1), (17, 129), (64, 4096)])
@pytest.mark.parametrize("before", [norm, gate])
@pytest.mark.parametrize("format", FORMATS)
def test_a_compiled_function_has_one_kernel(before, format, count, width):
    if resolve(format).block[1] and width % 128:
        pytest.skip("a partial block stays with the operator's own kernel")

    def function(x, w):
        hidden = before(x, w)
        return (hidden, *quantize_parts(hidden, format))

    x, w = rows(count, width)
    compiled = fulgurite.compile(function, tune=False)
    with torch.no_grad():
        hidden, *cast = compiled(x, w)
    same(cast, hidden, format)
    kernels = kernels_of(compiled.last_trace())
    assert len(kernels) == kernels_needed(before, format, width), str(compiled.last_trace())
    assert "fulgurite.quantize" not in str(compiled.last_trace())


def test_what_has_no_pieces_stays_whole():
    def function(x, w):
        return quantize_parts(norm(x, w), "nvfp4")

    x, w = rows(5, 256)
    compiled = fulgurite.compile(function, tune=False)
    with torch.no_grad():
        got = compiled(x, w)
    hidden = norm(x, w)
    assert got[0].dtype == torch.uint8 and got[0].shape == reference(hidden, "nvfp4")[0].shape
    assert "fulgurite.quantize" in str(compiled.last_trace())


@pytest.mark.parametrize(
    "weights, activations", [("fp8_e4m3_row", "fp8_e4m3_row"), ("int8", "int8")]
)
def test_a_norm_before_a_packed_linear_makes_its_cast(monkeypatch, weights, activations):
    """As on a GPU: one generated kernel for norm and cast, then the product of packed operands."""
    monkeypatch.setattr(modules, "CASTS_APART", ("cpu",))
    x, w = rows(6, 128)
    x[1:4] = torch.randn(3, 128)  # finite
    layer = modules.QuantLinear(oracle(torch.randn(48, 128), weights), torch.randn(48), activations)
    compiled = fulgurite.compile(lambda x, w: layer(norm(x, w)), tune=False)
    with torch.no_grad():
        got = compiled(x, w)
        want = layer(norm(x, w))
    text = str(compiled.last_trace())
    assert len(kernels_of(compiled.last_trace())) == 1 and "fulgurite.scaled_mm" in text
    assert "fulgurite.quantize" not in text and "fulgurite.quant_linear" not in text
    assert (got - want).norm() <= 1e-3 * want.norm()  # a code may round the other way
