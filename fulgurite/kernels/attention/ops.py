"""Attention over a paged cache: queries of many sequences end to end in, what they attend to out.

    out[t, n] = sum_j p_j value[j],   p = softmax over the seen keys j, and the sink, of
    softcap * tanh(scale * q[t, n] . key[j] / softcap)

Keys and values live in pages; a row of `tables` names the pages of one sequence. The last query of
sequence s stands at position lengths[s] - 1, the ones before it just before; a query at position i
sees the keys at j <= i, with a window those with i - j < window, with chunks those of its own chunk.
So prefill, decode, chunked prefill and any mixture are one call. `store_pages` writes new keys and
values into their slots before.

Three implementations, one definition: plain torch (`attention_reference`), C++ (`cpu/attention`) and
Triton (`triton/attention`). `paged_attention` picks by device; called while a graph is captured it is
the operator `fulgurite::paged_attention`.

Shapes: T query tokens; S sequences; P pages of B slots; M pages a row of the table; N query heads;
K key heads; H size of a key; V size of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.attention import reference
from fulgurite.kernels.attention.paged import as_read, check_slots, check_tables
from fulgurite.kernels.elementwise.ops import Heads, Pages

# device type -> function of the operator's arguments; it may return NotImplemented
IMPLEMENTATIONS = {
    "cpu": "fulgurite.kernels.attention.cpu:paged_attention",
    "cuda": "fulgurite.kernels.attention.triton_attention:paged_attention",
}
# the same for one new token a sequence, with heads as the linears left them
FRESH = {"cuda": "fulgurite.kernels.attention.triton_attention:fresh_attention"}
STORES = {
    "cpu": "fulgurite.kernels.attention.cpu:store_pages",
    "cuda": "fulgurite.kernels.attention.triton_store_kv:store_pages",
}

PAGE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def paged_attention(
    q_TNH: Tensor,
    keys_PBKH: Tensor,
    values_PBKV: Tensor | None,
    tables_SM: Tensor,
    query_starts: Tensor,
    lengths_S: Tensor,
    *,
    scale: float,
    value_dim: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    max_query: int | None = None,
    max_length: int | None = None,
) -> Tensor:
    """What each query token attends to, [T, N, V].

    values_PBKV   None where a value is the first `value_dim` numbers of its key (latent attention)
    tables_SM     int32; the key at position j of sequence s is in page tables[s, j // B], slot j % B
    query_starts  int32 [S + 1]; the tokens of sequence s are query_starts[s] up to query_starts[s + 1]
    lengths_S     int32; how many keys sequence s has, the new ones among them
    key_scale     what stored keys are multiplied by (float8 pages)
    max_query     the most tokens any sequence has in this call, if known: T otherwise
    max_length    the longest of `lengths_S`, if known: M * B otherwise

    Tokens at and past query_starts[S] belong to nobody and get zeros.
    """
    if value_dim is None:
        value_dim = keys_PBKH.shape[-1] if values_PBKV is None else values_PBKV.shape[-1]
    _check(q_TNH, keys_PBKH, values_PBKV, tables_SM, query_starts, lengths_S, value_dim, sinks_N)
    for name, value in (("window", window), ("chunk", chunk), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise ArgumentError(f"{name}={value} must be more than 0", next="or None, for none")
    call = _paged_attention if torch.compiler.is_compiling() else _dispatch
    return call(
        q_TNH,
        keys_PBKH,
        values_PBKV,
        tables_SM,
        query_starts,
        lengths_S,
        scale,
        value_dim,
        window,
        chunk,
        softcap,
        sinks_N,
        key_scale,
        value_scale,
        max_query if max_query is not None else q_TNH.shape[0],
        max_length if max_length is not None else tables_SM.shape[1] * keys_PBKH.shape[1],
    )


def fresh_attention(
    heads: Heads,
    pages: Pages,
    tables_SM: Tensor,
    query_starts: Tensor,
    lengths_S: Tensor,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks_N: Tensor | None,
    max_query: int,
    max_length: int,
) -> Tensor | None:
    """`paged_attention` of heads that are still to be normed and turned, and keys to be stored.

    One kernel where a device has it and every sequence has one new token; None elsewhere.
    """
    function = registry.find(FRESH, heads.q_XNH.device)
    if function is None or max_query != 1 or not registry.is_plain_call(*heads[:3]):
        return None
    value_dim, places = heads.v_XKV.shape[-1], (tables_SM, query_starts, lengths_S)
    _check(heads.q_XNH, pages.keys_PBKH, pages.values_PBKV, *places, value_dim, sinks_N)
    rules = (scale, value_dim, window, chunk, softcap, sinks_N, 1.0, 1.0, max_query, max_length)
    out = function(heads, pages, *places, *rules)
    return None if out is NotImplemented else out


def store_pages(
    k_TKH: Tensor,
    v_TKV: Tensor | None,
    keys_PBKH: Tensor,
    values_PBKV: Tensor | None,
    slots_T: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write new keys and values into pages, in place.

    slots_T   int64; token t goes to page slots[t] // B, slot slots[t] % B; negative: nowhere
    k_TKH     is divided by `key_scale` and rounded to the pages' dtype; float8 saturates
    """
    for new, pages in ((k_TKH, keys_PBKH), (v_TKV, values_PBKV)):
        if (new is None) != (pages is None):
            raise ArgumentError("new values without pages for them, or the other way round")
        if new is not None and pages is not None and new.shape[1:] != pages.shape[2:]:
            raise ArgumentError(
                f"new keys or values are [T, {', '.join(map(str, new.shape[1:]))}], "
                f"the pages hold {list(pages.shape[2:])} a slot"
            )
    check_slots(slots_T, k_TKH.shape[0])
    if v_TKV is not None and v_TKV.shape[0] != k_TKH.shape[0]:
        raise ArgumentError(f"{k_TKH.shape[0]} new keys and {v_TKV.shape[0]} new values")
    call = _store_pages if torch.compiler.is_compiling() else _dispatch_store
    call(k_TKH, v_TKV, keys_PBKH, values_PBKV, slots_T, key_scale, value_scale)


def _check(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    value_dim: int,
    sinks: Tensor | None,
) -> None:
    if q.dim() != 3 or keys.dim() != 4 or q.shape[2] != keys.shape[3]:
        raise ArgumentError(
            f"queries {list(q.shape)} and pages of keys {list(keys.shape)} don't fit together",
            next="queries are [T, N, H], pages of keys [P, B, K, H]",
        )
    if keys.shape[2] == 0 or q.shape[1] % keys.shape[2]:
        raise ArgumentError(f"{q.shape[1]} query heads can't share {keys.shape[2]} key heads")
    if values is not None and (values.shape[:3] != keys.shape[:3] or values.shape[3] != value_dim):
        raise ArgumentError(
            f"pages of values {list(values.shape)} don't fit those of keys {list(keys.shape)}"
        )
    if value_dim > keys.shape[3] and values is None:
        raise ArgumentError(f"a key of {keys.shape[3]} numbers has no value of {value_dim} in it")
    if keys.dtype not in PAGE_DTYPES and keys.dtype != q.dtype:
        raise ArgumentError(f"pages of {keys.dtype}", next=f"use one of {PAGE_DTYPES}")
    check_tables(tables, starts, lengths)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ArgumentError(f"{list(sinks.shape)} sinks for {q.shape[1]} query heads")


def _dispatch(
    q_TNH: Tensor,
    keys_PBKH: Tensor,
    values_PBKV: Tensor | None,
    tables_SM: Tensor,
    query_starts: Tensor,
    lengths_S: Tensor,
    scale: float,
    value_dim: int,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks_N: Tensor | None,
    key_scale: float,
    value_scale: float,
    max_query: int,
    max_length: int,
) -> Tensor:
    """The implementation for this device and these dtypes."""
    arguments = (
        q_TNH,
        keys_PBKH,
        values_PBKV,
        *as_read(tables_SM, query_starts, lengths_S),
        scale,
        value_dim,
        window,
        chunk,
        softcap,
        None if sinks_N is None else sinks_N.contiguous(),
        key_scale,
        value_scale,
        max_query,
        max_length,
    )
    out: Tensor = registry.run(IMPLEMENTATIONS, q_TNH.device, reference.paged_attention, *arguments)
    return out


def _dispatch_store(
    k_TKH: Tensor,
    v_TKV: Tensor | None,
    keys_PBKH: Tensor,
    values_PBKV: Tensor | None,
    slots_T: Tensor,
    key_scale: float,
    value_scale: float,
) -> None:
    arguments = (k_TKH, v_TKV, keys_PBKH, values_PBKV, slots_T, key_scale, value_scale)
    registry.run(STORES, k_TKH.device, reference.store_pages, *arguments)


_paged_attention = torch.library.custom_op("fulgurite::paged_attention", _dispatch, mutates_args=())
_store_pages = torch.library.custom_op(
    "fulgurite::store_pages", _dispatch_store, mutates_args=("keys_PBKH", "values_PBKV")
)


@_paged_attention.register_fake
def _(q_TNH, keys_PBKH, values_PBKV, tables, starts, lengths, scale, value_dim, *rest):  # type: ignore[no-untyped-def]
    return q_TNH.new_empty((q_TNH.shape[0], q_TNH.shape[1], value_dim))


@_store_pages.register_fake
def _(k_TKH, v_TKV, keys_PBKH, values_PBKV, slots_T, key_scale, value_scale):  # type: ignore[no-untyped-def]
    return None
