"""Linear attention in deterministic mode on a GPU: token by token, cut anywhere, among any companions."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_support import DEVICE  # isort: skip

from fulgurite.determinism import deterministic
from fulgurite.kernels.linear_attention import triton_causal_conv, triton_delta_rule
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs, SequenceLayout
from fulgurite.kernels.linear_attention.reference import recurrent_delta_rule
from tests.kernels.linear_attention.cases import SLOTS, Step, random_inputs, random_state

LENGTH = 66  # more than a block of the chunked form


def on_device(layout: SequenceLayout) -> SequenceLayout:
    return SequenceLayout(*(x.to(DEVICE) for x in layout[:4]), layout.max_query_len)


def random_steps(seed: int, prompt: int) -> list[tuple[Step, int]]:
    """Steps that compute LENGTH tokens in slot 1 among companions; and the index of that sequence."""
    rng, start, steps, companion = random.Random(seed), 0, [], 0
    while start < LENGTH:
        count = min(rng.choice((1, 1, 3, 20, 64)), LENGTH - start)
        others = [(companion, rng.choice((1, 2)), 2, 30), (0, rng.choice((1, 3)), 3, 5)]
        sequences = [(start, count, 1, prompt), *others[: rng.randrange(3)]]
        if any(slot == 2 for _, _, slot, _ in sequences):
            companion += others[0][1]
        rng.shuffle(sequences)
        sequences += [(0, 1, -1, 1)] * rng.randrange(2)  # padding
        index = next(i for i, one in enumerate(sequences) if one[2] == 1)
        steps.append((Step(tuple(sequences)), index))
        start += count
    return steps


def place(own: Tensor, step: Step, index: int) -> tuple[Tensor, slice]:
    """The tokens of a step: `own` at its sequence, other numbers elsewhere."""
    counts = [count for _, count, _, _ in step.sequences]
    first = sum(counts[:index])
    part = slice(first, first + counts[index])
    x = torch.randn(step.num_tokens, *own.shape[1:]).to(own)
    x[part] = own
    return x, part


@pytest.mark.parametrize(("dtype", "seed"), [(torch.float32, 0), (torch.float16, 1)])
def test_gated_delta_rule(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    inputs = random_inputs(LENGTH, 1, 1, 16, 8, dtype=dtype)
    inputs = DeltaRuleInputs(*(x.to(DEVICE) for x in inputs))
    states = [random_state(inputs).to(DEVICE) for _ in range(2)]
    with deterministic():
        layout = on_device(Step(((0, LENGTH, 1, LENGTH),)).layout())
        whole = triton_delta_rule.gated_delta_rule(inputs, states[0], layout)
        done = 0
        for step, index in random_steps(seed, prompt=LENGTH - 9):
            count = step.sequences[index][1]
            own = [x[done : done + count] for x in inputs[:5]]
            placed = [place(x, step, index) for x in own]
            tokens = DeltaRuleInputs(*(x for x, _ in placed), *inputs[5:])
            out = triton_delta_rule.gated_delta_rule(tokens, states[1], on_device(step.layout()))
            assert torch.equal(out[placed[0][1]], whole[done : done + count]), (done, count)
            done += count
    assert torch.equal(states[0][1], states[1][1])
    exact, _ = recurrent_delta_rule(inputs, torch.zeros_like(states[0][1]), torch.float64)
    assert (whole.double() - exact).abs().max() <= (5e-6 if dtype == torch.float32 else 2e-3) * (
        1 + exact.abs().max()
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_causal_conv(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(LENGTH, 20).to(DEVICE, torch.float16)
    weight, bias = torch.randn(4, 20).to(x), torch.randn(20).to(x)
    states = [torch.randn(SLOTS, 3, 20).to(x) for _ in range(2)]
    with deterministic():
        layout = on_device(Step(((0, LENGTH, 1, LENGTH),)).layout())
        whole = triton_causal_conv.causal_conv(x, weight, bias, states[0], layout, "silu")
        done = 0
        for step, index in random_steps(seed, prompt=LENGTH):
            count = step.sequences[index][1]
            tokens, part = place(x[done : done + count], step, index)
            out = triton_causal_conv.causal_conv(
                tokens, weight, bias, states[1], on_device(step.layout()), "silu"
            )
            assert torch.equal(out[part], whole[done : done + count]), (done, count)
            done += count
    assert torch.equal(states[0][1], states[1][1])
