"""torch's operator database: the samples of an operator, compiled against eager.

In: a `Setting` (operator, dtype, gradient or not, executors, device). Out: a `Tally`, or an error.
The compiled program must match eager in values, dtypes, shapes and strides, from the same seed.
Samples of one operator are captured in groups; a group that fails is run again sample by sample.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.testing._internal import common_methods_invocations, common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

import fulgurite
from fulgurite.errors import FulguriteError
from fulgurite.trace.purity import is_random
from tests.suites.comparison import (
    assert_error_at_most_twice_eager,
    assert_same_metadata,
    assert_same_values,
    tensors_of,
)

OPS = {op.formatted_name: op for op in op_db}
GROUP = 12  # samples captured as one graph
SEED = 20261115

# Operators whose values can't be compared, and why; all else of them is. Ten at most.
_UNINITIALISED = "its values are whatever was in memory"
_WRONG_IN_TORCH = "torch 2.13's own aot_eager gives other values than eager here"
EXCEPTIONS = {
    "empty": _UNINITIALISED,
    "empty_like": _UNINITIALISED,
    "empty_permuted": _UNINITIALISED,
    "empty_strided": _UNINITIALISED,
    "new_empty": _UNINITIALISED,
    "new_empty_strided": _UNINITIALISED,
    "linalg_pinv-complex64": _WRONG_IN_TORCH,
    "linalg_pinv_singular-complex64": _WRONG_IN_TORCH,
    "pinverse-complex64": _WRONG_IN_TORCH,
}
# Operators with samples that capture leaves to eager, by reason. Their results are compared all the same.
GRAPH_BREAKS = {
    "it gives a Python bool or number": ("allclose", "equal", "item"),
    "it decides by its data": (
        "corrcoef",
        "cov",
        "nn_functional_gaussian_nll_loss",
        "nn_functional_one_hot",
        "tensor_split",
    ),
    "the derivative of a complex decomposition asks allclose": (
        "linalg_svd",
        "pca_lowrank",
        "svd",
        "svd_lowrank",
    ),
    "the size of its result depends on data, and torch's fake rule is wrong": (
        "combinations",
        "masked_select",
    ),
    "torch has no fake rule for it that knows the sizes of its results": (
        "linalg_lstsq",
        "linalg_lstsq_grad_oriented",
        "nn_functional_ctc_loss",
    ),
    "TorchDynamo does not trace resize_": ("resize_", "resize_as_"),
    "TorchDynamo takes no sparse tensors": (
        "sparse_mm_reduce",
        "sparse_sampled_addmm",
        "to_sparse",
    ),
    **(
        {"before torch 2.13 it decides by its data": ("quantile", "nanquantile")}
        if torch.__version__ < "2.13"
        else {}
    ),
}
# Among thousands of elements some are equal in narrow dtypes, and only a stable sort orders those.
SORTS = ("sort", "argsort")
MANY_ELEMENTS = 1000
BREAKING = {name for names in GRAPH_BREAKS.values() for name in names}


@dataclass
class Tally:
    """What was checked."""

    samples: int = 0
    graphs: int = 0
    refused: int = 0  # samples that eager itself refuses
    uncaptured: list[str] = field(default_factory=list)


@dataclass
class Call:
    """One sample: the arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]


Program = Callable[[list[tuple[tuple[Any, ...], dict[str, Any]]]], list[Any]]


def calls(setting: Setting, limit: int | None) -> list[Call]:
    """The samples of an operator, the same at every call."""
    _seed()
    found = []
    for sample in sample_inputs(setting.op, setting.device, setting.dtype, setting.gradient):
        process = sample.output_process_fn_grad
        kwargs = sample.kwargs
        if setting.op.name in SORTS and not sample.args and sample.input.numel() > MANY_ELEMENTS:
            kwargs = {**kwargs, "stable": True}
        found.append(Call((sample.input, *sample.args), kwargs, process))
        if len(found) == limit:
            break
    return found


