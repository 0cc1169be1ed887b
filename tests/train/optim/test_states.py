"""8-bit states and random rounding: stated errors, odd sizes, and a curve near that of float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fulgurite.train.optim import AdamW
from fulgurite.train.optim.rounding import (
    join_master,
    make_key,
    random_bits,
    round_stochastic,
    split_master,
)
from fulgurite.train.optim.states import (
    choose_format,
    create_state,
    dequantize_blocks,
    make_code,
    quantize_blocks,
    read_state,
    write_state,
)

CPU = torch.device("cpu")


def random_state(shape, name, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.abs() if name == "exp_avg_sq" else x


@pytest.mark.parametrize(("name", "bound"), [("exp_avg", 0.008), ("exp_avg_sq", 0.004)])
@pytest.mark.parametrize("shape", [(3, 128), (5, 1), (2, 7, 200), (40, 129), (0, 64)])
def test_error_of_the_code(name, bound, shape):
    x = random_state(shape, name)
    codes, scales = quantize_blocks(x, name)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape
    assert scales.shape == (*shape[:-1], -(-shape[-1] // 128))
    values = dequantize_blocks(codes, scales, name)
    largest = scales.repeat_interleave(128, -1)[..., : shape[-1]]
    assert ((values - x).abs() <= bound * largest).all()


def test_codes_are_ordered_and_distinct():
    for name, smallest in (("exp_avg", -1.0), ("exp_avg_sq", 0.0)):
        code = make_code(name, CPU)
        assert len(code) == 256 and (code.diff() > 0).all()
        assert code[-1] == 1.0 and code[0] >= smallest and 0.0 in code.tolist()


def test_small_roots_do_not_become_zero():
    """Otherwise m / sqrt(v) would explode for elements far below their block's largest."""
    state = create_state(torch.zeros(64, 128), "exp_avg_sq", "int8")
    values = torch.full((64, 128), 1e-16)
    values[:, 0] = 1.0
    values[:, 1] = 0.0
    write_state(state, "exp_avg_sq", values)
    found = read_state(state, "exp_avg_sq")
    assert (found[:, 2:] >= values[:, 2:]).all() and (found[:, 1] == 0).all()
    assert read_state(create_state(torch.zeros(64, 128), "exp_avg", "int8"), "exp_avg").eq(0).all()


@pytest.mark.parametrize("shape", [(), (5,), (0, 300), (63, 64), (100_000,)])
def test_small_and_one_dimensional_parameters_keep_float32(shape):
    assert choose_format(torch.zeros(shape), "int8") == "float32"
    assert choose_format(torch.zeros(64, 64), "int8") == "int8"


def test_memory_of_states():
    weight = nn.Parameter(torch.zeros(128, 256, dtype=torch.bfloat16))

    def count(**options):
        state = AdamW([weight], **options).state[weight]
        return sum(x.nbytes for n, x in state.items() if n != "step") / weight.numel()

    assert count(states="float32", rounding="master") == 10  # 2 * 4, and 2 of low bits
    assert count(states="bfloat16", rounding="stochastic") == 4
    assert count(states="int8", rounding="stochastic") == 2 + 2 * 4 / 128


def train_small(states, rounding="master", dtype=torch.float32, steps=200):
    """Regression by two layers with a learnable target; returns the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 160), nn.Tanh(), nn.Linear(160, 32)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(32, 32, generator=generator) / 6
    optimizer = AdamW(model.parameters(), lr=3e-3, states=states, rounding=rounding)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        loss = (model(x.to(dtype)).float() - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# The mean of the last 20 of 200 losses over that of float32, which fell to 6 % of the first.
@pytest.mark.parametrize(
    ("options", "band"),
    [
        (("bfloat16", "master", torch.float32), 0.05),
        (("int8", "master", torch.float32), 0.05),
        (("float32", "master", torch.bfloat16), 0.1),
        (("float32", "stochastic", torch.bfloat16), 0.3),
        (("int8", "stochastic", torch.bfloat16), 0.3),
    ],
)
def test_curves_stay_in_their_band(options, band):
    expected, found = train_small("float32"), train_small(*options)
    assert sum(expected[-20:]) < 0.1 * sum(expected[:20])
    ratio = sum(found[-20:]) / sum(expected[-20:])
    assert abs(ratio - 1) < band


# ---- rounding ------------------------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased():
    x = torch.tensor([1.0 + 2**-10, -3.3, 1e-30, 0.0, 257.25]).repeat(20_000, 1)
    bits = random_bits(x.shape, (0, 0), make_key("w", 1), CPU)
    rounded = round_stochastic(x, bits).float()
    assert len(rounded[:, 0].unique()) == 2
    step = x[0].abs() * 2**-7  # at most: four standard errors of a mean of 20,000
    assert ((rounded.double().mean(0) - x[0]).abs() <= 4 * step / 2 / 20_000**0.5).all()
    assert (rounded[:, 3] == 0).all()


def test_exact_values_and_infinities_are_kept():
    x = torch.tensor([1.0, -0.5, 0.0, float("inf"), float("-inf"), float("nan")])
    for bits in (0, 0xFFFF, -1):
        rounded = round_stochastic(x, torch.full(x.shape, bits, dtype=torch.int32))
        torch.testing.assert_close(rounded.float(), x, rtol=0, atol=0, equal_nan=True)


def test_bits_depend_on_name_step_purpose_and_place_only():
    whole = random_bits(torch.Size((6, 5)), (0, 0), make_key("w", 3), CPU)
    assert torch.equal(whole, random_bits(torch.Size((6, 5)), (0, 0), make_key("w", 3), CPU))
    for other in (make_key("w", 4), make_key("v", 3), make_key("w", 3, 1)):
        assert not torch.equal(whole, random_bits(torch.Size((6, 5)), (0, 0), other, CPU))
    shard = random_bits(torch.Size((2, 3)), (3, 1), make_key("w", 3), CPU)
    assert torch.equal(shard, whole[3:5, 1:4])
    assert random_bits(torch.Size(()), (), 5, CPU).shape == ()
    assert random_bits(torch.Size((0, 3)), (0, 0), 5, CPU).shape == (0, 3)


def test_bits_are_even():
    bits = random_bits(torch.Size((300, 300)), (0, 0), make_key("w", 0), CPU)
    for position in range(32):
        share = ((bits >> position) & 1).float().mean()
        assert abs(share - 0.5) < 4 * 0.5 / 300, position


def test_master_bits_round_trip():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    x = bits.view(torch.float32)
    x = x[x.isfinite() & (x.abs() < 3e38)]
    weight, low = split_master(x)
    assert torch.equal(join_master(weight, low), x)
    assert ((weight.float() - x).abs() <= (x.to(torch.bfloat16).float() - x).abs()).all()
    odd = torch.tensor([float("inf"), float("-inf"), float("nan")])
    weight, low = split_master(odd)
    torch.testing.assert_close(join_master(weight, low), odd, equal_nan=True)
