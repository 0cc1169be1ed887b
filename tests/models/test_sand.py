"""`sand`, the mixture of experts in this package: its evaluation, and the engine on it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fulgurite.models import load_model
from fulgurite.models.expert_load import record_expert_load
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading.hub import resolve_model_path
from fulgurite.models.tokenizer import load_tokenizer
from fulgurite.quant import QuantTensor
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM

MAX_BYTES = 20_000_000
HELD_OUT = Path(__file__).with_name("sand_held_out.txt")  # a speech that it was not trained on
MAX_BITS_PER_BYTE = 1.2  # 1.02 on average; guessing letters by their frequency takes 4.3


@pytest.fixture(scope="module")
def sand() -> CausalLM:
    return load_model("sand", dtype=torch.float32, keep_quantized=True)


def test_files_are_small() -> None:
    files = list(resolve_model_path("sand").iterdir())
    assert sum(path.stat().st_size for path in files) < MAX_BYTES


@torch.inference_mode()
def test_held_out_text(sand: CausalLM) -> None:
    text = HELD_OUT.read_text()
    ids = torch.tensor(load_tokenizer("sand").encode(text, add_special_tokens=False))
    logits = sand(ids[None], torch.arange(len(ids))[None])[0]
    nats = F.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum")
    assert float(nats) / math.log(2) / len(text.encode()) < MAX_BITS_PER_BYTE


@torch.inference_mode()
def test_experts_share_the_tokens(sand: CausalLM) -> None:
    ids = load_tokenizer("sand").encode(HELD_OUT.read_text(), add_special_tokens=False)
    assert any(isinstance(parameter, QuantTensor) for parameter in sand.parameters())
    with record_expert_load(sand) as load_LE:
        sand(torch.tensor([ids]), torch.arange(len(ids))[None])
    assert load_LE.shape == (7, 8) and load_LE.sum(-1).tolist() == [2 * len(ids)] * 7
    # one text has its own experts, but a layer neither ignores most of them nor needs only one
    assert int((load_LE > 0).sum(-1).min()) >= 7 and int(load_LE.max()) < len(ids)


def test_engine_writes_words() -> None:
    with LLM("sand", device="cpu", context=128) as llm:
        (alone,) = llm.generate(["The Congress of the United"], SamplingParams(max_tokens=12))
        both = llm.generate(["The Congress of the United", "In"], SamplingParams(max_tokens=12))
    assert alone.text.startswith(" States") and both[0].token_ids == alone.token_ids
