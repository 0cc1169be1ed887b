"""`TransformersModel`: transformers' modules as a `CausalLM`. Token ids and positions in, logits out.

    token ids [T] ─ [1, T] ─▶ decoder of transformers ─▶ hidden states ─ rows ─▶ its head ─▶ logits
                                 │ each attention layer
                                 ▼
                              attention.py ─▶ KVCache.attend

The decoder runs under `fulgurite.compile` with a symbolic number of tokens. The head is the module's
own forward around given hidden states, so scales and softcaps of logits are transformers' own. In
deterministic mode on a GPU both run eagerly, with batch-invariant ops (`invariant_ops.py`); the engine's
CUDA graphs take the host's time out of decode steps.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.determinism import deterministic, is_deterministic
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.config import ModelConfig
from fulgurite.models.kv_cache import KVCache, NoKVCache
from fulgurite.models.layers import CausalLM
from fulgurite.models.rope import RotaryCosSin
from fulgurite.models.state_spec import StateSpec
from fulgurite.models.transformers_backend.attention import Step, mark_layer, use_step
from fulgurite.models.transformers_backend.invariant_ops import InvariantOps
from fulgurite.quant import QuantTensor

_model_numbers = itertools.count()


class TransformersModel(CausalLM):
    """A causal LM of transformers with our KV cache behind its attention.

    module             transformers' model, with a head
    attention_layers   names of its attention modules, in the order of `specs`
    """

    def __init__(
        self,
        config: ModelConfig,
        module: Any,
        attention_layers: Sequence[str],
        specs: Sequence[AttentionSpec],
    ) -> None:
        nn.Module.__init__(self)  # the modules of CausalLM are not used
        self.config = config
        self.module = module
        self.attention_layers = tuple(attention_layers)
        self.specs = tuple(specs)
        self.needs_sequence_lengths = False
        self.recompute_after = None
        self.model_number = next(_model_numbers)
        for index, name in enumerate(attention_layers):
            mark_layer(module.get_submodule(name), self.model_number, index)
        self.compiled_decoder: Any = None
        self.packs_linears = False

    def compile_decoder(self, packs_linears: bool = False) -> None:
        """Run the decoder compiled from now on. The engine captures whole steps itself.

        `packs_linears`: its `nn.Linear`s will not run kernels of ours, so that a graph packs their
        weights on a CPU. A deterministic engine, the default there, replaces them.

        All numbers of tokens share one graph. A compiler makes another one for a single token, so a
        single token runs as two (see `run_layers`).
        """
        from fulgurite.compile import compile  # takes as long to import as the rest of an engine

        compiled = compile(self.decoder, dynamic=True, cudagraph=False)
        self.packs_linears = packs_linears
        self.__dict__["compiled_decoder"] = compiled  # no child: `module` has its parameters

    @property
    def decoder(self) -> Any:
        """The module without its head."""
        return self.module.get_decoder()

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.module.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.module.device
        return device

    @property
    def _uses_invariant_ops(self) -> bool:
        return is_deterministic() and self.device.type == "cuda"

    def _invariant_ops(self) -> AbstractContextManager[Any]:
        return InvariantOps() if self._uses_invariant_ops else nullcontext()

    def check_invariant_ops(self) -> None:
        """Run two tokens in deterministic mode; ArgumentError for an op without an invariant kernel."""
        ids = torch.zeros(2, dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device)
        with torch.inference_mode(), deterministic():
            self.compute_logits(self.run_layers(ids, positions, [], NoKVCache()))

    @property
    def packed_weight_bytes(self) -> int:
        """Bytes of the copies that a compiled decoder keeps: float32 matrices on a CPU.

        Embeddings are looked up, not multiplied, and the head is not compiled. Quantized weights are
        multiplied as they are.
        """
        if self.compiled_decoder is None:
            return 0
        kinds = nn.Embedding if self.packs_linears else nn.Embedding | nn.Linear
        not_packed = {id(m.weight) for m in self.modules() if isinstance(m, kinds)}
        return sum(
            weight.nbytes
            for weight in self.decoder.parameters()
            if weight.dim() == 2 and weight.dtype == torch.float32 and id(weight) not in not_packed
            if not isinstance(weight, QuantTensor)
        )

    @property
    def no_capture_reason(self) -> str | None:
        """CUDA graphs capture any kernel; a recording on a CPU only native ones."""
        if self.device.type == "cuda":
            return None
        return "modules of transformers run torch operators, which are not recorded"

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return self.specs

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return ()  # layers with a state are refused

    def embed_inputs(self, token_ids_X: Tensor) -> Tensor:
        """The token ids themselves: the decoder embeds them, each family in its own way."""
        return token_ids_X

    def rotate(self, positions_X: Tensor, cache: KVCache) -> list[RotaryCosSin]:
        """Nothing: the decoder rotates."""
        return []

    def run_layers(
        self, x_XD: Tensor, positions_X: Tensor, cos_sins: Sequence[RotaryCosSin], cache: KVCache
    ) -> Tensor:
        """The decoder over token ids."""
        is_flat, num_tokens = x_XD.dim() == 1, x_XD.shape[-1]
        ids, positions = (x_XD[None], positions_X[None]) if is_flat else (x_XD, positions_X)
        is_compiled = self.compiled_decoder is not None and ids.device.type != "meta"
        is_compiled = is_compiled and not self._uses_invariant_ops
        if is_compiled and num_tokens == 1:  # the second token is padding, which attention ignores
            ids, positions = ids.repeat(1, 2), positions.repeat(1, 2)
        decoder = self.compiled_decoder if is_compiled else self.decoder
        step = use_step(self.model_number, Step(self.specs, cache, positions_X))
        with step, self._invariant_ops():
            hidden_BTD = decoder(
                input_ids=ids, position_ids=positions, use_cache=False
            ).last_hidden_state[:, :num_tokens]
        hidden_XD: Tensor = hidden_BTD[0] if is_flat else hidden_BTD
        return hidden_XD

    def compute_logits(self, hidden_XD: Tensor) -> Tensor:
        """The logits of given hidden states: the module's forward with its decoder replaced."""
        is_flat = hidden_XD.dim() == 2
        head = copy.copy(self.module)
        prefix = self.module.base_model_prefix
        given = GivenHiddenStates(hidden_XD[None] if is_flat else hidden_XD)
        head.__dict__["_modules"] = {**self.module._modules, prefix: given}
        with self._invariant_ops():
            logits = head(inputs_embeds=given.hidden_BTD, use_cache=False).logits
        logits_XO: Tensor = logits[0] if is_flat else logits
        return logits_XO


class GivenHiddenStates(nn.Module):
    """Stands in for a decoder that has already run."""

    def __init__(self, hidden_BTD: Tensor) -> None:
        super().__init__()
        self.hidden_BTD = hidden_BTD

    @property
    def decoder(self) -> GivenHiddenStates:
        """Some families wrap their decoder once more."""
        return self

    def forward(self, *args: Any, **options: Any) -> Any:
        return DecoderOutput(self.hidden_BTD)


class DecoderOutput(tuple[Any, ...]):
    """What a decoder of transformers returns: a tuple with names; all but the first are None."""

    def __new__(cls, hidden_BTD: Tensor) -> DecoderOutput:
        return super().__new__(cls, (hidden_BTD,))

    @property
    def last_hidden_state(self) -> Any:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
