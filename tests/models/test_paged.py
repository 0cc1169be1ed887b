"""The interface fits a paged cache: blocks, a table a sequence, flat tokens of many sequences at once.

The cache here is as small as one can be. It is for the interface, not for use.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.models import AttentionSpec, Decoder
from fulgurite.models.cache import Unpaged, attention, visible
from fulgurite.models.latent import LatentStep, absorbed
from tests.models.model_oracle import prompt

BLOCK = 4


class PagedCache(Unpaged):
    """Blocks of BLOCK keys; sequence s has its keys in the blocks that `tables[s]` lists."""

    def __init__(self, specs: tuple[AttentionSpec, ...], blocks: int) -> None:
        self.keys = [torch.zeros(blocks * BLOCK, s.kv_heads, s.key_dim) for s in specs]
        self.values = [torch.zeros(blocks * BLOCK, s.kv_heads, s.value_dim) for s in specs]
        self.free = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).tolist()
        self.tables: dict[int, list[int]] = {}
        self.sequence_T = torch.zeros(0, dtype=torch.long)

    def begin(self, sequence_T: Tensor, positions_T: Tensor) -> None:
        """What a scheduler does before a step: room for the new tokens of each sequence."""
        self.sequence_T = sequence_T
        for sequence, position in zip(sequence_T.tolist(), positions_T.tolist(), strict=True):
            table = self.tables.setdefault(sequence, [])
            if position // BLOCK == len(table):
                table.append(self.free.pop())

    def slots(self, sequence: int, count: int) -> Tensor:
        table = self.tables[sequence]
        return torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(count)])

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        keys, values = self.keys[spec.layer], self.values[spec.layer]
        out = torch.zeros(*q_XNH.shape[:-1], spec.value_dim)
        for sequence in self.sequence_T.unique().tolist():
            mine = self.sequence_T == sequence
            positions = positions_X[mine]
            slots = self.slots(sequence, int(positions.max()) + 1)
            keys[slots[positions]] = k_XKH[mine]
            if v_XKV is not None:
                values[slots[positions]] = v_XKV[mine]
            seen_k = keys[slots]
            seen_v = values[slots] if v_XKV is not None else seen_k[..., : spec.value_dim]
            mask = visible(spec, positions, torch.arange(len(slots)))
            out[mine] = attention(spec, q_XNH[mine], seen_k, seen_v, mask, sinks_N)
        return out

    def attend_latent(self, spec: AttentionSpec, step: LatentStep, positions_X: Tensor) -> Tensor:
        return absorbed(self.attend, spec, step, positions_X)

    def extent(self, positions_X: Tensor) -> Tensor:
        longest = torch.zeros(int(self.sequence_T.max()) + 1, dtype=torch.long)
        longest = longest.scatter_reduce(0, self.sequence_T, positions_X + 1, "amax")
        return longest[self.sequence_T]


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "deepseek_v3", "llama4", "gpt_oss"])
def test_prompts_and_steps_of_three_sequences_in_one_flat_batch(name: str, get_pair) -> None:
    model: Decoder = get_pair(name).ours
    texts = [prompt(length, seed) for seed, length in enumerate((19, 12, 23))]
    cache = PagedCache(model.attention_specs, blocks=20)
    got: list[list[Tensor]] = [[], [], []]
    # Each step: (sequence, from, to). Prompts come in pieces, beside single steps of others.
    steps = [
        [(0, 0, 7), (1, 0, 10)],
        [(1, 10, 11), (0, 7, 19), (2, 0, 5)],
        [(2, 5, 22), (1, 11, 12)],
        [(2, 22, 23)],
    ]
    for step in steps:
        ids = torch.cat([texts[s][start:stop] for s, start, stop in step])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in step])
        sequences = torch.cat([torch.full((stop - start,), s) for s, start, stop in step])
        cache.begin(sequences, positions)
        logits = model(ids, positions, cache)
        for s, _, _ in step:
            got[s].append(logits[sequences == s])
    for text, pieces in zip(texts, got, strict=True):
        alone = model(text[None], torch.arange(len(text))[None])[0]
        error = (torch.cat(pieces) - alone).abs().max() / alone.abs().max()
        assert error.item() < 1e-5
