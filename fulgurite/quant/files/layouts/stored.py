"""One weight as a checkpoint stores it: the names of its tensors, their contents, and what a reader
makes of them.

In: tensor names and tensors of a file. Out: `StoredParts` (a tensor for each role: weight, scale,
zero point), from which a layout's reader builds a `PackedWeight` or a `DenseWeight`.

A reader also runs on meta tensors: so the format and shape of a weight are known before its data is
read. `StoredParts.values(role)` reads the few small tensors whose values decide these (an original
shape, a group index).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant.files.layouts.section import QuantizationFields
from fulgurite.quant.format import Format

WEIGHT = "weight"


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PackedWeight:
    """A weight [.., N, K] in a format of `FORMATS`."""

    format: Format
    data: Tensor
    scales: dict[str, Tensor]


@dataclass(frozen=True)
class DenseWeight:
    """A dequantized weight [.., N, K] in float32, and why no format holds it."""

    values: Tensor
    reason: str


ReadWeight = PackedWeight | DenseWeight


class Naming(Enum):
    """How the name of a tensor is built from the base name of a weight and the tensor's role.

    DOTTED               base.role, the tensors of a linear
    PARAMETER            base for the weight and base_role for others: stacked experts
    FLATTENED            base._weight_role: a flattened tensor subclass (torchao)
    FLATTENED_PARAMETER  module._name_role of the parameter module.name: the same of stacked experts
    """

    DOTTED = "dotted"
    PARAMETER = "parameter"
    FLATTENED = "flattened"
    FLATTENED_PARAMETER = "flattened parameter"

    def join(self, base: str, role: str) -> str:
        """The name of a tensor."""
        if self is Naming.DOTTED:
            return f"{base}.{role}"
        if self is Naming.PARAMETER:
            return base if role == WEIGHT else f"{base}_{role}"
        if self is Naming.FLATTENED:
            return f"{base}._{WEIGHT}_{role}"
        module, _, parameter = base.rpartition(".")
        return f"{module}._{parameter}_{role}"

    def split(self, name: str, role: str) -> str | None:
        """The base name of the tensor `name`, or None if it does not have this role."""
        if self is Naming.FLATTENED_PARAMETER:
            match = re.fullmatch(rf"(.+)\._(\w+)_{re.escape(role)}", name)
            is_parameter = match is not None and match[2] != WEIGHT
            return f"{match[1]}.{match[2]}" if match is not None and is_parameter else None
        suffix = self.join("", role)
        if not name.endswith(suffix) or name == suffix:
            return None
        base = name.removesuffix(suffix)
        is_linear = self is Naming.PARAMETER and base.endswith(f".{WEIGHT}")
        return None if is_linear else base

    def weight_name(self, base: str) -> str:
        """The name that the weight has in an unquantized checkpoint."""
        is_parameter = self in (Naming.PARAMETER, Naming.FLATTENED_PARAMETER)
        return base if is_parameter else f"{base}.{WEIGHT}"


@dataclass(frozen=True)
class StoredParts:
    """The tensors of one weight by role; on the meta device while a weight is only described."""

    base: str
    naming: Naming
    roles: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    read_values: Callable[[str], Tensor]
    config: QuantizationFields

    def __contains__(self, role: str) -> bool:
        return role in self.roles

    def __getitem__(self, role: str) -> Tensor:
        return self.tensors[self.name(role)]

    def find(self, role: str) -> Tensor | None:
        """The tensor of a role, or None if the checkpoint does not have it."""
        return self.tensors[self.name(role)] if role in self.roles else None

    def name(self, role: str) -> str:
        """The full name of a tensor, for errors."""
        return self.naming.join(self.base, role)

    def values(self, role: str) -> Tensor:
        """The values of a small tensor, also while the weight is only described."""
        return self.read_values(self.name(role))

    def get_nonzero(self, role: str) -> Tensor | None:
        """The tensor of a role, or None if all of it is zero: zero points of symmetric codes."""
        is_zero = role not in self or not bool(self.values(role).any())
        return None if is_zero else self[role]

    def check_dtype(self, role: str, *dtypes: torch.dtype) -> Tensor:
        """The tensor of a role; raises if it has another dtype."""
        tensor = self[role]
        if tensor.dtype in dtypes:
            return tensor
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise FormatError(
            f"{role} has dtype {str(tensor.dtype).removeprefix('torch.')}; it must be {allowed}",
            where=self.name(role),
            next="the checkpoint is damaged or in another layout: download it again, or check "
            "quantization_config in config.json",
        )

    def check_shape(self, role: str, *shapes: tuple[int, ...]) -> Tensor:
        """The tensor of a role; raises if it has another shape."""
        tensor = self[role]
        if tuple(tensor.shape) in shapes:
            return tensor
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise FormatError(
            f"{role} has shape {list(tensor.shape)}; it must be {allowed}",
            where=f"{self.name(role)}; {self.describe_shapes()}",
            next="the file is truncated or config.json belongs to another checkpoint: download "
            "it again",
        )

    def describe_shapes(self) -> str:
        """All tensors of the weight with their shapes, for errors."""
        return ", ".join(f"{role} {list(self[role].shape)}" for role in self.roles)

    def error(self, what: str, role: str, next: str) -> FormatError:
        """An error about one tensor of the weight."""
        return FormatError(what, where=f"{self.name(role)}; {self.describe_shapes()}", next=next)


@dataclass(frozen=True)
class CheckpointLayout:
    """A layout: the roles that identify it, those that may accompany them, and its reader.

    `value_roles`: small tensors whose values the reader needs to tell format and shape.
    """

    name: str
    required: tuple[str, ...]
    read: Callable[[StoredParts], ReadWeight]
    naming: Naming = Naming.DOTTED
    optional: tuple[str, ...] = ()
    value_roles: tuple[str, ...] = ()
    matches: Callable[[Mapping[str, StoredTensor]], bool] | None = None

    def find_roles(self, base: str, present: Mapping[str, object]) -> tuple[str, ...]:
        """The roles of a weight's tensors that the checkpoint has; () without the required ones."""
        join = self.naming.join
        # The last role is the rarest: for most layouts one look tells.
        if any(join(base, role) not in present for role in reversed(self.required)):
            return ()
        return self.required + tuple(r for r in self.optional if join(base, r) in present)

    def is_layout_of(self, base: str, stored: Mapping[str, StoredTensor]) -> bool:
        """Whether the weight `base` has this layout."""
        roles = self.find_roles(base, stored)
        if not roles or self.matches is None:
            return bool(roles)
        return self.matches({role: stored[self.naming.join(base, role)] for role in roles})


def require_finite(values: Tensor, where: str) -> None:
    """Raise if a dequantized weight has a NaN or an infinity."""
    if values.is_meta or bool(values.isfinite().all()):
        return
    count = int((~values.isfinite()).sum())
    raise WeightsError(
        f"{count} of {values.numel()} dequantized values are not finite",
        where=where,
        next="the file is damaged, or its original weights contained NaN: download it again, "
        "or quantize again from the original weights; check=False loads it anyway",
    )
