"""What one rank of many holds: a model's configuration and a mesh in, a smaller model out.

A rank's share of a model is itself a model: fewer heads, a narrower MLP, fewer experts, a slice of the
vocabulary. It is built on the meta device with one layer of each kind, and the functions that plan
memory on one device (memory.py) read its sizes like any other model's.

    data      every rank has all of the dense weights and its own requests
    tensor    heads, inner sizes and vocabulary are cut; keys and values too where there are enough heads
    expert    whole experts are spread; with expert = 1 each is cut along the tensor axis instead

The rules are those of `parallel.tensor.parallelize`, which cuts the real thing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError, FormatError
from fulgurite.models.cache import AttentionSpec
from fulgurite.models.config import ExpertsConfig, ModelConfig
from fulgurite.models.family import Family
from fulgurite.models.layers import Decoder
from fulgurite.models.moe import MixtureOfExperts
from fulgurite.models.weights import build_model
from fulgurite.parallel.collectives import share
from fulgurite.parallel.mesh import MeshShape
from fulgurite.parallel.tensor import split_heads
from fulgurite.plan.memory import Packed
from fulgurite.quant.format import Format
from fulgurite.quant.shapes import check_shape, data_shape, scale_shape

FormatOf = Callable[[str], Format | None]
# Parts of a model as people ask for them, by what the names of their parameters contain.
PARTS = (
    ("experts", ".feed_forward.experts."),
    ("attention", ".attention."),
    ("dense MLP", ".feed_forward."),
    ("embedding", "embedding."),
    ("embedding", "head."),
)
OTHERS = "norms, routers"
NEVER_PACKED = (".latent_up.",)  # models.deepseek.LatentUp: read by rows and by columns


@dataclass(frozen=True)
class Cut:
    """How a model is spread: a mesh, `slots` places for the experts of a layer, redundant ones included,
    and the `step` in which packed weights may be cut."""

    shape: MeshShape
    slots: int = 0
    step: int = 1


def refusal(config: ModelConfig, cut: Cut) -> str:
    """Why a model can't be cut so, or nothing."""
    tensor, expert, experts = cut.shape.tensor, cut.shape.expert, config.experts
    sizes = {"vocabulary": config.vocabulary}
    if experts is None or not all(layer.experts for layer in config.layers):
        sizes["MLP"] = config.inner
    if experts is None:
        if expert > 1:
            return f"there are no experts to spread over {expert} ranks"
    elif expert == 1:
        sizes["expert"] = experts.inner
    elif cut.slots < expert:
        return f"{experts.count} experts are too few for {expert} ranks"
    for name, size in sizes.items():
        if (tensor - 1) * _share(size, tensor, cut.step) >= size:
            return f"{name} of {size} can't be shared by {tensor} ranks"
    return ""


def rank_config(config: ModelConfig, cut: Cut) -> ModelConfig:
    """The configuration of the first rank's share, which is the largest."""
    problem = refusal(config, cut)
    if problem:
        raise ArgumentError(problem, where=str(cut.shape))
    tensor, step, experts = cut.shape.tensor, cut.step, config.experts
    heads, kv_heads = share_heads(config, tensor)
    if experts is not None:
        across = (
            tensor if cut.shape.expert == 1 else 1
        )  # spread experts are whole, the shared one too
        experts = ExpertsConfig(
            count=cut.slots // cut.shape.expert,
            per_token=1,  # how tokens are routed is not asked of this model
            inner=_share(experts.inner, across, step),
            shared_inner=_share(experts.shared_inner, across, step),
        )
    return replace(
        config,
        heads=heads,
        kv_heads=kv_heads,
        inner=_share(config.inner, tensor, step),
        vocabulary=_share(config.vocabulary, tensor, 1),
        experts=experts,
    )


