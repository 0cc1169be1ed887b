"""`nn.LSTM`, `nn.GRU` and `nn.RNN` in inference: captured, where TorchDynamo leaves the whole function to Python.

In: ATen's `lstm`, `gru`, `rnn_tanh` and `rnn_relu` of float32 tensors on the CPU. Out: of each layer linears of all
steps, and `fulgurite::recurrence`. The graph has as many ops for any number of steps. Training, other dtypes and
devices, projections (`proj_size`) and packed sequences are left to torch, as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._dynamo.variables.builder import VariableBuilder

from fulgurite.capture.program_errors import capture
from fulgurite.kernels.conv.ops import pack_bias, pack_weight
from fulgurite.kernels.recurrent.ops import recurrence

aten = torch.ops.aten
OPS = {
    aten.lstm.input: "lstm",
    aten.gru.input: "gru",
    aten.rnn_tanh.input: "rnn_tanh",
    aten.rnn_relu.input: "rnn_relu",
}
KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


def install() -> None:
    """Let TorchDynamo enter these modules, and trace their ops by layers."""
    VariableBuilder.wrap_module = _enter_recurrent_modules(VariableBuilder.wrap_module)
    for op, cell in OPS.items():
        for key in KEYS:
            original = op.py_kernels.get(key)
            if original is not None:
                op.py_kernels[key] = _trace_by_layers(cell, original)
        op._dispatch_cache.clear()


def _enter_recurrent_modules(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrap_module(builder: Any, value: nn.Module) -> Any:
        is_recurrent = isinstance(value, nn.LSTM | nn.GRU | nn.RNN)
        if is_recurrent and capture.is_active and _can_enter(value):
            with torch._dynamo.config.patch(allow_rnn=True):
                return original(builder, value)
        return original(builder, value)

    return wrap_module


def _can_enter(module: Any) -> bool:
    """Whether calls of a module are inference with tensors that the operator takes."""
    if torch.is_grad_enabled() or (module.training and module.dropout) or module.proj_size:
        return False
    return all(_is_supported(weight) for weight in module._flat_weights)


def _is_supported(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor) and tensor.dtype is torch.float32 and tensor.device.type == "cpu"
    )


def _trace_by_layers(cell: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = tuple(hx) if cell == "lstm" else (hx, None)
        tensors = (x, *params, *(state for state in states if state is not None))
        is_training = torch.is_grad_enabled() or (train and dropout)
        per_direction = 4 if has_biases else 2
        has_projections = len(params) != num_layers * (1 + bidirectional) * per_direction
        if is_training or has_projections or not all(map(_is_supported, tensors)):
            numbers = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
            return original(x, hx, params, *numbers)
        length = x.shape[1 if batch_first else 0]
        torch._check(length > 0, lambda: "Expected sequence length to be larger than 0 in RNN")
        layers = _split(params, num_layers, 1 + bidirectional, per_direction)
        out, *last = _run_layers(cell, x, states, layers, batch_first)
        return (out, *last) if cell == "lstm" else (out, last[0])

    return call


def _split(
    params: Sequence[Tensor], num_layers: int, directions: int, count: int
) -> list[list[Sequence[Tensor]]]:
    """The parameters of each layer's directions: of inputs, of states, then their biases."""
    parts = [params[k : k + count] for k in range(0, len(params), count)]
    return [parts[k * directions : (k + 1) * directions] for k in range(num_layers)]


def _run_layers(
    cell: str,
    x: Tensor,
    states: tuple[Tensor, Tensor | None],
    layers: list[list[Sequence[Tensor]]],
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The output, and the last states and memories of all layers and directions."""
    directions = len(layers[0])
    hidden, memory = states
    is_transposed = batch_first  # whether x is [B, T, I]; later layers are [T, B, I]
    last: list[tuple[Tensor, Tensor]] = []
    for k, layer in enumerate(layers):
        gates = [F.linear(x, one[0], one[2] if len(one) == 4 else None) for one in layer]
        if is_transposed:
            gates = [gate.transpose(0, 1) for gate in gates]
        weights = [pack_weight(one[1], 1) for one in layer]
        biases = [pack_bias(one[3], None, 1) for one in layer if len(one) == 4]
        rows = slice(k * directions, (k + 1) * directions)
        first = None if memory is None else memory[rows]
        x, *after = recurrence(gates, weights, biases, hidden[rows], first, cell)
        last.append((after[0], after[1]))
        is_transposed = False
    out = x.transpose(0, 1) if batch_first else x
    if len(last) == 1:
        return out, *last[0]
    return out, *(torch.cat(tensors) for tensors in zip(*last, strict=True))
