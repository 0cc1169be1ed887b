"""Names what made a step's loss or gradients NaN or infinite: batches in, a sentence out.

The step is computed again with `find_nonfinite`, which checks the output of every op. That is slow, so
it runs only after a step that went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fulgurite.compile import compile as compile_module
from fulgurite.errors import FulguriteError, NonFiniteError
from fulgurite.train.batch import Batch
from fulgurite.transforms.nonfinite import find_nonfinite


def name_nonfinite(loss_module: nn.Module, batches: Sequence[Batch]) -> str:
    """What was not finite first: a weight, or an op of forward or backward with its source line.

    `loss_module` is not compiled. Gradients are left as None.
    """
    for name, parameter in loss_module.named_parameters():
        if not bool(torch.isfinite(parameter.detach()).all()):
            return f"the weight {name.removeprefix('model.')} is not finite"
    checked = compile_module(loss_module, transforms=[find_nonfinite], cudagraph=False)
    try:
        for batch in batches:
            sums = checked(batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)
            sums.total.backward()
    except NonFiniteError as error:
        return " ".join(str(error).split())
    except FulguriteError as error:  # naming the cause must not end the run
        return f"the op could not be named ({error.one_line()})"
    finally:
        loss_module.zero_grad(set_to_none=True)
    return "every op of a single rank is finite: the sum of ranks or microbatches overflowed"
