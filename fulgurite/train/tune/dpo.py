"""Direct preference optimization (DPO): pairs of answers in, a loss that prefers the chosen ones out.

    margin = (logp(chosen) - ref(chosen)) - (logp(rejected) - ref(rejected))
    loss   = -log sigmoid(beta * margin)                      mean over pairs

`logp` is the sum over the tokens of an answer, given its prompt; `ref` the same of the model before
tuning. This is TRL's `loss_type="sigmoid"`.

    {"prompt": "Q", "chosen": " A", "rejected": " B"}         plain text
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}
    {"chosen": [messages], "rejected": [messages]}            whole conversations

A row is one pair: document 2n is the chosen answer of pair n with its prompt, 2n + 1 the rejected one.

Shapes: B rows; T tokens; N pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.models.layers import CausalLM
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.train.batch import Batch
from fulgurite.train.config import TrainConfig
from fulgurite.train.data.loader import collate
from fulgurite.train.data.records import BadSamples
from fulgurite.train.loss import LossSums
from fulgurite.train.tune.chat import convert_records, nothing_to_learn, read_split, require_length
from fulgurite.train.tune.chat_tokens import EncodedText, encode_chat, encode_completion
from fulgurite.train.tune.logprobs import compute_logprobs
from fulgurite.train.tune.lora import adapters_disabled
from fulgurite.train.tune.reference import ReferenceModel, score
from fulgurite.train.tune.rows import Example, RowDataset, make_example

SIDES = ("chosen", "rejected")


def open_pair_dataset(
    config: TrainConfig, tokenizer: Tokenizer, split: str, first: int = 0
) -> RowDataset:
    """The pairs of `train` or `validation`. An answer gets half of a row; longer ones are cut.

    Documents are numbered from `first` on.
    """
    length = require_length(config)
    bad = BadSamples(config.data.max_bad_samples)
    records, hashes = read_split(config, split, bad)
    examples: list[Example] = []
    for record, pair in convert_records(records, lambda f: encode_pair(tokenizer, f), bad):
        whole = [make_example(text.token_ids, text.is_answer) for text in pair]
        cut = [example.truncated(length // 2) for example in whole]
        if any(not example.num_labels for example in cut):
            bad.skip(record.where, f"no answer within the first {length // 2} tokens")
            continue
        for example in cut:
            examples.append(Example(example.tokens, example.labels, document=first + len(examples)))
    bad.report()
    if not examples:
        form = '{"prompt": ..., "chosen": ..., "rejected": ...}'
        raise nothing_to_learn(config, split, bad, form)
    rows = [[index, index + 1] for index in range(0, len(examples), 2)]
    pad_id = tokenizer.stop_ids[0] if tokenizer.stop_ids else 0
    return RowDataset(examples, rows, length, pad_id, hashes)


def encode_pair(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> list[EncodedText]:
    """The chosen and the rejected text of one line."""
    prompt, values = fields.get("prompt"), {}
    if fields.get("tools"):
        values = {"tools": fields["tools"]}
    answers = [fields.get(side) for side in SIDES]
    if isinstance(prompt, str) and all(isinstance(x, str) and x for x in answers) and prompt:
        return [encode_completion(tokenizer, prompt, str(answer)) for answer in answers]
    context = [] if prompt is None else prompt
    if not isinstance(context, list) or not all(isinstance(x, list) and x for x in answers):
        raise ArgumentError("a pair is `chosen` and `rejected`, texts with a `prompt` or messages")
    pair = []
    for answer in answers:
        first = len(context) if prompt is not None else len(answer or []) - 1
        texts = encode_chat(tokenizer, [*context, *(answer or [])], first, **values)
        pair.append(texts[-1])
    return pair


def dpo_loss(logp_B2: Tensor, reference_B2: Tensor, beta: float) -> Tensor:
    """The loss of each pair: [B, chosen and rejected] -> [B]."""
    gain_B2 = logp_B2 - reference_B2
    return -F.logsigmoid(beta * (gain_B2[:, 0] - gain_B2[:, 1]))


class DPOLoss(nn.Module):
    """The model with the loss of pairs. Exactly one of `reference_N2` and `reference` is given.

    reference_N2   log-probabilities of all pairs of the dataset, by number
    reference      a model that computes them in every step
    """

    reference_N2: Tensor | None

    def __init__(
        self,
        model: CausalLM,
        beta: float,
        *,
        reference_N2: Tensor | None = None,
        reference: ReferenceModel | None = None,
    ) -> None:
        super().__init__()
        if not beta > 0:
            raise ArgumentError(f"tune.beta={beta} must be above 0", next="--tune.beta 0.1")
        assert (reference_N2 is None) != (reference is None), "one reference"
        self.model, self.beta, self.reference = model, beta, reference
        self.register_buffer("reference_N2", reference_N2, persistent=False)

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        offsets_S: Tensor | None = None,
    ) -> LossSums:
        """Sums over pairs. `z_loss` is unused; `tokens` are the pairs, which the loss is divided by."""
        assert documents_BT is not None, "a row is a pair of documents"
        batch = (tokens_BT, labels_BT, positions_BT, documents_BT)
        logp_B2 = sum_answers(compute_logprobs(self.model, *batch), documents_BT)
        if self.reference_N2 is None:
            assert self.reference is not None, "one reference"
            reference_B2 = sum_answers(self.reference.compute_logprobs(Batch(*batch)), documents_BT)
        else:
            reference_B2 = self.reference_N2[documents_BT[:, 0] // 2]
        loss = dpo_loss(logp_B2, reference_B2, self.beta).sum()
        pairs = torch.full((), len(tokens_BT), dtype=torch.int64, device=tokens_BT.device)
        value = loss.detach().clone()  # sums are added in place
        return LossSums(loss, value, torch.zeros_like(value), pairs)

    def count_terms(self, batch: Batch) -> Tensor:
        """The pairs of a batch; see `accumulate.count_terms`."""
        return torch.tensor(len(batch.tokens_BT))


def sum_answers(logprobs_BT: Tensor, documents_BT: Tensor) -> Tensor:
    """The log-probability of the chosen and of the rejected answer of each row: [B, 2]."""
    is_chosen_BT = documents_BT == documents_BT[:, :1]
    chosen_B = torch.where(is_chosen_BT, logprobs_BT, 0.0).sum(1)
    rejected_B = torch.where(is_chosen_BT, 0.0, logprobs_BT).sum(1)
    return torch.stack((chosen_B, rejected_B), dim=1)


@torch.no_grad()
def precompute_reference(model: CausalLM, dataset: RowDataset, rows: int = 4) -> Tensor:
    """`reference_N2` of a dataset, by the model as it is now, without adapters."""
    parts = []
    for first in range(0, len(dataset), rows):
        numbers = range(first, min(first + rows, len(dataset)))
        batch = collate([dataset.sample(number) for number in numbers]).to(model.device)
        assert batch.documents_BT is not None, "a row is a pair of documents"
        with adapters_disabled(model):
            parts.append(sum_answers(score(model, batch), batch.documents_BT))
    return torch.cat(parts)
