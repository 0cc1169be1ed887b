"""What each rank does in test_tensor.py: a divided model against the whole one, in the same process.

The whole model runs the tokens of all data ranks; its logits and gradients are the oracle. Gradients are
cut like weights: a second copy of the model, whose weights are those gradients, is divided in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fulgurite
from fulgurite.models import CausalLM, ModelConfig, build_random_model
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.registry import ARCHITECTURES, get_sharding_rules
from fulgurite.parallel import AllToAllDispatcher, Mesh, Placement, parallelize
from tests.ranks import open_once

Shape = tuple[int, int, int]


def mesh_of(shape: Shape) -> Mesh:
    """The mesh of this shape, made once."""
    return open_once(shape, lambda: Mesh(*shape, timeout=60))


def family(config: ModelConfig) -> ModelFamily:
    return next(f for f in ARCHITECTURES.values() if f.name == config.family)


def whole_model(config: ModelConfig) -> CausalLM:
    """Wide weights, so that every part matters; biases and router corrections too."""
    return build_random_model(config, family(config), dtype=torch.float32, std=0.3).train()


def tokens_of(rank: int, vocabulary: int, lengths: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.randint(0, vocabulary, (lengths[rank % len(lengths)],), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(ids, torch.arange(len(ids)))
    weights = torch.linspace(-1, 1, logits.shape[-1])
    return logits, (logits.tanh() * weights).sum()


@dataclass(frozen=True)
class Compared:
    """The largest difference, over the largest number of the oracle."""

    logits: float
    gradients: Mapping[str, float]
    report: str


def compare(
    config: ModelConfig, shape: Shape, lengths: tuple[int, ...], placement: Placement | None = None
) -> Compared:
    mesh = mesh_of(shape)
    whole = whole_model(config)
    everyone = [tokens_of(rank, config.vocab_size, lengths) for rank in range(shape[0])]
    wanted, losses = zip(*(loss_of(whole, ids) for ids in everyone), strict=True)
    torch.stack(losses).sum().backward()
    local, expected = copy.deepcopy(whole), copy.deepcopy(whole)
    local.zero_grad(set_to_none=True)
    with torch.no_grad():
        for parameter, source in zip(expected.parameters(), whole.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    plan = get_sharding_rules(config)
    shares = parallelize(local, mesh, plan, placement=placement)
    parallelize(expected, mesh, plan, placement=placement)
    logits, loss = loss_of(local, everyone[mesh.data.index])
    loss.backward()
    shares.reduce_gradients()
    gradients = {
        name: distance(parameter.grad, other, whole.get_parameter(whole_name(name)).grad)
        for (name, parameter), other in zip(
            local.named_parameters(), expected.parameters(), strict=True
        )
    }
    return Compared(distance(logits, wanted[mesh.data.index]), gradients, str(shares))


def compare_trained(
    config: ModelConfig, shape: Shape, lengths: tuple[int, ...], steps: int = 2
) -> list[float]:
    """Logits of two models after steps of two gradients each that both took in turns, divided and whole."""
    mesh, ranks, rate = mesh_of(shape), shape[0], 1e-3
    wholes = [whole_model(config).double() for _ in range(2)]
    with torch.no_grad():
        for parameter in wholes[1].parameters():
            parameter.mul_(0.7)
    locals = [copy.deepcopy(whole) for whole in wholes]
    shares = [parallelize(local, mesh, get_sharding_rules(config)) for local in locals]

    def descend(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
        model.zero_grad(set_to_none=True)

    for step in range(steps):
        for seed in (2 * step, 2 * step + 1):  # two gradients a step
            batches = [tokens_of(100 * seed + r, config.vocab_size, lengths) for r in range(ranks)]
            for whole, local in zip(wholes, locals, strict=True):
                torch.stack([loss_of(whole, ids)[1] for ids in batches]).sum().backward()
                loss_of(local, batches[mesh.data.index])[1].backward()
        for whole, local, share in zip(wholes, locals, shares, strict=True):
            share.reduce_gradients()
            descend(whole)
            descend(local)
    ids = tokens_of(7, config.vocab_size, (9,))
    return [
        distance(loss_of(local, ids)[0], loss_of(whole, ids)[0])
        for whole, local in zip(wholes, locals, strict=True)
    ]


def whole_name(name: str) -> str:
    """The parameter of the undivided model."""
    return name.replace(".inner", "").replace("experts.experts", "experts")


def distance(ours: Tensor | None, wanted: Tensor, whole: Tensor | None = None) -> float:
    """The largest difference over the largest number, of the whole tensor where `wanted` is a share."""
    assert ours is not None and ours.shape == wanted.shape, (ours, wanted.shape)
    if wanted.numel() == 0:
        return 0.0
    scale = max(float((wanted if whole is None else whole).detach().abs().max()), 1e-3)
    return float((ours - wanted).detach().abs().max()) / scale


def compare_packed(config: ModelConfig, shape: Shape, recipe: str) -> float:
    """Packed weights are cut, not quantized anew: the same numbers, divided."""
    mesh = mesh_of(shape)
    whole = whole_model(config).eval()
    fulgurite.quantize(whole, recipe, progress=False)
    for module in whole.modules():
        if hasattr(module, "activations"):
            module.activations = "none"  # of rows that are divided, blocks have other maxima
    ids = tokens_of(0, config.vocab_size, (13,))
    with torch.no_grad():
        wanted = whole(ids, torch.arange(len(ids)))
        parallelize(whole, mesh, get_sharding_rules(config))
        return distance(whole(ids, torch.arange(len(ids))), wanted)


def compare_cached(config: ModelConfig, shape: Shape, new: int) -> tuple[list[int], list[int]]:
    """Greedy tokens of a divided model with a cache of its own heads, and of the whole one."""
    from fulgurite.models import ContiguousKVCache

    mesh = mesh_of(shape)
    model = whole_model(config).eval()
    ids = tokens_of(0, config.vocab_size, (7,))
    texts = []
    for _ in range(2):
        cache = ContiguousKVCache(model.attention_specs, 1, len(ids) + new)
        text, step, start = ids.tolist(), ids[None], 0
        with torch.no_grad():
            for _ in range(new):
                positions = torch.arange(start, start + step.shape[1])[None]
                chosen = model(step, positions, cache)[0, -1].argmax()
                start, step = len(text), chosen[None, None]
                text.append(int(chosen))
        texts.append(text[len(ids) :])
        if len(texts) == 1:
            parallelize(model, mesh, get_sharding_rules(config), dispatcher=_make_dispatcher(mesh))
    return texts[1], texts[0]


def _make_dispatcher(mesh: Mesh) -> AllToAllDispatcher | None:
    return AllToAllDispatcher(mesh.expert) if mesh.expert.size > 1 else None
