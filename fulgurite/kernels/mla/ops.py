"""Latent attention over paged memory: DeepSeek's, from the raw projections of new tokens to their heads.

    write_latent       norms a new token's latent, turns its rotary key, and keeps both in a slot
    latent_attention   turns the queries and attends to what is kept

A token leaves L = C + R numbers for all heads: its latent c, from which every head's key and value
follow (key = (U_k c, r), value = U_v c), and one rotary key r. There are two ways to attend to them:

    absorbed   (U_k^T q, q_r) . (c, r), and U_v on what was gathered: no key is expanded. A pair of a
               query and a key costs 2C + R products a head, a query C (D + V) more.
    expanded   keys and values of each head are made first, C (D + V) products a key and head; a pair
               then costs D + R + V, a third of it.

So a token that is decoded, or a few, are absorbed; long prompts are expanded, and so is a cached prefix they
come after. `expands` decides for each sequence. Pages are float32, bfloat16 or float16, [P, B, C + R]; or uint8,
[P, B, bytes], rows of which hold an FP8 latent with a scale of its own, and its rotary key in bfloat16
(`mla_reference.packed_row`; 656 bytes for C = 512, R = 64, against 1152 in 16 bits).

The reference is `mla_reference`; the kernels are in C++ (`cpu/mla`) and Triton (`triton/mla`). While a graph
is captured these are the operators `fulgurite::write_latent` and `fulgurite::latent_attention`.

Shapes: T tokens; S sequences; P pages of B slots of W numbers or bytes; M pages a row of the table;
N heads; D size of a query without its rotary part; R the rotary part; H = D + R; I = R / 2 pairs;
C latent rank; V size of a value; U = D + V; L = C + R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.attention.paged import as_read, check_slots, check_tables
from fulgurite.kernels.mla import reference

# device type -> function of the operator's arguments; it may return NotImplemented
ATTENTION = {
    "cpu": "fulgurite.kernels.mla.cpu:latent_attention",
    "cuda": "fulgurite.kernels.mla.triton_mla:latent_attention",
}
WRITES = {
    "cpu": "fulgurite.kernels.mla.cpu:write_latent",
    "cuda": "fulgurite.kernels.mla.triton_store_kv:write_latent",
}

PAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
EXPANDED_KEYS = 4096  # that a GPU expands at once; a longer sequence goes in pieces
FEW = 32  # new tokens that are absorbed whatever the products: less than a tile of an expanded head


def page_shape(rank: int, rope: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """How wide a slot is and in which dtype, to keep latents in `dtype`; any float8 is packed rows."""
    if dtype.itemsize > 1:
        return rank + rope, dtype
    return reference.packed_row(rank, rope).size, torch.uint8


def expands(queries: int, keys: int, rank: int, plain: int, rope: int, value: int) -> bool:
    """Whether expanding its keys is less work for a sequence of `keys`, the last `queries` of them new."""
    pairs = queries * (2 * keys - queries + 1) // 2
    up = rank * (plain + value)
    absorbed = queries * up + pairs * (2 * rank + rope)
    return queries >= FEW and keys * up + pairs * (plain + rope + value) < absorbed


def largest_step(q_TNH: Tensor, up_NUC: Tensor, value: int) -> Tensor:
    """The result's shape, beside as much memory as a GPU takes to expand keys: for planning it."""
    up_NUC.new_empty((EXPANDED_KEYS, *up_NUC.shape[:2]))
    return q_TNH.new_empty((*q_TNH.shape[:2], value))


