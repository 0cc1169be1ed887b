"""Where TorchDynamo fails or is wrong on programs that eager mode runs.

In: their functions. Out: the same functions, corrected when this module is first used.

- An op that its FakeTensor rule refuses and the op itself takes is a graph break: torch runs that op, and
  capture goes on after it. If the op fails as well, its own error is raised. With `FULGURITE_STRICT=1` and
  `fullgraph=True` the failed capture is an error. `program_errors.py` has what concerns errors of the program
  itself, `aot_fixes.py` what concerns AOTAutograd, `python_numbers.py` the arithmetic of symbols,
  `tensor_attributes.py` attributes, `matmul_rules.py` the rules of grouped matmuls, `kernel_layouts.py` strides and
  dtypes, `autograd_functions.py` functions with a backward of their own.
- A function on which TorchDynamo itself fails runs in eager mode (`failed_functions.py`).
- `multilabel_margin_loss` is traced as one op: its decomposition counts labels after the first -1.
- `max_unpool2d` and `max_unpool3d` are traced as one op: in their decompositions an index out of range may write
  to the next channel.
- `dropout` that drops nothing (p = 0, or not in training) returns its input: a later in-place op writes to it.
  TorchDynamo traces a copy.
- `diagonal` beyond the tensor has no element, and starts where the tensor does. torch's rule for traced tensors
  gives an offset past the end, which a later `as_strided` counts from.
- Padding with a constant by symbols that are 0 or negative keeps the order of strides, as by numbers.
- `threshold_backward` of two dtypes has the dtype that both promote to. torch's rule takes the gradient's.
- The gradient of `F.affine_grid` takes symbolic sizes: torch's own takes numbers only.
- Norms of bfloat16 or float16 numbers with float32 parameters save their statistics in float32 on CPUs, and
  running statistics keep their dtype (`mixed_norms.py`).
- The norm of vectors along negative dimensions of size 1 has the shape of the op's result (before torch 2.13).
- `F.channel_shuffle` of one group, or of groups of one channel, is contiguous: the FakeTensor rule for GPUs
  gives it the strides of its input, of which several elements may share an address. Results of other ops have
  the strides and dtypes of torch's kernels (`kernel_layouts.py`).
- `select_scatter`, `slice_scatter` and `diagonal_scatter` of an expanded tensor have memory for each element.
  Before torch 2.13 their FakeTensor rules kept stride 0. The rule of `zero` gave contiguous strides.
- Elementwise ops of tensors that are contiguous and channels-last, as with one channel, give contiguous ones.
  The FakeTensor rule went by the strides of dimensions of size 1, and a later `cat` was channels-last.
- `torch._foreach_lerp_` writes its tensors one after another (`foreach.py`).
- `F.interpolate(mode="nearest")` of an empty batch is captured: the check in its FakeTensor rule computes an
  integer and demands a bool.
- The gradient of a mean loss of no elements (`mse_loss`, `smooth_l1_loss`, `huber_loss`) is empty. torch's
  decompositions divide by zero.
- `x in values` of tensors is true for a tensor that is one of the values, and otherwise a graph break: Python
  asks for the truth of each `==`. TorchDynamo returns a tensor.
- A NumPy function of a tensor is a graph break: eager mode's result may be a tensor, TorchDynamo's is an array.
  So is `numpy.random`: TorchDynamo takes its numbers from torch's generator.
- A method of a `random.Random` from outside the function is a graph break: TorchDynamo captures its state as a
  constant, so each call drew the same number.
- `isinstance` calls the `__instancecheck__` of a metaclass at each capture of an object whose attributes it reads,
  with guards on them.
- `5 in (n, m)`, `n in range(5)` and `values.pop(n)` with integers that became symbols take their values.
- The attributes of a method are those of its function, as `inspect.getfullargspec` reads them. TorchDynamo fails
  on methods, which have no `__dict__`.
- A lazy module whose first input has symbolic sizes gets the numbers that its parameters and attributes need.
- A branch whose outcome the range of `torch.rand` decides is no graph break: `if torch.rand([]) < p` with p = 0,
  as models write to skip layers at random.
"""

