"""Linear attention in Triton against float64, and the same bits for cuts at block boundaries."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.linear_attention import triton_causal_conv, triton_delta_rule
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs, SequenceLayout
from fulgurite.kernels.linear_attention.triton_delta_rule import CHUNK
from tests.kernels.linear_attention.cases import (
    SLOTS,
    STEPS,
    Step,
    exact_conv,
    exact_delta_rule,
    random_inputs,
    random_state,
)
from tests.kernels.triton_support import DEVICE, INTERPRETED

CHUNKED = {
    "one_block": Step(((0, CHUNK, 1, CHUNK),)),
    "blocks_and_tail": Step(((0, 2 * CHUNK + 3, 1, 2 * CHUNK + 3), (0, 2, 0, 2))),
    "continued": Step(((CHUNK, CHUNK + 1, 2, 2 * CHUNK + 1), (5, 70, 0, 90), (70, 1, 3, 64))),
    "recomputed_reply": Step(((0, 2 * CHUNK, 1, CHUNK + 9),)),
    "padding": Step(((0, CHUNK, -1, CHUNK), (0, CHUNK, 0, CHUNK))),
}
# tf32x3 products on a GPU; exact ones in the interpreter
TOLERANCES = {torch.float32: 5e-6 if INTERPRETED else 2e-5, torch.bfloat16: 1e-2}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    difference = (actual.cpu().double() - expected).abs().max()
    assert difference <= tolerance * (1 + expected.abs().max())


def run_delta_rule(inputs: DeltaRuleInputs, state: torch.Tensor, layout: SequenceLayout):
    inputs = DeltaRuleInputs(*(x.to(DEVICE) for x in inputs))
    moved = SequenceLayout(*(x.to(DEVICE) for x in layout[:4]), layout.max_query_len)
    return triton_delta_rule.gated_delta_rule(inputs, state, moved)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", [*STEPS, *CHUNKED])
@pytest.mark.parametrize("sizes", [(1, 2, 8, 6), (1, 1, 17, 33)])
def test_gated_delta_rule(name, sizes, dtype) -> None:
    if INTERPRETED and name in CHUNKED and dtype != torch.float32:
        pytest.skip("the interpreter is slow")
    step = {**STEPS, **CHUNKED}[name]
    inputs = random_inputs(step.num_tokens, *sizes, dtype=dtype)
    state = random_state(inputs)
    expected, expected_states, real = exact_delta_rule(inputs, state, step)
    state = state.to(DEVICE)
    out = run_delta_rule(inputs, state, step.layout())
    assert_close(out.cpu()[real], expected[real], TOLERANCES[dtype])
    assert_close(state, expected_states, TOLERANCES[torch.float32])


def test_equal_keys_stay_accurate() -> None:
    inputs = random_inputs(CHUNK, 1, 1, 8, 8)
    inputs = inputs._replace(
        k_TKD=torch.ones_like(inputs.k_TKD),
        a_TN=torch.full_like(inputs.a_TN, -30.0),
        b_TN=torch.full_like(inputs.b_TN, 30.0),
    )
    step, state = CHUNKED["one_block"], random_state(inputs)
    expected, _, _ = exact_delta_rule(inputs, state, step)
    out = run_delta_rule(inputs, state.to(DEVICE), step.layout())
    assert_close(out, expected, 3e-5)


@pytest.mark.parametrize("cuts", [[CHUNK, CHUNK + 9, 1, 3], [2 * CHUNK + 2, 8, 3]])
def test_cuts_at_blocks_and_recomputed_replies_give_the_same_bits(cuts: list[int]) -> None:
    """2 blocks and 9 tokens of prompt, 4 of reply; any tokens after the blocks may be cut anywhere."""
    total, prompt = 2 * CHUNK + 13, 2 * CHUNK + 9
    inputs = random_inputs(total, 1, 1, 16, 16)
    states = [random_state(inputs).to(DEVICE) for _ in range(2)]
    expected = run_delta_rule(inputs, states[0], Step(((0, total, 1, prompt),)).layout())
    outputs, start = [], 0
    for count in cuts:
        tokens = DeltaRuleInputs(*(x[start : start + count] for x in inputs[:5]), *inputs[5:])
        layout = Step(((start, count, 1, prompt),)).layout()
        outputs.append(run_delta_rule(tokens, states[1], layout))
        start += count
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(states[0][1], states[1][1])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", [*STEPS, "blocks_and_tail"])
@pytest.mark.parametrize(
    "channels, taps, bias, activation",
    [(40, 4, False, "silu"), (1, 1, True, None), (70, 3, True, "silu"), (16, 2, False, None)],
)
def test_causal_conv(name, channels, taps, bias, activation, dtype) -> None:
    step, generator = {**STEPS, **CHUNKED}[name], torch.Generator().manual_seed(0)
    x = torch.randn(step.num_tokens, channels + 5, generator=generator).to(dtype)[:, :channels]
    weight = torch.randn(taps, channels, generator=generator).to(dtype)
    bias_C = torch.randn(channels, generator=generator).to(dtype) if bias else None
    state = torch.randn(SLOTS, taps - 1, channels, generator=generator).to(dtype)
    expected, states, real = exact_conv(x, weight, bias_C, state, step, activation == "silu")
    layout, state = step.layout(), state.to(DEVICE)
    moved = SequenceLayout(*(part.to(DEVICE) for part in layout[:4]), layout.max_query_len)
    out = triton_causal_conv.causal_conv(
        x.to(DEVICE),
        weight.to(DEVICE),
        None if bias_C is None else bias_C.to(DEVICE),
        state,
        moved,
        activation,
    )
    assert_close(out.cpu()[real], expected[real], TOLERANCES[dtype])
    assert torch.equal(state.cpu().double(), states)
