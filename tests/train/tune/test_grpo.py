"""GRPO: the formula, the engine on live weights, a ratio of exactly 1 on policy, and learning."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.models import CausalLM
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.dots import DOTS1
from fulgurite.models.loading.loader import build_random_model
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from fulgurite.train.batch import IGNORED
from fulgurite.train.build import build_from_scratch
from fulgurite.train.config import DataSection, TrainConfig, TuneSection
from fulgurite.train.data.loader import collate
from fulgurite.train.loss import LossModule
from fulgurite.train.step import OneRank
from fulgurite.train.tune.chat import open_chat_dataset
from fulgurite.train.tune.grpo import group_advantages, grpo_loss
from fulgurite.train.tune.logprobs import compute_logprobs
from fulgurite.train.tune.lora import adapter_weights
from fulgurite.train.tune.rewards import compute_reward, load_rewards
from fulgurite.train.tune.task import TuneTask, prepare_tuning
from tests.serve.engines import FIELDS, tiny_model
from tests.train.tune.chat_files import VOCAB_SIZE, make_tokenizer, message, write_lines

MOE = {
    **FIELDS, "vocab_size": VOCAB_SIZE, "moe_intermediate_size": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip


def reward_length(prompt: Any, completion: str, **columns: Any) -> float:
    return float(len(completion)) * columns.get("factor", 1.0)


def reward_without_answer(prompt: Any, completion: str, **columns: Any) -> float:
    raise ValueError("no answer")


def build(kind: str) -> CausalLM:
    if kind == "dense":
        return tiny_model(vocab_size=VOCAB_SIZE)
    return build_random_model(DOTS1.read_config(ConfigFields(MOE, "a test")), DOTS1, std=0.3)


def make_task(folder: Path, model: CausalLM, rewards: Any, **tune: Any) -> TuneTask:
    lines = [{"prompt": f"{n}+{n}=", "factor": 2.0} for n in range(5)]
    lines.append({"prompt": [message("user", "hi")]})
    file = write_lines(folder / "prompts.jsonl", lines)
    section = {"task": "grpo", "max_tokens": 8, "group_size": 4, "rewards": (rewards,), **tune}
    config = TrainConfig(
        batch_size=8,
        microbatch_size=3,
        deterministic=True,
        data=DataSection(train=(file,), validation=(file,), sequence_length=32),
        tune=TuneSection(**section),
    )
    task = prepare_tuning(config, model, make_tokenizer())
    task.build_loss(model, OneRank(deterministic=True))
    return task


def compute_ratios(task: TuneTask, step: int) -> Tensor:
    """exp(logp - old) of all completion tokens of a step, by the training forward."""
    assert task.loader is not None
    batches, found = task.loader.step(step), []
    for batch in batches:
        with fulgurite.deterministic():  # with gradients, as a step has them
            logp = compute_logprobs(
                task.model, batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT
            )
        assert logp.requires_grad and batch.documents_BT is not None
        old = task.loader.table.old_NT[batch.documents_BT[:, 0]]
        found.append(torch.exp(logp - old)[batch.labels_BT != IGNORED].detach())
    return torch.cat(found)


def take_step(task: TuneTask, step: int, optimizer: torch.optim.Optimizer) -> float:
    assert task.loader is not None and task.loss_module is not None
    batches = task.loader.step(step)
    with fulgurite.deterministic():
        totals = OneRank(deterministic=True).run_microbatches(task.loss_module, batches)
    optimizer.step()
    return float(totals.loss)


@pytest.mark.parametrize("method", ["none", "lora", "qlora"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_ratio_is_exactly_1_on_policy(kind: str, method: str, tmp_path) -> None:
    """Before and after updates: the sampler runs on the trained weights, and on no stale key."""
    model = build(kind)
    tune = {"method": method, "quantize": "q8_0", "rank": 2, "beta": 0.05}
    task = make_task(tmp_path, model, reward_length, **tune)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05)
    for step in range(3):
        ratios = compute_ratios(task, step)
        assert len(ratios) > 8 and torch.equal(ratios, torch.ones_like(ratios)), step
        before = [p.detach().clone() for p in trainable]
        take_step(task, step, optimizer)
        assert any(not torch.equal(p, old) for p, old in zip(trainable, before, strict=True))
    if method == "none":  # weights changed, so old completions are off policy
        batches = task.loader.step(2)  # type: ignore[union-attr]
        assert task.loader.step(2) is batches  # type: ignore[union-attr]
        assert not torch.equal(compute_ratios(task, 2), torch.ones_like(compute_ratios(task, 2)))


def test_kl_is_0_at_first_and_grows(tmp_path) -> None:
    model = build("dense")
    task = make_task(tmp_path, model, reward_length, method="lora", rank=2, beta=0.5)
    assert task.loader is not None and task.loss_module is not None
    optimizer = torch.optim.SGD([p for w in adapter_weights(model) for p in (w.a, w.b)], lr=5.0)
    found = []
    for step in range(2):
        batches = task.loader.step(step)
        with fulgurite.deterministic():
            totals = OneRank().run_microbatches(task.loss_module, batches)
        found.append(float(totals.z_loss))
        optimizer.step()
    assert found[0] == 0.0 and found[1] > 0.0
    with fulgurite.deterministic():  # the reference is the base
        table, batch = task.loader.table, batches[0]
        base = build("dense")
        arguments = (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
        expected = compute_logprobs(base, *arguments).detach()
    assert torch.equal(table.reference_NT[: len(expected)], expected)


def test_loss_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    logp, old, reference = (-torch.rand(3, 5, generator=generator) for _ in range(3))
    advantage, clip, beta = torch.tensor([[1.5], [-0.5], [0.0]]), 0.2, 0.3
    found, kl = grpo_loss(logp, old, reference, advantage, clip, beta)
    for row in range(3):
        for t in range(5):
            ratio = math.exp(logp[row, t] - old[row, t])
            a = float(advantage[row])
            gain = min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a)
            d = float(reference[row, t] - logp[row, t])
            assert float(kl[row, t]) == pytest.approx(math.exp(d) - d - 1, rel=1e-3, abs=1e-6)
            expected = -gain + beta * (math.exp(d) - d - 1)
            assert float(found[row, t]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_advantages_of_groups() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]])
    found = group_advantages(rewards)
    assert torch.allclose(found[0], torch.tensor([-1.0, 0.0, 1.0]), atol=1e-3)
    assert torch.equal(found[1], torch.zeros(3))


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e30, 1e300])
def test_advantages_do_not_overflow(factor: float) -> None:
    rewards = factor * torch.tensor([[1.0, 2.0, 4.0, -7.0]], dtype=torch.float64)
    plain = torch.tensor([[1.0, 2.0, 4.0, -7.0]], dtype=torch.float64)
    expected = (plain - plain.mean()) / (plain.std() + 1e-4 / factor)
    assert torch.allclose(group_advantages(rewards), expected, rtol=1e-12)


def test_a_file_is_no_name_of_a_reward() -> None:
    with pytest.raises(ArgumentError, match="rewards my_rewards:score, in the folder lib"):
        load_rewards(("lib/my_rewards.py:score",))


def test_an_engine_on_a_model_in_memory_shares_its_weights() -> None:
    model, tokenizer = build("dense"), make_tokenizer()
    llm = LLM.from_model(model, tokenizer, context=64, max_sequences=4)
    assert llm.model is model
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    first = llm.generate(["hello"], params)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    llm.engine.reset_prefix_cache()
    changed = llm.generate(["hello"], params)[0]
    fresh = LLM.from_model(model, tokenizer, context=64, max_sequences=4)
    assert changed.logprobs == fresh.generate(["hello"], params)[0].logprobs
    assert changed.logprobs != first.logprobs


def test_temperature_samples_groups_and_seeds(tmp_path) -> None:
    """With another temperature than 1 the ratio is that of the tempered distribution."""
    model = build("dense")
    tasks = [
        make_task(tmp_path, build("dense"), reward_length, temperature=1.7, updates=2)
        for _ in range(2)
    ]
    first, second = (task.loader for task in tasks)
    assert first is not None and second is not None
    batches = first.step(0)
    assert all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in zip(batches, second.step(0)))
    assert [len(batch.tokens_BT) for batch in batches] == [3, 3, 2]
    assert len({text for _, text, _ in first.samples[:4]}) > 1  # a group has different samples
    assert {prompt for prompt, *_ in first.samples[:4]} == {first.samples[0][0]}
    assert first.step(1) is batches and first.step(2) is not batches  # updates=2
    loader, batch = second, second.step(0)[0]
    with fulgurite.deterministic(), torch.no_grad():
        arguments = (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
        expected = compute_logprobs(model, *arguments, temperature=1.7)
    assert torch.equal(loader.table.old_NT[:3], expected)
    rewards = [reward for *_, reward in loader.samples]
    assert loader.metrics["reward"] == pytest.approx(sum(rewards) / len(rewards))


def test_wrong_options(tmp_path, monkeypatch) -> None:
    model = build("dense")
    for wrong, text in (
        ({"group_size": 1}, "group_size"),
        ({"group_size": 3}, "whole groups"),
        ({"max_tokens": 40}, "no room"),
        ({"method": "lora", "dropout": 0.1}, "dropout"),
        ({"temperature": 0.0}, "temperature"),
        ({"updates": 0}, "updates"),
    ):
        with pytest.raises(ArgumentError, match=text):
            make_task(tmp_path, build("dense"), reward_length, **wrong)
    with pytest.raises(ArgumentError, match="needs a reward"):
        load_rewards(())
    for name in ("nothing", "no_such_module:f", "math:nope"):
        with pytest.raises(ArgumentError):
            load_rewards((name,))
    with pytest.raises(ArgumentError, match="returned nan"):
        compute_reward([lambda *a, **k: math.nan], {"prompt": "a"}, "b")
    with pytest.raises(ArgumentError, match="raised ValueError: no answer") as raised:
        compute_reward([reward_without_answer], {"prompt": "a"}, "b")
    assert f"{Path(__file__).name}:" in str(raised.value)  # the line of the user's function
    assert load_rewards(("math:hypot",)) == [math.hypot]
    (tmp_path / "broken_rewards.py").write_text("def reward(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"SyntaxError[\s\S]*broken_rewards.py:1"):
        load_rewards(("broken_rewards:reward",))
    for number in (2, 2.0, True, np.float32(2), np.int64(2), torch.tensor(2.0)):
        rewards = [lambda *a, value=number, **k: value]
        assert compute_reward(rewards, {"prompt": "a"}, "b") == float(number)
    for wrong in (None, "2", [2.0], np.ones(3)):
        with pytest.raises(ArgumentError, match="return a finite number"):
            compute_reward([lambda *a, value=wrong, **k: value], {"prompt": "a"}, "b")
    config = replace(TrainConfig(), tune=TuneSection(task="grpo"))
    config = replace(config, parallel=replace(config.parallel, tensor=2))
    with pytest.raises(ArgumentError, match="tensor=2"):
        prepare_tuning(config, model, make_tokenizer())
    config = TrainConfig(tune=TuneSection(method="lora", dropout=0.1), deterministic=True)
    with pytest.raises(ArgumentError, match="tune.dropout=0.1"):
        prepare_tuning(config, model, make_tokenizer())


# ---- learning --------------------------------------------------------------------------------------


def reward_copy(prompt: str, completion: str, **columns: Any) -> float:
    """Whether the completion is the digit of the prompt."""
    return float(completion == prompt[:1])


def pretrain_copying(folder: Path) -> CausalLM:
    """A small model that answers `7>` with 7 about half of the time: half of its data is wrong."""
    fields = {**FIELDS, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 1}
    model = build_from_scratch(
        fields, "LlamaForCausalLM", dtype=torch.float32, device="cpu", seed=0
    ).model
    lines = [
        {"prompt": f"{n}>", "completion": f"{n if k % 2 else (n * 3 + k) % 10}"}
        for n in range(10)
        for k in range(20)
    ]
    file = write_lines(folder / "copies.jsonl", lines)
    data = DataSection(train=(file,), validation=(file,), sequence_length=64)
    dataset = open_chat_dataset(TrainConfig(data=data), make_tokenizer(), "train")
    batch = collate([dataset.sample(number) for number in range(len(dataset))])
    loss, optimizer = LossModule(model.train()), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        totals = OneRank().run_microbatches(loss, [batch])
        optimizer.step()
        optimizer.zero_grad()
    assert float(totals.loss) < 1.2
    return model


def test_grpo_learns_to_copy_a_digit(tmp_path) -> None:
    model = pretrain_copying(tmp_path)
    file = write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"{n}>"} for n in range(10)])
    config = TrainConfig(
        batch_size=64,
        microbatch_size=64,
        deterministic=True,
        data=DataSection(train=(file,), validation=(file,), sequence_length=8),
        tune=TuneSection(task="grpo", group_size=8, max_tokens=3, beta=0.0, rewards=(reward_copy,)),  # type: ignore[arg-type]
    )
    task = prepare_tuning(config, model, make_tokenizer())
    task.build_loss(model, OneRank(deterministic=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rewards = []
    for step in range(40):
        take_step(task, step, optimizer)
        rewards.append(task.metrics()["reward"])
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert 0.2 < first < 0.75 and last > 0.9, (first, last)