from __future__ import annotations

import dis
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, NoReturn

import numpy as np
import torch
import torch._meta_registrations
import torch._prims_common
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import decomposition_table, decompositions
from torch._dynamo import exc, polyfills, symbolic_convert, trace_rules, utils
from torch._dynamo.variables import builder, builtin, dicts, lists, misc, nn_module
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import SkipFunctionVariable, WrapperUserFunctionVariable
from torch._dynamo.variables.tensor import (
    NumpyNdarrayVariable,
    SymNodeVariable,
    TensorVariable,
)
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false, is_cpu_scalar_tensor
from torch._subclasses.fake_impls import register_op_impl
from torch.fx.experimental.symbolic_shapes import (
    PendingUnbackedSymbolNotFound,
    guard_or_false,
)
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fulgurite.capture import (
    aot_fixes,
    autograd_functions,
    failed_functions,
    kernel_layouts,
    matmul_rules,
    python_numbers,
    recurrent,
    tensor_attributes,
)
from fulgurite.capture.foreach import lerp_in_place
from fulgurite.capture.mixed_norms import (
    fake_group_norm,
    fake_group_norm_backward,
    keep_dtype_of_input,
    keep_dtype_of_running_statistics,
    save_float32_statistics,
)
from fulgurite.capture.program_errors import (
    breaks_at_failed_op,
    check_node,
    mark_assert,
)
from fulgurite.errors import FallbackWarning
from fulgurite.logs import LOG
from fulgurite.transforms.vector_norm import vector_norm

BRANCHES = (
    *("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP"),
    *("POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE"),
    *("POP_JUMP_BACKWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_TRUE"),
    *("UNARY_NOT", "TO_BOOL"),
)
# a < b is b > a
MIRRORED = {
    operator.lt: operator.gt,
    operator.gt: operator.lt,
    operator.le: operator.ge,
    operator.ge: operator.le,
}
SUM = 2  # a `reduction` of losses
NUMBERS: dict[type, Callable[[Any], Any]] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
}
TO_ARRAY = (np.array, np.asarray, np.asanyarray, np.ascontiguousarray)
NOT_USERS = sys.stdlib_module_names | {"torch"}  # packages
_installed = False


