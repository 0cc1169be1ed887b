"""Rollouts of GRPO: prompts in, the microbatches of a step out, sampled by our own engine.

    prompts of step s ─▶ engine (the live model) ─▶ completions ─▶ rewards ─▶ advantages ─▶ Batches

The engine runs in this process on the parameters that are trained: nothing is copied or written. If
ranks share the weights (`parallel.data_shard`), the engine of a rank has a whole model, and trained
weights are gathered into it once a round, rank to rank. After an update only cached keys are stale, so
the prefix cache is reset. In deterministic mode the engine's
log-probabilities are those of the training forward to the bit, and the ratio is exactly 1 on policy.

Prompts are lines of JSONL: {"prompt": "2+3=", ...}, text or messages. The other fields go to rewards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fulgurite.determinism import deterministic
from fulgurite.errors import ArgumentError
from fulgurite.models.layers import CausalLM
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.engine.request import Result, SamplingParams
from fulgurite.serve.llm import LLM
from fulgurite.train.batch import Batch
from fulgurite.train.config import TrainConfig
from fulgurite.train.data.loader import collate
from fulgurite.train.data.order import sample_index
from fulgurite.train.data.records import BadSamples
from fulgurite.train.tune.chat import convert_records, read_split, require_length
from fulgurite.train.tune.chat_tokens import check_messages
from fulgurite.train.tune.grpo import RolloutTable, group_advantages
from fulgurite.train.tune.reference import ReferenceModel, score
from fulgurite.train.tune.rewards import Reward, compute_reward
from fulgurite.train.tune.rows import Example, make_example, make_row

MAX_SEQUENCES = 64  # completions that the engine runs at once


@dataclass(frozen=True)
class PromptLine:
    """A prompt as token ids, and the fields of its line."""

    token_ids: list[int]
    fields: Mapping[str, Any]


def read_prompts(
    config: TrainConfig, tokenizer: Tokenizer, split: str
) -> tuple[list[PromptLine], dict[str, str]]:
    """The prompts of a split and the hashes of their files."""
    longest = require_length(config) + 1 - config.tune.max_tokens
    if longest < 1:
        raise ArgumentError(
            f"tune.max_tokens={config.tune.max_tokens} leaves no room for a prompt in "
            f"data.sequence_length={config.data.sequence_length}",
            next="raise data.sequence_length, or lower tune.max_tokens",
        )
    bad = BadSamples(config.data.max_bad_samples)
    records, hashes = read_split(config, split, bad)

    def convert(fields: Mapping[str, Any]) -> PromptLine:
        ids = encode_prompt(tokenizer, fields)
        if len(ids) > longest:
            raise ArgumentError(f"the prompt has {len(ids)} tokens, more than {longest}")
        return PromptLine(ids, fields)

    lines = [line for _, line in convert_records(records, convert, bad)]
    bad.report()
    if not lines:
        raise ArgumentError(
            "there are no prompts",
            where="\n".join(bad.named) or None,
            next=f'lines are {{"prompt": ...}}; a prompt has at most {longest} tokens: '
            f"data.sequence_length {config.data.sequence_length} holds it and tune.max_tokens "
            f"{config.tune.max_tokens}",
        )
    return lines, hashes


def encode_prompt(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> list[int]:
    """Token ids of a text, or of messages with the generation prompt."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str) and prompt:
        return tokenizer.encode(prompt)
    check_messages(prompt)
    values = {"tools": fields["tools"]} if fields.get("tools") else {}
    text = tokenizer.apply_chat_template(prompt, **values)  # type: ignore[arg-type]
    return tokenizer.encode(text, add_special_tokens=False)


