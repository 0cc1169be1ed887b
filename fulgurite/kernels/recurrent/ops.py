"""The operator of recurrent layers.

    recurrence    one layer of an LSTM, a GRU or a plain RNN, in one or two directions

`capture/recurrent.py` puts it into graphs. The products of all inputs with their weights are linears before it.

Shapes: D directions; T steps; B batch; H hidden size; G gates of a cell times H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels import registry
from fulgurite.kernels.conv.ops import unpack_bias, unpack_weight
from fulgurite.kernels.recurrent import cpu
from fulgurite.op import op

RECURRENCE_KERNELS: dict[str, registry.Kernel] = {"cpu": cpu.recurrence}


@op("fulgurite::recurrence")
def recurrence(
    gates: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    hidden: Tensor,
    memory: Tensor | None,
    cell: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs [T, B, D * H] and the last states [D, B, H] (of an LSTM: also its memories).

    gates      of each direction the projected inputs [T, B, G]; the second direction runs backward
    weights    of each direction [G, H], packed; biases [G] too, or none at all
    hidden     the first states [D, B, H]
    memory     of an LSTM: its first memories [D, B, H]
    cell       lstm, gru, rnn_tanh or rnn_relu
    """
    out: tuple[Tensor, Tensor, Tensor] = registry.dispatch(
        RECURRENCE_KERNELS, hidden.device, _reference, gates, weights, biases, hidden, memory, cell
    )
    return out


@recurrence.fake
def _(
    gates: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    hidden: Tensor,
    memory: Tensor | None,
    cell: str,
) -> tuple[Tensor, Tensor, Tensor]:
    out = hidden.new_empty((*gates[0].shape[:2], len(gates) * hidden.shape[2]))
    last = hidden.new_empty((0,) if memory is None else hidden.shape)
    return out, hidden.new_empty(hidden.shape), last


def _reference(
    gates: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    hidden: Tensor,
    memory: Tensor | None,
    cell: str,
) -> tuple[Tensor, Tensor, Tensor]:
    size = hidden.shape[2]
    columns = cpu.GATES[cell] * size
    outs, states, memories = [], [], []
    for k, gate in enumerate(gates):
        weight = unpack_weight(weights[k], [columns, 1, 1], size, 1).reshape(columns, size)
        bias = unpack_bias(biases[k], columns, 1) if biases else hidden.new_zeros(columns)
        h, c = hidden[k], hidden[k] if memory is None else memory[k]
        steps = range(gate.shape[0])
        rows = {}
        for step in reversed(steps) if k else steps:
            h, c = _advance(cell, gate[step], h @ weight.t() + bias, h, c)
            rows[step] = h
        outs.append(torch.stack([rows[step] for step in steps]) if rows else gate[..., :size])
        states.append(h)
        memories.append(c)
    last = hidden.new_empty(0) if memory is None else torch.stack(memories)
    return torch.cat(outs, -1), torch.stack(states), last


def _advance(cell: str, gates: Tensor, sums: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The state and the memory after one step."""
    if cell == "lstm":
        i, f, g, o = (gates + sums).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if cell == "gru":
        (r, z, n), (sum_r, sum_z, sum_n) = gates.chunk(3, -1), sums.chunk(3, -1)
        n = (n + (r + sum_r).sigmoid() * sum_n).tanh()
        return n + (z + sum_z).sigmoid() * (h - n), c
    return ((gates + sums).tanh() if cell == "rnn_tanh" else (gates + sums).relu()), c
