"""A nested state as a flat dict of leaves, and back.

In: `{"model": {"norm.weight": tensor}, "step": 7}`. Out: `{"model.norm.weight": tensor, "step": 7}`.

Dicts are opened, and lists that hold tensors. Every other value is a leaf: tensors are stored as
tensors, all else is pickled. Leaves that a load replaces are written back into the nested state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fulgurite.errors import ArgumentError
from fulgurite.train.checkpoint.errors import CheckpointError

PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer, DTensor)


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """All leaves by their dotted names."""
    return {name: container[key] for name, container, key in iterate_leaves(state)}


def iterate_leaves(state: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, container and key of every leaf; each name once."""
    seen: set[str] = set()
    for name, container, key in _walk(state, ""):
        if name in seen:
            raise CheckpointError(
                f"two values of the state have the name {name}",
                next="rename one of them; names of nested dicts are joined by dots",
            )
        seen.add(name)
        _check_leaf(name, container[key])
        yield name, container, key


def _walk(container: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    keys = list(container) if isinstance(container, Mapping) else range(len(container))
    for key in keys:
        name = f"{prefix}.{key}" if prefix else str(key)
        value = container[key]
        if _is_opened(value, name):
            yield from _walk(value, name)
        else:
            yield name, container, key


def _is_opened(value: Any, name: str) -> bool:
    if isinstance(value, dict):
        return bool(value)
    if isinstance(value, list):
        return _holds_tensor(value)
    if isinstance(value, tuple) and _holds_tensor(value):
        raise CheckpointError(
            f"{name} is a tuple with tensors: a load could not write into it",
            next="use a list or a dict",
        )
    return False


def _holds_tensor(values: list[Any] | tuple[Any, ...]) -> bool:
    return any(
        isinstance(value, Tensor)
        or (isinstance(value, dict) and _holds_tensor(list(value.values())))
        or (isinstance(value, (list, tuple)) and _holds_tensor(value))
        for value in values
    )


def _check_leaf(name: str, value: Any) -> None:
    """Refuse tensors whose bytes are not those of one dense local tensor."""
    if not isinstance(value, Tensor):
        return
    if type(value) not in PLAIN_TENSORS:
        raise CheckpointError(
            f"{name} is a {type(value).__name__}, which a checkpoint can't hold",
            next="put its plain tensors into the state, for example by `__tensor_flatten__`",
        )
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise CheckpointError(f"{name} is a partial sum", next="reduce it before the save")
    elif value.is_meta or value.layout != torch.strided:
        kind = "on the meta device" if value.is_meta else f"of layout {value.layout}"
        raise CheckpointError(f"{name} is a tensor {kind}", next="save dense tensors")


def training_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The weights, buffers and optimizer states of a run, by parameter name.

    The values are the live ones: a load into this state is a load into the model and the optimizer.
    Names do not depend on ranks or on the order of parameters, as the numbers of
    `optimizer.state_dict()` do. Hyperparameters are left out: they come from the configuration.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ArgumentError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not one of "
                    "the model",
                    next="give the model that the optimizer was made for",
                )
            states[names[id(parameter)]] = optimizer.state[parameter]
    weights = {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    return {"model": weights, "optimizer": states}


def hash_state(state: Mapping[str, Any]) -> str:
    """SHA-256 of all tensors of a state: names, dtypes, shapes and bytes.

    DTensors are gathered, so the hash does not depend on ranks or sharding.
    """
    digest = hashlib.sha256()
    leaves = flatten(state)
    for name in sorted(leaves):
        value = leaves[name]
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(tensor_bytes(value))
    return digest.hexdigest()


def tensor_bytes(x: Tensor) -> memoryview:
    """The bytes of a tensor on a CPU, in the order of its elements; no copy if it is contiguous."""
    flat = x.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())
