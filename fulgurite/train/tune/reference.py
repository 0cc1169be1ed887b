"""`ReferenceModel`: the model before tuning, for the log-probabilities that DPO and GRPO compare with.

With adapters it is the same model with them switched off: no second copy of the weights. Without, it is
a frozen copy, or none: log-probabilities of a fixed dataset can be computed once, before the first step.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fulgurite.models.layers import CausalLM
from fulgurite.quant import QuantTensor
from fulgurite.train.batch import Batch
from fulgurite.train.tune.logprobs import compute_logprobs
from fulgurite.train.tune.lora import adapter_modules, adapters_disabled


class ReferenceModel:
    """The model as it is now: later changes of its trained weights don't change it.

    It is no module, so that its copy belongs to no optimizer and no checkpoint.
    """

    def __init__(self, model: CausalLM, frozen: CausalLM | None = None) -> None:
        """`frozen` is the copy of a model without adapters; None: it is made here."""
        self.has_adapters = bool(adapter_modules(model))
        if not self.has_adapters:
            model = copy_model(model) if frozen is None else frozen
            model.requires_grad_(False).eval()
        self.model = model

    @torch.no_grad()
    def compute_logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """Of a batch's labels, [B, T] in float32."""
        if not self.has_adapters:
            return score(self.model, batch, temperature)
        with adapters_disabled(self.model):
            return score(self.model, batch, temperature)


def copy_model(model: CausalLM) -> CausalLM:
    """A copy with weights of its own. Quantized weights never change, so both have the same."""
    memo = {id(p): p for p in model.parameters() if isinstance(p, QuantTensor)}
    return copy.deepcopy(model, memo)


@torch.no_grad()
def score(model: CausalLM, batch: Batch, temperature: float = 1.0) -> Tensor:
    """The log-probability of each label of a batch, without dropout and without a gradient."""
    was_training = model.training
    model.eval()
    try:
        batch = batch.to(model.device)
        return compute_logprobs(
            model,
            batch.tokens_BT,
            batch.labels_BT,
            batch.positions_BT,
            batch.documents_BT,
            temperature,
        )
    finally:
        model.train(was_training)
