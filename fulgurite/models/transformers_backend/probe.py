"""The attention of transformers' modules: modules on the meta device in, `AttentionSpec`s out.

A forward runs on the meta device, which computes nothing. Its mask function and its attention
function record what transformers passes them: heads and sizes, scale, softcap, and which keys a
query sees. A layer that passes anything else can't be expressed as an `AttentionSpec`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fulgurite.models.attention_spec import AttentionSpec, build_attention_mask

PROBE = "fulgurite_probe"  # the name of the recording functions in transformers' interfaces
PROBE_TOKENS = 3
MAX_PROBED_POSITIONS = 1 << 17
# Options of an attention call that don't change its result in inference.
IGNORED_OPTIONS = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "dropout",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "scaling",
    "sliding_window",  # the mask has it as well, and says to which layers it applies
    "softcap",
    "s_aux",
    "token_type_ids",
    "use_cache",
}


class UnsupportedAttention(Exception):
    """An attention layer is not causal attention with a window, a softcap and sinks."""


class Reach(NamedTuple):
    """How far back a mask lets a query see."""

    sliding_window: int | None = None
    chunk_size: int | None = None


class AttentionProbe:
    """Records the attention calls of one forward."""

    def __init__(self, max_positions: int) -> None:
        self.max_positions = min(max_positions, MAX_PROBED_POSITIONS)
        self.masks: dict[int, tuple[Tensor, Reach]] = {}  # by id of the mask that was returned
        self.modules: list[nn.Module] = []
        self.specs: list[AttentionSpec] = []

    def make_mask(self, *args: Any, mask_function: Any = None, **options: Any) -> Tensor:
        """transformers' mask interface: a tensor that stands for this mask."""
        if mask_function is None:
            raise UnsupportedAttention("an attention mask is made without a mask function")
        reach = read_reach(mask_function, self.max_positions)
        mask = torch.empty(1, 1, PROBE_TOKENS, PROBE_TOKENS, dtype=torch.bool, device="meta")
        self.masks[id(mask)] = mask, reach
        return mask

    def attend(
        self,
        module: nn.Module,
        query_BNTH: Tensor,
        key_BKTH: Tensor,
        value_BKTV: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention interface: record the call, return a tensor of the right shape."""
        batch, heads, tokens, key_dim = query_BNTH.shape
        if key_BKTH.shape[2] != tokens:
            raise UnsupportedAttention(
                f"{tokens} queries attend to {key_BKTH.shape[2]} keys: cross-attention or added keys"
            )
        if module in self.modules:
            raise UnsupportedAttention("layers share one attention module")
        if not getattr(module, "is_causal", True):  # its mask is causal with some kernels only
            raise UnsupportedAttention("a layer says that its attention is not causal (is_causal)")
        for name, value in options.items():
            if name not in IGNORED_OPTIONS and value is not None and value is not False:
                raise UnsupportedAttention(f"attention takes {name}, which changes its result")
        reach = self._find_reach(attention_mask)
        self.modules.append(module)
        self.specs.append(
            AttentionSpec(
                layer_index=len(self.specs),
                num_heads=heads,
                num_kv_heads=key_BKTH.shape[1],
                key_dim=key_dim,
                value_dim=value_BKTV.shape[-1],
                scale=key_dim**-0.5 if scaling is None else float(scaling),
                sliding_window=reach.sliding_window,
                chunk_size=reach.chunk_size,
                softcap=options.get("softcap"),
            )
        )
        return query_BNTH.new_empty((batch, tokens, heads, value_BKTV.shape[-1])), None

    def _find_reach(self, mask: Tensor | None) -> Reach:
        if mask is None:
            raise UnsupportedAttention("a layer attends without a mask: it is not causal")
        if id(mask) not in self.masks:
            raise UnsupportedAttention(
                "the model changes its attention mask (a bias such as ALiBi)"
            )
        return self.masks[id(mask)][1]


def read_reach(mask_function: Callable[..., Tensor], max_positions: int) -> Reach:
    """The window or chunk of a mask function `visible(batch, head, query, key)`.

    The queries that see key 0 give its size. The mask is then compared with that of the spec for
    queries on both sides of it and at the end.
    """
    all_positions = torch.arange(max_positions, device="cpu")
    zero = torch.tensor(0, device="cpu")
    try:
        sees_first = _evaluate(mask_function, all_positions, zero)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedAttention(f"its attention mask can't be evaluated: {error}") from error
    size = int(sees_first.sum())
    candidates = [Reach(), Reach(sliding_window=size), Reach(chunk_size=size)]
    queries = sorted({q % max_positions for q in (0, 1, size - 1, size, size + 1, 2 * size, -1)})
    query = torch.tensor(queries, device="cpu")
    visible = _evaluate(mask_function, query[:, None], all_positions[None, :])
    for reach in candidates if size < max_positions else candidates[:1]:
        spec = AttentionSpec(0, 1, 1, 1, 1, 1.0, *reach)
        if torch.equal(visible, build_attention_mask(spec, query, all_positions)):
            return reach
    raise UnsupportedAttention("its attention mask is neither causal, a sliding window nor chunks")


def _evaluate(mask_function: Callable[..., Tensor], query: Tensor, key: Tensor) -> Tensor:
    zero = torch.tensor(0, device="cpu")
    visible = mask_function(zero, zero, query, key)
    shape = torch.broadcast_shapes(query.shape, key.shape)
    return visible.to(torch.bool).expand(shape)


class ProbeFunctions:
    """The functions that are registered with transformers: they go to the probe in use."""

    def __init__(self) -> None:
        self.probe: AttentionProbe | None = None

    def make_mask(self, *args: Any, **options: Any) -> Tensor:
        assert self.probe is not None, f"{PROBE} is only used by a probe"
        return self.probe.make_mask(*args, **options)

    def attend(self, *args: Any, **options: Any) -> tuple[Tensor, None]:
        assert self.probe is not None, f"{PROBE} is only used by a probe"
        return self.probe.attend(*args, **options)

    @contextmanager
    def use(self, probe: AttentionProbe) -> Iterator[None]:
        assert self.probe is None, "probes don't nest"
        self.probe = probe
        try:
            yield
        finally:
            self.probe = None


PROBE_FUNCTIONS = ProbeFunctions()


def run_experts_on_meta(
    experts: Any, hidden_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
) -> Tensor:
    """Experts on the meta device: the tensors of a grouped GEMM, without sizes that depend on data."""
    rows, width = top_k_index_TK.numel(), hidden_TD.shape[-1]
    sorted_RD = hidden_TD.new_empty(rows, width)
    up = experts.gate_up_proj if getattr(experts, "has_gate", True) else experts.up_proj
    intermediate = sorted_RD.new_empty(rows, max(up.shape[1:]))
    activated = intermediate.new_empty(rows, max(up.shape[1:]))
    del intermediate
    out_RD = activated.new_empty(rows, width)
    del activated
    return out_RD.view(*top_k_index_TK.shape, width).sum(dim=1)


def probe_attention(decoder: Any, num_layers: int, max_positions: int) -> AttentionProbe:
    """Run the decoder on the meta device and record its attention.

    Its attention implementation must be `PROBE`. UnsupportedAttention if it has layers that an
    `AttentionSpec` can't express.
    """
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise UnsupportedAttention("its forward takes no position_ids")
    probe = AttentionProbe(max_positions)
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), PROBE_FUNCTIONS.use(probe):
            # Without a mask transformers looks for packed sequences, in the values of positions.
            decoder(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except UnsupportedAttention:
        raise
    except Exception as error:  # whatever foreign code raises is a reason not to run it
        raise UnsupportedAttention(
            f"its forward fails on the meta device: {type(error).__name__}: {error}"
        ) from error
    if len(probe.specs) != num_layers:
        raise UnsupportedAttention(
            f"{num_layers - len(probe.specs)} of {num_layers} layers don't use transformers' "
            "attention interface (another kind of attention, or a recurrent state)"
        )
    return probe
