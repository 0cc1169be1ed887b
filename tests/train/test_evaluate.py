"""Validation and probes: figures against a loss written out, on any number of ranks."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.models.kv_cache import NoKVCache
from fulgurite.train.batch import IGNORED
from fulgurite.train.data import open_dataset
from fulgurite.train.data.order import sample_index
from fulgurite.train.evaluate import Evaluation, evaluate, summarize
from fulgurite.train.loss import LossModule
from fulgurite.train.probes import (
    Question,
    evaluate_choices,
    evaluate_cloze,
    probe_induction,
    read_questions,
    score_continuations,
)
from fulgurite.train.step import OneRank
from tests.train.data.samples import data_config, random_texts, small_tokenizer
from tests.train.models import build_small


class Rank(OneRank):
    """One of several data ranks; `sum_over_data` keeps its own share for the test to add."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.data_rank, self.data_ranks = rank, ranks
        self.share: Tensor | None = None
        self.others: list[Rank] = []

    def sum_over_data(self, x: Tensor) -> Tensor:
        self.share = x
        return sum((other.share for other in self.others if other.share is not None), x * 1)


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    rows = [json.dumps({"text": text}) for text in random_texts(60)]
    path.write_text("\n".join(rows))
    config = data_config(path, validation=(str(path),))
    return open_dataset(config, small_tokenizer(), "validation")


@pytest.fixture(scope="module")
def loss_module() -> LossModule:
    return LossModule(build_small("Dots1ForCausalLM"))


def reference(loss_module: LossModule, dataset: Any, count: int) -> tuple[float, int, int]:
    """The sum of losses, labels and bytes of the first `count` samples, one document at a time."""
    total, labels, num_bytes = 0.0, 0, 0
    for number in range(count):
        sample = dataset.sample(sample_index(number, len(dataset), 0))
        for document in set(sample.documents.tolist()) - {-1}:
            rows = sample.documents == document
            tokens = torch.from_numpy(sample.tokens[rows])
            targets = torch.from_numpy(sample.labels[rows])
            with torch.no_grad():
                logits = loss_module.model(tokens, torch.arange(len(tokens)), NoKVCache())
            total += F.cross_entropy(
                logits.double(), targets, ignore_index=IGNORED, reduction="sum"
            ).item()
            kept = targets[targets != IGNORED].tolist()
            labels += len(kept)
            num_bytes += len(b"".join(byte_text(id) for id in kept))
    return total, labels, num_bytes


def byte_text(id: int) -> bytes:
    return b"" if id < 4 else b"x" * len(small_tokenizer().backend.id_to_token(id))


def test_validation_is_the_loss_of_each_document(loss_module: LossModule, validation: Any):
    found = evaluate(loss_module, validation, OneRank(), batches=3, batch_size=4, device="cpu")
    total, labels, num_bytes = reference(loss_module, validation, 12)
    assert found.tokens == labels
    assert found.loss == pytest.approx(total / labels, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / labels), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / num_bytes, rel=1e-5)
    assert set(found.values()) == {"loss", "perplexity", "bits_per_byte"}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_result_does_not_depend_on_ranks(loss_module: LossModule, validation: Any, ranks: int):
    def run(rank: Rank) -> Evaluation:
        return evaluate(loss_module, validation, rank, batches=5, batch_size=2, device="cpu")

    calls = []
    handle = loss_module.register_forward_hook(lambda *_: calls.append(1))
    group = [Rank(rank, ranks) for rank in range(ranks)]
    for rank in group[1:]:
        run(rank)
    group[0].others = group[1:]
    found = run(group[0])
    handle.remove()
    assert len(calls) == ranks * math.ceil(5 / ranks)  # equally often
    assert found == run(Rank(0, 1))


def test_small_datasets_are_evaluated_once(loss_module: LossModule, validation: Any):
    whole = evaluate(loss_module, validation, OneRank(), batches=999, batch_size=8, device="cpu")
    assert whole.tokens == validation.num_tokens - validation.num_documents


def test_the_module_trains_on_afterwards(loss_module: LossModule, validation: Any):
    loss_module.train()
    evaluate(loss_module, validation, OneRank(), batches=1, batch_size=1, device="cpu")
    assert loss_module.training
    assert all(parameter.grad is None for parameter in loss_module.parameters())


def test_an_error_leaves_the_module_in_training_mode(validation: Any):
    class Broken(nn.Module):
        def forward(self, *arguments: object) -> None:
            raise RuntimeError("broken")

    module = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        evaluate(module, validation, OneRank(), batches=1, batch_size=1, device="cpu")
    assert module.training


def test_odd_sums():
    assert math.isnan(summarize(0.0, 0, 0).loss)
    assert math.isnan(summarize(0.0, 0, 0).perplexity)
    assert summarize(1e6, 10, 0) == Evaluation(1e5, math.inf, None, 10)
    with pytest.raises(ArgumentError, match="at least 1"):
        evaluate(nn.Module(), None, OneRank(), batches=0, batch_size=1, device="cpu")  # type: ignore[arg-type]


# ---- probes --------------------------------------------------------------------------------------


