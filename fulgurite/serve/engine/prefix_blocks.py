"""KV-cache blocks between engines: a prompt in, the contents of its cached blocks out, and back.

    engine A: prefill ─▶ export_prefix ══ chunks of a few MiB ══▶ import_prefix ─▶ engine B: decode

Prefill and decode can so run on different engines: one computes the prompt and exports its full
blocks, the other imports them into its prefix cache and finds them there like any cached prefix.
The rest of the prompt, less than a block, is computed again.

Both calls are short and keep nothing between chunks: steps run in between, and a transfer that ends
early leaves only cached blocks. A block is found by its hash, which covers all tokens before it and the
cache salt, so that an incomplete prefix is a shorter hit or none, never a wrong one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.quant import QuantTensor
from fulgurite.serve.engine.block_manager import BlockManager, BlockPool
from fulgurite.serve.engine.kv_cache import PagedKVCache
from fulgurite.serve.engine.prefix_chunk import CHUNK_BYTES, PrefixBlocks
from fulgurite.serve.engine.request import Request, RequestOptions, SamplingParams

if TYPE_CHECKING:
    from fulgurite.serve.engine.engine import Engine

SAMPLED_VALUES = 32  # of the first and last row of each weight, to tell models apart
NO_BYTES = torch.empty(0, dtype=torch.uint8)
_layouts: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()


def export_prefix(
    engine: Engine,
    prompt_ids: Sequence[int],
    cache_salt: str = "",
    *,
    hashes: Sequence[bytes] = (),
    start: int = 0,
    max_bytes: int = CHUNK_BYTES,
) -> PrefixBlocks:
    """The cached blocks of a prompt from block `start` on: up to `max_bytes` of them, at least one.

    With `max_bytes=0` hashes only: they say how much of the prompt is cached. For later chunks give
    the `hashes` of the first one instead of the prompt, so that they need not be computed again.
    """
    _check_engine(engine)
    manager = engine.block_manager
    hashes = list(hashes or _hash_prompt(engine, prompt_ids, cache_salt))
    hashes = hashes[: manager.match_hashes(hashes)]
    end = _choose_end(engine, len(hashes), start, max_bytes)
    contents = []
    for index, pool in enumerate(manager.pools):
        first = max(start, _first_block(manager, index, len(hashes)))
        blocks = [pool.block_by_hash[hash] for hash in hashes[first:end]]
        contents.append(_read_blocks(_group_tensors(engine.kv_cache, index), blocks))
    return PrefixBlocks(hashes, min(start, end), end, contents, describe_layout(engine))


def import_prefix(engine: Engine, blocks: PrefixBlocks) -> int:
    """Put a chunk of exported blocks into the prefix cache. Chunks come in order.

    Returns how many blocks of the prefix, from its first, a request finds once all chunks are there.
    Less than `blocks.end`: the pool has no room for more, and further chunks are of no use. Blocks that
    requests hold are never evicted, nor are blocks of the same prefix.
    """
    _check_engine(engine)
    contents = _check_chunk(engine, blocks)
    manager = engine.block_manager
    reach = _plan_reach(manager, blocks)
    for index, pool in enumerate(manager.pools):
        _import_group(engine, index, pool, blocks, contents[index], reach)
    return reach


def describe_layout(engine: Engine) -> str:
    """A text that is equal for engines whose blocks can be exchanged: same weights, same cache."""
    found = _layouts.get(engine)
    if found is None:
        cache = engine.kv_cache
        shapes = [
            f"{layer}:{tensor.dtype}{list(tensor.shape[1:])}"
            for caches in (cache.key_caches, cache.value_caches)
            for layer, tensor in sorted(caches.items())
            if tensor is not None
        ]
        digest = hashlib.blake2b(f"{shapes}{engine.model.attention_specs}".encode(), digest_size=8)
        dtype = next(iter(cache.key_caches.values())).dtype
        size = f"{len(cache.key_caches)} layers, blocks of {cache.block_size}, {dtype}"
        weights = _hash_weights(engine.model)
        found = f"{size}, cache {digest.hexdigest()}, weights {weights}"
        _layouts[engine] = found
    return found


def _hash_weights(model: torch.nn.Module) -> str:
    """A hash of a few values of every weight: keys of another model must not be imported."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        data = parameter.packed if isinstance(parameter, QuantTensor) else parameter.detach()
        digest.update(f"{name}{data.dtype}{list(data.shape)}".encode())
        for row in (0, -1):
            values = data
            while values.dim() > 1 and len(values):
                values = values[row]
            part = values.reshape(-1)[:SAMPLED_VALUES].contiguous()
            digest.update(part.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _check_engine(engine: Engine) -> None:
    """ArgumentError for engines whose blocks can't be exchanged."""
    if engine.coordinator is not None:
        raise ArgumentError(
            "KV-cache blocks of several ranks can't be handed over",
            next="use prefill replicas with tensor=1, or none",
        )
    if not engine.block_manager.prefix_caching:
        reason = engine.model.no_prefix_cache_reason or "prefix_caching=False"
        raise ArgumentError(
            f"this engine has no prefix cache to hand blocks over: {reason}",
            next="run this model without prefill replicas",
        )


def _first_block(manager: BlockManager, group: int, count: int) -> int:
    """The first block of a prefix of `count` blocks that a later token attends to."""
    visible = manager.groups[group].first_visible(count * manager.block_size)
    return min(visible // manager.block_size, count)


# ---- export -------------------------------------------------------------------------------------


def _hash_prompt(engine: Engine, prompt_ids: Sequence[int], cache_salt: str) -> list[bytes]:
    """The hashes of the blocks that a request with this prompt looks for."""
    if not 0 < len(prompt_ids) < engine.context:
        raise ArgumentError(
            f"a prompt of {len(prompt_ids)} tokens; this engine has a context of {engine.context}"
        )
    options, params = RequestOptions(cache_salt=cache_salt), SamplingParams(max_tokens=1)
    request = Request("export", prompt_ids, params, engine.context, options=options)
    engine.block_manager.match_prefix(request)
    return request.block_hashes


def _choose_end(engine: Engine, count: int, start: int, max_bytes: int) -> int:
    """The end of a chunk from `start`. All chunks of a prefix have equally many blocks."""
    if max_bytes <= 0 or start >= count:
        return min(start, count)
    groups = range(len(engine.block_manager.groups))
    size = sum(_block_bytes(_group_tensors(engine.kv_cache, index)) for index in groups)
    return min(start + max(max_bytes // size, 1), count)


def _group_tensors(cache: PagedKVCache, group: int) -> list[Tensor]:
    """Keys and values of a group's layers, [blocks, bytes of a block]: views in memory order."""
    layers = [layer for layer, index in cache.group_of_layer.items() if index == group]
    keys, values = cache.key_caches, cache.value_caches
    tensors = [*(keys[layer] for layer in layers), *(values[layer] for layer in layers)]
    return [_as_bytes(tensor) for tensor in tensors if tensor is not None]


def _as_bytes(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.is_contiguous() else tensor.transpose(1, 2)  # heads come first
    return dense.view(torch.uint8).view(len(dense), -1)


def _block_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.shape[1] for tensor in tensors)


def _read_blocks(tensors: Sequence[Tensor], blocks: Sequence[int]) -> bytes:
    """The contents of blocks, one after another; one copy from the device for all of them."""
    if not blocks:
        return b""
    rows = torch.tensor(blocks, device=tensors[0].device)
    parts = [tensor.index_select(0, rows) for tensor in tensors]
    content: bytes = torch.cat(parts, dim=1).cpu().numpy().tobytes()
    return content


# ---- import -------------------------------------------------------------------------------------


def _check_chunk(engine: Engine, blocks: PrefixBlocks) -> list[Tensor]:
    """The contents by group, [blocks, bytes of a block]; ArgumentError if anything does not fit."""
    manager, own = engine.block_manager, describe_layout(engine)
    if blocks.layout != own or len(blocks.contents) != len(manager.pools):
        raise ArgumentError(
            f"these blocks are of a cache with another layout: {blocks.layout}; here: {own}",
            next="give both engines the same model, kv_dtype and block size",
        )
    count = len(blocks.hashes)
    if not 0 <= blocks.start <= blocks.end <= count or len({*blocks.hashes}) != count:
        raise ArgumentError(f"blocks {blocks.start} to {blocks.end} of a prefix of {count} blocks")
    contents = []
    for index, content in enumerate(blocks.contents):
        first = max(blocks.start, _first_block(manager, index, count))
        wanted = max(blocks.end - first, 0)
        size = _block_bytes(_group_tensors(engine.kv_cache, index))
        if len(content) != wanted * size:
            raise ArgumentError(
                f"{wanted} blocks of cache group {index} have {wanted * size} bytes here, "
                f"but {len(content)} came",
                next="give both engines the same version",
            )
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else NO_BYTES
        contents.append(data.view(wanted, size))
    return contents


def _plan_reach(manager: BlockManager, blocks: PrefixBlocks) -> int:
    """The longest prefix that requests will find, if it is imported as far as there is room."""
    tables = [_GroupNeeds(manager, index, blocks) for index in range(len(manager.groups))]
    lengths = range(len(blocks.hashes), 0, -1)
    return next((count for count in lengths if all(one.fits(count) for one in tables)), 0)


class _GroupNeeds:
    """What a prefix needs in one group, as running sums over its blocks."""

    def __init__(self, manager: BlockManager, group: int, blocks: PrefixBlocks) -> None:
        self.manager, self.group = manager, group
        pool = manager.pools[group]
        self.room = len(pool.free_blocks)
        first = max(blocks.start, _first_block(manager, group, len(blocks.hashes)))
        missing, new, idle = [0], [0], [0]
        for position, hash in enumerate(blocks.hashes):
            block = pool.block_by_hash.get(hash)
            missing.append(block is None and position < first)  # no chunk will bring it
            new.append(block is None and position >= first)
            idle.append(block is not None and not pool.ref_counts[block])
        sums = (list(itertools.accumulate(one)) for one in (missing, new, idle))
        self.missing, self.new, self.idle = sums

    def fits(self, count: int) -> bool:
        """Whether a prefix of `count` blocks can be complete, without a block of its own evicted."""
        first = _first_block(self.manager, self.group, count)
        if self.missing[count] > self.missing[first]:
            return False
        return self.new[count] + self.idle[count] - self.idle[first] <= self.room


def _import_group(
    engine: Engine, index: int, pool: BlockPool, blocks: PrefixBlocks, content: Tensor, reach: int
) -> None:
    """Write the new blocks of one group. References keep the prefix from evicting itself."""
    offset = blocks.end - len(content)  # the position of the first block in `content`
    hashes = blocks.hashes[_first_block(engine.block_manager, index, reach) : reach]
    held = {hash: pool.block_by_hash[hash] for hash in hashes if hash in pool.block_by_hash}
    for block in held.values():
        pool.add_reference(block)
    new: dict[bytes, int] = {}
    rows: dict[int, int] = {}  # of `content` by block
    try:
        for position in range(offset, min(blocks.end, reach)):
            hash = blocks.hashes[position]
            if hash not in held:
                new[hash] = pool.allocate()
                rows[new[hash]] = position - offset
        _write_blocks(_group_tensors(engine.kv_cache, index), rows, content)
        for hash, block in new.items():
            pool.cache_block(block, hash)
    finally:
        held |= new
        for hash in reversed(hashes):  # the last block is evicted first
            if hash in held:
                pool.release(held[hash])


def _write_blocks(tensors: Sequence[Tensor], rows: Mapping[int, int], content: Tensor) -> None:
    """Write rows of `content` to blocks; one copy to the device for all of them."""
    if not rows:
        return
    sizes = [tensor.shape[1] for tensor in tensors]
    parts = content.to(tensors[0].device).split(sizes, dim=1)
    for tensor, part in zip(tensors, parts, strict=True):
        for block, row in rows.items():
            tensor[block].copy_(part[row])
