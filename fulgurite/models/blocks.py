"""Blocks of a layer: hidden states in, hidden states out, without attention.

    ResidualBlock   a module that can fuse the norm before it and the residual add after it
    GatedMLP        down_proj(activation(gate_proj(x)) * up_proj(x))
    MLP             down_proj(activation(up_proj(x)))

Shapes: X token layout, [T] or [B, T]; D hidden size; I intermediate size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.kernels.gemm import fused_projections
from fulgurite.models.config import ModelConfig
from fulgurite.models.norms import RMSNorm


class ResidualBlock(nn.Module):
    """A module that can fuse the norm before it and the residual add after it.

    `block(x, norm=norm, residual_XD=x)` is x + block(norm(x)), in fewer kernels where possible.
    """


class GatedMLP(ResidualBlock):
    """y = down_proj(activation(gate_proj(x)) * up_proj(x))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = activation

    @classmethod
    def from_config(cls, config: ModelConfig) -> GatedMLP:
        """The MLP of a dense layer."""
        return cls(config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias)

    def forward(
        self, x_XD: Tensor, *, norm: RMSNorm | None = None, residual_XD: Tensor | None = None
    ) -> Tensor:
        """Apply `norm` to x first if given, and add the output to `residual_XD` if given."""
        gate, up = self.fused_projections
        intermediate_XI = fused_projections.fused_gate_up(x_XD, gate, up, self.activation, norm)
        return project_add(residual_XD, intermediate_XI, self.down_proj)

    @property
    def fused_projections(self) -> tuple[nn.Module, ...]:
        """The linears that read the same input."""
        return get_children(self, "gate_proj", "up_proj")


class MLP(ResidualBlock):
    """y = down_proj(activation(up_proj(x)))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = activation

    @classmethod
    def from_config(cls, config: ModelConfig) -> MLP:
        """The MLP of a dense layer."""
        return cls(config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias)

    def forward(
        self, x_XD: Tensor, *, norm: RMSNorm | None = None, residual_XD: Tensor | None = None
    ) -> Tensor:
        """Apply `norm` to x first if given, and add the output to `residual_XD` if given."""
        (up_XI,) = fused_projections.fused_linears(x_XD, get_children(self, "up_proj"), norm)
        activated_XI = elementwise.activate(up_XI, self.activation)
        return project_add(residual_XD, activated_XI, self.down_proj)


def get_children(module: nn.Module, *names: str) -> tuple[nn.Module, ...]:
    """Children by name. It bypasses the slow `nn.Module.__getattr__`: every layer calls it each
    step.
    """
    modules: dict[str, Any] = module._modules
    return tuple([modules[name] for name in names])


def project_add(residual_XD: Tensor | None, x: Tensor, linear: nn.Module) -> Tensor:
    """linear(x), plus the residual if given."""
    if residual_XD is None:
        out_XD: Tensor = linear(x)
        return out_XD
    return fused_projections.fused_linear_add(residual_XD, x, linear)
