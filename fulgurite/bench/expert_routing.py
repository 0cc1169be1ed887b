"""Routing histograms for benchmarks of experts: which experts tokens choose, and how unevenly.

    uniform   every expert is equally likely
    zipf      the n-th busiest expert is chosen 1/n as often as the busiest
    sand      as uneven as the experts of `sand`, the model that ships with this package, on English text

A histogram in, random routes out. Busy experts are spread over the ranks by a fixed permutation. The k
experts of a token differ: they are drawn without replacement, in proportion to the histogram.

`sand` has 8 experts a layer. Its loads, sorted and relative to the mean, are averaged over its layers and
interpolated to the number of experts of the layer that is measured.

Shapes: T tokens; k experts of a token; E experts; L MoE layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite import models
from fulgurite.models import layers, moe
from fulgurite.models.expert_load import record_expert_load
from fulgurite.models.loading import hub, loader
from fulgurite.models.tokenizer import find_tokenizer

ROUTINGS = ("uniform", "zipf", "sand")
RECORDED_MODEL = "sand"
RECORDED_TEXTS = (models, layers, moe, hub, loader)  # their docstrings are English prose
PERMUTATION_SEED = 0


@dataclass(frozen=True, eq=False)
class Routing:
    """How likely each expert is."""

    name: str
    probabilities_E: Tensor

    def draw(self, tokens: int, top_k: int, seed: int, device: str = "cpu") -> Tensor:
        """Random routes [T, k]: the Gumbel trick draws without replacement."""
        generator = torch.Generator().manual_seed(seed)
        uniform_TE = torch.rand(tokens, len(self.probabilities_E), generator=generator)
        gumbel_TE = -(-uniform_TE.clamp_min(1e-20).log()).log()
        chosen_Tk = (self.probabilities_E.log() + gumbel_TE).topk(top_k, dim=-1).indices
        return chosen_Tk.to(device)

    @property
    def busiest(self) -> float:
        """The probability of the busiest expert over the mean."""
        return float(self.probabilities_E.max() * len(self.probabilities_E))


def make_routing(name: str, num_experts: int, recorded_LE: Tensor | None = None) -> Routing:
    """A histogram of `ROUTINGS`; `recorded_LE`: the loads for `sand`, if they were recorded before."""
    if name == "uniform":
        weights_E = torch.ones(num_experts)
    elif name == "zipf":
        weights_E = 1 / torch.arange(1, num_experts + 1).float()
    else:
        assert name == RECORDED_MODEL, f"{name} is not one of {ROUTINGS}"
        recorded_LE = record_load() if recorded_LE is None else recorded_LE
        weights_E = interpolate_load(recorded_LE, num_experts)
    generator = torch.Generator().manual_seed(PERMUTATION_SEED)
    weights_E = weights_E[torch.randperm(num_experts, generator=generator)]
    return Routing(name, weights_E / weights_E.sum())


def record_load() -> Tensor:
    """Tokens by layer and expert, [L, E], of `sand` on the docstrings of this package."""
    path = hub.resolve_model_path(RECORDED_MODEL)
    model, tokenizer = models.load_model(path), find_tokenizer(path)
    assert tokenizer is not None, f"{RECORDED_MODEL} has a tokenizer"
    with record_expert_load(model) as load_LE, torch.inference_mode():
        for module in RECORDED_TEXTS:
            ids = torch.tensor(tokenizer.encode(module.__doc__ or ""))
            model(ids, torch.arange(len(ids)))
    return load_LE.clone()


def interpolate_load(load_LE: Tensor, num_experts: int) -> Tensor:
    """Sorted loads relative to the mean, averaged over layers, for another number of experts."""
    sorted_LE = load_LE.double().sort(dim=1, descending=True).values
    relative_E = (sorted_LE / sorted_LE.mean(dim=1, keepdim=True)).mean(0)
    last = len(relative_E) - 1
    place_E = torch.linspace(0, last, num_experts, dtype=torch.float64)
    below_E = place_E.floor().long().clamp(max=max(0, last - 1))
    above_E = (below_E + 1).clamp(max=last)
    mixed_E = relative_E[below_E].lerp(relative_E[above_E], place_E - below_E)
    return mixed_E.clamp_min(1e-6).float()
