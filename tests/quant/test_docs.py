"""docs/quant.md: its code runs, and its two tables are what the code gives today."""

import re
from pathlib import Path

import pytest
import torch

from fulgurite.quant import FORMATS, describe_formats, quantize, signal_to_noise

PAGE = (Path(__file__).parents[2] / "docs" / "quant.md").read_text()


def test_the_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 4
    exec("\n".join(blocks), {"__name__": "docs"})


def test_the_table_of_formats():
    assert "\n".join("    " + line for line in describe_formats().splitlines()) in PAGE


@pytest.fixture(scope="module")
def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (128, 4096)
    gaussian = torch.randn(shape, generator=generator) * 0.02
    heavy = gaussian * torch.randn(shape, generator=generator).abs().exp()
    rare = torch.rand(shape, generator=generator) < 0.001
    return [gaussian, heavy, torch.where(rare, gaussian * 20, gaussian)]


@pytest.mark.parametrize("name", FORMATS)
def test_the_table_of_losses(name, weights):
    (row,) = re.findall(
        rf"^\| `{name}` \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE
    )
    bits, *losses = map(float, row)
    assert bits == pytest.approx(FORMATS[name].bits_per_element, abs=1e-3)
    measured = [signal_to_noise(x, quantize(x, name)) for x in weights]
    assert measured == pytest.approx(losses, abs=0.06)
