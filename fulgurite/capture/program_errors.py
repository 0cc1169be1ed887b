"""Errors of the program while TorchDynamo captures it: eager mode decides what is raised, and where.

In: TorchDynamo's functions and instructions, and what runs a graph. Out: the same, corrected.

- An op that fails inside `try` is a graph break: Python runs the handler. TorchDynamo raises the error of the
  FakeTensor rule past the handler.
- An op that writes to a tensor whose elements share memory, or to memory that another argument overlaps
  (`x.expand(3, 3).add_(1)`, `x[1:].add_(x[:-1])`), is a graph break: eager mode refuses most of them, and
  FakeTensor rules don't look.
- An in-place op whose result does not fit into its tensor is an error (`in_place_errors.py`).
- `assert condition, message` of a tensor raises AssertionError. TorchDynamo makes an op of it, which raises
  RuntimeError. Inside `try`, an assert is a graph break.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import exc, symbolic_convert
from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fulgurite.capture.in_place_errors import CheckInPlaceOps, is_in_place
from fulgurite.capture.input_aliasing import has_storage
from fulgurite.capture.python_numbers import check_cause, check_domain
from fulgurite.config import settings
from fulgurite.trace.cost import size_hint

ASSERTION = "AssertionError: "  # how the messages of asserts start in graphs
NO_MESSAGE = "AssertionError"
OVERLAPPING_WRITE = "In-place write to memory that several elements share"
HINT = "Write to a clone() of the tensor."


class _Capture(threading.local):
    """Whether this thread captures for us, and whether its capture must be one graph."""

    is_active = False
    fullgraph = False


capture = _Capture()


def breaks_at_failed_op() -> bool:
    """Whether an op that fails on FakeTensors is a graph break. In strict mode: only if the program may
    catch the error, so that failures of capture are seen."""
    if capture.fullgraph:
        return False
    return not settings().strict or _is_caught(_current_translator())


def skips_failed_functions() -> bool:
    """Whether a function that TorchDynamo can't capture, for an error of its own, runs in eager mode."""
    return capture.is_active and not capture.fullgraph and not settings().strict


def _current_translator() -> Any:
    """What translates the innermost function that TorchDynamo captures now."""
    return symbolic_convert.InstructionTranslator.current_tx().output.current_tx


def _is_caught(translator: Any) -> bool:
    """Whether the captured functions may catch an error at their current instructions."""
    while translator is not None:
        managers = [entry.with_context for entry in translator.block_stack]
        managers += translator.active_generic_context_managers
        if any(isinstance(manager, GenericContextWrappingVariable) for manager in managers):
            return True  # contextlib.suppress, for example
        if any(map(_is_except, _handlers(translator))):
            return True
        translator = translator.parent
    return False


def _handlers(translator: Any) -> Iterator[list[str]]:
    """The first instructions of each handler around the current instruction, innermost first."""
    seen = set()
    entry = translator.current_instruction.exn_tab_entry
    while entry is not None and entry.target not in seen:
        seen.add(entry.target)
        start = translator.indexof[entry.target]
        yield [instruction.opname for instruction in translator.instructions[start : start + 2]]
        entry = entry.target.exn_tab_entry


def _is_except(opnames: list[str]) -> bool:
    """Whether a handler is that of `try`: not of `with`, and no clean-up after a handler."""
    return opnames[0] == "PUSH_EXC_INFO" and opnames[1:] != ["WITH_EXCEPT_START"]


# ---- errors that are no RuntimeError, and overlapping writes ----------------------------------------


def check_node(original: Callable[..., Any]) -> Callable[..., Any]:
    """`run_node` of TorchDynamo, which runs one op on FakeTensors."""

    def run_node(tracer: Any, node: fx.Node, args: Any, kwargs: Any, module: Any) -> Any:
        check_domain(node.target, args)
        overlap = _BreakAtOverlappingWrites() if _may_overlap((args, kwargs)) else nullcontext()
        fit = CheckInPlaceOps() if is_in_place(node) else nullcontext()
        try:
            with overlap, fit:
                return original(tracer, node, args, kwargs, module)
        except RuntimeError as error:
            check_cause(node.target, args, error)
            raise
        except IndexError as error:  # TorchDynamo has no graph break for these
            if not breaks_at_failed_op():
                raise
            raise RuntimeError(str(error)) from error

    return run_node


def _may_overlap(values: Any) -> bool:
    """Whether a tensor has several elements at one address, or two tensors are in one storage."""
    tensors = [value for value in pytree.tree_leaves(values) if has_storage(value)]
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    return len(storages) < len(tensors) or any(map(_shares_elements, tensors))


