"""MLA in deterministic mode on a GPU: a token's bits depend on its own sequence alone.

One sequence at once, then cut into random chunks, each in a call with random companions, other cache
blocks, padding, and lengths that the host knows or (as in a CUDA graph) does not know.
"""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_support import DEVICE, INTERPRETED, assert_same_bits  # isort: skip

from fulgurite.determinism import deterministic
from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.mla import reference, triton_mla
from fulgurite.kernels.mla.ops import mla_slot_shape
from fulgurite.kernels.mla.prefill_plan import MLASizes, plan_prefill
from fulgurite.kernels.mla.triton_store_kv import store_mla_cache
from fulgurite.kernels.tuning import deterministic as deterministic_tuning
from fulgurite.kernels.tuning import heuristics_for

SIZES = MLASizes(rank=40, nope_dim=16, rope_dim=8, value_dim=12)
HEADS, BLOCK_SIZE, OTHERS = 3, 16, 2
LENGTH = 90 if INTERPRETED else 200
BLOCKS = -(-LENGTH // BLOCK_SIZE)  # of a sequence
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter truncates bfloat16


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic_tuning, "PART_KEYS", 64)


class Sequences:
    """Sequences of LENGTH tokens; the first is compared, the others are companions."""

    def __init__(self, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        torch.manual_seed(5)
        count = 1 + OTHERS
        width, slot_dtype = mla_slot_shape(SIZES.rank, SIZES.rope_dim, cache_dtype)
        self.cache_shape = (count * BLOCKS + 1, BLOCK_SIZE, width)
        self.slot_dtype = slot_dtype
        query = SIZES.nope_dim + SIZES.rope_dim
        self.q = torch.randn(count, LENGTH, HEADS, query).to(DEVICE, dtype)
        self.kv_a = torch.randn(count, LENGTH, SIZES.rank + SIZES.rope_dim).to(DEVICE, dtype)
        self.norm = (torch.rand(SIZES.rank) + 0.5).to(DEVICE, dtype)
        rows = SIZES.nope_dim + SIZES.value_dim
        self.kv_b = (0.3 * torch.randn(HEADS, rows, SIZES.rank)).to(DEVICE, dtype)
        angles = torch.arange(LENGTH)[:, None] * torch.rand(SIZES.rope_dim // 2)
        self.cos, self.sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)

    def new_cache(self, seed: int) -> tuple[Tensor, Tensor]:
        """A cache of NaN and a block table in random order."""
        fill = 255 if self.slot_dtype == torch.uint8 else float("nan")
        cache = torch.full(self.cache_shape, fill, dtype=self.slot_dtype, device=DEVICE)
        order = torch.randperm(
            self.cache_shape[0] - 1, generator=torch.Generator().manual_seed(seed)
        )
        return cache, (order + 1).view(1 + OTHERS, BLOCKS).int().to(DEVICE)

    def run(
        self,
        cache: Tensor,
        table: Tensor,
        chunks: list[tuple[int, int, int]],
        *,
        padding: int = 0,
        host_lens: bool = True,
    ) -> list[Tensor]:
        """(sequence, first token, tokens) of each chunk: their outputs."""

        def gather(x: Tensor) -> Tensor:
            parts = [x[s, first : first + n] for s, first, n in chunks]
            return torch.cat([*parts, x[0, :padding]])

        angles = [torch.cat([*(a[f : f + n] for _, f, n in chunks), a[:padding]])
                  for a in (self.cos, self.sin)]  # fmt: skip
        slots = [
            table[s, t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE
            for s, first, n in chunks for t in range(first, first + n)
        ]  # fmt: skip
        slot_mapping = torch.tensor([*slots, *[-1] * padding], dtype=torch.int64, device=DEVICE)
        stored = store_mla_cache(
            gather(self.kv_a), self.norm, *angles, cache, slot_mapping, 1e-6, True
        )
        assert stored is not NotImplemented
        counts = [n for _, _, n in chunks]
        lengths = [first + n for _, first, n in chunks]
        metadata = AttentionMetadata(
            table[[s for s, _, _ in chunks]].contiguous(),
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE),
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            max(counts),
            max(lengths),
            counts if host_lens else None,
            lengths if host_lens else None,
        )
        out = triton_mla.mla_attention(
            gather(self.q), self.kv_b, *angles, cache, metadata, 0.2, True
        )
        assert not out[len(slots) :].any()
        return list(out[: len(slots)].split(counts))

    def exact(self) -> Tensor:
        """The first sequence in float64, from the cache that the kernel wrote."""
        cache, table = self.new_cache(0)
        self.run(cache, table, [(0, 0, LENGTH)])
        metadata = AttentionMetadata(
            table[:1],
            torch.tensor([0, LENGTH], dtype=torch.int32, device=DEVICE),
            torch.tensor([LENGTH], dtype=torch.int32, device=DEVICE),
        )
        return reference.mla_attention(
            self.q[0].double(), self.kv_b.double(), self.cos.double(), self.sin.double(), cache,
            metadata, 0.2, True,
        )  # fmt: skip


def random_cuts(rng: random.Random) -> list[int]:
    """Chunks of a prompt, then single tokens, as the engine runs them."""
    prompt, sizes = rng.randrange(40, LENGTH - 3), []
    while sum(sizes) < prompt:
        sizes.append(min(rng.choice((1, 3, 16, 17, 40)), prompt - sum(sizes)))
    return sizes + [1] * (LENGTH - prompt if LENGTH - prompt < 6 else 3)


DTYPES = [(torch.float32, torch.float32), (HALF, HALF), (HALF, torch.uint8)]


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("seed", [0] if INTERPRETED else [0, 1, 2])
def test_chunks_companions_and_padding(
    dtype: torch.dtype, cache_dtype: torch.dtype, seed: int
) -> None:
    sequences, rng = Sequences(dtype, cache_dtype), random.Random(seed)
    with deterministic():
        whole = sequences.run(*sequences.new_cache(0), [(0, 0, LENGTH)])[0]
        cache, table = sequences.new_cache(seed + 1)
        done = [0] * (1 + OTHERS)
        for size in random_cuts(rng):
            chunks = [(0, done[0], size)]
            for other in range(1, 1 + OTHERS):
                count = min(rng.choice((0, 1, 1, 35)), LENGTH - done[other])
                if count:
                    chunks.append((other, done[other], count))
            rng.shuffle(chunks)
            options = {"padding": rng.choice((0, 2)), "host_lens": rng.random() < 0.7}
            outputs = sequences.run(cache, table, chunks, **options)
            for (s, first, count), out in zip(chunks, outputs, strict=True):
                if s == 0:
                    assert_same_bits(out, whole[first : first + count], f"{count} from {first} on")
                done[s] += count
    expected = sequences.exact()
    # absorbed queries, latent results, weights and results are rounded once each
    tolerance = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
    assert (whole.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
def test_one_program_has_all_parts_or_several_share_them(
    dtype: torch.dtype, cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = Sequences(dtype, cache_dtype)
    chunks = [(0, 0, LENGTH), (1, 0, 3)]
    with deterministic():
        whole = sequences.run(*sequences.new_cache(0), chunks)
        heuristics = heuristics_for(sequences.q.device)
        monkeypatch.setattr(heuristics, "num_sms", 1)
        alone = sequences.run(*sequences.new_cache(0), chunks)
    assert all(torch.equal(a, b) for a, b in zip(whole, alone, strict=True))


def test_groups_of_absorbed_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long step is run in groups, which may cut a sequence anywhere: the bits stay the same."""
    sequences = Sequences(torch.float32, torch.float32)
    with deterministic():
        whole = sequences.run(*sequences.new_cache(0), [(0, 0, LENGTH)])[0]
        target = "fulgurite.kernels.mla.prefill_plan.max_absorbed_tokens"
        monkeypatch.setattr(target, lambda *_: 33)
        chunks = [(1, 0, 20), (0, 0, LENGTH), (2, 0, 5)]
        crowded = sequences.run(*sequences.new_cache(3), chunks)[1]
    assert torch.equal(crowded, whole)


def test_keys_are_never_expanded() -> None:
    lens = [400, 1]
    starts = torch.tensor([0, 400, 401], dtype=torch.int32)
    metadata = AttentionMetadata(
        torch.zeros(2, 30, dtype=torch.int32), starts, torch.tensor(lens, dtype=torch.int32), 400,
        400, lens, lens,
    )  # fmt: skip
    sizes = MLASizes(512, 128, 64, 128)
    plain = plan_prefill(metadata, sizes, torch.device("cpu"))
    assert plain is not None and plain.chunks
    with deterministic():
        plan = plan_prefill(metadata, sizes, torch.device("cpu"))
    assert plan is not None and not plan.chunks
