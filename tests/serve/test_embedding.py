"""Embedding models against transformers and a pooling written here; companions change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors

pytest.importorskip("transformers", reason="transformers is the reference")

import transformers

from fulgurite import LLM, EmbeddingModel
from fulgurite.cli import main
from fulgurite.errors import ArgumentError, WeightsError
from tests.models.reference_models import build_reference, make_prompt, randomize
from tests.serve.tiny_checkpoint import VOCABULARY, byte_tokenizer

LENGTHS = (5, 1, 17, 30, 8)
PROMPTS = [make_prompt(length, seed).tolist() for seed, length in enumerate(LENGTHS)]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
ENCODERS = {
    "Bert": {},
    "Roberta": {"pad_token_id": 1, "layer_norm_eps": 1e-5},
    "XLMRoberta": {"pad_token_id": 1, "hidden_act": "gelu_pytorch_tanh"},
}


def write_modules(folder: Path, *modules: str, **pooling: object) -> None:
    """modules.json with pooling and these modules, as sentence-transformers writes it."""
    kinds = ["Transformer", "Pooling", *modules]
    entries = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"st.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    fields = {"word_embedding_dimension": 32, **pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))


def save_encoder(
    folder: Path, prefix: str, head: str = "Model", **changed: object
) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **ENCODERS[prefix], **changed})
    model = getattr(transformers, prefix + head)(config).eval()
    randomize(model, torch.Generator().manual_seed(1))
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    tokenizer.enable_padding(length=50)  # as published files do: it must not matter
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def hidden_states(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    output = model(torch.tensor([ids]), output_hidden_states=True)
    return output.hidden_states[-1][0].double()


POOLING = {
    "pooling_mode_cls_token": lambda x: x[0],
    "pooling_mode_mean_tokens": lambda x: x.mean(0),
    "pooling_mode_lasttoken": lambda x: x[-1],
    "pooling_mode_max_tokens": lambda x: x.max(0).values,
    "pooling_mode_mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "pooling_mode_weightedmean_tokens": lambda x: (
        sum((i + 1) * row for i, row in enumerate(x)) / sum(range(1, len(x) + 1))
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
@pytest.mark.parametrize("prefix", list(ENCODERS))
def test_encoders_match_transformers(prefix: str, head: str, tmp_path) -> None:
    reference = save_encoder(tmp_path, prefix, head)
    write_modules(tmp_path, "Normalize", pooling_mode_cls_token=True)
    # RoBERTa's padding token may be in a prompt of token ids: it has a position of its own
    model = EmbeddingModel(tmp_path, device="cpu", max_batched_tokens=30)
    actual = model.embed(PROMPTS)
    assert actual.shape == (5, 32) and actual.dtype == torch.float32
    for row, ids in zip(actual, PROMPTS, strict=True):
        expected = hidden_states(reference, ids)[0]
        torch.testing.assert_close(row.double(), expected / expected.norm(), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("field", list(POOLING))
def test_pooling_modes(field: str, tmp_path) -> None:
    reference = save_encoder(tmp_path, "Bert")
    write_modules(tmp_path, **{field: True})
    actual = EmbeddingModel(tmp_path, device="cpu").embed(PROMPTS)
    for row, ids in zip(actual, PROMPTS, strict=True):
        expected = POOLING[field](hidden_states(reference, ids))
        torch.testing.assert_close(row.double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_modes_are_concatenated_and_dense_layers_applied(tmp_path) -> None:
    reference = save_encoder(tmp_path, "Bert")
    write_modules(
        tmp_path, "Dense", "Normalize", pooling_mode_lasttoken=True, pooling_mode_cls_token=True
    )
    dense = torch.nn.Linear(64, 10)
    (tmp_path / "2_Dense").mkdir()
    fields = {"in_features": 64, "out_features": 10, "bias": True}
    fields["activation_function"] = "torch.nn.modules.activation.Tanh"
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(fields))
    tensors = {f"linear.{name}": tensor.data for name, tensor in dense.named_parameters()}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    (actual,) = EmbeddingModel(tmp_path, device="cpu").embed(PROMPTS[0])
    hidden = hidden_states(reference, PROMPTS[0]).float()
    expected = torch.tanh(dense(torch.cat((hidden[0], hidden[-1]))))
    torch.testing.assert_close(actual, expected / expected.norm(), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_text_gets_special_tokens_and_is_truncated_only_if_asked(tmp_path) -> None:
    reference = save_encoder(tmp_path, "Bert")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    model = EmbeddingModel(tmp_path, device="cpu")
    assert model.max_tokens == 12 and model.tokenizer is not None
    ids = [256, *model.tokenizer.encode("hello", add_special_tokens=False), 257]
    expected = hidden_states(reference, ids).mean(0)
    torch.testing.assert_close(model.embed("hello")[0].double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ArgumentError, match="22 tokens, the model reads 12"):
        model.embed(["a", "abcdefghijklmnopqrst"])
    cut = model.embed("abcdefghijklmnopqrst", truncate=True)
    torch.testing.assert_close(cut, model.embed("abcdefghij"))
    assert torch.equal(model.embed(PROMPTS[3], truncate=True), model.embed(PROMPTS[3][:12]))


@torch.no_grad()
@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "qwen3_next"])
def test_decoders_match_transformers(name: str, is_bare: bool, tmp_path) -> None:
    """Without modules the vector is the last token's. A bare decoder has no LM head and no prefix."""
    reference = build_reference(name)
    (reference.model if is_bare else reference).save_pretrained(tmp_path)
    model = EmbeddingModel(tmp_path, device="cpu", max_batched_tokens=24)
    for row, ids in zip(model.embed(PROMPTS), PROMPTS, strict=True):
        expected = reference.model(torch.tensor([ids])).last_hidden_state[0, -1]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
    if not is_bare:
        with LLM(tmp_path, device="cpu", context=64) as llm:
            torch.testing.assert_close(llm.embed(PROMPTS), model.embed(PROMPTS))


