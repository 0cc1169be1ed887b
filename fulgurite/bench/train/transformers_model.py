"""The candidate "transformers": a workload in, the same model of transformers with its loss out.

What a user of PyTorch has without this project: transformers' modules with its defaults (attention by
`scaled_dot_product_attention`, experts by `torch.nn.functional.grouped_mm`) and torch's cross entropy,
under torch.compile. The loop and the optimizer are those of the other candidates. It computes no
loss that balances experts, so it has slightly less to do.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.bench.train.workloads import Workload
from fulgurite.errors import ArgumentError
from fulgurite.train.batch import IGNORED
from fulgurite.train.loss import LossSums


def is_installed() -> bool:
    return find_spec("transformers") is not None


def build_transformers_model(workload: Workload, dtype: torch.dtype, device: str) -> nn.Module:
    """The architecture of a workload with random weights, on a device."""
    import transformers  # not a dependency

    cls = getattr(transformers, workload.architecture, None)
    if cls is None:
        raise ArgumentError(
            f"transformers {transformers.__version__} has no {workload.architecture}",
            next="leave the candidate transformers out of --candidates",
        )
    config = cls.config_class(**workload.fields)
    with torch.device(device):
        model: nn.Module = cls._from_config(config, dtype=dtype)
    return model.train()


class TransformersLoss(nn.Module):
    """A model of transformers with what `TrainStep` reads of a `LossModule`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
    ) -> LossSums:
        assert documents_BT is None, "transformers' attention knows no documents"
        outputs = self.model(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False)
        loss = F.cross_entropy(
            outputs.logits.float().flatten(0, 1),
            labels_BT.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        tokens = (labels_BT != IGNORED).sum()
        return LossSums(loss, loss.detach().clone(), torch.zeros_like(loss), tokens)