class _BreakAtOverlappingWrites(TorchDispatchMode):
    """Break the graph at ops that eager mode may refuse for the memory that they write."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and _writes_overlapping_memory(func, args, kwargs):
            exc.unimplemented(
                gb_type=OVERLAPPING_WRITE,
                context=str(func),
                explanation=f"`{func}` writes to memory that it reads by another argument, or to "
                "one address more than once. Eager mode refuses most such writes.",
                hints=[HINT],
            )
        return func(*args, **kwargs)


def _writes_overlapping_memory(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    written: list[Tensor] = []
    read: dict[int, list[Tensor]] = defaultdict(list)  # by storage
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        tensors = [one for one in pytree.tree_leaves(value) if has_storage(one)]
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors
        else:
            for tensor in tensors:
                read[tensor.untyped_storage()._cdata].append(tensor)
    may_be_equal = torch.Tag.pointwise in func.tags or func is torch.ops.aten.copy_.default
    return any(map(_shares_elements, written)) or any(
        _overlaps(tensor, other, may_be_equal)
        for tensor in written
        for other in read[tensor.untyped_storage()._cdata]
    )


def _shares_elements(tensor: Tensor) -> bool:
    """Whether several elements certainly share an address, as in `expand`."""
    sizes = [size_hint(size) for size in tensor.shape]
    pairs = zip(sizes, map(size_hint, tensor.stride()), strict=True)
    return 0 not in sizes and any(stride == 0 and size > 1 for size, stride in pairs)


def _overlaps(written: Tensor, read: Tensor, may_be_equal: bool) -> bool:
    """Whether two dense tensors of a storage overlap. Of others, eager mode does not know it either."""
    spans = [_dense_span(tensor) for tensor in (written, read)]
    if spans[0] is None or spans[1] is None:
        return False
    (start, end), (other_start, other_end) = spans[0], spans[1]
    if not (_is_less(start, other_end) and _is_less(other_start, end)):
        return False
    has_same_bytes = (size_hint(start), size_hint(end)) == (
        size_hint(other_start),
        size_hint(other_end),
    )
    strides = [list(map(size_hint, tensor.stride())) for tensor in (written, read)]
    return not (may_be_equal and has_same_bytes and strides[0] == strides[1])


def _is_less(a: Any, b: Any) -> bool:
    """Whether a < b, with a guard on symbols of inputs."""
    is_guarded = all(isinstance(n, int) or n.node.has_hint() for n in (a, b))
    return bool(a < b) if is_guarded else size_hint(a) < size_hint(b)


def _dense_span(tensor: Tensor) -> tuple[Any, Any] | None:
    """First byte and end in the storage; None if the tensor has gaps or shares elements."""
    extent = 1
    pairs = zip(map(size_hint, tensor.stride()), map(size_hint, tensor.shape), strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] != 1):
        if size and stride != extent:
            return None
        extent *= size
    start = tensor.storage_offset() * tensor.itemsize
    return start, start + tensor.numel() * tensor.itemsize


# ---- asserts ---------------------------------------------------------------------------------------


def mark_assert(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """An instruction that branches. If it became an op that asserts, its message says so."""

    def run(translator: Any, instruction: Any) -> Any:
        if _is_caught(translator):
            with torch._dynamo.config.patch(rewrite_assert_with_torch_assert=False):
                return original(translator, instruction)
        last = _last_node(translator)
        is_plain = _has_no_message(translator)
        result = original(translator, instruction)
        node = _last_node(translator)
        if node is not last and node is not None and node.target is torch._assert_async:
            condition, message = node.args
            node.args = (condition, NO_MESSAGE if is_plain else f"{ASSERTION}{message}")
        return result

    return run


def _last_node(translator: Any) -> fx.Node | None:
    # `reversed` gives an iterable that is not an iterator before torch 2.13
    return next(iter(reversed(translator.output.graph.nodes)), None)


def _has_no_message(translator: Any) -> bool:
    """Whether the instructions after the current one are those of an `assert` without a message."""
    start = translator.instruction_pointer
    following = itertools.islice(translator.instructions, start, start + 2)
    return [i.opname for i in following] == ["LOAD_ASSERTION_ERROR", "RAISE_VARARGS"]


def raise_assertion_errors(run: Callable[..., Any], captured: fx.GraphModule) -> Callable[..., Any]:
    """`run`, which raises AssertionError where an `assert` of the captured graph fails."""
    asserts = captured.graph.find_nodes(op="call_function", target=torch._assert_async)
    messages = {str(node.args[1]) for node in asserts if len(node.args) > 1}
    messages = {text for text in messages if text.startswith(NO_MESSAGE)}
    if not messages:
        return run

    def call(*args: Any) -> Any:
        try:
            return run(*args)
        except RuntimeError as error:
            text = str(error)
            if text not in messages:
                raise
        arguments = [] if text == NO_MESSAGE else [text.removeprefix(ASSERTION)]
        raise AssertionError(*arguments)

    return call