def share_heads(config: ModelConfig, tensor: int) -> tuple[int, int]:
    """The first rank's query and key heads, as `parallelize` cuts them: all where they don't go evenly."""
    kv_heads = config.heads if config.latent is not None else config.kv_heads
    found = split_heads(config.heads, kv_heads, 0, tensor)
    if found is None:
        return config.heads, config.kv_heads
    (_, heads), _ = found
    return heads, max(1, config.kv_heads // tensor)


def _share(size: int, ranks: int, step: int) -> int:
    """The largest share of a size that is cut at multiples of `step`."""
    return share(size, 0, ranks, step)[1] if ranks > 1 else size


@dataclass(frozen=True)
class RankModel:
    """One rank's share on the meta device. `kinds[i]` is the layer of `model` that layer i is like."""

    model: Decoder
    kinds: tuple[int, ...]

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of every layer."""
        found = self.model.attention_specs
        return tuple(replace(found[kind], layer=i) for i, kind in enumerate(self.kinds))

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Every parameter of every layer by its full name; alike layers share the tensors."""
        result = []
        layers = [list(layer.named_parameters()) for layer in self.model.layers]
        for name, parameter in self.model.named_parameters():
            if not name.startswith("layers."):
                result.append((name, parameter))
        for index, kind in enumerate(self.kinds):
            result += [(f"layers.{index}.{name}", tensor) for name, tensor in layers[kind]]
        return result

    def weights(self, format_of: FormatOf) -> dict[str, int]:
        """Bytes by part of the model, packed where `format_of` says so and the shape allows it."""
        parts = {part: 0 for part, _ in PARTS} | {OTHERS: 0}
        for name, parameter in self.parameters():
            parts[part_of(name)] += packed_bytes(parameter, format_of(name))
        parts[OTHERS] += sum(tensor.nbytes for tensor in self.model.buffers())  # angles: no layer's
        return parts

    def packed(self, format_of: FormatOf) -> list[Packed]:
        """The weights that are packed."""
        found = ((name, tensor, format_of(name)) for name, tensor in self.parameters())
        return [
            Packed(name, tensor.numel(), format)
            for name, tensor, format in found
            if format is not None and takes(format, tensor)
        ]


def part_of(name: str) -> str:
    if ".router." in name or "norm" in name.split(".")[-2]:
        return OTHERS
    return next((part for part, text in PARTS if text in name), OTHERS)


def packed_bytes(tensor: Tensor, format: Format | None) -> int:
    """Bytes of a weight in a format, its scales too; 16 bits stay where it doesn't divide."""
    if format is None or not takes(format, tensor):
        return tensor.nbytes
    total = math.prod(data_shape(format, tensor.shape)) * format.data_dtype.itemsize
    for scale in format.stored_scales:
        total += math.prod(scale_shape(scale, tensor.shape)) * scale.dtype.itemsize
    return total


def takes(format: Format, tensor: Tensor) -> bool:
    """Whether a tensor of this shape can be packed so."""
    try:
        check_shape(format, tensor.shape)
    except FormatError:
        return False
    return True


def build_rank(config: ModelConfig, family: Family, cut: Cut, expert_rows: int = 0) -> RankModel:
    """One rank's share; its experts compute `expert_rows` rows in the largest step."""
    mine = rank_config(config, cut)
    kinds = list(dict.fromkeys(mine.layers))
    model = build_model(replace(mine, layers=tuple(kinds)), family, config.dtype)
    if config.experts is not None:
        for layer in model.layers:
            mixture = layer.feed_forward
            if isinstance(mixture, MixtureOfExperts):
                layer.feed_forward = PlannedMixture(mixture, config.experts, expert_rows)
    return RankModel(model.to("meta"), tuple(kinds.index(layer) for layer in mine.layers))


class PlannedMixture(nn.Module):
    """A mixture of experts that allocates what one needs and computes nothing.

    The router knows all experts of the model, the others only those of this rank.
    """

    def __init__(self, mixture: MixtureOfExperts, experts: ExpertsConfig, rows: int) -> None:
        super().__init__()
        self.count, self.per_token, self.rows = experts.count, experts.per_token, rows
        self.router = nn.Module()
        for name, parameter in mixture.router.named_parameters():
            whole = parameter.new_empty(experts.count, *parameter.shape[1:])
            self.router.register_parameter(name, nn.Parameter(whole))
        self.experts, self.shared = mixture.experts, mixture.shared

    def forward(self, x_TD: Tensor) -> Tensor:
        tokens, hidden = x_TD.shape
        logits_TE = x_TD.new_empty(tokens, self.count, dtype=torch.float32)
        routes = [
            logits_TE.new_empty(tokens, self.per_token, dtype=dtype)
            for dtype in (torch.float32, torch.int64)
        ]
        del logits_TE
        inner_R2I = x_TD.new_empty(self.rows, self.experts.gate_up.shape[1])
        act_RI = x_TD.new_empty(self.rows, self.experts.down.shape[2])
        del inner_R2I
        y_RD = x_TD.new_empty(self.rows, hidden)
        del act_RI
        out_TD = x_TD.new_empty(tokens, hidden)
        del y_RD, routes
        return out_TD if self.shared is None else out_TD + self.shared(x_TD)


def format_everywhere(format: Format | None, experts_only: bool = False) -> FormatOf:
    """The format of every linear inside the layers, or of experts only; the rest stays as it is."""

    def format_of(name: str) -> Format | None:
        if ".experts." in name:
            return None if name.endswith("bias") else format
        linear = name.startswith("layers.") and name.endswith(".weight")
        dense = part_of(name) == OTHERS or any(text in name for text in NEVER_PACKED)
        return format if linear and not dense and not experts_only else None

    return format_of
