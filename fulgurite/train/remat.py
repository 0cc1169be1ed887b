"""Activation checkpointing: a model and a policy in; the same model, whose layers recompute, out.

    none        save everything that backward reads
    mincut      compiled: the compiler's min-cut saves the fewest bytes. Eager: as `none`
    selective   each layer saves the outputs of matmuls and attention, and recomputes the rest
    full        each layer saves its input only; backward runs the layer again

`selective` and `full` are `torch.utils.checkpoint` around each layer, eager or compiled. The layer keeps
its name and its parameters. They are applied before FSDP2 and inside pipeline stages.

A layer that runs again in backward computes the same: it has the random state and the deterministic mode
of its forward. Expert load is not counted again, since `RouteRecorder` ignores calls of backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fulgurite.determinism import deterministic, is_deterministic
from fulgurite.errors import ArgumentError

POLICIES = ("none", "mincut", "selective", "full")
# Ops whose outputs `selective` saves, without overload: they cost more than their bytes.
SAVED_OPS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"),
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_attention_math",
        "aten::_grouped_mm",
        "fulgurite::document_attention",
        "fulgurite::dense_linear",
        "fulgurite::grouped_gemm",
    }
)
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ArgumentError(f"parallel.remat={policy!r}", next=f"one of {', '.join(POLICIES)}")


def compiler_policy(policy: str) -> str:
    """The `remat` of `fulgurite.compile`: layers that checkpoint themselves need none of its own."""
    check_policy(policy)
    return "none" if policy == "none" else "mincut"


def apply_remat(model: nn.Module, policy: str, saved_ops: frozenset[str] = SAVED_OPS) -> nn.Module:
    """Checkpoint each of `model.layers` by a policy, in place.

    `saved_ops` are the operators whose outputs `selective` saves, such as `aten::mm`.
    """
    check_policy(policy)
    if policy in ("none", "mincut"):
        return model
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ArgumentError(
            f"parallel.remat={policy!r}: {type(model).__name__} has no layers to checkpoint",
            next="parallel.remat='none' or 'mincut'",
        )
    for layer in layers:
        layer.__class__ = _checkpointed_class(type(layer))
        layer._saved_ops = None if policy == "full" else saved_ops
        layer._checkpoint_policy = _make_policy(saved_ops)
    # Layers fill the mask cache of a step and record routes: backward need not do it again.
    if hasattr(dynamo_config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        dynamo_config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    return model


def _make_contexts(saved_ops: frozenset[str] | None) -> Contexts:
    """Contexts of a layer's forward and of its recomputation."""
    forward: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if saved_ops is not None:
        forward, again = create_selective_checkpoint_contexts(_make_policy(saved_ops))
    # Backward may run in another thread, and the mode belongs to a thread.
    return forward, _Together((again, deterministic(is_deterministic())))


class _Together(ExitStack):
    """Several context managers as one, entered when it is."""

    def __init__(self, contexts: tuple[AbstractContextManager[Any], ...]) -> None:
        super().__init__()
        self.contexts = contexts

    def __enter__(self) -> _Together:
        super().__enter__()
        for context in self.contexts:
            self.enter_context(context)
        return self


@functools.cache
def _make_policy(saved_ops: frozenset[str]) -> Callable[..., CheckpointPolicy]:
    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = getattr(getattr(op, "_schema", None), "name", "")
        is_saved = name in saved_ops
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


_checkpointed_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _checkpointed_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a layer's class whose forward is checkpointed while gradients are recorded."""
    if base not in _checkpointed_classes:
        _checkpointed_classes[base] = _make_class(base)
    return _checkpointed_classes[base]


def _make_class(base: type[nn.Module]) -> type[nn.Module]:
    run: Callable[..., Any] = base.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(self, *args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False}
        if not torch.compiler.is_compiling():  # a graph has its mode, and its ops their policy
            options["context_fn"] = functools.partial(_make_contexts, self._saved_ops)
        elif self._saved_ops is not None:
            options["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, self._checkpoint_policy
            )
        return checkpoint(run, self, *args, **options, **kwargs)

    return type(f"Checkpointed{base.__name__}", (base,), {"forward": forward})