def write_latent(
    latent_TL: Tensor,
    norm_C: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    pages_PBW: Tensor,
    slots_T: Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> None:
    """Keep what new tokens leave to be attended to, in place.

    latent_TL   the down projection as it is: C numbers that are normed here, R that are turned here
    norm_C      the weight of the latent's RMS norm
    slots_T     int64; token t goes to page slots[t] // B, slot slots[t] % B; negative: nowhere
    """
    rank, rope = norm_C.shape[0], 2 * cos_TI.shape[-1]
    if latent_TL.dim() != 2 or latent_TL.shape[1] != rank + rope:
        raise ArgumentError(
            f"{list(latent_TL.shape)} for a latent of {rank} and a rotary key of {rope} numbers",
            next=f"new latents are [T, {rank + rope}]",
        )
    _check_pages(pages_PBW, rank, rope)
    _check_rotation(cos_TI, sin_TI, latent_TL.shape[0])
    check_slots(slots_T, latent_TL.shape[0])
    call = _write_latent if torch.compiler.is_compiling() else _dispatch_write
    call(latent_TL, norm_C, cos_TI, sin_TI, pages_PBW, slots_T, eps, interleaved)


def latent_attention(
    q_TNH: Tensor,
    up_NUC: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    pages_PBW: Tensor,
    tables_SM: Tensor,
    query_starts: Tensor,
    lengths_S: Tensor,
    *,
    scale: float,
    interleaved: bool,
    max_query: int | None = None,
    max_length: int | None = None,
    query_counts: list[int] | None = None,
    key_counts: list[int] | None = None,
) -> Tensor:
    """What each query token attends to, [T, N, V].

    q_TNH         not turned yet: D numbers as they are, then R that the rotation is for
    up_NUC        what expands a latent for each head: D rows for its key, V for its value
    tables_SM     int32; token j of sequence s is kept in page tables[s, j // B], slot j % B
    query_starts  int32 [S + 1]; the tokens of sequence s are query_starts[s] up to query_starts[s + 1]
    lengths_S     int32; how many tokens sequence s has, the new ones among them
    max_query     the most tokens any sequence has in this call, if known: T otherwise
    max_length    the longest of `lengths_S`, if known: M * B otherwise
    query_counts  the tokens of each sequence, and `key_counts` its length, where the host knows them: a
                  GPU expands only then

    Tokens at and past query_starts[S] belong to nobody and get zeros.
    """
    _check(q_TNH, up_NUC, cos_TI, sin_TI, pages_PBW, tables_SM, query_starts, lengths_S)
    call = _latent_attention if torch.compiler.is_compiling() else _dispatch
    return call(
        q_TNH,
        up_NUC,
        cos_TI,
        sin_TI,
        pages_PBW,
        tables_SM,
        query_starts,
        lengths_S,
        scale,
        interleaved,
        max_query if max_query is not None else q_TNH.shape[0],
        max_length if max_length is not None else tables_SM.shape[1] * pages_PBW.shape[1],
        query_counts,
        key_counts,
    )


def _check(
    q: Tensor,
    up: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
) -> None:
    rope = 2 * cos.shape[-1]
    if q.dim() != 3 or up.dim() != 3 or q.shape[1] != up.shape[0]:
        raise ArgumentError(
            f"queries {list(q.shape)} and an up projection {list(up.shape)} don't fit together",
            next="queries are [T, N, D + R], the up projection [N, D + V, C]",
        )
    if q.shape[2] < rope or up.shape[1] < q.shape[2] - rope:
        raise ArgumentError(
            f"queries of {q.shape[2]} numbers, {rope} of them turned, and {up.shape[1]} rows of the up "
            "projection for a head's key and value don't fit together"
        )
    _check_rotation(cos, sin, q.shape[0])
    _check_pages(pages, up.shape[2], rope)
    check_tables(tables, starts, lengths)


def _check_rotation(cos: Tensor, sin: Tensor, tokens: int) -> None:
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] != tokens:
        raise ArgumentError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} for {tokens} tokens",
            next="both are [T, R / 2]",
        )


def _check_pages(pages: Tensor, rank: int, rope: int) -> None:
    if pages.dtype not in PAGE_DTYPES:
        raise ArgumentError(f"pages of {pages.dtype}", next=f"use one of {PAGE_DTYPES}")
    width = rank + rope
    if pages.dtype == torch.uint8:
        width = reference.packed_row(rank, rope).size
    if pages.dim() != 3 or pages.shape[2] != width:
        raise ArgumentError(
            f"pages {list(pages.shape)} for a latent of {rank} and a rotary key of {rope} numbers",
            next=f"pages of {pages.dtype} are [P, B, {width}]",
        )


def _dispatch(
    q_TNH: Tensor,
    up_NUC: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    pages_PBW: Tensor,
    tables_SM: Tensor,
    query_starts: Tensor,
    lengths_S: Tensor,
    scale: float,
    interleaved: bool,
    max_query: int,
    max_length: int,
    query_counts: list[int] | None,
    key_counts: list[int] | None,
) -> Tensor:
    """The implementation for this device and these dtypes."""
    arguments = (
        q_TNH,
        up_NUC,
        cos_TI,
        sin_TI,
        pages_PBW,
        *as_read(tables_SM, query_starts, lengths_S),
        scale,
        interleaved,
        max_query,
        max_length,
        query_counts,
        key_counts,
    )
    out: Tensor = registry.run(ATTENTION, q_TNH.device, reference.latent_attention, *arguments)
    return out


def _dispatch_write(
    latent_TL: Tensor,
    norm_C: Tensor,
    cos_TI: Tensor,
    sin_TI: Tensor,
    pages_PBW: Tensor,
    slots_T: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    arguments = (latent_TL, norm_C, cos_TI, sin_TI, pages_PBW, slots_T, eps, interleaved)
    registry.run(WRITES, latent_TL.device, reference.write_latent, *arguments)


_latent_attention = torch.library.custom_op(
    "fulgurite::latent_attention", _dispatch, mutates_args=()
)
_write_latent = torch.library.custom_op(
    "fulgurite::write_latent", _dispatch_write, mutates_args=("pages_PBW",)
)


@_latent_attention.register_fake
def _(q_TNH, up_NUC, cos_TI, *rest):  # type: ignore[no-untyped-def]
    value = up_NUC.shape[1] - (q_TNH.shape[2] - 2 * cos_TI.shape[-1])
    return q_TNH.new_empty((q_TNH.shape[0], q_TNH.shape[1], value))


@_write_latent.register_fake
def _(latent_TL, norm_C, cos_TI, sin_TI, pages_PBW, slots_T, eps, interleaved):  # type: ignore[no-untyped-def]
    return None
