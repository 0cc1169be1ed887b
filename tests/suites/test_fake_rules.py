"""The rules by which ops are traced against torch's kernels: dtypes, sizes and strides of all results.

Sample inputs of the operator database, in other memory layouts and with mixed dtypes. Nothing is compiled, so one
operator takes milliseconds. The normal run takes a fixed sample. All: pytest -m slow tests/suites/test_fake_rules.py
"""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

from fulgurite.capture import dynamo_fixes
from tests.suites.operator_database import OPS

SAMPLES_PER_OP = 6
# whose results are random, uninitialised or of sizes that depend on data
SKIPPED = ("empty", "rand", "bernoulli", "normal", "multinomial", "dropout", "exponential")
SKIPPED += ("geometric", "cauchy", "uniform", "item", "nonzero", "unique", "masked_select")
SKIPPED += ("sparse", "tensor_split", "argwhere", "bincount", "histc", "allclose", "equal")
SKIPPED += ("jiterator",)  # for GPUs
EXCEPTIONS = {"linalg_pinv_singular": "the database makes a product of two dtypes"}


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x


def channels_last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape) if has_rows(x) else x


def expanded_last(x: Tensor) -> Tensor:
    return x[..., :1].expand(x.shape) if x.dim() and has_rows(x.movedim(-1, 0)) else x


def has_rows(x: Tensor) -> bool:
    """Whether rows may be equal. Of integers they may not: some ops don't check offsets and indices."""
    return x.dim() > 0 and x.shape[0] > 1 and (x.is_floating_point() or x.is_complex())


def stepped(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x


def narrow(x: Tensor) -> Tensor:
    return x.bfloat16() if x.is_floating_point() else x


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def wide_number(x: Tensor) -> Tensor:
    return wide(x).flatten()[0] if x.numel() else x


CHANGES = (transposed, channels_last, expanded, expanded_last, stepped, narrow, wide, wide_number)


def metadata(value: Any) -> list[Any]:
    """Dtype, sizes, and the strides that have a meaning, of all tensors."""
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    return [
        (x.dtype, tuple(x.shape), [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1])
        if x.layout is torch.strided and x.numel()
        else (x.dtype, tuple(x.shape))
        for x in tensors
    ]


def variants(call: Any) -> Iterator[tuple[str, Any]]:
    """The arguments of a call with all tensors changed, only the first, and all others."""
    yield "as they are", call
    for change in CHANGES:
        for which in ("all", "first", "others"):
            count = itertools.count()

            def one(x: Any, change: Any = change, which: str = which, count: Any = count) -> Any:
                if not isinstance(x, Tensor) or x.layout is not torch.strided:
                    return x
                is_chosen = which == "all" or (next(count) == 0) == (which == "first")
                return change(x) if is_chosen else x

            changed = pytree.tree_map(one, call)
            if metadata(changed) != metadata(call):
                yield f"{change.__name__}, {which}", changed


def calls(op: OpInfo) -> Iterator[Any]:
    """Arguments of a few samples, in float32 and complex64 or in the dtype that the operator has."""
    for dtype in (torch.float32, torch.complex64, torch.int64, torch.bool):
        if dtype not in op.dtypes or (dtype is torch.bool and torch.int64 in op.dtypes):
            continue
        samples = list(itertools.islice(op.sample_inputs("cpu", dtype), 40))
        for sample in samples[:: max(1, len(samples) // SAMPLES_PER_OP)]:
            yield (sample.input, *sample.args), sample.kwargs


def predict(run: Callable[..., Any], args: Any, kwargs: Any) -> list[Any] | None:
    """What the rules predict; None if they need the values of the tensors."""
    mode = FakeTensorMode()
    fake = pytree.tree_map(
        lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, (args, kwargs)
    )
    try:
        with mode, enable_python_dispatcher():
            return metadata(run(*fake[0], **fake[1]))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None


def differences(op: OpInfo) -> Iterator[str]:
    for number, call in enumerate(calls(op)):
        for name, (args, kwargs) in variants(call):
            try:
                real = metadata(op.op(*args, **kwargs))
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                continue  # what eager refuses has no result to compare
            found = predict(op.op, args, kwargs)
            if found is not None and found != real:
                yield f"sample {number}, {name}: {metadata((args, kwargs))}: {real}, rule {found}"


def check(name: str) -> None:
    dynamo_fixes.install()
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = list(differences(OPS[name]))
    finally:
        logging.disable(logging.NOTSET)
    assert not found, f"{len(found)} calls, first:\n" + "\n".join(found[:3])


IS_PRIVATE = re.compile(r"_(?!_)|ops_aten")  # such ops are called with what others have checked
NAMES = [
    name
    for name in sorted(OPS)
    if not any(word in name for word in SKIPPED)
    and name not in EXCEPTIONS
    and not IS_PRIVATE.match(name)
]
CORRECTED = ("copysign", "floor_divide", "xlogy", "addr", "block_diag", "angle")
CORRECTED += ("heaviside", "logical_or", "ldexp")
CORRECTED += ("nn_functional_huber_loss", "nn_functional_soft_margin_loss")
CORRECTED += ("nn_functional_batch_norm", "nn_functional_one_hot", "nn_functional_max_unpool2d")


@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_rules(name: str):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_rule(name: str):
    check(name)
