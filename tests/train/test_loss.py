"""Losses and gradients against torch's cross entropy and against transformers' models."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fulgurite
from fulgurite.models import load_model
from fulgurite.train import loss as loss_file
from fulgurite.train.batch import IGNORED
from fulgurite.train.build import build_from_scratch
from fulgurite.train.config import LossSection
from fulgurite.train.family_fields import Size, build_fields
from fulgurite.train.loss import LossModule, _sum_any_logits, linear_cross_entropy

TINY = Size(32, 2, 4, 2, 8, 48, 4, 2, 24, 97, 32, 4, 10, 1e-2)
VOCAB = 97


def build_tiny(architecture: str, seed: int = 0, **fields: object) -> nn.Module:
    values = {**build_fields(architecture, TINY, 32), "vocab_size": VOCAB, **fields}
    built = build_from_scratch(values, architecture, dtype=torch.float32, device="cpu", seed=seed)
    return built.model.train()


def make_batch(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A row of documents end to end: tokens, labels, positions, documents."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    tokens = torch.randint(0, VOCAB, (1, total), generator=generator)
    ends = torch.tensor(lengths).cumsum(0) - 1
    labels = tokens.roll(-1, 1)
    labels[0, ends] = IGNORED
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    return tokens, labels, positions, documents


# ---- cross entropy by chunks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bias", "scale", "cap", "z_weight"),
    [
        (False, 1.0, None, 0.0),
        (True, 0.5, None, 0.0),
        (True, 2.0, 3.0, 0.01),
        (False, 1.0, None, 0.1),
    ],
)
@pytest.mark.parametrize("tokens", [1, 63, 200])
def test_gradients_of_linear_cross_entropy(monkeypatch, bias, scale, cap, z_weight, tokens):
    monkeypatch.setitem(loss_file.CHUNK_BYTES, "cpu", 1)  # chunks of 64 rows
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden, weight = random(tokens, 12), random(31, 12)
    bias_V = random(31) if bias else None
    labels = torch.randint(0, 31, (tokens,), generator=generator)
    labels[::3] = IGNORED if tokens > 1 else 5
    leaves = [hidden, weight] + ([] if bias_V is None else [bias_V])
    total, loss, z = linear_cross_entropy(
        hidden, weight, bias_V, labels, z_weight=z_weight, scale=scale, cap=cap
    )
    logits = F.linear(hidden, weight, bias_V) * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    expected = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
    expected_z = (logits.logsumexp(-1).square() * (labels != IGNORED)).sum()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(z, expected_z.detach())
    torch.testing.assert_close(total, expected + z_weight * expected_z)
    actual = torch.autograd.grad(3 * total, leaves)
    wanted = torch.autograd.grad(3 * (expected + z_weight * expected_z), leaves)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_without_any_label():
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    total, loss, _ = linear_cross_entropy(hidden, weight, None, torch.full((5,), IGNORED))
    total.backward()
    assert loss == 0 and hidden.grad.eq(0).all() and weight.grad.eq(0).all()


def test_a_frozen_head_gets_no_gradient():
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    total, *_ = linear_cross_entropy(hidden, weight, None, torch.arange(5))
    total.backward()
    expected = torch.autograd.grad(
        F.cross_entropy(hidden @ weight.t(), torch.arange(5), reduction="sum"), hidden
    )[0]
    torch.testing.assert_close(hidden.grad, expected)


def test_a_head_of_another_kind_gives_the_same():
    model = build_tiny("Gemma3ForCausalLM", final_logit_softcapping=2.0)
    hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(9)
    labels[3] = IGNORED
    results = []
    for function in (loss_file.sum_cross_entropy, _sum_any_logits):
        sums = function(model, hidden, labels, 0.01)
        results.append((*sums, *torch.autograd.grad(sums[0], [hidden, model.embed_tokens.weight])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# ---- documents -------------------------------------------------------------------------------------

FAMILIES = [
    "LlamaForCausalLM",
    "Dots1ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "Qwen3NextForCausalLM",
    "Lfm2ForCausalLM",
    "Olmo2ForCausalLM",
]
EXTRA = {
    "GptOssForCausalLM": {"sliding_window": 5},
    "Llama4ForCausalLM": {"attention_chunk_size": 4},
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_packed_documents_have_the_loss_of_documents_alone(architecture):
    model = build_tiny(architecture, **EXTRA.get(architecture, {}))
    module = LossModule(model, LossSection(balance="none"))
    lengths = [7, 1, 12, 4]
    batch = make_batch(lengths)
    packed = module(*batch)
    packed.total.backward()
    actual = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    loss, tokens = 0.0, 0
    for part in zip(*(x.split(lengths, dim=1) for x in batch), strict=True):
        sums = module(*part[:3], None)
        sums.total.backward()
        loss, tokens = loss + sums.loss.item(), tokens + sums.tokens.item()
    assert packed.tokens.item() == tokens == sum(lengths) - len(lengths)
    assert packed.loss.item() == pytest.approx(loss, rel=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().item() + 1e-4
            torch.testing.assert_close(
                actual[name], parameter.grad, rtol=1e-3, atol=1e-3 * scale, msg=name
            )


def test_padding_changes_nothing():
    model = build_tiny("Dots1ForCausalLM")
    module = LossModule(model)
    tokens, labels, positions, documents = make_batch([7, 12])
    pad = 5
    padded = (
        F.pad(tokens, (0, pad), value=3),
        F.pad(labels, (0, pad), value=IGNORED),
        F.pad(positions, (0, pad), value=-1),
        F.pad(documents, (0, pad), value=-1),
    )
    sums, other = module(tokens, labels, positions, documents), module(*padded)
    assert sums.loss.item() == pytest.approx(other.loss.item(), rel=1e-5)
    assert sums.tokens == other.tokens
    assert torch.equal(sums.load_LE, other.load_LE), "padding counts as expert load"


# ---- compiled --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3ForCausalLM",
        "Dots1ForCausalLM",
        pytest.param("OlmoeForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_compiled_is_one_graph_with_the_same_gradients(architecture):
    model = build_tiny(architecture)
    module = LossModule(model, LossSection(z_loss=1e-3))
    batch = make_batch([9, 15])
    sums = module(*batch)
    sums.total.backward()
    eager = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compiled = fulgurite.compile(module)
    result = compiled(*batch)
    result.total.backward()
    assert not compiled.breaks
    outer = [record for record in compiled.graphs if "linear_cross_entropy" in str(record.captured)]
    assert len(outer) == 1, "forward and loss are not one graph"
    text = str(compiled.explain())
    if "Dots1" in architecture or "Olmoe" in architecture:
        assert "grouped_gemm" in text and "grouped_wgrad" in text
    torch.testing.assert_close(result.loss, sums.loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, eager[name], rtol=1e-4, atol=1e-5, msg=name)


# ---- transformers ----------------------------------------------------------------------------------

TRANSFORMERS_CASES = [
    "llama",
    "qwen3",
    "qwen3_moe",
    "dots1",
    "olmoe",
    "deepseek_v3",
    "gemma3",
    "gpt_oss",
]


@pytest.mark.parametrize("name", TRANSFORMERS_CASES)
def test_first_step_equals_transformers(name, tmp_path):
    """Gradients of the reference are saved as if they were weights, and loaded in our layout."""
    pytest.importorskip("transformers", reason="transformers is the reference")
    from tests.models.reference_models import VOCAB_SIZE, build_reference

    reference = build_reference(name, initializer_range=0.1)
    reference.save_pretrained(tmp_path / "weights")
    tokens = torch.randint(0, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = IGNORED
    labels[0, 5:9] = IGNORED
    logits = reference(tokens).logits.float()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    gradients = copy.deepcopy(reference)
    for parameter, source in zip(gradients.parameters(), reference.parameters(), strict=True):
        found = source.grad
        parameter.data = torch.zeros_like(source) if found is None else found.clone()
    gradients.save_pretrained(tmp_path / "gradients")
    wanted = dict(load_model(tmp_path / "gradients").named_parameters())

    model = load_model(tmp_path / "weights").train()
    positions = torch.arange(24).expand(2, 24)
    sums = LossModule(model, LossSection(balance="none"))(tokens, labels, positions)
    sums.total.backward()
    torch.testing.assert_close(sums.loss, expected.detach(), rtol=1e-4, atol=1e-3)
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert "correction_bias" in parameter_name, parameter_name
            continue
        other = wanted[parameter_name]
        scale = other.abs().max().item()
        torch.testing.assert_close(
            parameter.grad, other, rtol=1e-2, atol=2e-3 * scale + 1e-6, msg=parameter_name
        )
