"""Linear attention on the CPU against float64: outputs, states, ragged steps, cuts, bad arguments."""

from __future__ import annotations

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.kernels.linear_attention import reference
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs
from fulgurite.kernels.linear_attention.ops import causal_conv, gated_delta_rule
from tests.kernels.linear_attention.cases import (
    SLOTS,
    STEPS,
    Step,
    exact_conv,
    exact_delta_rule,
    random_inputs,
    random_state,
)

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (actual.double() - expected).abs().max() <= tolerance * (1 + expected.abs().max())


@pytest.mark.covering
@pytest.mark.parametrize("use_reference", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("sizes", [(2, 2, 8, 6), (1, 1, 1, 1), (1, 3, 17, 130), (3, 1, 16, 128)])
def test_gated_delta_rule(name, sizes, dtype, use_reference) -> None:
    step = STEPS[name]
    inputs = random_inputs(step.num_tokens, *sizes, dtype=dtype)
    state = random_state(inputs)
    expected, expected_states, real = exact_delta_rule(inputs, state, step)
    run = reference.gated_delta_rule if use_reference else gated_delta_rule
    out = run(inputs, state, step.layout())
    assert out.dtype == dtype
    assert_close(out[real], expected[real], TOLERANCES[dtype])
    assert_close(state, expected_states, 2e-6)


@pytest.mark.parametrize("use_reference", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    "channels, taps, bias, activation",
    [(40, 4, False, "silu"), (1, 1, True, None), (33, 3, True, "silu"), (16, 2, True, None)],
)
def test_causal_conv(name, channels, taps, bias, activation, dtype, use_reference) -> None:
    step, generator = STEPS[name], torch.Generator().manual_seed(0)
    x = torch.randn(step.num_tokens, channels + 5, generator=generator).to(dtype)[:, :channels]
    weight = torch.randn(taps, channels, generator=generator).to(dtype)
    bias_C = torch.randn(channels, generator=generator).to(dtype) if bias else None
    state = torch.randn(SLOTS, taps - 1, channels, generator=generator).to(dtype)
    expected, states, real = exact_conv(x, weight, bias_C, state, step, activation == "silu")
    run = reference.causal_conv if use_reference else causal_conv
    out = run(x, weight, bias_C, state, step.layout(), activation)
    assert_close(out[real], expected[real], TOLERANCES[dtype])
    assert torch.equal(state.double(), states), "a state holds inputs, unchanged"


@pytest.mark.parametrize("cuts", [[1] * 20, [7, 1, 12], [19, 1], [3, 9, 8]])
def test_cuts_of_a_sequence_give_the_same_bits(cuts: list[int]) -> None:
    inputs, weight = random_inputs(20, 2, 2, 17, 21), torch.randn(4, 34)
    whole = Step(((0, 20, 1, 20),))
    state, conv_state = random_state(inputs), torch.randn(SLOTS, 3, 34)
    states = state.clone(), conv_state.clone()
    x = inputs.q_TKD.flatten(1)
    expected = gated_delta_rule(inputs, state, whole.layout())
    expected_conv = causal_conv(x, weight, None, conv_state, whole.layout())
    outputs, conv_outputs, start = [], [], 0
    for count in cuts:
        layout = Step(((start, count, 1, 20),)).layout()
        part = slice(start, start + count)
        tokens = DeltaRuleInputs(*(t[part] for t in inputs[:5]), *inputs[5:])
        outputs.append(gated_delta_rule(tokens, states[0], layout))
        conv_outputs.append(causal_conv(x[part], weight, None, states[1], layout))
        start += count
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(torch.cat(conv_outputs), expected_conv)
    assert torch.equal(states[0][1], state[1])
    assert torch.equal(states[1][1], conv_state[1])


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 150])
def test_chunked_form_is_the_recurrence(length: int) -> None:
    inputs = random_inputs(2 * length, 1, 2, 9, 5)
    step = Step(((0, length, 0, length), (0, length, 1, length)))
    expected, _, _ = exact_delta_rule(inputs, random_state(inputs), step)
    out = reference.chunked_delta_rule(inputs, batch=2)
    assert_close(out.flatten(0, 1), expected, 5e-6) if length else None
    assert out.shape == (2, length, 2, 5)


def test_equal_keys_stay_accurate() -> None:
    """Keys that are all alike make the chunk's system of equations as bad as it gets."""
    inputs = random_inputs(64, 1, 1, 8, 8)
    inputs = inputs._replace(
        k_TKD=torch.ones_like(inputs.k_TKD),
        a_TN=torch.full_like(inputs.a_TN, -30.0),
        b_TN=torch.full_like(inputs.b_TN, 30.0),
    )
    step = Step(((0, 64, 0, 64),))
    state = random_state(inputs)
    expected, _, _ = exact_delta_rule(inputs, state, step)
    assert_close(gated_delta_rule(inputs, state, step.layout()), expected, 1e-5)
    assert_close(reference.chunked_delta_rule(inputs, 1)[0], expected, 1e-5)


def test_nan_stays_in_its_sequence() -> None:
    step = STEPS["mixed"]
    inputs = random_inputs(step.num_tokens)
    state = random_state(inputs)
    inputs.v_TNV[0] = float("nan")
    state[2] = float("inf")
    out = gated_delta_rule(inputs, state, step.layout())
    assert out[0].isnan().all()
    assert out[1 : 1 + 7 + 6].isfinite().all()
    assert state[3].isfinite().all() and state[0].isfinite().all()


def test_bad_arguments_are_named() -> None:
    step = STEPS["mixed"]
    inputs, layout = random_inputs(step.num_tokens), step.layout()
    state = random_state(inputs)
    with pytest.raises(ArgumentError, match="past the last state"):
        gated_delta_rule(inputs, state, layout._replace(slots_S=layout.slots_S + 9))
    with pytest.raises(ArgumentError, match="query_start_loc must rise"):
        gated_delta_rule(inputs, state, layout._replace(query_start_loc=layout.query_start_loc + 1))
    with pytest.raises(ArgumentError, match="states are torch.float64"):
        gated_delta_rule(inputs, state.double(), layout)
    with pytest.raises(ArgumentError, match="int32"):
        gated_delta_rule(inputs, state, layout._replace(slots_S=layout.slots_S.long()))
    with pytest.raises(ArgumentError, match="values"):
        gated_delta_rule(inputs._replace(v_TNV=inputs.v_TNV[:, :3]), state, layout)
    with pytest.raises(ArgumentError, match="activation='relu'"):
        causal_conv(torch.zeros(14, 4), torch.zeros(3, 4), None, state, layout, "relu")
    with pytest.raises(ArgumentError, match="slots, 2, 4"):
        causal_conv(torch.zeros(14, 4), torch.zeros(3, 4), None, state, layout)


def test_operators_have_a_schema_and_a_fake() -> None:
    step = STEPS["mixed"]
    inputs, layout = random_inputs(step.num_tokens), step.layout()
    state = random_state(inputs)
    expected_state = state.clone()
    expected = gated_delta_rule(inputs, expected_state, layout)
    compiled = torch.compile(
        lambda state: gated_delta_rule(inputs, state, layout), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(state), expected)
    assert torch.equal(state, expected_state)
