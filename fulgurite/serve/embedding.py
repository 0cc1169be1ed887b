"""`EmbeddingModel`: the name of a model and texts in, one vector a text out.

texts ─ tokenizer ─▶ token ids ─ flat batches ─▶ model ─▶ hidden states ─ pooling ─▶ [texts, D]

The model is an encoder (BERT, RoBERTa, XLM-R: MiniLM, BGE, E5, GTE) or a decoder (Qwen3-Embedding,
E5-Mistral). A batch is as many whole texts as fit into `max_batched_tokens`, end to end without
padding; each text attends to itself only, so its vector does not depend on the others.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from pathlib import Path

import torch
from torch import Tensor

from fulgurite.determinism import deterministic
from fulgurite.device import choose_compute_dtype, resolve_device
from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.dense_linear import use_dense_kernels
from fulgurite.models.encoder import Encoder
from fulgurite.models.families.encoders import is_encoder, read_encoder_config
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import open_bare_decoder, open_checkpoint, read_config_file
from fulgurite.models.loading.encoder_loader import load_encoder
from fulgurite.models.loading.loader import load_checkpoint
from fulgurite.models.pooling import Pooling, read_max_tokens, read_pooling
from fulgurite.models.ragged_cache import RaggedCache
from fulgurite.models.tokenizer import Tokenizer, find_tokenizer
from fulgurite.plan.limits import MAX_BATCHED_TOKENS
from fulgurite.serve.engine.engine import Prompt

# The hidden states [T, D] of sequences end to end, from their token ids and lengths.
HiddenStates = Callable[[Tensor, Sequence[int]], Tensor]


class EmbeddingModel:
    """A model to embed texts with.

    The pooling is that of the folder's sentence-transformers modules. Without them encoders average
    all tokens, and decoders take the last one.

    Args:
        name: a folder, or a model on the Hugging Face Hub (`owner/model`).
        dtype: dtype of the weights. None: the checkpoint's, or float32 on a CPU without instructions
            for it.
        device: `cpu` or `cuda`. None: `cuda` if there is a GPU.
        max_batched_tokens: maximum number of tokens of a step; a longer text is a step of its own.
            None: 512, on a GPU 4096.
    """

    def __init__(
        self,
        name: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_batched_tokens: int | None = None,
    ) -> None:
        path, resolved = hub.resolve_model_path(name), resolve_device(device)
        if max_batched_tokens is None:
            max_batched_tokens = MAX_BATCHED_TOKENS[resolved.type]
        if max_batched_tokens < 1:
            raise ArgumentError(f"max_batched_tokens={max_batched_tokens} must be 1 or more")
        model = _load(path, dtype, resolved)
        self._set_parts(path, model, find_tokenizer(path), max_batched_tokens)

    @classmethod
    def from_parts(
        cls,
        path: Path,
        model: CausalLM | Encoder,
        tokenizer: Tokenizer | None,
        max_batched_tokens: int,
    ) -> EmbeddingModel:
        """The same for a model that is loaded already."""
        made = cls.__new__(cls)
        made._set_parts(path, model, tokenizer, max_batched_tokens)
        return made

    def _set_parts(
        self,
        path: Path,
        model: CausalLM | Encoder,
        tokenizer: Tokenizer | None,
        max_batched_tokens: int,
    ) -> None:
        folder = path.parent if path.is_file() else path
        self.model, self.tokenizer, self.device = model, tokenizer, model.device
        self.max_batched_tokens = max_batched_tokens
        if self.device.type == "cpu":
            use_dense_kernels(model)  # whose rows don't depend on their number
        is_encoder = isinstance(model, Encoder)
        self.pooling: Pooling = read_pooling(
            folder, "mean" if is_encoder else "lasttoken", self.device
        )
        self.vocab_size = model.config.vocab_size
        limit = (
            model.config.max_tokens if isinstance(model, Encoder) else model.config.max_positions
        )
        self.max_tokens = min(limit, read_max_tokens(folder) or limit)
        self.hidden_states: HiddenStates = (
            model if isinstance(model, Encoder) else _decoder_hidden_states(model)
        )

    @torch.inference_mode()
    def embed(self, prompts: Prompt | Sequence[Prompt], *, truncate: bool = False) -> Tensor:
        """One vector a prompt, [prompts, D] in float32 on the CPU; a single prompt gives one row.

        A prompt is a text, with the special tokens that the tokenizer adds, or a list of token ids.
        One that is longer than the model reads is an error, or with `truncate` cut at its end.
        """
        sequences = [self._encode(prompt, truncate) for prompt in as_prompt_list(prompts)]
        if not sequences:
            raise ArgumentError("there are no prompts", next="give at least one")
        return torch.cat([self._run(batch) for batch in self._batches(sequences)]).cpu()

    def _encode(self, prompt: Prompt, truncate: bool) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ArgumentError("a text needs a tokenizer", next="give token ids")
            tokenizer = self.tokenizer
            ids = (
                tokenizer.encode_truncated(prompt, self.max_tokens)
                if truncate
                else tokenizer.encode(prompt)
            )
        else:
            ids = list(prompt)[: self.max_tokens if truncate else None]
        if not ids:
            raise ArgumentError("a prompt is empty", next="give at least one token")
        if len(ids) > self.max_tokens:
            raise ArgumentError(
                f"a prompt has {len(ids)} tokens, the model reads {self.max_tokens}",
                next="shorten it, or pass truncate=True to embed its beginning",
            )
        invalid = [
            id for id in ids if not isinstance(id, Integral) or not 0 <= id < self.vocab_size
        ]
        if invalid:
            raise ArgumentError(
                f"a prompt has token {invalid[0]!r}",
                next=f"token ids are integers from 0 to {self.vocab_size - 1}",
            )
        return ids

    def _batches(self, sequences: list[list[int]]) -> Iterator[list[list[int]]]:
        """Whole sequences in order, up to `max_batched_tokens` at once."""
        batch: list[list[int]] = []
        for sequence in sequences:
            if batch and sum(map(len, batch)) + len(sequence) > self.max_batched_tokens:
                yield batch
                batch = []
            batch.append(sequence)
        yield batch

    def _run(self, batch: list[list[int]]) -> Tensor:
        lengths = [len(sequence) for sequence in batch]
        flat = torch.tensor([id for sequence in batch for id in sequence], device=self.device)
        with deterministic(self.device.type == "cpu"):
            hidden_TD = self.hidden_states(flat, lengths)
        return self.pooling(hidden_TD, lengths)


def _load(path: Path, dtype: torch.dtype | None, device: torch.device) -> CausalLM | Encoder:
    if path.suffix != ".gguf":
        fields = read_config_file(path.parent if path.is_file() else path)
        if is_encoder(fields):
            stored = read_encoder_config(fields).dtype
            return load_encoder(path, fields, dtype or choose_compute_dtype(stored, device), device)
        checkpoint = open_bare_decoder(path, fields) or open_checkpoint(path)
    else:
        checkpoint = open_checkpoint(path)
    with checkpoint:
        dtype = dtype or choose_compute_dtype(checkpoint.config.dtype, device)
        return load_checkpoint(checkpoint, dtype=dtype, device=device, keep_quantized=True)


def _decoder_hidden_states(model: CausalLM) -> HiddenStates:
    def compute(token_ids_T: Tensor, lengths: Sequence[int]) -> Tensor:
        device = token_ids_T.device
        positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])
        return model.compute_hidden_states(token_ids_T, positions_T, RaggedCache(lengths, device))

    return compute


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A single string or list of token ids becomes a list of one prompt."""
    is_single = isinstance(prompts, str) or not isinstance(prompts, Sequence)
    if is_single or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


# ---- the command ---------------------------------------------------------------------------------


def add_options(parser: ArgumentParser) -> None:
    """The arguments of `fulgurite embed`."""
    parser.add_argument("texts", nargs="*", help="the texts (default: one a line of stdin)")
    parser.add_argument("--model", required=True, help="a folder, or owner/model on the Hub")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument(
        "--truncate", action="store_true", help="embed the beginning of texts that are too long"
    )


def run_embed(options: Namespace) -> None:
    """Print one JSON array of numbers a text."""
    texts = options.texts or sys.stdin.read().splitlines()
    model = EmbeddingModel(options.model, device=options.device)
    for vector in model.embed(texts, truncate=options.truncate):
        print(json.dumps(vector.tolist()))
