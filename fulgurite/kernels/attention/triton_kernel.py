# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernel of paged attention (launched by `triton_attention.py`).

    s_j = scale * q . key[j]      out = sum_j exp(s_j - max) value[j] / sum_j exp(s_j - max)

A program takes a tile of rows and a range of keys. Rows are the (token, head) pairs of one sequence
that share a key head. With few programs (decode of a small batch) contexts are split (split-KV):
each program stores its maximum, sum and accumulator, and the last program of a tile merges them.
In deterministic mode (PART_KEYS) a context has parts at fixed positions. Each is attended to by itself,
and the parts are merged in order, in registers if one program has them all. So the bits of a row
don't depend on the number of programs.

Causal, window and chunk masks all make the visible keys of a row an interval, so a mask is two
numbers. Blocks of keys that every row sees completely are not masked.

Where the cache's block size is a multiple of BN, a block of BN keys is in one cache block and is
read like a matrix. With smaller cache blocks every key looks up its own block.

A key of H numbers is read as two tiles, the largest power of two in H and the rest, so that sizes
like 576, 96 and 80 waste little.
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    prefetch_l2,
    wait_for_dependencies,
)
from fulgurite.kernels.elementwise.triton_elementwise import load_norm_rope, store_to_cache, tanh

NEG_INF = tl.constexpr(-float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_tile(
    cache_ptr, at, column, is_key, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """Rows at offsets `at` of the cache, SIZE numbers padded to WIDTH columns."""
    if MASKED:
        mask = is_key[:, None] & (column < SIZE)[None, :]
        return tl.load(cache_ptr + at[:, None] + column[None, :], mask, 0.0)
    elif SIZE < WIDTH:
        mask = (column < SIZE)[None, :]
        return tl.load(cache_ptr + at[:, None] + column[None, :], mask, 0.0)
    else:
        return tl.load(cache_ptr + at[:, None] + column[None, :])


@triton.jit
def _attend_blocks(
    start, stop, last, q1, q2, m_i, l_i, acc, first_visible, position, key_cache_ptr,
    value_cache_ptr, block_row, scale, softcap, key_block_stride, key_slot_stride,
    value_block_stride, value_slot_stride,
    H: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, VALUES_IN_KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys start .. stop, in blocks of BN."""
    c1, c2, cv = tl.arange(0, H1), H1 + tl.arange(0, H2), tl.arange(0, BV)
    for j in range(start, stop, BN):
        key = j + tl.arange(0, BN)
        is_key = key < last
        if BLOCK_SIZE % BN == 0:  # all BN keys are in one cache block
            block = tl.load(block_row + j // BLOCK_SIZE).to(tl.int64)
            slot = j % BLOCK_SIZE + tl.arange(0, BN)
        else:
            block = tl.load(block_row + key // BLOCK_SIZE, is_key, 0).to(tl.int64)
            slot = key % BLOCK_SIZE
        key_offset = block * key_block_stride + slot * key_slot_stride
        value_offset = block * value_block_stride + slot * value_slot_stride
        k1 = _load_tile(key_cache_ptr, key_offset, c1, is_key, min(H, H1), H1, MASKED).to(COMPUTE)
        if VALUES_IN_KEYS and V == H1:
            values = k1
        else:
            values = _load_tile(value_cache_ptr, value_offset, cv, is_key, V, BV, MASKED).to(
                COMPUTE
            )
        qk = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if H > H1:
            k2 = _load_tile(key_cache_ptr, key_offset, c2, is_key, H, H1 + H2, MASKED).to(COMPUTE)
            qk = tl.dot(q2, tl.trans(k2), qk, input_precision=PRECISION)
        qk_scale = scale * LOG2E
        if SOFTCAP:
            qk = softcap * tanh(qk * (scale / softcap))
            qk_scale = LOG2E
        if MASKED:
            visible = (key[None, :] >= first_visible[:, None]) & (key[None, :] <= position[:, None])
            qk = tl.where(visible & is_key[None, :], qk, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
        m_base = tl.where(m_new == NEG_INF, 0.0, m_new) if MASKED else m_new
        p = tl.exp2(qk * qk_scale - m_base[:, None])
        alpha = tl.exp2(m_i - m_base)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(COMPUTE), values, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return m_i, l_i, acc


@triton.jit
def find_part_start(part, PART_KEYS: tl.constexpr):
    """The first key of a part: 16 parts of PART_KEYS keys, 16 of twice as many, and so on."""
    level = part // 16
    return PART_KEYS * ((16 << level) - 16 + ((part % 16) << level))


@triton.jit
def find_part(key, PART_KEYS: tl.constexpr):
    """The part that a key is in."""
    level = tl.log2((key // (16 * PART_KEYS) + 1).to(tl.float32) + 0.5).to(tl.int32)
    return level * 16 + (key - find_part_start(level * 16, PART_KEYS)) // (PART_KEYS << level)


@triton.jit
def merge_part(m_i, l_i, acc, part_max, part_sum, part_acc):
    """Maximum, sum and accumulator over two sets of keys. FMAs are explicit: all callers round alike."""
    m_new = tl.maximum(m_i, part_max)
    m_base = tl.where(m_new == NEG_INF, 0.0, m_new)
    alpha, beta = tl.exp2(m_i - m_base), tl.exp2(part_max - m_base)
    l_i = tl.fma(l_i, alpha, part_sum * beta)
    acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), part_acc * beta[:, None])
    return m_new, l_i, acc


@cached_launch
def attention_kernel(
    q_ptr, key_cache_ptr, value_cache_ptr, block_table_ptr, query_start_loc_ptr, seq_lens_ptr,
    sinks_ptr, out_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr, counter_ptr,
    scale, softcap, value_scale, window, chunk, tiles, splits, max_parts, tokens, sequences,
    q_token_stride, q_head_stride, table_row_stride, key_block_stride, key_slot_stride,
    key_head_stride, value_block_stride, value_slot_stride, value_head_stride,
    k_ptr, v_ptr, slot_mapping_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, pairs, eps, offset, cache_max,
    lse_ptr, shard_index, shard_count,
    HEADS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BLOCK_SIZE: tl.constexpr, VALUES_IN_KEYS: tl.constexpr,
    HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, ONE_LOOP: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr, PART_KEYS: tl.constexpr, MERGE_SPLITS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, SHARDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows tile * BM .. of one sequence and key head, over one split of its keys.

    With FUSED each sequence has one new token whose heads are as projected: they are normed and
    rotated here, and the program of the last split stores key and value before it reads them.
    With SHARDED the cache has the keys of a context-parallel rank (`_count_local_keys`), and
    log-sum-exps are stored.
    """
    if PDL:
        launch_dependents()
    sequence = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles  # later tiles have more keys: run them first
    key_head = tl.program_id(1)
    split = tl.program_id(2)
    if sequence >= sequences:
        if PDL:
            wait_for_dependencies()
        if split == 0:
            first_token = tl.load(query_start_loc_ptr + sequences)
            _zero_unused_tokens(out_ptr, first_token, tokens, key_head * GROUP, HEADS, GROUP, V, BV)
        return
    start = tl.load(query_start_loc_ptr + sequence)
    count = tl.load(query_start_loc_ptr + sequence + 1) - start
    length = tl.load(seq_lens_ptr + sequence)
    if tile * BM >= count * GROUP:
        if PDL:
            wait_for_dependencies()
        return
    row = tile * BM + tl.arange(0, BM)
    is_row = row < count * GROUP
    token = row // GROUP
    head = key_head * GROUP + row % GROUP
    position = length - count + token
    first_visible = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    chunk_start = position // tl.maximum(chunk, 1) * chunk
    first_visible = tl.where(chunk > 0, tl.maximum(first_visible, chunk_start), first_visible)
    if SHARDED:  # the numbers of the keys within the cache: the visible ones are an interval, too
        first_visible = _count_local_keys(first_visible, shard_index, shard_count, BLOCK_SIZE)
        position = _count_local_keys(position + 1, shard_index, shard_count, BLOCK_SIZE) - 1

    # the keys of the tile, and of this split
    first = tl.min(tl.where(is_row, first_visible, length), 0)
    last = tl.max(tl.where(is_row, position, -1), 0) + 1
    first = first // BN * BN
    num_splits = splits
    num_parts = splits  # partial results; without PART_KEYS a program has one
    stores_new = (first < last) & (last == length)  # with FUSED
    if PART_KEYS > 0:
        first_part = find_part(first, PART_KEYS)
        num_parts = tl.where(first < last, find_part(last - 1, PART_KEYS) + 1 - first_part, 0)
        num_splits = tl.maximum(tl.minimum(splits, num_parts), 1)
        if split >= num_splits:
            if PDL:
                wait_for_dependencies()
            return
        stores_new &= (num_parts - 1) % num_splits == split
    elif SPLIT:  # a short context uses fewer splits than were launched
        num_splits = tl.minimum(splits, tl.cdiv(last - first, MIN_SPLIT_KEYS))
        if SHARDED:  # a rank may have no key that these rows see
            num_splits = tl.maximum(num_splits, 1)
        if split >= num_splits:
            if PDL:
                wait_for_dependencies()
            return
        split_keys = tl.cdiv(tl.cdiv(last - first, num_splits), BN) * BN
        num_parts = num_splits
        first = first + split * split_keys
        last = tl.minimum(last, first + split_keys)
        stores_new = (first < last) & (last == length)

    c1, c2, cv = tl.arange(0, H1), H1 + tl.arange(0, H2), tl.arange(0, BV)
    block_row = block_table_ptr + sequence.to(tl.int64) * table_row_stride
    if PDL:
        LINES: tl.constexpr = (
            H1 * (key_cache_ptr.dtype.element_ty.primitive_bitwidth // 8) + 127
        ) // 128
        if BM == 16:  # decode: all keys and values but the new token's are already in the cache
            prefetched = first + tl.arange(0, MIN_SPLIT_KEYS)
            block = tl.load(block_row + prefetched // BLOCK_SIZE, prefetched < last, 0).to(tl.int64)
            prefetch_slot = prefetched % BLOCK_SIZE
            key_offset = block * key_block_stride + prefetch_slot * key_slot_stride
            prefetch_l2(key_cache_ptr + key_offset + key_head * key_head_stride, LINES)
            if not VALUES_IN_KEYS:
                value_offset = block * value_block_stride + prefetch_slot * value_slot_stride
                prefetch_l2(value_cache_ptr + value_offset + key_head * value_head_stride, LINES)
        wait_for_dependencies()
    q_row_ptrs = q_ptr + ((start + token).to(tl.int64) * q_token_stride + head * q_head_stride)
    if FUSED:
        new_token, one_row = start.to(tl.int64), tl.zeros([1], tl.int64)
        cos_ptr += new_token * pairs
        sin_ptr += new_token * pairs
        q1 = load_norm_rope(
            q_row_ptrs, is_row, query_norm_ptr, cos_ptr, sin_ptr, pairs, eps, offset, H, H1, NORM,
            ROPE, INTERLEAVED,
        )  # fmt: skip
        q1 = q1.to(q_ptr.dtype.element_ty).to(COMPUTE)
        q2 = tl.zeros([BM, H2], COMPUTE)
        if stores_new:
            slot = tl.load(slot_mapping_ptr + start)
            new_key = load_norm_rope(
                k_ptr + new_token * k_token_stride + key_head * k_head_stride + one_row,
                one_row == 0, key_norm_ptr, cos_ptr, sin_ptr, pairs, eps, offset, H, H1, NORM, ROPE,
                INTERLEAVED,
            )  # fmt: skip
            new_key = tl.reshape(new_key, [H1])
            value_row = v_ptr + new_token * v_token_stride + key_head * v_head_stride
            value = tl.load(value_row + cv, cv < V, 0.0).to(tl.float32)
            store_to_cache(
                new_key, key_cache_ptr, slot, key_head, c1, slot >= 0, 1.0, cache_max,
                key_block_stride, key_slot_stride, key_head_stride, H, BLOCK_SIZE,
            )  # fmt: skip
            store_to_cache(
                value, value_cache_ptr, slot, key_head, cv, slot >= 0, 1.0, cache_max,
                value_block_stride, value_slot_stride, value_head_stride, V, BLOCK_SIZE,
            )  # fmt: skip
            tl.debug_barrier()
    else:
        q_rows = q_row_ptrs[:, None]
        q1 = tl.load(q_rows + c1[None, :], is_row[:, None] & (c1 < H)[None, :], 0.0).to(COMPUTE)
        q2 = tl.load(q_rows + c2[None, :], is_row[:, None] & (c2 < H)[None, :], 0.0).to(COMPUTE)
    m_i = tl.full([BM], NEG_INF, tl.float32)
    l_i = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    key_cache_ptr += key_head * key_head_stride
    value_cache_ptr += key_head * value_head_stride

    out_row = (start + token).to(tl.int64) * HEADS + head
    partial_row = out_row * max_parts
    if PART_KEYS > 0:
        if HAS_SINKS and not SPLIT:
            m_i = tl.load(sinks_ptr + head, is_row, 0.0).to(tl.float32) * LOG2E
            l_i += 1.0
        for part in range(split, num_parts, num_splits):
            part_first = find_part_start(first_part + part, PART_KEYS)
            part_last = find_part_start(first_part + part + 1, PART_KEYS)
            part_max, part_sum, part_acc = _attend_blocks(
                tl.maximum(part_first, first), tl.minimum(part_last, last), last, q1, q2,
                tl.full([BM], NEG_INF, tl.float32), tl.zeros([BM], tl.float32),
                tl.zeros([BM, BV], tl.float32), first_visible, position, key_cache_ptr,
                value_cache_ptr, block_row, scale, softcap, key_block_stride, key_slot_stride,
                value_block_stride, value_slot_stride, H, H1, H2, V, BV, BLOCK_SIZE,
                VALUES_IN_KEYS, SOFTCAP, PRECISION, COMPUTE, BN, True,
            )  # fmt: skip
            if SPLIT:
                store_part(
                    partial_acc_ptr, partial_max_ptr, partial_sum_ptr, partial_row + part, is_row,
                    part_max, part_sum, part_acc, BV,
                )  # fmt: skip
            else:
                m_i, l_i, acc = merge_part(m_i, l_i, acc, part_max, part_sum, part_acc)
    else:
        # blocks of keys that every row sees completely need no mask
        unmasked_end = first
        if not ONE_LOOP:
            all_visible_end = tl.min(tl.where(is_row, position, last), 0) + 1
            visible_keys = tl.maximum(tl.minimum(all_visible_end, last) - first, 0)
            unmasked_end = first + visible_keys // BN * BN
            m_i, l_i, acc = _attend_blocks(
                first, unmasked_end, last, q1, q2, m_i, l_i, acc, first_visible, position,
                key_cache_ptr, value_cache_ptr, block_row, scale, softcap, key_block_stride,
                key_slot_stride, value_block_stride, value_slot_stride, H, H1, H2, V, BV,
                BLOCK_SIZE, VALUES_IN_KEYS, SOFTCAP, PRECISION, COMPUTE, BN, False,
            )  # fmt: skip
        m_i, l_i, acc = _attend_blocks(
            unmasked_end, last, last, q1, q2, m_i, l_i, acc, first_visible, position,
            key_cache_ptr, value_cache_ptr, block_row, scale, softcap, key_block_stride,
            key_slot_stride, value_block_stride, value_slot_stride, H, H1, H2, V, BV, BLOCK_SIZE,
            VALUES_IN_KEYS, SOFTCAP, PRECISION, COMPUTE, BN, True,
        )  # fmt: skip
        if SPLIT:
            store_part(
                partial_acc_ptr, partial_max_ptr, partial_sum_ptr, partial_row + split, is_row, m_i,
                l_i, acc, BV,
            )  # fmt: skip

    if SPLIT:
        tl.debug_barrier()
        counter = counter_ptr + tl.program_id(0) * tl.num_programs(1) + key_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
            tl.store(counter, 0)
            rows = tl.minimum(BM, count * GROUP - tile * BM)
            for merge_start in range(0, rows, MERGE_ROWS):
                merged_row = tile * BM + merge_start + tl.arange(0, MERGE_ROWS)
                merged_head = key_head * GROUP + merged_row % GROUP
                merged_out_row = (start + merged_row // GROUP).to(tl.int64) * HEADS + merged_head
                _merge_splits(
                    partial_acc_ptr, partial_max_ptr, partial_sum_ptr, sinks_ptr, out_ptr,
                    merged_out_row, merged_head, merged_row < count * GROUP, max_parts, num_parts,
                    value_scale, lse_ptr, V, BV, HAS_SINKS, SHARDED, MERGE_ROWS, MERGE_SPLITS,
                    PART_KEYS > 0,
                )  # fmt: skip
    else:
        if HAS_SINKS and PART_KEYS == 0:
            sink = tl.load(sinks_ptr + head, is_row, 0.0).to(tl.float32) * LOG2E
            m_new = tl.maximum(m_i, sink)
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.exp2(sink - m_new)
            acc *= alpha[:, None]
            m_i = m_new
        _store_rows(
            m_i, l_i, acc, out_ptr, lse_ptr, out_row, is_row, value_scale, V, BV, SHARDED,
        )  # fmt: skip


@triton.jit
def _store_rows(
    m_i, l_i, acc, out_ptr, lse_ptr, out_row, is_row, value_scale,
    V: tl.constexpr, BV: tl.constexpr, SHARDED: tl.constexpr,
):  # fmt: skip
    """Divide by the sums, and store the rows."""
    column = tl.arange(0, BV)
    if SHARDED:
        tl.store(lse_ptr + out_row, (m_i + tl.log2(l_i)) / LOG2E, is_row)
        l_i = tl.where(m_i == NEG_INF, 1.0, l_i)
    out = acc * value_scale / tl.where(is_row, l_i, 1.0)[:, None]
    out_ptrs = out_ptr + out_row[:, None] * V + column[None, :]
    mask = is_row[:, None] & (column < V)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _merge_splits(
    partial_acc_ptr, partial_max_ptr, partial_sum_ptr, sinks_ptr, out_ptr, out_row, head, is_row,
    max_parts, num_parts, value_scale, lse_ptr,
    V: tl.constexpr, BV: tl.constexpr, HAS_SINKS: tl.constexpr, SHARDED: tl.constexpr,
    ROWS: tl.constexpr, MERGE_SPLITS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of ROWS rows, rescaled to the running maximum.

    MERGE_SPLITS at a time; with ORDERED one after the other, four of them in flight.
    """
    column = tl.arange(0, BV)
    m_i = tl.full([ROWS], NEG_INF, tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        m_i = tl.load(sinks_ptr + head, is_row, 0.0).to(tl.float32) * LOG2E
        l_i += 1.0
    acc = tl.zeros([ROWS, BV], tl.float32)
    from_row = out_row * max_parts
    if ORDERED:
        m_i, l_i, acc = merge_parts(
            m_i, l_i, acc, partial_acc_ptr, partial_max_ptr, partial_sum_ptr, from_row, is_row,
            num_parts, BV,
        )  # fmt: skip
    else:
        for start in range(0, num_parts, MERGE_SPLITS):
            split = start + tl.arange(0, MERGE_SPLITS)
            at = from_row[:, None] + split[None, :]
            is_partial = is_row[:, None] & (split < num_parts)[None, :]
            partial_max = tl.load(partial_max_ptr + at, is_partial, NEG_INF, cache_modifier=".cg")
            partial_sum = tl.load(partial_sum_ptr + at, is_partial, 0.0, cache_modifier=".cg")
            partial_ptrs = partial_acc_ptr + at[:, :, None] * BV + column[None, None, :]
            partial_acc = tl.load(partial_ptrs, is_partial[:, :, None], 0.0, cache_modifier=".cg")
            m_new = tl.maximum(m_i, tl.max(partial_max, 1))
            m_base = tl.where(m_new == NEG_INF, 0.0, m_new)
            alpha = tl.exp2(m_i - m_base)
            rescale = tl.exp2(partial_max - m_base[:, None])
            l_i = l_i * alpha + tl.sum(partial_sum * rescale, 1)
            acc = acc * alpha[:, None] + tl.sum(partial_acc * rescale[:, :, None], 1)
            m_i = m_new
    _store_rows(m_i, l_i, acc, out_ptr, lse_ptr, out_row, is_row, value_scale, V, BV, SHARDED)


@triton.jit
def merge_parts(
    m_i, l_i, acc, acc_ptr, max_ptr, sum_ptr, from_row, is_row, num_parts, BV: tl.constexpr
):  # fmt: skip
    """Merge the parts of a context that are stored from row `from_row` on, in order, four in flight."""
    for part in range(0, num_parts, 4):
        at = from_row + part
        end = from_row + num_parts
        m_0, l_0, acc_0 = _load_part(acc_ptr, max_ptr, sum_ptr, at, is_row & (at < end), BV)
        m_1, l_1, acc_1 = _load_part(acc_ptr, max_ptr, sum_ptr, at + 1, is_row & (at + 1 < end), BV)
        m_2, l_2, acc_2 = _load_part(acc_ptr, max_ptr, sum_ptr, at + 2, is_row & (at + 2 < end), BV)
        m_3, l_3, acc_3 = _load_part(acc_ptr, max_ptr, sum_ptr, at + 3, is_row & (at + 3 < end), BV)
        m_i, l_i, acc = merge_part(m_i, l_i, acc, m_0, l_0, acc_0)
        m_i, l_i, acc = merge_part(m_i, l_i, acc, m_1, l_1, acc_1)
        m_i, l_i, acc = merge_part(m_i, l_i, acc, m_2, l_2, acc_2)
        m_i, l_i, acc = merge_part(m_i, l_i, acc, m_3, l_3, acc_3)
    return m_i, l_i, acc


@triton.jit
def store_part(
    acc_ptr, max_ptr, sum_ptr, at, is_row, part_max, part_sum, part_acc, BV: tl.constexpr
):  # fmt: skip
    """Store the partial results of some rows, each at row `at`."""
    tl.store(max_ptr + at, part_max, is_row)
    tl.store(sum_ptr + at, part_sum, is_row)
    acc_ptrs = acc_ptr + at[:, None] * BV + tl.arange(0, BV)[None, :]
    tl.store(acc_ptrs, part_acc, is_row[:, None])


@triton.jit
def _load_part(acc_ptr, max_ptr, sum_ptr, at, is_part, BV: tl.constexpr):
    """A stored partial result; that of no keys where there is none."""
    part_max = tl.load(max_ptr + at, is_part, NEG_INF, cache_modifier=".cg")
    part_sum = tl.load(sum_ptr + at, is_part, 0.0, cache_modifier=".cg")
    acc_ptrs = acc_ptr + at[:, None] * BV + tl.arange(0, BV)[None, :]
    return part_max, part_sum, tl.load(acc_ptrs, is_part[:, None], 0.0, cache_modifier=".cg")


@triton.jit
def _count_local_keys(count, shard_index, shard_count, BLOCK_SIZE: tl.constexpr):
    """How many of the first `count` keys of a sequence a context-parallel rank has."""
    stripe = shard_count * BLOCK_SIZE
    rest = tl.maximum(count % stripe - shard_index * BLOCK_SIZE, 0)
    return count // stripe * BLOCK_SIZE + tl.minimum(rest, BLOCK_SIZE)


@triton.jit
def _zero_unused_tokens(
    out_ptr, first, tokens, head, HEADS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Zero the output of tokens of no sequence, for one key head."""
    column = tl.arange(0, BV)
    out_ptr += (first.to(tl.int64) * HEADS + head) * V
    for row in range(0, (tokens - first) * GROUP):
        out_row = (row // GROUP) * HEADS + row % GROUP
        zeros = tl.zeros([BV], out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_row * V + column, zeros, column < V)
