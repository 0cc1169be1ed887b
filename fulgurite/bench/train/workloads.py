"""Models and batches of the suite `train`: config.json fields and a batch in, a `Workload` out.

Weights are initialized as `fulgurite train` does, and tokens are random: speed does not depend on them,
except that random text spreads over all experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fulgurite.models.families.presets import find_preset
from fulgurite.train.batch import Batch

CUDA_DTYPE, CPU_DTYPE = "bfloat16", "float32"


@dataclass(frozen=True)
class Workload:
    """A model and what it is trained on.

    Attributes:
        fields: of config.json.
        rows, length: of a microbatch.
        microbatches: of a step.
        documents: of a row; more than one: packed, with document masks.
        recipes: number formats of matmuls to compare, names of `precision.matmul`.
    """

    name: str
    architecture: str
    fields: dict[str, Any]
    rows: int
    length: int
    microbatches: int = 1
    documents: int = 1
    recipes: tuple[str, ...] = ("none",)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.length * self.microbatches

    def make_batches(self, device: str, seed: int = 0) -> list[Batch]:
        """The microbatches of one step."""
        generator = torch.Generator().manual_seed(seed)
        vocab = self.fields["vocab_size"]
        return [self._make_batch(generator, vocab).to(device) for _ in range(self.microbatches)]

    def _make_batch(self, generator: torch.Generator, vocab: int) -> Batch:
        size = self.rows, self.length
        tokens = torch.randint(0, vocab, (self.rows, self.length + 1), generator=generator)
        part = -(-self.length // self.documents)
        positions = (torch.arange(self.length) % part).expand(size)
        documents = (torch.arange(self.length) // part).expand(size).contiguous()
        return Batch(
            tokens[:, :-1].contiguous(),
            tokens[:, 1:].contiguous(),
            positions.contiguous(),
            documents if self.documents > 1 else None,
        )


def preset_fields(name: str, **changes: Any) -> dict[str, Any]:
    """The fields of a known model."""
    preset = find_preset(name)
    assert preset is not None, f"there is no preset {name}"
    return {**preset.values, **changes}


DENSE_124M = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "vocab_size": 50_304,
}
NANO = {
    **DENSE_124M,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
}
NANO_MOE = {
    **NANO,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def make_workloads(device: str, quick: bool) -> list[Workload]:
    """The workloads of a device; `quick`: the first ones, with smaller steps."""
    if not device.startswith("cuda"):
        chosen = [
            Workload("dense 1M", "LlamaForCausalLM", NANO, 4, 256, 4),
            Workload("dense 1M, packed", "LlamaForCausalLM", NANO, 4, 256, 4, documents=5),
            Workload("MoE 1M of 2M", "Qwen3MoeForCausalLM", NANO_MOE, 4, 256, 4),
        ]
        return [replace(one, microbatches=1) for one in chosen] if quick else chosen
    olmoe = preset_fields("olmoe-1b-7b", num_hidden_layers=8)
    chosen = [
        Workload("GPT-2 124M class", "LlamaForCausalLM", DENSE_124M, 32, 1024, 2),
        Workload("the same, packed", "LlamaForCausalLM", DENSE_124M, 32, 1024, 2, documents=4),
        Workload("Llama-3.2-1B", "LlamaForCausalLM", preset_fields("llama-3.2-1b"), 8, 2048),
        Workload("OLMoE-1B-7B, 8 layers", "OlmoeForCausalLM", olmoe, 8, 2048),
        Workload(
            "Llama-3.1-8B, 4 layers",
            "LlamaForCausalLM",
            preset_fields("llama-3.1-8b", num_hidden_layers=4, vocab_size=32_000),
            4,
            4096,
            recipes=("none", "fp8_tensorwise", "fp8_rowwise"),
        ),
    ]
    return chosen[:2] if quick else chosen
