"""nf4 and fp4: the nearest entry of the codebook, and bitsandbytes' own codes."""

import pytest
import torch

from fulgurite.quant import FORMATS, quantize
from fulgurite.quant.codecs.codebook import CODEBOOKS

NAMES = ["nf4", "fp4"]


@pytest.mark.parametrize("name", NAMES)
def test_nearest_entry(name):
    x = torch.randn(7, 192, generator=torch.Generator().manual_seed(0))
    q = quantize(x, name)
    table = torch.tensor(CODEBOOKS[name])
    scale = x.reshape(7, 3, 64).abs().amax(-1)
    assert torch.equal(q.scales["scale"], scale)
    steps = x / scale.repeat_interleave(64, dim=1)
    distance = (steps[..., None] - table).abs()
    chosen = (steps - table[q.unpack().codes.int()]).abs()
    assert torch.allclose(chosen, distance.amin(-1), atol=1e-6)
    expected = table[q.unpack().codes.int()] * scale.repeat_interleave(64, dim=1)
    assert torch.equal(q.dequantize(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_exact(name):
    table = torch.tensor(CODEBOOKS[name])
    x = table.repeat(4)[None] * 3.5
    assert torch.equal(quantize(x, name).dequantize(), x)
    assert FORMATS[name].element.smallest_subnormal == table[table > 0].min().item()


@pytest.mark.parametrize("name", NAMES)
def test_codes_of_bitsandbytes(name):
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="compares with bitsandbytes's own output"
    )
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    packed, state = functional.quantize_4bit(x, blocksize=64, quant_type=name)
    q = quantize(x, name)
    values = functional.dequantize_4bit(packed, state)
    # Thresholds between entries are rounded differently: next to one, either entry is right.
    same = q.dequantize() == values
    assert same.float().mean() > 0.999
    assert torch.equal(q.scales["scale"].flatten(), state.absmax)
