"""What each rank does in test_quantized_layouts.py: load its shard, and compare logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fulgurite.models import load_model, load_shard
from fulgurite.quant import QuantTensor
from tests.parallel.model_cases import Shape, mesh_of

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
NEW_TOKENS = 4


class Compared(NamedTuple):
    """A sharded model against the whole one.

    error    the largest difference of a logit to the dense model's, relative to its largest
    tokens   greedy tokens of the ranks
    whole    those of one rank
    packed   parameters that are packed, on this rank and on one rank
    """

    error: float
    tokens: list[int]
    whole: list[int]
    packed: tuple[int, int]


@torch.inference_mode()
def compare_logits(
    folder: Path,
    reference: Path,
    shape: Shape,
    quantize: str | None = None,
    keep_quantized: bool = True,
) -> tuple[float, int]:
    """The largest difference to the dense model, relative, and how many parameters are packed."""
    model, _ = load_shard(
        folder,
        mesh_of(shape),
        keep_quantized=keep_quantized,
        activations="none",
        quantize=quantize,
    )
    positions = torch.arange(len(IDS))
    expected = load_model(reference)(IDS, positions)
    error = (model(IDS, positions) - expected).abs().max() / expected.abs().max()
    return error.item(), count_packed(model)


def compare_dequantized(folder: Path, reference: Path, shape: Shape) -> tuple[float, int]:
    return compare_logits(folder, reference, shape, keep_quantized=False)


@torch.inference_mode()
def compare_layouts(
    folders: Mapping[str, tuple[Path, Path]], shape: Shape, quantize: str | None = None
) -> dict[str, Compared]:
    """Every layout in one process group: a rank's shard, the packed model, and the dense one."""
    found = {}
    for name, (folder, reference) in folders.items():
        options = {"keep_quantized": True, "activations": "none", "quantize": quantize}
        model, _ = load_shard(folder, mesh_of(shape), **options)
        whole = load_model(folder, **options)
        positions = torch.arange(len(IDS))
        expected = load_model(reference)(IDS, positions)
        error = (model(IDS, positions) - expected).abs().max() / expected.abs().max()
        found[name] = Compared(
            error.item(),
            decode_greedily(model),
            decode_greedily(whole),
            (count_packed(model), count_packed(whole)),
        )
    return found


def decode_greedily(model: nn.Module) -> list[int]:
    ids: Tensor = IDS
    for _ in range(NEW_TOKENS):
        logits = model(ids, torch.arange(len(ids)))
        ids = torch.cat([ids, logits[-1:].argmax(dim=-1)])
    return ids[len(IDS) :].tolist()


def count_packed(model: nn.Module) -> int:
    return sum(isinstance(parameter, QuantTensor) for parameter in model.parameters())
