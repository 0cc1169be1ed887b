"""DPO: the loss is the formula written out, with any kind of reference, and training prefers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.models import CausalLM
from fulgurite.train.batch import Batch
from fulgurite.train.config import DataSection, TrainConfig
from fulgurite.train.data.loader import collate
from fulgurite.train.step import OneRank
from fulgurite.train.tune.dpo import DPOLoss, open_pair_dataset, precompute_reference
from fulgurite.train.tune.lora import LoRAConfig, add_adapters
from fulgurite.train.tune.reference import ReferenceModel
from fulgurite.train.tune.rows import RowDataset
from tests.serve.engines import tiny_model
from tests.train.tune.chat_files import VOCAB_SIZE, make_tokenizer, message, write_lines
from tests.train.tune.test_lora import randomize

PAIRS = [
    {"prompt": "2+2=", "chosen": "4", "rejected": "five"},
    {"prompt": "The sky is ", "chosen": "blue", "rejected": "green and"},
    {
        "prompt": [message("user", "hi")],
        "chosen": [message("assistant", "hello")],
        "rejected": [message("assistant", "no")],
    },
    {
        "chosen": [message("user", "a"), message("assistant", "b")],
        "rejected": [message("user", "a"), message("assistant", "c")],
    },
]


def build() -> CausalLM:
    return tiny_model(vocab_size=VOCAB_SIZE)


def open_pairs(folder: Path, lines: list[object] | None = None, length: int = 96) -> RowDataset:
    file = write_lines(folder / "pairs.jsonl", lines or PAIRS)
    data = DataSection(train=(file,), validation=(file,), sequence_length=length)
    return open_pair_dataset(TrainConfig(data=data), make_tokenizer(), "train")


def load(dataset: RowDataset) -> Batch:
    return collate([dataset.sample(number) for number in range(len(dataset))])


def run(loss: torch.nn.Module, batch: Batch) -> Tensor:
    arguments = (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
    total: Tensor = loss(*arguments).total
    return total


def sum_by_hand(model: CausalLM, tokens: Tensor, labels: Tensor) -> float:
    """The log-probability of the labels of one document, from its logits."""
    with torch.no_grad():
        logprobs = model(tokens, torch.arange(len(tokens))).double().log_softmax(-1)
    return sum(float(logprobs[t, label]) for t, label in enumerate(labels.tolist()) if label >= 0)


@pytest.mark.parametrize("kind", ["precomputed", "adapters", "copy"])
def test_loss_is_the_formula(kind: str, tmp_path) -> None:
    dataset, base, model = open_pairs(tmp_path), build(), build()
    batch, beta = load(dataset), 0.3
    options: dict[str, object] = {}
    if kind == "precomputed":
        options["reference_N2"] = precompute_reference(model, dataset, rows=3)
    elif kind == "copy":
        options["reference"] = ReferenceModel(model)
    if kind == "adapters":
        add_adapters(model, LoRAConfig(rank=2))
        options["reference"] = ReferenceModel(model)
        randomize(model, 0.3)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    loss = run(DPOLoss(model, beta, **options), batch)  # type: ignore[arg-type]
    expected = 0.0
    for row in range(len(dataset)):
        gains = []
        for side in (0, 1):
            one = batch.documents_BT[row] == 2 * row + side  # type: ignore[index]
            tokens, labels = batch.tokens_BT[row][one], batch.labels_BT[row][one]
            gains.append(sum_by_hand(model, tokens, labels) - sum_by_hand(base, tokens, labels))
        expected += math.log1p(math.exp(-beta * (gains[0] - gains[1])))
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_gradient_is_that_of_plain_ops(tmp_path) -> None:
    """Of the log-probabilities by chunks, against torch's autograd through the whole logits."""
    dataset, model = open_pairs(tmp_path), build()
    batch = load(dataset)
    table = precompute_reference(model, dataset) + torch.tensor([0.3, -0.4])
    run(DPOLoss(model, 0.5, reference_N2=table), batch).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total = torch.zeros(())
    for row in range(len(dataset)):
        sums = []
        for side in (0, 1):
            one = batch.documents_BT[row] == 2 * row + side  # type: ignore[index]
            tokens, labels = batch.tokens_BT[row][one], batch.labels_BT[row][one]
            logprobs = model(tokens, torch.arange(len(tokens))).log_softmax(-1)
            picked = logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
            sums.append(picked[labels >= 0].sum() - table[row, side])
        total = total - torch.nn.functional.logsigmoid(0.5 * (sums[0] - sums[1]))
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_compiled(tmp_path) -> None:
    dataset, model = open_pairs(tmp_path), build()
    add_adapters(model, LoRAConfig(rank=2))
    randomize(model, 0.2)
    loss = DPOLoss(model, 0.3, reference_N2=precompute_reference(model, dataset))
    batch = load(dataset)
    values, gradients = [], []
    for module in (loss, fulgurite.compile(loss)):
        value = run(module, batch)
        value.backward()
        values.append(value.item())
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
        model.zero_grad()
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    for eager, compiled in zip(*gradients, strict=True):
        atol = 1e-3 * float(eager.abs().max())
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=atol)


def test_training_prefers_the_chosen_answers(tmp_path) -> None:
    dataset, model = open_pairs(tmp_path), build()
    add_adapters(model, LoRAConfig(rank=4))
    before = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    loss = DPOLoss(model, 0.1, reference_N2=precompute_reference(model, dataset))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for _ in range(12):
        totals = OneRank().run_microbatches(loss, [load(dataset)])
        assert int(totals.tokens) == len(dataset)  # the mean is over pairs
        losses.append(float(totals.loss))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(math.log(2), rel=1e-4) and losses[-1] < 0.1
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value), name


def test_bad_pairs(tmp_path) -> None:
    lines: list[object] = [{"prompt": "a", "chosen": "b"}, {"prompt": "q" * 80, "chosen": "b",
        "rejected": "c"}, PAIRS[0]]  # fmt: skip
    assert len(open_pairs(tmp_path, lines)) == 1
    with pytest.raises(ArgumentError, match="nothing to learn"):
        open_pairs(tmp_path, lines[:2])
    with pytest.raises(ArgumentError, match="beta"):
        DPOLoss(build(), 0.0, reference_N2=torch.zeros(1, 2))
