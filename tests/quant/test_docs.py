"""The table of formats in docs/quantization.md and the SQNR table in benchmarks/notes/quant.md.

`tests/test_docs.py` runs the code blocks of the page.
"""

import re
from pathlib import Path

import pytest
import torch

from fulgurite.quant import FORMATS, compute_sqnr, describe_formats, quantize

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quantization.md").read_text()
NOTES = (ROOT / "benchmarks" / "notes" / "quant.md").read_text()
SQNR_ROW = re.compile(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", re.MULTILINE)


def read_sqnr_table(text: str) -> dict[str, list[float]]:
    """Bits per element and three SQNRs of each format."""
    return {name: [float(x) for x in figures] for name, *figures in SQNR_ROW.findall(text)}


def test_format_table_is_what_describe_formats_prints():
    assert describe_formats() in PAGE


def test_sqnr_table_has_all_formats():
    assert list(read_sqnr_table(NOTES)) == list(FORMATS)


@pytest.fixture(scope="module")
def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (128, 4096)
    gaussian = torch.randn(shape, generator=generator) * 0.02
    heavy = gaussian * torch.randn(shape, generator=generator).abs().exp()
    rare = torch.rand(shape, generator=generator) < 0.001
    return [gaussian, heavy, torch.where(rare, gaussian * 20, gaussian)]


@pytest.mark.parametrize("name", FORMATS)
def test_sqnr_table(name, weights):
    bits, *expected = read_sqnr_table(NOTES)[name]
    assert bits == pytest.approx(FORMATS[name].bits_per_element, abs=1e-3)
    measured = [compute_sqnr(x, quantize(x, name)) for x in weights]
    assert measured == pytest.approx(expected, abs=0.06)
