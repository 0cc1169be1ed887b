"""Checkpoints into models: a path in, a `Decoder` with its weights out.

load_checkpoint   modules on meta, then one tensor at a time to its final dtype and device
load_share        the same for one rank of many: modules divided on meta, then only its share read
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fulgurite.errors import ArgumentError
from fulgurite.models import hub
from fulgurite.models.checkpoint import Assignment, Checkpoint, open_checkpoint, plan
from fulgurite.models.config import ModelConfig
from fulgurite.models.family import Family
from fulgurite.models.filling import fill
from fulgurite.models.layers import Decoder
from fulgurite.models.packed import fill_packed, keep_packed, reads_groups
from fulgurite.parallel.mesh import Mesh
from fulgurite.parallel.placement import Placement
from fulgurite.parallel.shares import Kept, Shares
from fulgurite.parallel.tensor import parallelize
from fulgurite.parallel.transport import Transport
from fulgurite.quant import QuantTensor

KEEP = ("dense", "packed")


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    keep: str = "dense",
    activations: str | None = None,
) -> Decoder:
    """The model of a folder, file or name (see hub.py); dtype None keeps the checkpoint's.

    `keep="packed"` leaves weights that the file has in blocks as they are (see packed.py), multiplied
    by `quant_linear` with `activations`: None what is fastest on the device, "none" exact.
    """
    checkpoint = open_checkpoint(hub.resolve(name))
    return load_checkpoint(
        checkpoint, dtype=dtype, device=device, keep=keep, activations=activations
    )


def build_model(config: ModelConfig, family: Family, dtype: torch.dtype) -> Decoder:
    """The modules on the meta device: shapes and dtypes without memory."""
    with _default_dtype(dtype), torch.device("meta"):
        model = family.build(config)
    assert isinstance(model, Decoder), f"{family.name} builds no Decoder"
    return model


@torch.inference_mode(False)  # parameters are plain tensors wherever they are loaded
def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    keep: str = "dense",
    activations: str | None = None,
) -> Decoder:
    _check_ways(dtype, keep)
    model = build_model(checkpoint.config, checkpoint.family, dtype or checkpoint.config.dtype)
    assignments = plan(checkpoint, model)
    filled: set[str] = set()
    if keep == "packed":
        filled = keep_packed(
            model,
            checkpoint.tensors(),
            assignments,
            checkpoint.config,
            device=device,
            activations=activations,
            grouped=reads_groups(device, model.norm.weight.dtype),
        )
    allocate(model, device)
    kept = {name: Kept.all(name, p.shape) for name, p in model.named_parameters()}
    _fill_all(model, checkpoint, assignments, {n: k for n, k in kept.items() if n not in filled})
    return model.eval()


@torch.inference_mode(False)
def load_share(
    name: str | Path | Checkpoint,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    keep: str = "dense",
    activations: str | None = None,
    transport: Transport | None = None,
    placement: Placement | None = None,
) -> tuple[Decoder, Shares]:
    """What this rank of a mesh has of a checkpoint; nothing else of it is read.

    It is the model that `load_model` and then `parallelize` would leave, and what that says of it.
    """
    _check_ways(dtype, keep)
    checkpoint = name if isinstance(name, Checkpoint) else open_checkpoint(hub.resolve(name))
    device = mesh.device if device is None else device
    model, shares = divide(
        checkpoint, mesh, dtype, keep, activations, device=device, transport=transport,
        placement=placement,
    )  # fmt: skip
    allocate(model, device)
    _fill_all(model, checkpoint, plan(checkpoint, _whole(checkpoint, dtype)), shares.kept)
    for path, parameter in model.named_parameters():
        if isinstance(parameter, QuantTensor):
            parameter.check(path)
    return model.eval(), shares


def divide(
    checkpoint: Checkpoint,
    mesh: Mesh,
    dtype: torch.dtype | None,
    keep: str,
    activations: str | None = None,
    device: torch.device | str | None = None,
    **how: Any,
) -> tuple[Decoder, Shares]:
    """This rank's share on the meta device, packed where the file is: all shapes and no memory.

    `device` is where it will be (None: the mesh's), which decides how some weights are packed.
    """
    if mesh.expert.size > 1 and checkpoint.config.experts is None:
        raise ArgumentError(
            f"there are no experts to spread over {mesh.expert.size} ranks",
            where=f"{checkpoint.family.name}, {mesh.shape}",
            next="expert=1; tensor= divides every weight",
        )
    model = _whole(checkpoint, dtype)
    if keep == "packed":
        config, assignments = checkpoint.config, plan(checkpoint, model)
        tensors = checkpoint.tensors()
        grouped = reads_groups(mesh.device if device is None else device, model.norm.weight.dtype)
        keep_packed(
            model,
            tensors,
            assignments,
            config,
            device="meta",
            activations=activations,
            grouped=grouped,
        )
    return model, parallelize(model, mesh, checkpoint.family.plan, **how)


def _whole(checkpoint: Checkpoint, dtype: torch.dtype | None) -> Decoder:
    return build_model(checkpoint.config, checkpoint.family, dtype or checkpoint.config.dtype)


def _check_ways(dtype: torch.dtype | None, keep: str) -> None:
    if keep not in KEEP:
        raise ArgumentError(f"keep={keep!r} is not a way to keep weights", next=" or ".join(KEEP))
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"a model can't compute in {dtype}", next="try torch.bfloat16")


def _fill_all(
    model: nn.Module,
    checkpoint: Checkpoint,
    assignments: dict[str, list[Assignment]],
    kept: dict[str, Kept],
) -> None:
    """Every stored tensor into the parameters named by `kept`, which says what of it they keep."""
    parameters = dict(model.named_parameters())
    places = {one.name: (parameters[name], one) for name, one in kept.items()}
    with torch.no_grad():
        for name, stored in checkpoint.tensors():
            for assignment in assignments.get(name, ()):
                if assignment.parameter not in places:
                    continue
                parameter, one = places[assignment.parameter]
                put = fill_packed if isinstance(parameter, QuantTensor) else fill
                put(parameter, one, stored, assignment, checkpoint.config)


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Replace meta parameters by empty memory on the device; computed buffers move along."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, QuantTensor) and not parameter.is_meta:
                continue  # kept packed: it has its memory
            assert parameter.is_meta, f"{path}.{name} already has memory"
            memory = torch.empty_like(parameter, device=device)
            packed = isinstance(parameter, QuantTensor)
            setattr(module, name, nn.Parameter(memory, requires_grad=not packed))
    model.to(device)


def random_model(
    config: ModelConfig,
    family: Family,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    std: float = 0.02,
) -> Decoder:
    """A model with random weights, for benchmarks and tests; norms have weight one."""
    model = build_model(config, family, dtype or config.dtype)
    allocate(model, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, std, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return model.eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