def install() -> None:
    """Correct TorchDynamo's functions, once."""
    global _installed
    if _installed:
        return
    _installed = True
    _replace(utils, "_wrap_graph_break_with_torch_runtime_err", _break_at_failed_op)
    _replace(utils, "run_node", check_node)
    _replace(builder, "set_example_value", _break_at_unbound_sizes)
    _use_kernel_when_traced(torch.ops.aten.multilabel_margin_loss_forward.default)
    _use_kernel_when_traced(torch.ops.aten.max_unpool2d.default)
    _use_kernel_when_traced(torch.ops.aten.max_unpool3d.default)
    _return_input_of_dropout(torch.ops.aten.dropout.default)
    _trace_by(torch.ops.aten.diagonal.default, _view_diagonal)
    pad = torch.ops.aten.constant_pad_nd.default
    _use_shape_rule(pad, _pad_by_symbols(pad.py_kernels[DispatchKey.Meta]))
    _trace_by(torch.ops.aten.threshold_backward.default, _threshold_backward)
    _correct_mixed_norms()
    _use_shape_rule(torch.ops.aten.linalg_vector_norm.default, vector_norm)
    shuffle = torch.ops.aten.channel_shuffle.default
    grid_backward = torch.ops.aten.affine_grid_generator_backward.default
    _compute_when_traced(grid_backward, _affine_grid_backward)
    _use_shape_rule(shuffle, _make_contiguous(shuffle.py_kernels[DispatchKey.Meta]))
    _replace(torch._prims_common, "clone_preserve_strides", _copy_expanded)
    order = "compute_elementwise_output_logical_to_physical_perm"
    _replace(torch._prims_common, order, _order_contiguous_first)
    _use_shape_rule(torch.ops.aten.zero.default, torch.empty_like)
    _replace(torch._meta_registrations, "multiply_integers", _as_condition)
    _replace(polyfills, "foreach_lerp_inplace", lambda _: lerp_in_place)
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss"):
        op = getattr(torch.ops.aten, name + "_backward").default
        decomposition_table[op] = _sum_of_no_elements(decomposition_table[op])
        register_op_impl(op)(_fake_by_decomposition)
    # before torch 2.13; like `pack_padded_sequence` it has no FakeTensor rule: its sizes are values
    trace_rules.manual_torch_name_rule_map.setdefault(
        "torch.nn.utils.rnn.pad_packed_sequence", SkipFunctionVariable
    )
    trace_rules.clear_lru_cache()
    _replace(misc.NumpyVariable, "call_function", _break_at_functions_of_tensors)
    _replace(misc.RandomVariable, "call_method", _break_at_generator)
    _replace(builtin.BuiltinVariable, "call_isinstance", _trace_instance_check)
    _replace(lists, "iter_contains", _contains)
    _replace(lists.CommonListMethodsVariable, "call_method", _pop)
    _replace(lists.RangeVariable, "sq_contains", _range_contains)
    _replace(lists.RangeVariable, "range_count", _range_count)  # before torch 2.13
    for kind in (UninitializedParameter, UninitializedBuffer):
        _replace(kind, "materialize", _materialize_by_numbers)
    _replace(nn_module, "initialize_lazy_module", _specialize_attributes)
    proxy = getattr(dicts, "SideEffectsProxyDict", None)  # since torch 2.13
    _replace(proxy, "get_example_value_dict", _read_attributes_of_method)
    aot_fixes.install()
    autograd_functions.install()
    failed_functions.install()
    kernel_layouts.install()
    python_numbers.install()
    matmul_rules.install()
    recurrent.install()
    tensor_attributes.install()
    for translator in _subclasses(symbolic_convert.InstructionTranslatorBase):
        for name in BRANCHES:
            _replace_instruction(translator, name, _decide_branch)
            _replace_instruction(translator, name, mark_assert)


def _use_kernel_when_traced(op: OpOverload) -> None:
    """Trace an op as itself, not as the decomposition that torch has for it."""
    op.py_kernels.pop(DispatchKey.Autograd, None)
    op._dispatch_cache.clear()


def _compute_when_traced(op: OpOverload, rule: Callable[..., Any]) -> None:
    """Trace an op that torch computes by others as the ops of `rule`."""
    op.py_kernels[DispatchKey.CompositeImplicitAutograd] = rule
    op._dispatch_cache.clear()


def _use_shape_rule(op: OpOverload, rule: Callable[..., Any]) -> None:
    """Let FakeTensors have the sizes and strides of `rule`."""
    op.py_kernels[DispatchKey.Meta] = rule
    op._dispatch_cache.clear()


