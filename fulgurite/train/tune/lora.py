"""LoRA on a model: adapters added, listed, switched off and merged.

    names = add_adapters(model, LoRAConfig(rank=16))    all other parameters are frozen
    with adapters_disabled(model): ...                  the base model
    with adapters_merged(model): ...                    plain modules, for export and serving
    merge_adapters(model)                               the same for good

A target is a pattern of names of linears (`q_proj`, `*.attention.*`, `layers.3.*`) or of stacked
experts (`experts`, `experts.down_proj`). It matches a whole name, or its end after a dot. A pattern
that matches nothing is an error, so that nothing is silently frozen.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.models.moe import Experts
from fulgurite.train.tune.adapters import (
    LoRAExperts,
    LoRALinear,
    LoRAModule,
    LoRAWeights,
    as_dense,
    check_rank,
    init_adapter,
    make_dense,
)

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
NOT_BY_DEFAULT = ("lm_head",)  # as PEFT's `all-linear`


@dataclass(frozen=True)
class LoRAConfig:
    """Of adapters.

    Attributes:
        rank: columns of B and rows of A.
        alpha: B A is multiplied by alpha / rank.
        dropout: of the input of A, while training.
        targets: patterns of names; empty: all linears but the LM head, and all experts.
        use_rslora: multiply by alpha / sqrt(rank) instead (rank-stabilized LoRA).
        dtype: of A and B.
        seed: of A.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    use_rslora: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def add_adapters(model: nn.Module, config: LoRAConfig) -> list[str]:
    """Freeze the model and wrap its targets; returns the names of the weights with an adapter."""
    check_rank(config.rank, config.dropout)
    if any(isinstance(module, LoRAModule) for module in model.modules()):
        raise ArgumentError("this model has adapters already", next="merge_adapters(model) first")
    targets = find_targets(model, config.targets)
    model.requires_grad_(False)
    for path, parts in targets.items():
        base = model.get_submodule(path)
        options = (config.rank, config.scaling, config.dropout, config.dtype)
        wrapped: LoRAModule
        if isinstance(base, Experts):
            wrapped = LoRAExperts(base, parts, *options)
        else:
            assert isinstance(base, nn.Linear | QuantLinear), f"{path} is not a linear"
            wrapped = LoRALinear(base, *options)
        for weights in wrapped.weights(path):
            init_adapter(weights.a, _seed_of(weights.path, config.seed))
        set_module(model, path, wrapped.train(base.training))
    return [weights.path for weights in adapter_weights(model)]


def find_targets(model: nn.Module, patterns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Path of each module to wrap -> for experts, which of their weights; raises for a pattern
    without a match."""
    candidates = list_candidates(model)
    if not patterns:
        chosen = [name for name in candidates if name.split(".")[-1] not in NOT_BY_DEFAULT]
    else:
        unmatched = [p for p in patterns if not any(_matches(name, p) for name in candidates)]
        if unmatched:
            raise ArgumentError(
                f"no linear and no expert is called {', '.join(map(repr, unmatched))}",
                where=f"the model has {', '.join(_summarize(candidates))}",
                next="correct or leave out these targets; gate and up of experts are one weight, "
                "experts.gate_up_proj",
            )
        chosen = [name for name in candidates if any(_matches(name, p) for p in patterns)]
    if not chosen:
        raise ArgumentError("the model has neither linears nor experts to adapt")
    targets: dict[str, tuple[str, ...]] = {}
    for name in chosen:
        path, part = candidates[name]
        targets[path] = (*targets.get(path, ()), *((part,) if part else ()))
    return targets


def list_candidates(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Name of each weight that can have an adapter -> its module, and the parameter of experts."""
    candidates: dict[str, tuple[str, str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            candidates |= {f"{path}.{part}": (path, part) for part in EXPERT_WEIGHTS}
        elif isinstance(module, nn.Linear | QuantLinear):
            candidates[path] = path, ""
    return candidates


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a name, the end of it after a dot, or the experts it belongs to."""
    names = [name]
    if name.rpartition(".")[2] in EXPERT_WEIGHTS and ".experts." in name:
        names.append(name.rpartition(".")[0])
    return any(fnmatch.fnmatchcase(n, p) for n in names for p in (pattern, f"*.{pattern}"))


def _summarize(names: Sequence[str] | dict[str, tuple[str, str]]) -> list[str]:
    """The names with layer numbers replaced, each once."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))


def _seed_of(name: str, seed: int) -> int:
    """A seed that depends on the name, so that no order of modules changes the values."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at `path`."""
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


# ---- adapters of a model ---------------------------------------------------------------------------


def adapter_modules(model: nn.Module) -> dict[str, LoRAModule]:
    return {path: m for path, m in model.named_modules() if isinstance(m, LoRAModule)}


def adapter_weights(model: nn.Module) -> list[LoRAWeights]:
    """All adapters of a model, in the order of its modules."""
    modules = adapter_modules(model)
    return [weights for path, module in modules.items() for weights in module.weights(path)]


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Run the base model in the block."""
    modules = list(adapter_modules(model).values())
    before = [module.is_enabled for module in modules]
    for module in modules:
        module.is_enabled = False
    try:
        yield
    finally:
        for module, enabled in zip(modules, before, strict=True):
            module.is_enabled = enabled


def merge_adapters(model: nn.Module) -> None:
    """Replace wrapped modules by dense ones with the adapters added to their weights."""
    for path, module in adapter_modules(model).items():
        set_module(model, path, module.merged())


@contextmanager
def adapters_merged(model: nn.Module) -> Iterator[None]:
    """Dense modules in the block; afterwards the wrapped ones are back, unchanged.

    The block needs memory for a dense copy of all adapted weights. Quantized weights of the other
    modules are dequantized, too.
    """
    modules: dict[str, nn.Module] = dict(adapter_modules(model))
    wrapped = tuple(f"{path}." for path in modules)
    for path, module in model.named_modules():
        is_quantized = isinstance(module, QuantLinear) and not path.startswith(wrapped)
        if is_quantized and path not in modules:
            modules[path] = module
    try:
        for path, module in modules.items():
            set_module(model, path, merge_module(module))
        yield
    finally:
        for path, module in modules.items():
            set_module(model, path, module)


def merge_module(module: nn.Module) -> nn.Module:
    """The dense module that computes the same."""
    if isinstance(module, LoRAModule):
        return module.merged()
    assert isinstance(module, QuantLinear), f"{type(module).__name__} can't be merged"
    return make_dense(module, as_dense(module.weight))
