"""What a step of a model must read and compute: bytes, FLOPs, and the seconds they take at least.

In: a model. Out: a `ModelCost`. Every weight that a token uses is read once (for experts: the
expected number of distinct ones), and the KV cache of all requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.models.layers import CausalLM


@dataclass(frozen=True)
class Limits:
    """What the machine can do: bytes and operations a second."""

    bandwidth: float
    flops: float

    def floor(self, bytes: float, operations: float) -> float:
        """The least seconds for so much."""
        return max(bytes / self.bandwidth, operations / self.flops)


@dataclass(frozen=True)
class ModelCost:
    """Bytes and FLOPs of a model's steps."""

    dense_bytes: int  # of the weights that every token uses
    expert_bytes: int  # of one expert, over all layers
    experts: int
    chosen: int
    token_bytes: int  # KV cache of one token
    active: int  # active parameters per token, LM head included
    head: int
    attention: int  # FLOPs of one query with one key, over all layers

    def decode(self, batch: int, context: int) -> tuple[float, float]:
        """Bytes and FLOPs of a decode step of `batch` requests with `context` tokens each."""
        met = 0.0
        if self.experts:
            met = self.experts * (1 - (1 - self.chosen / self.experts) ** batch)
        bytes = self.dense_bytes + met * self.expert_bytes + batch * context * self.token_bytes
        return bytes, batch * (2.0 * self.active + self.attention * context)

    def prefill(self, tokens: int) -> tuple[float, float]:
        """Bytes and FLOPs of one prompt; logits are computed for its last token only."""
        bytes, _ = self.decode(tokens, 0)
        layers = 2.0 * (self.active - self.head) + self.attention * (tokens + 1) / 2
        return bytes, tokens * layers + 2.0 * self.head


def count_model_cost(model: CausalLM) -> ModelCost:
    """Count bytes and FLOPs from the parameters of the model."""
    config, experts = model.config, model.config.moe
    dense = expert = 0
    for name, parameter in model.named_parameters():
        if name == "embed_tokens.weight" and not config.tie_word_embeddings:
            continue  # an embedding lookup reads one row per token
        if ".experts." in name:
            expert += parameter.nbytes
        else:
            dense += parameter.nbytes
    size = model.norm.weight.element_size()
    count = 0 if experts is None else experts.num_experts
    chosen = 0 if experts is None else experts.top_k
    each = expert // count if count else 0
    specs = model.attention_specs
    return ModelCost(
        dense_bytes=dense,
        expert_bytes=each,
        experts=count,
        chosen=chosen,
        token_bytes=size * sum(
            s.num_kv_heads * (s.key_dim if s.is_mla else s.key_dim + s.value_dim) for s in specs
        ),
        active=(dense + chosen * each) // size,
        head=config.vocab_size * config.hidden_size,
        attention=sum(2 * s.num_heads * (s.key_dim + s.value_dim) for s in specs),
    )  # fmt: skip