def test_scores_are_log_probabilities_of_the_continuation():
    model, tokenizer = build_small(), small_tokenizer()
    pairs = [("alpha beta", " gamma"), ("東京", " delta delta"), ("", "beta"), ("x", "y" * 30)] * 6
    scores = score_continuations(model, tokenizer, pairs)
    for (prompt, continuation), score in zip(pairs, scores, strict=True):
        before = tokenizer.encode(prompt) or [0]
        ids = before + tokenizer.encode(continuation)
        with torch.no_grad():
            logits = model(torch.tensor(ids), torch.arange(len(ids)), NoKVCache()).double()
        steps = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        expected = steps[len(before) - 1 :].sum().item()
        assert score.log_probability == pytest.approx(expected, rel=1e-5)
        best = logits.argmax(-1)[len(before) - 1 : -1].tolist() == ids[len(before) :]
        assert score.is_greedy == best


class Bigram(nn.Module):
    """Always continues `a` with `b`: a model with known answers."""

    def __init__(self, follows: dict[int, int], vocab_size: int) -> None:
        super().__init__()
        self.table = torch.zeros(vocab_size, vocab_size)
        for first, second in follows.items():
            self.table[first, second] = 20.0
        self.config = build_small(vocab_size=vocab_size).config
        self.device = torch.device("cpu")

    def compute_hidden_states(self, tokens: Tensor, *rest: object) -> Tensor:
        return tokens[..., None].float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[..., 0].long()]


@pytest.fixture
def knowing() -> Any:
    tokenizer = small_tokenizer()
    chain = tokenizer.encode("alpha beta gamma")
    return Bigram(dict(pairwise(chain)), tokenizer.vocab_size)


def test_choices_and_clozes(knowing: Any):
    right = Question("alpha", (" delta", " beta"), 1)
    wrong = Question("alpha", (" delta", " beta"), 0)
    found = evaluate_choices(knowing, small_tokenizer(), [right, right, wrong])
    assert found.accuracy == found.byte_accuracy == pytest.approx(2 / 3)
    assert found.chance == 0.5 and found.questions == 3
    cloze = evaluate_cloze(knowing, small_tokenizer(), [right, wrong])
    assert cloze.accuracy == 0.5 and cloze.loss > 5


def test_long_prompts_lose_their_beginning():
    model = build_small(max_position_embeddings=16)
    [score] = score_continuations(model, small_tokenizer(), [("alpha " * 50 + "beta", " gamma")])
    assert math.isfinite(score.log_probability)
    with pytest.raises(ArgumentError, match="the model takes 16"):
        score_continuations(model, small_tokenizer(), [("x", " alpha" * 50)])


def test_questions_of_a_file(tmp_path: Path):
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"prompt": "a", "choices": ["x", "y"], "answer": 1}\n\n'
        '{"prompt": "a", "choices": ["x", "y"], "answer": "x"}\n{"prompt": "", "answer": "z"}\n'
    )
    assert read_questions(path) == [
        Question("a", ("x", "y"), 1),
        Question("a", ("x", "y"), 0),
        Question("", ("z",), 0),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "5",
        '{"prompt": "a"}',
        '{"prompt": "a", "choices": ["x"], "answer": 1}',
        '{"prompt": "a", "choices": ["x"], "answer": -1}',
        '{"prompt": "a", "choices": ["x"], "answer": "y"}',
        '{"prompt": 5, "choices": ["x"], "answer": 0}',
        '{"prompt": "a", "choices": ["x", ""], "answer": 0}',
        '{"prompt": "a", "choices": [], "answer": 0}',
        '{"prompt": "a", "choices": ["x"], "answer": null}',
    ],
)
def test_a_line_that_is_no_question(tmp_path: Path, line: str):
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "a", "answer": "z"}\n' + line)
    with pytest.raises(ArgumentError, match=r"q.jsonl:2 is no question"):
        read_questions(path)


def test_a_file_without_questions(tmp_path: Path):
    (tmp_path / "q.jsonl").write_text("\n")
    with pytest.raises(ArgumentError, match="no questions"):
        read_questions(tmp_path / "q.jsonl")
    with pytest.raises(ArgumentError, match="can't read"):
        read_questions(tmp_path / "nothing.jsonl")


def test_a_model_that_copies_passes_the_induction_probe():
    class Copier(Bigram):
        def compute_hidden_states(self, tokens: Tensor, *rest: object) -> Tensor:
            half = tokens.shape[-1] // 2
            guess = tokens.roll(-1, -1)
            guess[:, :half] = 0  # in the first half it knows nothing
            return guess[..., None].float()

        def compute_logits(self, hidden: Tensor) -> Tensor:
            return 30.0 * F.one_hot(hidden[..., 0].long(), 320)

    copier: Any = Copier({}, 320)
    found = probe_induction(copier, length=32, first_token=1)
    assert found.accuracy == 1.0 and found.second_loss < 1e-3 < found.first_loss
    untrained = probe_induction(build_small(), length=32)
    assert untrained.accuracy < 0.2 and abs(untrained.first_loss - math.log(320)) < 0.5
    assert untrained == probe_induction(build_small(), length=32)
    with pytest.raises(ArgumentError, match="too small"):
        probe_induction(build_small(), length=1)
