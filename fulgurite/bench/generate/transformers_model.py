"""A model of a given shape in transformers with random weights: the baseline of `bench generate`.

In: config.json fields. Out: seconds to the first token and of a decode step, eager or compiled. Its
KV cache is static, as torch.compile needs it.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulgurite.models.config import ConfigFields

NOT_FIELDS = ("architectures", "torch_dtype", "dtype", "quantization_config", "model_type")


@dataclass(frozen=True)
class TransformersDecoder:
    """A causal language model of transformers and the function that runs its decode step."""

    model: Any
    decode: Callable[..., Any]
    device: torch.device

    @classmethod
    def build(
        cls,
        fields: ConfigFields,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        is_compiled: bool = False,
    ) -> TransformersDecoder | None:
        """Build it with random weights; None if transformers is missing or lacks the model."""
        if importlib.util.find_spec("transformers") is None:
            return None
        import transformers
        from transformers.initialization import no_init_weights

        architecture = str(fields.get_list("architectures")[0])
        config_name = architecture.removesuffix("ForCausalLM") + "Config"
        if not hasattr(transformers, architecture) or not hasattr(transformers, config_name):
            return None
        values = {k: v for k, v in fields.values.items() if k not in NOT_FIELDS}
        config = getattr(transformers, config_name)(**values)
        if dtype is None:
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device), no_init_weights():
                model = getattr(transformers, architecture)(config).eval()
        finally:
            torch.set_default_dtype(before)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.02)
        decode = model.forward
        if is_compiled:
            mode = "reduce-overhead" if device.type == "cuda" else "default"
            decode = torch.compile(model.forward, mode=mode, dynamic=False)
        return cls(model, decode, device)

    @torch.inference_mode()
    def time_first_token(self, prompt: int, repeats: int = 3) -> float:
        """Seconds of a prefill, the best of several."""
        ids, times = self._random_ids(1, prompt), []
        for _ in range(repeats):
            start = self._now()
            self.model(ids, use_cache=True, logits_to_keep=1)
            times.append(self._now() - start)
        return min(times)

    @torch.inference_mode()
    def time_decode(self, batch: int, prompt: int, steps: int) -> float:
        """Seconds of a decode step, the median."""
        from transformers import StaticCache

        warm_up = 3
        cache = StaticCache(config=self.model.config, max_cache_len=prompt + steps + warm_up + 1)
        ids = self._random_ids(batch, prompt)
        self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token, times = ids[:, :1].clone(), []
        for _ in range(warm_up + steps):
            start = self._now()
            out = self.decode(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True).clone()
            times.append(self._now() - start)
        return statistics.median(times[warm_up:])

    def _random_ids(self, batch: int, count: int) -> Tensor:
        size = int(self.model.config.vocab_size)
        return torch.randint(0, size, (batch, count), device=self.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
