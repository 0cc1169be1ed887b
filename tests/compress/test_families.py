"""Families with layouts of their own: perplexity as in transformers, and a folder that loads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fulgurite.compress.command import open_source
from fulgurite.compress.pipeline import QuantizeOptions, quantize_checkpoint
from fulgurite.compress.weights import plan_weights
from fulgurite.models.loading.loader import load_model
from fulgurite.quant.files.compressed_tensors_writer import get_scheme
from tests.models.reference_models import build_reference, make_prompt

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["gemma3", "phi3", "lfm2", "deepseek_v3", "llama4", "gpt_oss"])
def test_layer_by_layer_is_the_whole_model(name: str, tmp_path: Path) -> None:
    """The perplexity of the original is that of transformers; the written folder has ours."""
    reference = build_reference(name)
    reference.save_pretrained(tmp_path / "source")
    ids_BT = torch.stack((make_prompt(48), make_prompt(48, seed=1)))
    source, model = open_source(str(tmp_path / "source"), CPU)
    plan = plan_weights(source, model, get_scheme("int4", 32))
    options = QuantizeOptions(tmp_path / "out", CPU, calibration_ids=ids_BT, eval_ids=ids_BT)
    report = quantize_checkpoint(source, model, plan, options)
    assert report.perplexity_before is not None and report.perplexity_after is not None
    with torch.no_grad():
        expected = next_token_loss(reference(ids_BT).logits, ids_BT)
        assert math.log(report.perplexity_before) == pytest.approx(expected, abs=1e-3)
        loaded = load_model(tmp_path / "out", dtype=torch.float32)
        positions_T = torch.arange(48)
        logits = torch.stack([loaded(ids_T, positions_T) for ids_T in ids_BT])
        written = next_token_loss(logits, ids_BT)
    assert math.log(report.perplexity_after) == pytest.approx(written, abs=1e-3)


def next_token_loss(logits_BTO: torch.Tensor, ids_BT: torch.Tensor) -> float:
    return float(F.cross_entropy(logits_BTO[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten()))
