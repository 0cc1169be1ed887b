"""The KVCache protocol supports paged caches: blocks, block tables, flat tokens of many sequences.

The cache here is minimal: it tests the protocol.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.models import AttentionSpec, CausalLM
from fulgurite.models.attention_spec import build_attention_mask
from fulgurite.models.kv_cache import UnpagedKVCache
from fulgurite.models.mla import MLAInputs, attend_absorbed
from fulgurite.models.uncached_attention import masked_attention
from tests.models.reference_models import make_prompt

BLOCK_SIZE = 4


class MinimalPagedCache(UnpagedKVCache):
    """Blocks of BLOCK_SIZE keys; `block_tables[s]` lists the blocks of sequence s."""

    def __init__(self, specs: tuple[AttentionSpec, ...], blocks: int) -> None:
        self.keys = [torch.zeros(blocks * BLOCK_SIZE, s.num_kv_heads, s.key_dim) for s in specs]
        self.values = [torch.zeros(blocks * BLOCK_SIZE, s.num_kv_heads, s.value_dim) for s in specs]
        self.free_blocks = torch.randperm(
            blocks, generator=torch.Generator().manual_seed(3)
        ).tolist()
        self.block_tables: dict[int, list[int]] = {}
        self.sequence_T = torch.zeros(0, dtype=torch.long)

    def allocate(self, sequence_T: Tensor, positions_T: Tensor) -> None:
        """Allocate blocks for the new tokens of each sequence, as a scheduler does."""
        self.sequence_T = sequence_T
        for sequence, position in zip(sequence_T.tolist(), positions_T.tolist(), strict=True):
            table = self.block_tables.setdefault(sequence, [])
            if position // BLOCK_SIZE == len(table):
                table.append(self.free_blocks.pop())

    def slot_mapping(self, sequence: int, count: int) -> Tensor:
        table = self.block_tables[sequence]
        return torch.tensor(
            [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(count)]
        )

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        keys, values = self.keys[spec.layer_index], self.values[spec.layer_index]
        out = torch.zeros(*q_XNH.shape[:-1], spec.value_dim)
        for sequence in self.sequence_T.unique().tolist():
            selected = self.sequence_T == sequence
            positions = positions_X[selected]
            slots = self.slot_mapping(sequence, int(positions.max()) + 1)
            keys[slots[positions]] = k_XKH[selected]
            if v_XKV is not None:
                values[slots[positions]] = v_XKV[selected]
            cached_k = keys[slots]
            cached_v = values[slots] if v_XKV is not None else cached_k[..., : spec.value_dim]
            mask = build_attention_mask(spec, positions, torch.arange(len(slots)))
            out[selected] = masked_attention(
                spec, q_XNH[selected], cached_k, cached_v, mask, sinks_N
            )
        return out

    def attend_mla(self, spec: AttentionSpec, inputs: MLAInputs, positions_X: Tensor) -> Tensor:
        return attend_absorbed(self.attend, spec, inputs, positions_X)

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        longest = torch.zeros(int(self.sequence_T.max()) + 1, dtype=torch.long)
        longest = longest.scatter_reduce(0, self.sequence_T, positions_X + 1, "amax")
        return longest[self.sequence_T]


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "deepseek_v3", "llama4", "gpt_oss"])
def test_mixed_prefill_and_decode_of_three_sequences(name: str, get_pair) -> None:
    model: CausalLM = get_pair(name).model
    texts = [make_prompt(length, seed) for seed, length in enumerate((19, 12, 23))]
    cache = MinimalPagedCache(model.attention_specs, blocks=20)
    outputs: list[list[Tensor]] = [[], [], []]
    # Each step: (sequence, start, stop). Chunks of prompts are mixed with decode steps of others.
    steps = [
        [(0, 0, 7), (1, 0, 10)],
        [(1, 10, 11), (0, 7, 19), (2, 0, 5)],
        [(2, 5, 22), (1, 11, 12)],
        [(2, 22, 23)],
    ]
    for inputs in steps:
        ids = torch.cat([texts[s][start:stop] for s, start, stop in inputs])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in inputs])
        sequences = torch.cat([torch.full((stop - start,), s) for s, start, stop in inputs])
        cache.allocate(sequences, positions)
        logits = model(ids, positions, cache)
        for s, _, _ in inputs:
            outputs[s].append(logits[sequences == s])
    for text, chunks in zip(texts, outputs, strict=True):
        expected = model(text[None], torch.arange(len(text))[None])[0]
        error = (torch.cat(chunks) - expected).abs().max() / expected.abs().max()
        assert error.item() < 1e-5
