"""Offline evaluations of a model: log-probabilities of given texts in, accuracies out.

    evaluate_choices    multiple choice: the answer with the highest log-probability
    evaluate_cloze      the next words: whether greedy decoding writes the answer
    probe_induction     random tokens twice: how much better the second time is

The first two read JSONL, one question a line:

    {"prompt": "The sky is", "choices": [" blue", " square"], "answer": 0}
    {"prompt": "Paris is the capital of", "answer": " France"}

Shapes: B rows; T tokens of a row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.models.layers import CausalLM
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.train.attention import TrainingAttention
from fulgurite.train.data.encoding import find_eos_id

ROWS = 16  # of one forward


@dataclass(frozen=True)
class Question:
    """A prompt with choices, the right one by number; one choice: a cloze."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Score:
    """A continuation: its log-probability, and whether each of its tokens is the most likely one."""

    log_probability: float
    is_greedy: bool


@dataclass(frozen=True)
class ChoiceResult:
    """`accuracy` by log-probability; `byte_accuracy` by log-probability a byte; `chance`: of guessing."""

    accuracy: float
    byte_accuracy: float
    chance: float
    questions: int


@dataclass(frozen=True)
class ClozeResult:
    """`accuracy`: answers that greedy decoding writes; `loss`: nats an answer."""

    accuracy: float
    loss: float
    questions: int


@dataclass(frozen=True)
class InductionResult:
    """Random tokens, then the same again.

    Attributes:
        first_loss, second_loss: nats a token of each half. A model that copies has a low second one.
        accuracy: tokens of the second half that are the most likely ones.
    """

    first_loss: float
    second_loss: float
    accuracy: float


