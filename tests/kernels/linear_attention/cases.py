"""Random steps of linear attention: ragged sequences, states in slots, and a float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs, SequenceLayout
from fulgurite.kernels.linear_attention.reference import recurrent_delta_rule


@dataclass(frozen=True)
class Step:
    """(tokens before this step, tokens of this step, slot, prompt length) of each sequence."""

    sequences: tuple[tuple[int, int, int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count, _, _ in self.sequences)

    def layout(self) -> SequenceLayout:
        counts = [count for _, count, _, _ in self.sequences]
        rows = [
            [0, *torch.tensor(counts).cumsum(0).tolist()],
            [start + count for start, count, _, _ in self.sequences],
            [slot for _, _, slot, _ in self.sequences],
            [prompt for _, _, _, prompt in self.sequences],
        ]
        tensors = [torch.tensor(row, dtype=torch.int32) for row in rows]
        return SequenceLayout(*tensors, max(counts))


STEPS = {
    "prefill": Step(((0, 5, 2, 5), (0, 1, 0, 1), (0, 9, 1, 9))),
    "decode": Step(((7, 1, 3, 4), (0, 1, 1, 1), (100, 1, 0, 99))),
    "mixed": Step(((3, 1, 1, 2), (0, 7, 3, 7), (4, 6, 0, 10), (2, 2, 2, 4))),
    "padding": Step(((3, 1, 1, 2), (0, 1, -1, 1), (0, 1, -1, 0))),
    "no_tokens": Step(((3, 0, 1, 2), (0, 2, 2, 2))),
}
SLOTS = 4


def random_inputs(
    tokens: int,
    key_heads: int = 2,
    group: int = 2,
    key_dim: int = 8,
    value_dim: int = 6,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> DeltaRuleInputs:
    """Inputs as slices of one projection, as a layer has them; gates that forget and remember."""
    generator = torch.Generator().manual_seed(seed)
    heads = key_heads * group
    sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim, heads, heads]
    fused = torch.randn(tokens, sum(sizes) + 3, generator=generator)
    q, k, v, a, b = fused.to(dtype)[:, :-3].split(sizes, dim=1)
    a_log = (16 * torch.rand(heads, generator=generator)).log()
    a_log[0] = -3.0  # a head that remembers
    dt_bias = torch.randn(heads, generator=generator)
    return DeltaRuleInputs(
        q.unflatten(1, (key_heads, key_dim)),
        k.unflatten(1, (key_heads, key_dim)),
        v.unflatten(1, (heads, value_dim)),
        a,
        b,
        a_log,
        dt_bias,
    )


def random_state(inputs: DeltaRuleInputs, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    heads, value_dim = inputs.v_TNV.shape[1:]
    return torch.randn(SLOTS, heads, inputs.q_TKD.shape[2], value_dim, generator=generator)


def exact_delta_rule(
    inputs: DeltaRuleInputs, state: Tensor, step: Step
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, states after the step, and which tokens are real, in float64."""
    outputs = torch.zeros(inputs.v_TNV.shape, dtype=torch.float64)
    states, real, first = state.double(), torch.zeros(step.num_tokens, dtype=torch.bool), 0
    for start, count, slot, _ in step.sequences:
        part, first = slice(first, first + count), first + count
        if slot < 0 or not count:
            continue
        old = states[slot] if start else torch.zeros_like(states[slot])
        tokens = DeltaRuleInputs(*(x[part] for x in inputs[:5]), *inputs[5:])
        outputs[part], states[slot] = recurrent_delta_rule(tokens, old, torch.float64)
        real[part] = True
    return outputs, states, real


def exact_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, step: Step, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the convolution, by torch's conv1d."""
    outputs = torch.zeros(x.shape, dtype=torch.float64)
    states, real, first = state.double(), torch.zeros(step.num_tokens, dtype=torch.bool), 0
    taps = weight.shape[0]
    for start, count, slot, _ in step.sequences:
        part, first = slice(first, first + count), first + count
        if slot < 0 or not count:
            continue
        old = states[slot] if start else torch.zeros_like(states[slot])
        inputs = torch.cat((old, x[part].double()))
        kernel = weight.double().T[:, None]
        out = F.conv1d(inputs.T[None], kernel, groups=x.shape[1])[0].T
        out = out if bias is None else out + bias.double()
        outputs[part] = F.silu(out) if silu else out
        states[slot] = inputs[len(inputs) - (taps - 1) :]
        real[part] = True
    return outputs, states, real
