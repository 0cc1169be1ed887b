"""A recorded step on a CPU: the numbers of a step in, the hidden states of its tokens out.

The layers' native calls are recorded for one `StepShape` and run again without Python in between
(`fulgurite.replay`); the torch ops before and after them (embedding, rotary angles, head) run eagerly.
Inputs are copied to the addresses that were recorded. Kernels read from there which tokens belong to
which sequence, so one recording runs any division of its tokens into sequences:

    decode steps   one token of each sequence: a shape for each number of requests
    mixed steps    with chunks of prompts: up to MAX_TOKENS, from TOKEN_MULTIPLE on rounded up to a
                   multiple of it. The tokens that are added are a sequence of their own, and write
                   no key.

The recording of a step takes as long as several steps. So the first steps of a shape run eagerly (they
compile, and touch memory first), and the next one is recorded while it runs. An idle engine does so on
padding (step_preparation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import profiler

from fulgurite import replay
from fulgurite.errors import ReplayError
from fulgurite.kernels.sampling.ops import fill_pending_tokens
from fulgurite.models.layers import CausalLM
from fulgurite.models.rope import RotaryCosSin
from fulgurite.serve.engine.batch import HostBatch, InputBatch
from fulgurite.serve.engine.block_manager import BlockManager
from fulgurite.serve.engine.kv_cache import PagedKVCache
from fulgurite.serve.engine.step_buffers import BufferLayout, StepBuffers

WARMUPS = 2  # eager steps before the recording
MAX_TOKENS = 64  # of mixed steps; what Python costs larger ones is a small part of their time
TOKEN_MULTIPLE = 8


class StepShape(NamedTuple):
    """Tokens and sequences of a recording; a step may have fewer of both if it is mixed."""

    num_tokens: int
    num_sequences: int

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_sequences


def find_shape(
    host: HostBatch, kv_cache: PagedKVCache, block_manager: BlockManager
) -> StepShape | None:
    """The shape that runs a step; None: it is too large, or its layers plan chunks of prompts on the
    host (MLA, states)."""
    if host.num_tokens == host.num_sequences:
        return StepShape(host.num_tokens, host.num_sequences)
    if host.num_tokens > MAX_TOKENS or kv_cache.has_states or kv_cache.mla_sizes:
        return None
    return mixed_shape(host.num_tokens, block_manager.num_rows)


def mixed_shape(num_tokens: int, max_sequences: int) -> StepShape:
    """The shape of mixed steps with so many tokens."""
    if num_tokens > TOKEN_MULTIPLE:
        num_tokens = -(-num_tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    num_sequences = max_sequences + 1
    if num_tokens == num_sequences:  # is no decode step
        num_sequences += 1
    return StepShape(num_tokens, num_sequences)


class RecordedStep:
    """The steps of one shape."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: PagedKVCache,
        block_manager: BlockManager,
        last_tokens_W: Tensor,
        shape: StepShape,
    ) -> None:
        self.model, self.kv_cache, self.shape = model, kv_cache, shape
        self.last_tokens_W = last_tokens_W
        tokens, sequences = shape
        groups, columns = len(block_manager.groups), block_manager.num_columns
        layout: BufferLayout = {
            "token_ids": ((tokens,), torch.int64),
            "positions": ((tokens,), torch.int64),
            "rows": ((tokens,), torch.int64),
            "rope_seq_lens": ((tokens,), torch.int64),
            "slot_mapping": ((groups, tokens), torch.int64),
            "query_start_loc": ((sequences + 1,), torch.int32),
            "seq_lens": ((sequences,), torch.int32),
            "state_slots": ((sequences,), torch.int32),
            "prompt_lens": ((sequences,), torch.int32),
            "block_tables": ((groups, sequences, columns), torch.int32),
        }
        buffers = StepBuffers(layout, torch.device("cpu"))
        self.host, self.inputs = buffers.begin_write(), buffers.device_inputs
        self.batch = self._make_batch(columns * block_manager.block_size)
        self.num_warmups = 0
        self.replay: Callable[[], Tensor] | None = None  # once it is recorded
        self.no_replay_reason: str | None = None

    def __call__(self, host: HostBatch) -> Tensor:
        """The hidden states of the step's tokens; the next step overwrites them."""
        self._write_inputs(host)
        return self._run()[: host.num_tokens]

    def prepare(self) -> bool:
        """Run once on tokens that are written nowhere; True: nothing is left to prepare."""
        if self.replay is None and self.no_replay_reason is None:
            self.host["query_start_loc"][0] = 0
            self._write_padding(0, 0)
            if self.shape.is_decode:  # one token of each sequence
                self.host["query_start_loc"][:] = np.arange(self.shape.num_sequences + 1)
                self.host["positions"][:] = 0
                self.host["rope_seq_lens"][:] = self.host["seq_lens"][:] = 1
            self._run()
        return self.replay is not None or self.no_replay_reason is not None

    def _make_batch(self, max_seq_len: int) -> InputBatch:
        inputs = self.inputs
        return InputBatch(
            token_ids_T=inputs["token_ids"],
            positions_T=inputs["positions"],
            slot_mapping_GT=list(inputs["slot_mapping"]),
            block_tables_GSB=list(inputs["block_tables"]),
            query_start_loc_S=inputs["query_start_loc"],
            seq_lens_S=inputs["seq_lens"],
            rope_seq_lens_T=inputs["rope_seq_lens"] if self.model.needs_sequence_lengths else None,
            logit_rows_R=None,
            max_query_len=1 if self.shape.is_decode else self.shape.num_tokens,
            max_seq_len=max_seq_len,
            state_slots_S=inputs["state_slots"],
            prompt_lens_S=inputs["prompt_lens"],
        )

    def _write_inputs(self, host: HostBatch) -> None:
        to, tokens, sequences = self.host, host.num_tokens, host.num_sequences
        to["token_ids"][:tokens] = host.token_ids_T
        to["positions"][:tokens] = host.positions_T
        if host.rope_seq_lens_T is not None:
            to["rope_seq_lens"][:tokens] = host.rope_seq_lens_T
        to["query_start_loc"][: sequences + 1] = host.query_start_loc_S
        to["seq_lens"][:sequences] = host.seq_lens_S
        to["state_slots"][:sequences] = host.rows_S
        to["prompt_lens"][:sequences] = host.prompt_lens_S
        for group, slots_T in enumerate(host.slot_mapping_GT):
            to["slot_mapping"][group, :tokens] = slots_T
            table_SB = host.block_tables_GSB[group]
            to["block_tables"][group, :sequences, : table_SB.shape[1]] = table_SB
        if not self.shape.is_decode:
            self._write_padding(tokens, sequences)
        if host.is_pending:
            to["rows"][:tokens] = host.rows_S[host.sequence_T]
            to["rows"][tokens:] = 0  # no token after these is -1
            fill_pending_tokens(self.inputs["token_ids"], self.inputs["rows"], self.last_tokens_W)

    def _write_padding(self, tokens: int, sequences: int) -> None:
        """The tokens from `tokens` on are a sequence that reads the first block; others are empty."""
        to, count = self.host, self.shape.num_tokens - tokens
        to["token_ids"][tokens:] = 0
        to["positions"][tokens:] = np.arange(count)
        to["rope_seq_lens"][tokens:] = count
        to["slot_mapping"][:, tokens:] = -1
        to["query_start_loc"][sequences + 1 :] = self.shape.num_tokens
        to["seq_lens"][sequences:] = max(count, 1)
        to["block_tables"][:, sequences:, :1] = 0

    def _embed(self) -> tuple[Tensor, list[RotaryCosSin]]:
        self.kv_cache.set_batch(self.batch)
        return self.model.embed(self.inputs["token_ids"], self.inputs["positions"], self.kv_cache)

    def _run_layers(self, x_TD: Tensor, cos_sin: Sequence[RotaryCosSin]) -> Tensor:
        return self.model.run_layers(x_TD, self.inputs["positions"], cos_sin, self.kv_cache)

    def _run(self) -> Tensor:
        """The layers run once, whether they are recorded or not."""
        if self.replay is not None:
            return self.replay()
        if self.num_warmups < WARMUPS or profiler._is_profiler_enabled:  # a recording has its own
            self.num_warmups += 1
            return self._run_layers(*self._embed())
        return self._record()

    def _record(self) -> Tensor:
        """The hidden states. `no_replay_reason` says why the layers were not recorded."""
        x_TD, cos_sin = self._embed()
        static_x_TD = x_TD.clone()
        static_cos_sin = [RotaryCosSin(pair.cos.clone(), pair.sin.clone()) for pair in cos_sin]
        outputs: list[Tensor] = []

        def run_layers() -> Tensor:
            outputs.append(self._run_layers(static_x_TD, static_cos_sin))
            return outputs[-1]

        try:
            layers = replay.record(run_layers, warmups=0)
        except ReplayError as error:
            if not outputs:
                raise
            self.no_replay_reason = str(error)
        else:
            self.replay = self._make_replay(layers, static_x_TD, static_cos_sin)
        return outputs.pop()

    def _make_replay(
        self,
        layers: replay.Recording,
        static_x_TD: Tensor,
        static_cos_sin: Sequence[RotaryCosSin],
    ) -> Callable[[], Tensor]:
        def run() -> Tensor:
            x_TD, cos_sin = self._embed()
            static_x_TD.copy_(x_TD)
            for static, new in zip(static_cos_sin, cos_sin, strict=True):
                static.cos.copy_(new.cos)
                static.sin.copy_(new.sin)
            hidden_TD: Tensor = layers()
            return hidden_TD

        return run
