"""The check of a loaded model: our attention against transformers' eager attention.

Two random prompts run in one ragged batch, in two chunks each, with a plain cache of their keys and
the masks of their `AttentionSpec`s. Each prompt also runs alone through transformers with `eager`
attention. What neither config.json nor the probe shows (positions that are not honoured, a bias
inside a layer, a recurrent state) makes their logits differ. Such a model is refused, not run.

Shapes: T tokens of a chunk; S keys so far; O vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.models.attention_spec import AttentionSpec, build_attention_mask
from fulgurite.models.kv_cache import UnpagedKVCache
from fulgurite.models.mla import MLAInputs
from fulgurite.models.transformers_backend.attention import IMPLEMENTATION
from fulgurite.models.transformers_backend.model import TransformersModel
from fulgurite.models.uncached_attention import masked_attention

PROMPT_LENGTHS = (23, 14)
FIRST_CHUNKS = (9, 5)
SEED = 20
# The largest relative difference of a row of logits, as the median over rows: rounding differs
# between two implementations of attention, and may send a token to another expert.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 0.1


@torch.inference_mode()
def check_model(model: TransformersModel) -> str | None:
    """None if the logits of both agree; otherwise how far they are apart."""
    generator = torch.Generator().manual_seed(SEED)
    prompts = [
        torch.randint(0, model.config.vocab_size, (length,), generator=generator).to(model.device)
        for length in PROMPT_LENGTHS
        if length <= model.config.max_positions
    ]
    expected = [run_eager(model, prompt) for prompt in prompts]
    actual = run_in_chunks(model, prompts)
    tolerance = TOLERANCES.get(model.dtype, LOW_PRECISION_TOLERANCE)
    if any(isinstance(m, QuantLinear) and m.activations != UNQUANTIZED for m in model.modules()):
        tolerance = LOW_PRECISION_TOLERANCE
    for logits_TO, expected_TO, start in zip(actual, expected, FIRST_CHUNKS, strict=False):
        for name, rows in (("first", slice(start)), ("second", slice(start, None))):
            difference = relative_difference(logits_TO[rows], expected_TO[rows])
            if not difference <= tolerance:
                return (
                    f"logits of the {name} chunk of a prompt differ from those with eager attention "
                    f"by {difference:.2g}, more than {tolerance:g}"
                )
    return None


def relative_difference(actual_TO: Tensor, expected_TO: Tensor) -> float:
    """The median over rows of |actual - expected| / |expected - mean of the row|."""
    centered_TO = expected_TO - expected_TO.mean(dim=-1, keepdim=True)
    difference_T = (actual_TO - expected_TO).norm(dim=-1) / centered_TO.norm(dim=-1)
    return float(difference_T.median())


def run_eager(model: TransformersModel, prompt_T: Tensor) -> Tensor:
    """The logits of a whole prompt from transformers alone."""
    module: Any = model.module
    module.set_attn_implementation("eager")
    try:
        logits_TO: Tensor = module(input_ids=prompt_T[None], use_cache=False).logits[0]
    finally:
        module.set_attn_implementation(IMPLEMENTATION)
    return logits_TO.double()


def run_in_chunks(model: TransformersModel, prompts: list[Tensor]) -> list[Tensor]:
    """The logits of all prompts in one flat batch, in two chunks."""
    cache = SegmentedKVCache(len(model.attention_specs))
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for is_second in (False, True):
        chunks = [
            prompt[start:] if is_second else prompt[:start]
            for prompt, start in zip(prompts, FIRST_CHUNKS, strict=False)
        ]
        starts = FIRST_CHUNKS if is_second else (0,) * len(prompts)
        positions_T = torch.cat(
            [
                torch.arange(start, start + len(chunk), device=model.device)
                for chunk, start in zip(chunks, starts, strict=False)
            ]
        )
        sizes = torch.tensor([len(chunk) for chunk in chunks], device=model.device)
        segments = torch.arange(len(chunks), device=model.device)
        cache.segments_T = segments.repeat_interleave(sizes)
        logits_TO = model(torch.cat(chunks), positions_T, cache).double()
        for index, rows in enumerate(logits_TO.split(sizes.tolist())):
            logits[index].append(rows)
    return [torch.cat(rows) for rows in logits]


class SegmentedKVCache(UnpagedKVCache):
    """Keys and values of several sequences in the flat layout: every call appends to them.

    `segments_T` has the sequence of each token of the next call.
    """

    def __init__(self, num_layers: int) -> None:
        self.segments_T = torch.zeros(0, dtype=torch.long)
        self.layers: list[tuple[Tensor, ...] | None] = [None] * num_layers

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        assert k_XKH is not None and v_XKV is not None, "transformers passes keys and values"
        new = (k_XKH, v_XKV, positions_X, self.segments_T)
        old = self.layers[spec.layer_index]
        stored = new if old is None else tuple(map(torch.cat, zip(old, new, strict=True)))
        self.layers[spec.layer_index] = stored
        keys_SKH, values_SKV, key_positions_S, key_segments_S = stored
        mask_TS = build_attention_mask(spec, positions_X, key_positions_S)
        mask_TS = mask_TS & (self.segments_T[:, None] == key_segments_S)
        return masked_attention(spec, q_XNH, keys_SKH, values_SKV, mask_TS, sinks_N)

    def attend_mla(self, spec: AttentionSpec, inputs: MLAInputs, positions_X: Tensor) -> Tensor:
        raise NotImplementedError("modules of transformers have no MLA layers of ours")

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        raise NotImplementedError("modules of transformers read no sequence lengths")
