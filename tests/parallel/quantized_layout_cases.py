"""What each rank does in test_quantized_layouts.py: load its shard, and compare logits."""

from __future__ import annotations

from pathlib import Path

import torch

from fulgurite.models import load_model, load_shard
from fulgurite.quant import QuantTensor
from tests.parallel.model_cases import Shape, mesh_of

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


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
    return error.item(), sum(isinstance(p, QuantTensor) for p in model.parameters())


def compare_dequantized(folder: Path, reference: Path, shape: Shape) -> tuple[float, int]:
    return compare_logits(folder, reference, shape, keep_quantized=False)