def _make_contiguous(rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: rule(*args).contiguous()


def _order_contiguous_first(find_order: Callable[..., Any]) -> Callable[..., Any]:
    """Elementwise ops of tensors that are contiguous and channels-last, as with one channel."""

    def find(*tensors: Any, **options: Any) -> tuple[list[int], bool]:
        arrays = [x for x in tensors if isinstance(x, Tensor) and not is_cpu_scalar_tensor(x)]
        if arrays and all(map(is_contiguous_or_false, arrays)):
            return [*range(arrays[0].dim())], False
        return find_order(*tensors, **options)

    return find


def _copy_expanded(copy_with_strides: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def copy(x: Tensor) -> Tensor:
        pairs = zip(x.shape, x.stride(), strict=True)
        is_expanded = any(
            guard_or_false(stride == 0) and not guard_or_false(size == 1) for size, stride in pairs
        )
        return x.clone() if is_expanded else copy_with_strides(x)

    return copy


def _as_condition(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda sizes: original(sizes) != 0


def _return_input_of_dropout(op: OpOverload) -> None:
    """Trace dropout that drops nothing as its input, as eager mode runs it."""
    for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd):
        drop = op.py_kernels.get(key)
        if drop is not None:
            op.py_kernels[key] = lambda x, p, train, drop=drop: (
                drop(x, p, train) if train and p else x
            )
    op._dispatch_cache.clear()


def _trace_by(op: OpOverload, rule: Callable[..., Any]) -> None:
    """Find sizes, strides and dtype of an op's result, and decompose it, by a rule of ours."""
    _use_shape_rule(op, rule)
    decomposition_table[op] = rule


def _correct_mixed_norms() -> None:
    for correct in (
        save_float32_statistics,
        keep_dtype_of_running_statistics,
        kernel_layouts.keep_memory_format,
    ):
        _replace(decompositions, "native_batch_norm_helper", correct)
    _replace(torch._refs, "native_layer_norm", save_float32_statistics)
    layer_norm = torch.ops.aten.native_layer_norm.default
    _trace_by(layer_norm, save_float32_statistics(decomposition_table[layer_norm]))
    group_norm = torch.ops.aten.native_group_norm.default
    decomposition_table[group_norm] = save_float32_statistics(decomposition_table[group_norm])
    register_op_impl(group_norm)(fake_group_norm)
    backward = torch.ops.aten.native_group_norm_backward.default
    decomposition_table[backward] = keep_dtype_of_input(decomposition_table[backward])
    register_op_impl(backward)(fake_group_norm_backward)


def _view_diagonal(self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    result: Tensor = torch._refs.diagonal(self, offset, dim1, dim2)
    if offset and guard_or_false(result.shape[-1] == 0):
        return self.as_strided(result.shape, result.stride(), self.storage_offset())
    return result


def _pad_by_symbols(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Without an added element the op copies a part of its input; torch's rule looks at numbers only."""

    def pad(input: Tensor, pad: list[Any], value: Any = 0) -> Tensor:
        padded: Tensor = rule(input, pad, value)
        if input.is_contiguous() or not all(guard_or_false(amount <= 0) for amount in pad):
            return padded
        part = input
        for number, before in enumerate(pad[::2]):
            dim = input.dim() - 1 - number
            part = part.narrow(dim, -before, padded.shape[dim])
        return part.clone()

    return pad


def _affine_grid_backward(grad: Tensor, size: list[Any], align_corners: bool) -> Tensor:
    """The sum over positions p of outer(grad[p], grid[p])."""
    is_image = len(size) == 4
    make = decompositions._make_base_grid_4d if is_image else decompositions._make_base_grid_5d
    grid = make(grad, *size[2:], align_corners)
    positions = grid.reshape(-1, grid.shape[-1])
    rows = grad.reshape(grad.shape[0], positions.shape[0], grad.shape[-1])
    return (positions.t() @ rows).transpose(1, 2)


def _threshold_backward(grad_output: Tensor, self: Tensor, threshold: float) -> Tensor:
    grad = grad_output.to(torch.result_type(grad_output, self))
    return torch.where(self <= threshold, 0, grad)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function where this version of torch has it."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, make(original))


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    subclass: type[Any]
    for subclass in kind.__subclasses__():
        yield from _subclasses(subclass)


def _replace_instruction(translator: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace what a bytecode instruction does, where this version of Python has it."""
    opcode = dis.opmap.get(name)
    if opcode is not None and translator.dispatch_table[opcode] is not None:
        translator.dispatch_table[opcode] = make(translator.dispatch_table[opcode])


def _decide_branch(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def run(translator: Any, instruction: Any) -> Any:
        truth = _find_truth(translator.stack[-1]) if translator.stack else None
        if truth is not None:
            translator.stack[-1] = ConstantVariable.create(truth)
        return original(translator, instruction)

    return run


def _find_truth(variable: Any) -> bool | None:
    """The value of a comparison of `torch.rand` with a number; None: it is none, or a random one."""
    if not isinstance(variable, TensorVariable) or variable.proxy.node.op != "call_function":
        return None
    node = variable.proxy.node
    if node.target not in MIRRORED or len(node.args) != 2:
        return None
    (left, right), compare = node.args, node.target
    if isinstance(left, int | float):
        left, right, compare = right, left, MIRRORED[compare]
    if getattr(left, "target", None) is not torch.rand or not isinstance(right, int | float):
        return None
    outcomes = {compare(bound, right) for bound in (0.0, 1.0)}  # half-precision numbers round to 1
    return outcomes.pop() if len(outcomes) == 1 else None


def _break_at_unbound_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """An op whose size depends on data in a form that TorchDynamo can't read back is a graph break.

    `torch.arange(x[0], x[-1])` of floats: before torch 2.13, TorchDynamo fails with an internal error.
    """

    def set_example_value(node: torch.fx.Node, value: Any) -> Any:
        try:
            return original(node, value)
        except PendingUnbackedSymbolNotFound as error:
            mode = detect_fake_mode(value)  # of one tensor, or of several
            assert mode is not None and mode.shape_env is not None, "a fake value has a fake mode"
            mode.shape_env.pending_fresh_unbacked_symbols.clear()
            exc.unimplemented(
                gb_type="Size that depends on data",
                context=str(node.target),
                explanation=f"the size of the result of {node.target} depends on data: {error}",
                hints=[],
            )

    return set_example_value


def _break_at_failed_op(original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    def raise_for_failed_op(raise_graph_break: Callable[[], NoReturn]) -> NoReturn:
        if not breaks_at_failed_op():
            original(raise_graph_break)
        try:
            raise_graph_break()
        except exc.Unsupported as error:
            message = str(error).partition("Hint:")[0].strip()
            LOG.warning("capture failed, eager mode runs the op: %s", message)
            warnings.warn(
                f"an op could not be captured: {message}\n"
                "  runs instead   the op itself, between two graphs\n"
                "  next           torch refuses these inputs while capturing; FULGURITE_STRICT=1 raises "
                "the error",
                FallbackWarning,
                stacklevel=2,
            )
            raise

    return raise_for_failed_op


def _sum_of_no_elements(gradient: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The gradient of a loss: its mean over no elements is a sum, which needs no division."""

    def differentiate(
        grad: Tensor, x: Tensor, target: Tensor, reduction: int, *args: Any
    ) -> Tensor:
        is_empty = guard_or_false(x.numel() == 0)
        return gradient(grad, x, target, SUM if is_empty else reduction, *args)

    return differentiate


def _fake_by_decomposition(mode: Any, op: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    with mode:
        return decomposition_table[op](*args, **kwargs)  # type: ignore[no-any-return]


def _break_at_functions_of_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        is_random = getattr(self.value, "__self__", None) is np.random.mtrand._rand
        is_random |= getattr(self.value, "__module__", None) == "numpy.random"
        values = [value.realize() for value in (*args, *kwargs.values())]
        takes_tensor = any(
            isinstance(value, TensorVariable) and not isinstance(value, NumpyNdarrayVariable)
            for value in values
        )
        if is_random or (takes_tensor and self.value not in TO_ARRAY):
            exc.unimplemented(
                gb_type="NumPy function that can't be captured",
                context=str(self.value),
                explanation="It draws random numbers of NumPy, or takes a tensor.",
                hints=["Use the function of torch."],
            )
        return original(self, tx, args, kwargs)

    return call_function


def _break_at_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: Any) -> Any:
        if self.source is not None:
            exc.unimplemented(
                gb_type="Generator of random numbers",
                context=f"random.Random.{name}",
                explanation="Its state changes with each call.",
                hints=["Pass the number as an argument, or use the functions of `random`."],
            )
        return original(self, tx, name, args, kwargs)

    return call_method


def _read_attributes_of_method(original: Callable[..., Any]) -> Any:
    def get_example_value_dict(variable: Any) -> Any:
        is_wrapper = isinstance(variable, WrapperUserFunctionVariable)
        wrapped = variable.get_function() if is_wrapper else None
        return vars(wrapped.__func__) if isinstance(wrapped, MethodType) else original(variable)

    return staticmethod(get_example_value_dict)


def _trace_instance_check(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_isinstance(self: Any, tx: Any, arg: Any, kind_variable: Any) -> Any:
        arg = arg.realize()
        kind = kind_variable.as_python_constant() if kind_variable.is_python_constant() else None
        check = type(kind).__dict__.get("__instancecheck__")
        package = getattr(check, "__module__", "").partition(".")[0]
        # torch's own (of nn.Parameter) does what TorchDynamo assumes, and can't be traced
        is_users = isinstance(check, FunctionType) and package not in NOT_USERS
        if not is_users or not isinstance(arg, UserDefinedObjectVariable):
            return original(self, tx, arg, kind_variable)
        if arg.value_type is kind:  # Python does not ask the metaclass
            return ConstantVariable.create(True)
        result = VariableTracker.build(tx, check).call_function(tx, [kind_variable, arg], {})
        return VariableTracker.build(tx, bool).call_function(tx, [result], {})

    return call_isinstance


def _contains(original: Callable[..., Any]) -> Callable[..., Any]:
    def contains(items: Iterable[Any], search: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(items)
        search = search.realize()
        if isinstance(search, TensorVariable) and type(search) is TensorVariable:
            return _contains_tensor(items, search)
        if isinstance(search, SymNodeVariable) or search.is_python_constant():
            search, items = _specialize(search), [_specialize(item) for item in items]
        return original(items, search, *args, **kwargs)

    return contains


def _contains_tensor(items: list[Any], search: TensorVariable) -> Any:
    """Whether a tensor is one of some values, as far as no `==` is needed to tell."""
    node = search.as_proxy().node
    for item in items:
        item = item.realize()
        if isinstance(item, TensorVariable) and item.as_proxy().node is node:
            return ConstantVariable.create(True)
        exc.unimplemented(
            gb_type="Search for a tensor among other values",
            context=str(search),
            explanation="`in` compares the tensor with each value, and asks for the truth of the result.",
            hints=["Use `any(x is y for y in values)`, or `torch.isin`."],
        )
    return ConstantVariable.create(False)


def _pop(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: Any) -> Any:
        if name == "pop":
            args = [_specialize(arg) for arg in args]
        return original(self, tx, name, args, kwargs)

    return call_method


def _range_contains(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tx, item: original(self, tx, _specialize(item))


def _range_count(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, item: original(self, _specialize(item))


def _specialize(variable: Any) -> Any:
    """A symbol as its value, with a guard on it."""
    variable = variable.realize()
    if isinstance(variable, SymNodeVariable):
        return ConstantVariable.create(variable.evaluate_expr())
    return variable


def _materialize_by_numbers(original: Callable[..., None]) -> Callable[..., None]:
    def materialize(self: Any, shape: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(shape, Iterable):
            shape = tuple(int(size) for size in shape)
        original(self, int(shape) if isinstance(shape, torch.SymInt) else shape, *args, **kwargs)

    return materialize


def _specialize_attributes(original: Callable[..., None]) -> Callable[..., None]:
    """Attributes of the user's module, such as `in_features`, outlive the capture and its symbols."""

    def initialize(tx: Any, module: torch.nn.Module, args: list[Any], kwargs: Any) -> None:
        original(tx, module, args, kwargs)
        for name, value in vars(module).items():
            for kind, convert in NUMBERS.items():
                if isinstance(value, kind):
                    setattr(module, name, convert(value))

    return initialize