def sample_inputs(
    op: OpInfo, device: str, dtype: torch.dtype, gradient: bool = False
) -> Iterator[SampleInput]:
    """The database's samples. torch looks for a `unittest.TestCase` on the stack: not here.

    For each sample it read the source of every frame, which was most of the CPU time of a check.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (common_utils, core):
            patch.setattr(module, "extract_test_fn", lambda: None, raising=False)
        yield from op.sample_inputs(device, dtype, requires_grad=gradient)


def _seed() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def program(function: Callable[..., Any]) -> Program:
    """One function that makes many calls."""

    def run(arguments: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        return [function(*args, **kwargs) for args, kwargs in arguments]

    return run


def execute(run: Program, group: Sequence[Call], gradient: bool) -> tuple[list[Any], list[Any]]:
    """Outputs and gradients of a group of calls. Cotangents have a fixed seed."""
    _seed()
    with torch.set_grad_enabled(gradient):
        outputs = run([(call.args, call.kwargs) for call in group])
    if not gradient:
        return outputs, []
    inputs = [t for call in group for t in tensors_of((call.args, call.kwargs)) if t.requires_grad]
    used = [call.process(output) for call, output in zip(group, outputs, strict=True)]
    results = [t for t in tensors_of(used) if t.requires_grad]
    if not inputs or not results:
        return outputs, []
    torch.manual_seed(SEED)
    cotangents = [torch.randn_like(result) for result in results]
    return outputs, list(torch.autograd.grad(results, inputs, cotangents, allow_unused=True))


@contextmanager
def capturing(op: OpInfo) -> Iterator[None]:
    """Let TorchDynamo capture warnings and data-dependent ops; disable the database's own seeding."""

    def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    known = op.formatted_name not in BREAKING
    dynamo = torch._dynamo.config.patch(
        capture_scalar_outputs=known,
        capture_dynamic_output_shape_ops=known,
        reorderable_logging_functions={warnings.warn},
    )
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), dynamo:
        patch.setattr(common_methods_invocations, "wrapper_set_seed", plainly)
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class Setting:
    """One operator, dtype and direction."""

    op: OpInfo
    dtype: torch.dtype
    gradient: bool
    executors: list[str]
    device: str = "cpu"

    @property
    def has_values(self) -> bool:
        """Whether the values are worth comparing."""
        name = self.op.formatted_name
        kind = str(self.dtype).removeprefix("torch.")
        return name not in EXCEPTIONS and f"{name}-{kind}" not in EXCEPTIONS


def compare(setting: Setting, eager: list[Call], ours: list[Call]) -> list[Any]:
    """Assert that compiled and eager agree on these calls; returns the graphs that were compiled."""
    torch._dynamo.reset()
    run = program(setting.op.op)
    compiled: Any = fulgurite.compile(run, executors=setting.executors, dynamic=False)
    with capturing(setting.op):
        expected = execute(run, eager, setting.gradient)
        result = execute(compiled, ours, setting.gradient)
    assert_same_metadata(result[0], expected[0])
    assert_same_metadata(
        result[1], expected[1], strides=False
    )  # autograd promises none for gradients
    if setting.has_values and not _draws_its_own(compiled, setting.executors):
        assert_same_values([c.args for c in ours], [c.args for c in eager])
        try:
            assert_same_values(result, expected)
        except AssertionError:  # rounding, or wrong? Float64 decides
            exact = execute(run, [exactly(call) for call in eager], setting.gradient)
            assert_error_at_most_twice_eager(
                tensors_of(result), tensors_of(expected), tensors_of(exact)
            )
    if compiled.breaks and len(ours) > 1:
        raise AssertionError(f"the graph breaks: {compiled.breaks[0]}")
    return compiled.graphs


def _draws_its_own(compiled: Any, executors: list[str]) -> bool:
    """Generated kernels have their own random stream, so their numbers differ from eager's."""
    nodes = [node for trace in compiled.history for node in trace.ops]
    return "fuser" in executors and any(map(is_random, nodes))


def exactly(call: Call) -> Call:
    """The same call in float64 or complex128."""

    def widen(value: Any) -> Any:
        if getattr(value, "acc_dtype", None) is not None:  # options of linear_cross_entropy
            return replace(value, acc_dtype=None)
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        wide = torch.complex128 if value.is_complex() else torch.float64
        return value.detach().to(wide).requires_grad_(value.requires_grad)

    args, kwargs = pytree.tree_map(widen, (call.args, call.kwargs))
    return Call(args, kwargs, call.process)


def check(setting: Setting, limit: int | None) -> Tally:
    """Compare all samples of one operator."""

    def make() -> list[Call]:
        return calls(setting, limit)

    tally = Tally()
    eager, ours = make(), make()
    for start in range(0, len(eager), GROUP):
        members = slice(start, start + GROUP)
        try:
            tally.graphs += len(compare(setting, eager[members], ours[members]))
            tally.samples += len(eager[members])
        except (AssertionError, RuntimeError, TypeError, ValueError, FulguriteError) as error:
            if not _one_by_one(setting, make()[members], make()[members], tally):
                raise error
    return tally


def _one_by_one(setting: Setting, eager: list[Call], ours: list[Call], tally: Tally) -> bool:
    """Find the sample that made a group fail. True if a sample explains it without being wrong.

    Samples that eager refuses don't count; one that capture leaves to eager is noted.
    """
    explained = False
    for index, (one, two) in enumerate(zip(eager, ours, strict=True)):
        if _refused(setting, one):
            tally.refused += 1
            explained = True
            continue
        graphs = compare(setting, [one], [two])
        tally.samples += 1
        tally.graphs += len(graphs)
        if not graphs:
            tally.uncaptured.append(f"sample {index} of {len(eager)}")
            explained = True
    return explained


def _refused(setting: Setting, call: Call) -> bool:
    try:
        execute(program(setting.op.op), [call], setting.gradient)
    except (RuntimeError, AssertionError):  # mostly: not implemented for this dtype or device
        return True
    return False


def differentiable(op: OpInfo, dtype: torch.dtype, device: str = "cpu") -> bool:
    return op.supports_autograd and dtype in op.supported_backward_dtypes(device)
