"""Parts of tensors by every rule, against the rule on the whole; shares of parameters, dense and packed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from fulgurite.models import family
from fulgurite.models.config import Fields
from fulgurite.models.deepseek import DEEPSEEK_V3
from fulgurite.models.family import Rule
from fulgurite.models.filling import WAYS, fill, place_of, taken
from fulgurite.models.llama import LLAMA
from fulgurite.models.packed import fill_packed
from fulgurite.models.stored import StoredTensor, dense
from fulgurite.parallel.shares import Kept
from fulgurite.quant import QuantTensor, quantize

CONFIG = LLAMA.read_config(
    Fields(
        {
            "vocab_size": 9,
            "hidden_size": 24,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8,
        },
        "a test",
    )
)
ROWS = (CONFIG.heads + 2 * CONFIG.kv_heads) * CONFIG.head_dim
SHAPES = {
    family.transposed: (3, 5, 8),
    family.gate_before_up: (3, 10, 7),
    family.transposed_gate_before_up: (3, 7, 10),
}


@dataclass(frozen=True)
class Filling:
    rule: Rule
    parameter: str = "it"
    expert: int = 0


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@pytest.mark.parametrize("take", WAYS, ids=lambda take: take.__name__)
def test_a_part_of_what_is_taken(take):
    whole = numbered(*SHAPES.get(take, (ROWS, 7)))
    wanted, stored = take(whole, CONFIG), dense("it", whole)
    edges = [sorted({0, 1, size // 2, size - 1, size}) for size in wanted.shape]
    pairs = [[(a, b) for a, b in itertools.combinations(dim, 2)] for dim in edges]
    for box in itertools.product(*pairs):
        slices = tuple(slice(*pair) for pair in box)
        assert torch.equal(taken(stored, take, CONFIG, slices), wanted[slices]), box


def test_every_rule_has_a_way():
    """A family that takes in a new way says how a part of it is read."""
    from fulgurite.models import ARCHITECTURES

    for one in ARCHITECTURES.values():
        tables = one.weights + (one.gguf.rules(()) if one.gguf else ())
        assert {rule.take for rule in tables} <= set(WAYS), one.name


PUTS = [
    (family.everything, (4, 6, 5), [(0, 4), (0, 6), (0, 5)]),
    (family.one_expert, (4, 6, 5), [(2, 3), (0, 6), (0, 5)]),
    (family.gate_of_expert, (4, 6, 5), [(2, 3), (0, 3), (0, 5)]),
    (family.up_of_expert, (4, 6, 5), [(2, 3), (3, 6), (0, 5)]),
    (family.gate_of_experts, (4, 6), [(0, 4), (0, 3)]),
    (family.up_of_experts, (4, 6, 1), [(0, 4), (3, 6), (0, 1)]),
    (family.everything, (0, 5), [(0, 0), (0, 0)]),
]


@pytest.mark.parametrize(("put", "shape", "wanted"), PUTS, ids=lambda one: str(one)[:24])
def test_the_place_of_a_tensor(put, shape, wanted):
    assert place_of(put, shape, CONFIG, 2) == wanted


def test_experts_in_any_order_and_twice():
    kept = Kept.all("it", (4, 6, 5)).cut(0, (3, 4), (1, 2), (3, 4))
    share = torch.zeros(3, 6, 5)
    for expert in range(4):
        for put, rows in ((family.gate_of_expert, 0), (family.up_of_expert, 3)):
            one = numbered(4, 6, 5)[expert, rows : rows + 3]
            fill(
                share, kept, dense("it", one), Filling(Rule("", "", put=put), "it", expert), CONFIG
            )
    assert torch.equal(share, numbered(4, 6, 5)[[3, 1, 3]])


def test_pieces_that_are_copied_one_after_the_other(monkeypatch):
    monkeypatch.setattr("fulgurite.models.filling.COPY_BYTES", 4 * 7 * 3)
    kept = Kept.all("it", (ROWS, 7)).cut(0, (5, 18))
    share = torch.zeros(13, 7)
    rule = Rule("", "", family.half_from_interleaved)
    fill(share, kept, dense("it", numbered(ROWS, 7)), Filling(rule), CONFIG)
    assert torch.equal(share, rule.take(numbered(ROWS, 7), CONFIG)[5:18])


def test_heads_whose_keys_and_values_are_apart():
    """GGUF has the two parts of a latent's up projection as tensors of their own."""
    fields = {
        "vocab_size": 9,
        "hidden_size": 16,
        "intermediate_size": 8,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 8,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2,
        "v_head_dim": 5,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
    }
    config = DEEPSEEK_V3.read_config(Fields(fields, "a test"))
    whole = numbered(4, 8, 6)
    share = torch.zeros(16, 6)
    kept = Kept.all("it", (32, 6)).cut(0, (16, 32))
    keys = dense("k", whole[:, :3].transpose(1, 2).contiguous())
    values = dense("v", whole[:, 3:].contiguous())
    fill(share, kept, keys, Filling(Rule("", "", family.transposed, family.key_rows)), config)
    fill(share, kept, values, Filling(Rule("", "", put=family.value_rows)), config)
    assert torch.equal(share, whole.flatten(0, 1)[16:])


def test_rows_of_a_gguf_weight_stay_packed():
    """Rows change places inside heads, and columns are cut at blocks."""
    weight = quantize(torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0)), "q8_0")
    stored = StoredTensor("it", (ROWS, 64), weight.packed, "Q8_0", lambda box: weight.packed)
    rule = Rule("", "", family.half_from_interleaved)
    kept = Kept.all("it", (ROWS, 64)).cut(0, (6, 24)).cut(1, (32, 64))
    share = torch.empty_like(weight[:18, :32])
    assert isinstance(share, QuantTensor)
    fill_packed(share, kept, stored, Filling(rule), CONFIG)
    wanted = rule.take(weight.dequantize(), CONFIG)[6:24, 32:]
    assert torch.equal(share.dequantize(), wanted)