# ---- questions -----------------------------------------------------------------------------------


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSONL file; raise with `file:line` for one that is not whole."""
    questions = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"can't read the questions in {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            questions.append(_parse_question(line, f"{path}:{number}"))
    if not questions:
        raise ArgumentError(f"there are no questions in {path}", next="write one a line, as JSON")
    return questions


def _parse_question(line: str, where: str) -> Question:
    try:
        row: Any = json.loads(line)
        prompt, answer = row["prompt"], row["answer"]
        choices = row.get("choices", [answer])
        number = choices.index(answer) if isinstance(answer, str) else int(answer)
        is_whole = isinstance(prompt, str) and all(isinstance(one, str) and one for one in choices)
        if not is_whole or not 0 <= number < len(choices):
            raise ValueError("prompt and choices must be text, answer a choice or its number")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ArgumentError(
            f"{where} is no question: {error}",
            next='write {"prompt": "...", "choices": ["...", "..."], "answer": 0}',
        ) from error
    return Question(prompt, tuple(choices), number)


def evaluate_choices(
    model: CausalLM, tokenizer: Tokenizer, questions: Sequence[Question]
) -> ChoiceResult:
    """Accuracy on multiple choice."""
    pairs = [(one.prompt, choice) for one in questions for choice in one.choices]
    scores = iter(score_continuations(model, tokenizer, pairs))
    right = byte_right = 0
    for question in questions:
        totals = [next(scores).log_probability for _ in question.choices]
        per_byte = [
            total / len(choice.encode())
            for total, choice in zip(totals, question.choices, strict=True)
        ]
        right += totals.index(max(totals)) == question.answer
        byte_right += per_byte.index(max(per_byte)) == question.answer
    count = len(questions)
    chance = sum(1 / len(question.choices) for question in questions) / count
    return ChoiceResult(right / count, byte_right / count, chance, count)


def evaluate_cloze(
    model: CausalLM, tokenizer: Tokenizer, questions: Sequence[Question]
) -> ClozeResult:
    """How often greedy decoding writes the answer."""
    pairs = [(one.prompt, one.choices[one.answer]) for one in questions]
    scores = score_continuations(model, tokenizer, pairs)
    count = len(scores)
    loss = -math.fsum(score.log_probability for score in scores) / count
    return ClozeResult(sum(score.is_greedy for score in scores) / count, loss, count)


# ---- log-probabilities ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """Token ids of a prompt with its continuation, from `start` on."""

    number: int
    ids: list[int]
    start: int


def score_continuations(
    model: CausalLM, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> list[Score]:
    """Scores of continuations after their prompts, in order.

    Prompt and continuation are encoded together; the continuation is what differs from the prompt
    alone. A text that is longer than the model allows loses its beginning.
    """
    rows = [_encode_pair(model, tokenizer, number, *pair) for number, pair in enumerate(pairs)]
    by_length = sorted(rows, key=lambda row: len(row.ids))
    scores: dict[int, Score] = {}
    for at in range(0, len(by_length), ROWS):
        part = by_length[at : at + ROWS]
        for row, score in zip(part, _score_rows(model, part), strict=True):
            scores[row.number] = score
    return [scores[number] for number in range(len(pairs))]


def _encode_pair(
    model: CausalLM, tokenizer: Tokenizer, number: int, prompt: str, continuation: str
) -> _Row:
    before = tokenizer.encode(prompt) or [find_eos_id(tokenizer)]
    whole = tokenizer.encode(prompt + continuation) if prompt else []
    if not prompt or whole[: len(before)] != before or len(whole) == len(before):
        whole = before + tokenizer.encode(continuation, add_special_tokens=False)
    start = len(before)
    too_long = max(0, len(whole) - model.config.max_positions)
    if too_long >= start:
        raise ArgumentError(
            f"a choice has {len(whole) - start} tokens; the model takes {model.config.max_positions}"
        )
    return _Row(number, whole[too_long:], start - too_long)


@torch.no_grad()
def _score_rows(model: CausalLM, rows: Sequence[_Row]) -> list[Score]:
    length = max(len(row.ids) for row in rows)
    padded = [row.ids + [0] * (length - len(row.ids)) for row in rows]
    tokens_BT = torch.tensor(padded, device=model.device)
    log_probabilities_BT, is_best_BT = _next_token_scores(model, tokens_BT)
    scores = []
    for number, row in enumerate(rows):
        place = slice(row.start - 1, len(row.ids) - 1)
        total = math.fsum(log_probabilities_BT[number, place].tolist())
        scores.append(Score(total, bool(is_best_BT[number, place].all())))
    return scores


def _next_token_scores(model: CausalLM, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each token's successor, and whether it is the most likely one.

    Padding at the end of a row does not change what is before it: attention is causal.
    """
    length = tokens_BT.shape[1]
    positions_BT = torch.arange(length, device=tokens_BT.device).expand_as(tokens_BT).contiguous()
    hidden_BTD = model.compute_hidden_states(tokens_BT, positions_BT, TrainingAttention())
    values, best = [], []
    for hidden_TD, tokens_T in zip(hidden_BTD, tokens_BT, strict=True):  # one row of logits
        logits_TV = model.compute_logits(hidden_TD[:-1]).float()
        targets_T = tokens_T[1:]
        chosen_T = logits_TV.gather(1, targets_T[:, None])[:, 0]
        values.append((chosen_T - logits_TV.logsumexp(-1)).double().cpu())
        best.append((logits_TV.argmax(-1) == targets_T).cpu())
    return torch.stack(values), torch.stack(best)


@torch.no_grad()
def probe_induction(
    model: CausalLM, *, length: int = 64, rows: int = 8, seed: int = 0, first_token: int = 0
) -> InductionResult:
    """Compare the loss of random tokens with that of their repetition.

    `first_token`: lower ids, such as special tokens, are not drawn.
    """
    length = min(length, model.config.max_positions // 2)
    if length < 2 or rows < 1:
        raise ArgumentError(f"length={length} and rows={rows} are too small to repeat anything")
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.vocab_size
    half_BT = torch.randint(first_token, vocab_size, (rows, length), generator=generator)
    tokens_BT = half_BT.repeat(1, 2).to(model.device)
    log_probabilities_BT, is_best_BT = _next_token_scores(model, tokens_BT)
    first, second = log_probabilities_BT[:, : length - 1], log_probabilities_BT[:, length:]
    accuracy = is_best_BT[:, length:].double().mean().item()
    return InductionResult(-first.mean().item(), -second.mean().item(), accuracy)
