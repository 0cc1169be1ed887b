"""bitsandbytes: nf4, fp4 with nested scales, and LLM.int8; its own output where it is installed."""

import json

import pytest
import torch

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant import read_quantized_weight
from fulgurite.quant.codecs.codebook import CODEBOOKS
from tests.quant.files.layouts.support import random_codes, random_scales, read_checked, seeded


def bnb_tensors(shape, kind="nf4", block=64, nested=False, base="up"):
    """Written from the definition; returns the tensors and the values."""
    count = shape[0] * shape[1]
    codes = random_codes((count,), 4)
    blocks = -(-count // block)
    absmax = random_scales(blocks)
    padded = torch.nn.functional.pad(codes, (0, count % 2))
    state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(shape)}
    tensors = {
        f"{base}.weight": (padded[0::2] * 16 + padded[1::2]).to(torch.uint8).reshape(-1, 1),
        f"{base}.weight.absmax": absmax,
        f"{base}.weight.quant_map": torch.tensor(CODEBOOKS[kind]),
    }
    if nested:
        levels = torch.rand(256, generator=seeded(7)) * 2 - 1
        outer = random_scales(-(-blocks // 256), seed=8)
        inner = random_codes((blocks,), 8, seed=9).to(torch.uint8)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.05}
        tensors |= {
            f"{base}.weight.absmax": inner,
            f"{base}.weight.nested_absmax": outer,
            f"{base}.weight.nested_quant_map": levels,
        }
        absmax = levels[inner.int()] * outer.repeat_interleave(256)[:blocks] + 0.05
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors[f"{base}.weight.quant_state.bitsandbytes__{kind}"] = text
    values = torch.tensor(CODEBOOKS[kind])[codes] * absmax.repeat_interleave(block)[:count]
    return tensors, values.reshape(shape)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("shape", "block"), [((24, 128), 64), ((3, 64), 64), ((16, 256), 128), ((300, 192), 64)]
)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_blocks_within_rows_stay_packed(kind, shape, block, nested):
    tensors, expected = bnb_tensors(shape, kind, block, nested)
    assert torch.equal(read_checked(tensors, "up", format=kind), expected)


@pytest.mark.parametrize(("shape", "block"), [((24, 100), 64), ((7, 33), 64), ((4, 64), 32)])
def test_other_blocks_are_dequantized(shape, block):
    tensors, expected = bnb_tensors(shape, "nf4", block)
    assert torch.equal(read_checked(tensors, "up", format=None), expected)


def test_packed_in_another_dtype():
    """`bnb_4bit_quant_storage` stores the bytes as bfloat16."""
    tensors, expected = bnb_tensors((24, 128))
    tensors["up.weight"] = tensors["up.weight"].flatten().view(torch.bfloat16)[:, None]
    assert torch.equal(read_checked(tensors, "up", format="nf4"), expected)


def test_llm_int8():
    codes = torch.randint(-127, 128, (24, 100), generator=seeded(), dtype=torch.int8)
    amax = random_scales(24) * 100
    tensors = {"up.weight": codes, "up.SCB": amax, "up.weight_format": torch.tensor(0)}
    expected = codes * (amax[:, None] * 7.874015718698502e-3)
    assert torch.equal(read_checked(tensors, "up", format="int8"), expected)
    with pytest.raises(FormatError, match="row-major order"):
        read_quantized_weight(tensors | {"up.weight_format": torch.tensor(2)}, "up")
    with pytest.raises(FormatError, match=r"SCB has shape \[12\]; it must be \[24\]"):
        read_quantized_weight(tensors | {"up.SCB": amax[:12]}, "up")


def test_errors_name_the_tensor():
    tensors, _ = bnb_tensors((24, 128), nested=True)
    state = "up.weight.quant_state.bitsandbytes__nf4"
    with pytest.raises(FormatError, match="absmax has 40 values for 48 blocks"):
        cut = {"up.weight.absmax": tensors["up.weight.absmax"][:40]}
        read_quantized_weight(tensors | cut, "up")
    with pytest.raises(FormatError, match="1000 bytes do not hold a nf4 weight") as caught:
        read_quantized_weight(tensors | {"up.weight": tensors["up.weight"][:1000]}, "up")
    assert "up.weight" in str(caught.value)
    with pytest.raises(WeightsError, match="cannot parse the quant state"):
        read_quantized_weight(tensors | {state: tensors[state][:20]}, "up")
    with pytest.raises(FormatError, match="the codebook is not that of nf4"):
        read_quantized_weight(tensors | {"up.weight.quant_map": torch.zeros(16)}, "up")
    bad = tensors["up.weight.nested_absmax"].clone()
    bad[0] = float("nan")
    with pytest.raises(WeightsError, match="scale is not finite"):
        read_quantized_weight(tensors | {"up.weight.nested_absmax": bad}, "up")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("shape", "block"), [((48, 128), 64), ((16, 512), 256), ((5, 77), 64)])
def test_values_of_bitsandbytes(shape, block, kind, nested):
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="compares with bitsandbytes's own output"
    )
    weight = torch.randn(shape, generator=seeded()) * 0.05
    packed, state = functional.quantize_4bit(
        weight, blocksize=block, compress_statistics=nested, quant_type=kind
    )
    tensors = {f"up.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    tensors["up.weight"] = packed
    format = kind if shape[1] % block == 0 else None
    actual = read_checked(tensors, "up", format=format)
    assert torch.equal(actual, functional.dequantize_4bit(packed, state))


def test_values_of_bitsandbytes_int8():
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="compares with bitsandbytes's own output"
    )
    weight = torch.randn(24, 100, generator=seeded()).half()
    codes, amax, _ = functional.int8_vectorwise_quant(weight)
    actual = read_checked({"up.weight": codes, "up.SCB": amax}, "up", format="int8")
    torch.testing.assert_close(
        actual, functional.int8_vectorwise_dequant(codes, amax), rtol=2e-7, atol=0
    )
