"""What every reader of a layout must do: find, describe and read a weight, with the same values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.gemm.quant_linear import quant_linear
from fulgurite.quant import (
    QuantTensor,
    StoredTensor,
    describe_quantized_weight,
    find_quantized_weights,
    read_quantized_weight,
)

Tensors = dict[str, Tensor]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_codes(shape: tuple[int, ...], bits: int, seed: int = 0) -> Tensor:
    """Unsigned codes as int32."""
    return torch.randint(2**bits, shape, generator=seeded(seed), dtype=torch.int32)


def random_scales(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return (torch.rand(shape, generator=seeded(seed)) * 0.02 + 0.001).to(dtype)


def headers(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    return {name: StoredTensor(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def read_checked(
    tensors: Tensors, base: str, config: Mapping[str, Any] | None = None, *, format: str | None
) -> Tensor:
    """Read a weight; check that its description, its product and its tensors agree with it.

    `format`: the expected one; None for a weight that is dequantized. Returns its values.
    """
    small: list[str] = []

    def read_small(name: str) -> Tensor:
        small.append(name)
        assert tensors[name].numel() <= 2**16
        return tensors[name]

    stored = headers(tensors)
    described = describe_quantized_weight(stored, base, config, read_small)
    assert find_quantized_weights(stored) == {base: described.layout}
    assert set(described.tensors) == set(tensors)
    loaded = read_quantized_weight(tensors, base, torch.float32, config=config)
    assert loaded.layout == described.layout
    assert tuple(loaded.weight.shape) == described.shape
    assert described.input_scale == (loaded.input_scale is not None)
    assert loaded.reason == described.reason
    if format is None:
        assert described.format is None
        assert described.reason
        assert not isinstance(loaded.weight, QuantTensor)
        return loaded.weight
    assert isinstance(loaded.weight, QuantTensor)
    assert loaded.weight.format.name == format
    assert described.format is loaded.weight.format
    values = loaded.weight.dequantize()
    check_product(loaded.weight, values)
    return values


def check_product(weight: QuantTensor, values: Tensor) -> None:
    """The packed linear is that of the dequantized weight."""
    matrix, dense = (weight, values) if weight.dim() == 2 else (weight[0], values[0])
    for rows in (1, 20):
        x = torch.randn(rows, dense.shape[1], generator=seeded(3))
        expected = x.double() @ dense.double().T
        actual = quant_linear(x, matrix).double()
        assert (actual - expected).norm() <= 2e-6 * dense.shape[1] ** 0.5 * expected.norm() + 1e-30