@pytest.mark.parametrize("kind", ["Bert", "qwen3"])
def test_companions_do_not_change_a_vector(kind: str, tmp_path) -> None:
    if kind == "Bert":
        odd = {"hidden_size": 36, "intermediate_size": 45, "hidden_act": "gelu_pytorch_tanh"}
        save_encoder(tmp_path, kind, **odd)
    else:
        build_reference(kind).save_pretrained(tmp_path)
    model = EmbeddingModel(tmp_path, device="cpu")
    together = model.embed(PROMPTS)
    for row, ids in zip(together, PROMPTS, strict=True):
        assert torch.equal(row, model.embed(ids)[0])


def test_bad_input_is_named(tmp_path) -> None:
    save_encoder(tmp_path, "Bert")
    model = EmbeddingModel(tmp_path, device="cpu")
    with pytest.raises(ArgumentError, match="no prompts"):
        model.embed([])
    with pytest.raises(ArgumentError, match="empty"):
        model.embed([[1, 2], []])
    with pytest.raises(ArgumentError, match="has token 258"):
        model.embed([258])
    with pytest.raises(ArgumentError, match="65 tokens, the model reads 64"):
        model.embed([3] * 65)
    write_modules(tmp_path, "LSTM", pooling_mode_mean_tokens=True)
    with pytest.raises(WeightsError, match=r"st\.models\.LSTM is not supported"):
        EmbeddingModel(tmp_path, device="cpu")
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "median"}')
    with pytest.raises(WeightsError, match="'median' is not supported"):
        EmbeddingModel(tmp_path, device="cpu")
    (tmp_path / "modules.json").unlink()
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"encoder\.layer\.1\.output\.dense\.weight"):
        EmbeddingModel(tmp_path, device="cpu")


def test_command(tmp_path, capsys) -> None:
    save_encoder(tmp_path, "Bert")
    assert main(["embed", "--model", str(tmp_path), "--device", "cpu", "one", "another"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = EmbeddingModel(tmp_path, device="cpu").embed(["one", "another"])
    assert [len(line) for line in lines] == [32, 32]
    torch.testing.assert_close(torch.tensor(lines), expected)