class Sampler:
    """The engine on the live model, or on a whole copy of one that ranks share.

    `sync` brings the weights of the copy up to date, on all ranks together; None: they are live.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        config: TrainConfig,
        sync: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.section, self.seed, self.sync = model, config.tune, config.seed, sync
        self.llm = LLM.from_model(
            model,
            tokenizer,
            context=min(require_length(config) + 1, model.config.max_positions),
            max_sequences=min(MAX_SEQUENCES, config.batch_size or MAX_SEQUENCES),
            kv_dtype=str(model.dtype).removeprefix("torch."),
            deterministic=config.deterministic or None,
        )

    def sample(self, prompts: Sequence[list[int]], step: int, first: int) -> list[Result]:
        """`group_size` completions of each prompt; `first` is the global number of the first one."""
        group = self.section.group_size
        params = [
            SamplingParams(
                temperature=self.section.temperature,
                max_tokens=self.section.max_tokens,
                seed=_seed_of(self.seed, step, first + number),
                logprobs=0,
            )
            for number in range(len(prompts) * group)
        ]
        repeated = [prompt for prompt in prompts for _ in range(group)]
        if self.sync is not None:
            self.sync()
        was_training = self.model.training
        self.model.eval()
        self.llm.engine.reset_prefix_cache()
        try:
            return self.llm.generate(repeated, params)
        finally:
            self.model.train(was_training)


@torch.no_grad()
def gather_weights(source: CausalLM, target: CausalLM) -> None:
    """Copy what training changes: trained parameters, and selection biases. All ranks call it."""
    for name, parameter in source.named_parameters():
        if parameter.requires_grad or name.endswith("correction_bias"):
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            target.get_parameter(name).copy_(whole)


def _seed_of(*numbers: int) -> int:
    text = ":".join(map(str, numbers))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


class RolloutLoader:
    """The microbatches of each step: `step(s)` samples with the weights as they are now.

    `batch_size` counts completions over all data ranks. With `tune.updates` above 1 the completions of
    a step serve so many steps; these are off policy, and clipped.
    """

    def __init__(
        self,
        config: TrainConfig,
        sampler: Sampler,
        prompts: Sequence[PromptLine],
        rewards: Sequence[Reward],
        table: RolloutTable,
        reference: ReferenceModel | None,
        data_rank: int = 0,
        data_ranks: int = 1,
    ) -> None:
        self.config, self.sampler, self.prompts, self.rewards = config, sampler, prompts, rewards
        self.table, self.reference = table, reference
        self.data_rank, self.share = data_rank, completions_of_rank(config, data_ranks)
        self.metrics: dict[str, float] = {}
        self.samples: list[
            tuple[str, str, float]
        ] = []  # prompt, completion, reward of the last step
        self._sampled_at: int | None = None
        self._batches: list[Batch] = []

    def step(self, step: int) -> list[Batch]:
        updates = self.config.tune.updates
        if self._sampled_at is None or step // updates != self._sampled_at // updates:
            with deterministic(self.config.deterministic):
                self._batches = self._sample(step)
            self._sampled_at = step
        return self._batches

    def can_resume(self, step: int) -> bool:
        """Whether a run that resumes at `step` samples as this one: not while completions of a sampling
        wait for updates, as the weights that sampled them are gone."""
        return step % self.config.tune.updates == 0

    def close(self) -> None:
        """Nothing runs ahead."""

    def _sample(self, step: int) -> list[Batch]:
        group = self.config.tune.group_size
        batch_size = self.config.batch_size
        assert batch_size is not None, "the config is resolved"
        first = step // self.config.tune.updates * batch_size + self.data_rank * self.share
        seed = self.config.seed if self.config.data.shuffle else None
        lines = [
            self.prompts[sample_index(first // group + number, len(self.prompts), seed)]
            for number in range(self.share // group)
        ]
        results = self.sampler.sample([line.token_ids for line in lines], step, first)
        owners = [line for line in lines for _ in range(group)]
        self.samples = [
            (
                line.fields["prompt"],
                result.text,
                compute_reward(self.rewards, line.fields, result.text),
            )
            for line, result in zip(owners, results, strict=True)
        ]
        rewards_N = torch.tensor([reward for *_, reward in self.samples], dtype=torch.float64)
        rewards_NG = rewards_N.view(-1, group)
        batches = self._build_batches(owners, results)
        self._fill_table(batches, results, owners, group_advantages(rewards_NG).float().flatten())
        lengths = [len(result.token_ids) for result in results]
        self.metrics = {
            "reward": float(rewards_NG.mean()),
            "reward_std": float(rewards_NG.std(1).mean()),
            "completion_tokens": sum(lengths) / len(lengths),
            "stopped": sum(r.finish_reason == "stop" for r in results) / len(results),
        }
        return batches

    def _build_batches(
        self, owners: Sequence[PromptLine], results: Sequence[Result]
    ) -> list[Batch]:
        length, size = require_length(self.config), self.config.microbatch_size
        assert size is not None, "the config is resolved"
        samples = []
        for number, (line, result) in enumerate(zip(owners, results, strict=True)):
            ids = [*line.token_ids, *result.token_ids]
            flags = [index >= len(line.token_ids) for index in range(len(ids))]
            example = make_example(ids, flags)
            example = Example(example.tokens, example.labels, document=number)
            samples.append(make_row([example], length, pad_id=0))
        starts = range(0, len(samples), size)
        return [collate(samples[start : start + size], start) for start in starts]

    def _fill_table(
        self,
        batches: Sequence[Batch],
        results: Sequence[Result],
        owners: Sequence[PromptLine],
        advantages_N: Tensor,
    ) -> None:
        temperature = self.config.tune.temperature
        if temperature == 1.0:
            old_NT = torch.zeros(len(results), require_length(self.config))
            for row, (line, result) in enumerate(zip(owners, results, strict=True)):
                start = len(line.token_ids) - 1
                values = [one.logprob for one in result.logprobs or ()]
                old_NT[row, start : start + len(values)] = torch.tensor(values)
        else:  # the engine reports those of temperature 1
            model = self.sampler.model
            old_NT = torch.cat([score(model, batch, temperature) for batch in batches])
        reference_NT = None
        if self.reference is not None:
            parts = [self.reference.compute_logprobs(batch, temperature) for batch in batches]
            reference_NT = torch.cat(parts)
        self.table.write(advantages_N, old_NT, reference_NT)


def completions_of_rank(config: TrainConfig, data_ranks: int) -> int:
    """Completions of a step that a data rank samples: whole groups."""
    group, batch_size = config.tune.group_size, config.batch_size
    assert batch_size is not None, "the config is resolved"
    if group < 2:
        raise ArgumentError(f"tune.group_size={group} must be 2 or more: a group has a mean")
    if config.tune.updates < 1:
        raise ArgumentError(f"tune.updates={config.tune.updates} must be 1 or more")
    if batch_size % (group * data_ranks):
        raise ArgumentError(
            f"batch_size={batch_size} completions are no whole groups of {group} on "
            f"{data_ranks} data ranks",
            next=f"try --batch_size {group * data_ranks * max(1, batch_size // group // data_ranks)}",
        )
    return batch_size // data_ranks
