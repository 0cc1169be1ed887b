"""Programs that eager mode runs and TorchDynamo refuses, or gets wrong."""

from __future__ import annotations

import copy
import inspect
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode

import fulgurite
from fulgurite.capture import dynamo_fixes
from fulgurite.errors import FallbackWarning, OpError

OFFSETS = torch.tensor([16, 16, 40, 64], dtype=torch.int32)


def make_inputs(dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return torch.randn(64, 16).to(dtype), torch.randn(4, 16, 8).to(dtype)


@torch.library.custom_op("dynamo_fixes::grouped_mm", mutates_args=())
def grouped_mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x, weight, offs=OFFSETS)


@grouped_mm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    torch._check(x.dtype == torch.bfloat16, lambda: "Expected inputs of BF16 type")
    return x.new_empty(x.shape[0], weight.shape[2])


def experts(x, weight):
    """The FakeTensor rule of this op takes bfloat16 only."""
    return grouped_mm(x.sin(), weight).relu()


@pytest.fixture
def lenient(monkeypatch):
    monkeypatch.delenv("FULGURITE_STRICT")


@pytest.mark.usefixtures("lenient")
def test_a_refused_op_runs_between_two_graphs():
    compiled = fulgurite.compile(experts)
    inputs = make_inputs()
    with pytest.warns(FallbackWarning, match=r"could not be captured(.|\n)*grouped_mm"):
        torch.testing.assert_close(compiled(*inputs), experts(*inputs))
    assert len(compiled.graphs) == 2
    assert "fake tensor call" in str(compiled.explain())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(*inputs), experts(*inputs))
        other = make_inputs(torch.bfloat16)  # captured whole
        torch.testing.assert_close(compiled(*other), experts(*other))
    assert len(compiled.graphs) == 3


def test_strict_mode_raises():
    with pytest.raises(OpError, match="BF16"):
        fulgurite.compile(experts)(*make_inputs())


@pytest.mark.usefixtures("lenient")
def test_fullgraph_raises():
    with pytest.raises(OpError, match="BF16"):
        fulgurite.compile(experts, fullgraph=True)(*make_inputs())


@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore::fulgurite.errors.FallbackWarning")
def test_later_parts_of_a_call():
    def function(x, weight):
        x.add_(1)
        torch._dynamo.graph_break()
        return experts(x, weight)

    x, weight = make_inputs()
    expected = experts(x + 1, weight)
    torch.testing.assert_close(fulgurite.compile(function)(x, weight), expected)


@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore::fulgurite.errors.FallbackWarning")
def test_an_op_that_fails_raises_its_own_error():
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"\(2x3 and 2x3\)"):
        fulgurite.compile(lambda x: x @ x)(x)


INTEGERS = [(1, 2), (3, 4), (5, 1), (2, 5), (-3, 7), (5, 5), (0, 0), (4, 9)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n, m: x + (1 if 5 in (n, m) else 2),
        lambda x, n, m: x + (1 if n in [m, 4, 0] else 2),
        lambda x, n, m: x + (1 if n not in range(m) else 2),
        lambda x, n, m: x + (n, m, 5).count(5) + [n, m, 5].index(5),
        lambda x, n, m: x + (1 if 5 in {1: n, 2: m}.values() else 2),
        lambda x, n, m: [x, x * 2, x * 3].pop(n % 3),
    ],
)
def test_symbols_in_containers(function):
    compiled, x = fulgurite.compile(function), torch.randn(3)
    for n, m in INTEGERS:
        torch.testing.assert_close(compiled(x, n, m), function(x, n, m))


def test_layers_chosen_by_an_argument():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

        def forward(self, x, skip):
            for index, layer in enumerate(self.layers):
                if index not in skip:
                    x = x + layer(x)
            return x

    model, x = Model(), torch.randn(2, 4)
    compiled = fulgurite.compile(model)
    for skip in ((), (1,), (0, 4), (2, 3), (1, 2), ()):
        torch.testing.assert_close(compiled(x, skip), model(x, skip))


@pytest.mark.parametrize("is_training", [False, True])
def test_labels_after_the_first_minus_one_don_t_count(is_training):
    """torch's decomposition of `multilabel_margin_loss` counts them."""
    scores = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    scores.requires_grad_(is_training)
    labels = torch.tensor([[0, 2, -1, 1, 1], [3, -1, 0, 0, 0]]).repeat(3, 1)
    loss = torch.nn.functional.multilabel_margin_loss
    torch.testing.assert_close(fulgurite.compile(loss)(scores, labels), loss(scores, labels))


@pytest.mark.parametrize(
    ("skips", "runs_layers"),
    [
        (lambda p: torch.rand([]) < p, {0.0: True, -1.0: True, 2.0: False}),
        (lambda p: p > torch.rand(()), {0.0: True, 2.0: False}),
        (lambda p: not torch.rand(()) >= p, {0.0: True, 2.0: False}),
        (lambda p: torch.rand(()) <= p, {-0.5: True, 1.0: False}),
    ],
)
def test_branches_that_the_range_of_random_numbers_decides(skips, runs_layers):
    def run(x, p):
        for _ in range(3):
            if skips(p):
                continue
            x = x + 1
        return x

    x = torch.zeros(3)
    for p, is_run in runs_layers.items():
        torch._dynamo.reset()
        compiled = fulgurite.compile(lambda x, p=p: run(x, p), fullgraph=True)
        assert compiled(x).tolist() == [3.0 * is_run] * 3


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_random_branches_stay_random(p):
    """`rand <= 0` may be true, too."""

    def run(x):
        return x + 1 if torch.rand(()) <= p else x - 1

    compiled, x = fulgurite.compile(run, executors=["torch"]), torch.zeros(2)
    for seed in range(6):
        torch.manual_seed(seed)
        right = run(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(compiled(x), right)
    assert compiled.breaks


@pytest.mark.parametrize("index", [5, 40])
def test_max_unpool_refuses_an_index_of_the_next_channel(index):
    def f(x, indices):
        return F.max_unpool1d(x * 2, indices, 2)

    x, indices = torch.randn(1, 2, 2), torch.tensor([[[0, 3], [1, 2]]])
    compiled = fulgurite.compile(f)
    assert torch.equal(compiled(x, indices), f(x, indices))
    indices[0, 0, 1] = index
    with pytest.raises(RuntimeError, match="invalid max index"):
        compiled(x, indices)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
@pytest.mark.parametrize("grad", [False, True])
def test_dropout_that_drops_nothing_returns_its_input(p, training, grad):
    def f(x):
        y = F.dropout(x, p, training)
        y.add_(1)
        return y * 2, x * 3

    compiled = fulgurite.compile(f)
    ours, eager = (torch.arange(6.0, requires_grad=grad) * 1 for _ in range(2))
    torch.testing.assert_close(compiled(ours), f(eager))
    torch.testing.assert_close(ours, eager)


def test_dropout_draws_numbers():
    torch.manual_seed(0)
    dropped = fulgurite.compile(lambda x: F.dropout(x, 0.5))(torch.ones(1000))
    assert 300 < int((dropped == 0).sum()) < 700


@pytest.mark.parametrize("offset", [-9, -2, 1, 9])
def test_views_of_an_empty_diagonal(offset):
    def f(x):
        return x.diagonal(offset).as_strided((2,), (1,))

    compiled = fulgurite.compile(f)
    for size in (2, 3, 4, 5):
        x = torch.randn(size, size)
        for _ in range(2):  # later calls run the host program
            torch.testing.assert_close(compiled(x), f(x))


@pytest.mark.parametrize("amount", [0, -1, 2])
@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 5)])
def test_padding_by_a_symbol_has_the_strides_of_eager(amount, shape):
    def pad(x, n):
        return F.pad(x, (n, 0)), F.pad(x, (0, 0, n, n), value=3.0)

    x = torch.arange(float(math.prod(shape))).view(shape).mT
    for ours, eager in zip(
        fulgurite.compile(pad, dynamic=True)(x, amount), pad(x, amount), strict=True
    ):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


@pytest.mark.parametrize("dtypes", [(torch.int64, torch.float32), (torch.float32, torch.float64)])
def test_dtype_of_a_gradient_of_two_dtypes(dtypes):
    op = torch.ops.aten.threshold_backward
    grad, x = (torch.tensor([-3, 0, 2]).to(dtype) for dtype in dtypes)
    expected = op(grad, x, 1)
    found = fulgurite.compile(lambda grad, x: op(grad, x, 1))(grad, x)
    torch.testing.assert_close(found, expected)


@pytest.mark.covering
@pytest.mark.parametrize("order", [1, 2, -1.5, float("inf")])
@pytest.mark.parametrize(
    ("size", "dim"), [((1,), -1), ((2, 1), -1), ((1, 3), -2), ((1, 1, 2), (-3, 1))]
)
@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_along_negative_dimensions_of_size_1(order, size, dim, keepdim):
    def norm(x):
        result = torch.linalg.vector_norm(x, order, dim, keepdim)
        return result, result.new_zeros(result.shape)

    x = torch.full(size, -3.0)
    torch.testing.assert_close(fulgurite.compile(norm)(x), norm(x))


def test_a_norm_along_a_dimension_that_is_none():
    with pytest.raises((IndexError, OpError), match="Dimension out of range"):
        fulgurite.compile(lambda x: torch.linalg.vector_norm(x, 1, -3))(torch.ones(1, 1))


SHARED = {
    "overlap": lambda x: (x[1:5], x[2:]),
    "one in the other": lambda x: (x[2:], x),
    "rows": lambda x: (x.view(4, 2)[1:], x.view(4, 2)[2]),
    "transposed": lambda x: (x.view(4, 2).t(), x.view(4, 2)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("views", SHARED.values(), ids=SHARED)
def test_outputs_that_are_views_of_inputs_that_share_memory(views, dynamic):
    def write(x, y):
        x.add_(1)
        return x[:1], x[1:], y.view(-1)[1:], x.t(), x, x.sum()

    compiled = fulgurite.compile(write, dynamic=dynamic)
    memory, eager_memory = torch.arange(8.0), torch.arange(8.0)
    results, expected = compiled(*views(memory)), write(*views(eager_memory))
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(memory, eager_memory)
    for ours, eager in zip(results[:-1], expected[:-1], strict=True):
        assert ours.storage_offset() == eager.storage_offset()
        assert ours.untyped_storage().data_ptr() == memory.data_ptr()


@pytest.mark.parametrize("end", [5, 8])
def test_inputs_that_share_memory_are_outputs(end):
    def write(x, y):
        return x.mul_(2), y.add_(1), x[1]

    def inputs():
        memory = torch.arange(24.0).view(8, 3)
        return memory[:end], memory[:5]

    compiled, (x, y) = fulgurite.compile(write), inputs()
    results = compiled(x, y)
    torch.testing.assert_close((*results, x, y), (*write(*(eager := inputs())), *eager))
    assert results[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_upsampling_of_an_empty_batch(mode, dims):
    def upsample(x):
        return F.interpolate(x, size=4, mode=mode) + 1

    x = torch.ones(0, 2, *[3] * dims)
    torch.testing.assert_close(fulgurite.compile(upsample)(x), upsample(x))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_fake_results_of_channel_shuffle_are_contiguous(groups):
    dynamo_fixes.install()
    with FakeTensorMode(), enable_python_dispatcher():
        x = torch.empty_strided((2, 4, 3), (0, 1, 4), device="cuda")
        assert F.channel_shuffle(x, groups).stride() == (12, 3, 1)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_size_from_floats_of_a_tensor_is_captured_or_a_graph_break():
    """Before torch 2.13, TorchDynamo fails with an internal error: transformers' Funnel."""

    def positions(x):
        pos = torch.arange(0, 8, dtype=x.dtype)
        return x.sum() + torch.arange(pos[-1], pos[0] - 1, -1, dtype=torch.long)

    x = torch.randn(4)
    torch.testing.assert_close(fulgurite.compile(positions)(x), positions(x))


WRITES = {
    "select": lambda x: x.unbind(0)[-1].mul_(-1),
    "slice": lambda x: x[1:].mul_(-1),
    "diagonal": lambda x: x.diagonal().mul_(-1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_through_a_view_of_an_expanded_tensor(write, dynamic):
    def program(x):
        y = x.expand(2, *x.shape)[:, 1]
        write(y)
        return y

    compiled = fulgurite.compile(program, dynamic=dynamic)
    given, ours = (torch.tensor([[2.0, 3.0], [1.75, 4.0]]) for _ in range(2))
    expected = program(given)
    torch.testing.assert_close(compiled(ours), expected, rtol=0, atol=0)
    torch.testing.assert_close(ours, given, rtol=0, atol=0)


def test_zero_keeps_strides():
    def program(x):
        return x.cos().zero_()

    x = torch.randn(3, 2).t()
    assert fulgurite.compile(program)(x).stride() == program(x).stride() == (1, 2)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_gradient_of_affine_grids_of_symbolic_sizes(dims: int, align_corners: bool) -> None:
    def grid(theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.affine_grid(theta, x.shape, align_corners=align_corners) * 2

    compiled = fulgurite.compile(grid, dynamic=True)
    for batch, size in ((2, 5), (3, 4), (2, 7)):
        theta = torch.randn(batch, dims, dims + 1, requires_grad=True)
        x = torch.randn(batch, 1, *range(size, size + dims))
        found, expected = (
            torch.autograd.grad(f(theta, x).square().sum(), theta)[0] for f in (compiled, grid)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def fail_in_capture(x):
    return torch.special.sinc(x) + 1


def call_both(x):
    x.add_(1)
    return fail_in_capture(x), x.sin()


@pytest.fixture
def failing_dynamo(monkeypatch):
    """TorchDynamo fails on one op with an error of its own."""
    owner = torch._dynamo.variables.torch.TorchInGraphFunctionVariable
    call_function = owner.call_function

    def fail(variable, *args, **kwargs):
        if variable.value is torch.special.sinc:
            raise KeyError("a defect of TorchDynamo")
        return call_function(variable, *args, **kwargs)

    monkeypatch.setattr(owner, "call_function", fail)


def test_a_function_on_which_dynamo_fails_runs_in_eager_mode(failing_dynamo, monkeypatch):
    monkeypatch.delenv("FULGURITE_STRICT")
    compiled = fulgurite.compile(call_both)
    x, y = torch.randn(5), torch.randn(5)
    with pytest.warns(FallbackWarning, match="a defect of TorchDynamo"):
        for given in (x, y):
            ours = given.clone()
            torch.testing.assert_close(compiled(ours), call_both(given))
            assert torch.equal(ours, given)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_failures_of_dynamo_are_raised(failing_dynamo, monkeypatch, fullgraph):
    if fullgraph:
        monkeypatch.delenv("FULGURITE_STRICT")
    with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError, match="a defect"):
        fulgurite.compile(call_both, fullgraph=fullgraph)(torch.randn(5))


def test_other_backends_raise_failures_of_dynamo(failing_dynamo, monkeypatch):
    monkeypatch.delenv("FULGURITE_STRICT")
    with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError, match="a defect"):
        torch.compile(call_both, backend="eager")(torch.randn(5))


@pytest.mark.parametrize(
    "op",
    [torch.relu, lambda x: x * x, lambda x: F.batch_norm(x, x[0, :, 0, 0], x[0, :, 0, 0].exp())],
)
def test_one_channel_is_contiguous(op):
    """Strides of a dimension of size 1 don't make a result channels-last."""
    x = torch.randn(5, 1, 3, 4).to(memory_format=torch.channels_last)

    def function(x):
        y = op(x)
        return torch.cat([y, y + 1], dim=1)

    expected, found = function(x), fulgurite.compile(function)(x)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)


@pytest.mark.covering
@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_gradients_of_a_mean_loss_of_no_elements(name, dynamic):
    compiled = fulgurite.compile(lambda x, y: getattr(F, name)(x, y), dynamic=dynamic)
    for rows in (0, 2, 0):
        x, y = (torch.randn(rows, 3, requires_grad=True) for _ in range(2))
        found, right = compiled(x, y), getattr(F, name)(x, y)
        torch.testing.assert_close(found, right, equal_nan=True)
        grads = [torch.autograd.grad(loss, (x, y)) for loss in (found, right)]
        torch.testing.assert_close(grads[0], grads[1])


def test_a_tensor_among_other_tensors():
    def f(x, y):
        return x in [y, x], x in (x,), y in {1: x}.values(), x * 2

    compiled = fulgurite.compile(f)
    for x, y in [(torch.ones(1), torch.zeros(1)), (torch.ones(1), torch.ones(1))]:
        assert compiled(x, y)[:3] == f(x, y)[:3] and compiled(x, x)[:3] == f(x, x)[:3]
    with pytest.raises(RuntimeError, match="ambiguous"):
        compiled(torch.ones(2), torch.ones(2))


def test_numpy_functions_of_tensors_return_what_numpy_does():
    compiled = fulgurite.compile(lambda x: (np.exp(x), np.sqrt(x.numpy()), np.asarray(x) + 1))
    for size in (2, 3):
        x = torch.rand(size)
        found, *arrays = compiled(x)
        assert isinstance(found, torch.Tensor)
        assert all(isinstance(array, np.ndarray) for array in arrays)
        torch.testing.assert_close(found, x.exp())


def test_random_numbers_of_numpy_are_those_of_its_generator():
    def f(x):
        return x + np.random.rand() + torch.from_numpy(np.random.normal(size=2))

    compiled = fulgurite.compile(f)
    for seed in (1, 2, 3):
        results = []
        for function in (f, compiled):
            np.random.seed(seed)
            results.append((function(torch.ones(2)), np.random.rand()))
        assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


def test_modules_take_attributes_of_any_class():
    """`nn.Module.__setattr__` asks the metaclass of `nn.Parameter`, which can't be traced."""

    class Observer:
        pass

    def f(module, x):
        module.observer = Observer()
        return module(x)

    layer, x = torch.nn.Linear(2, 3), torch.ones(2)
    assert torch.equal(fulgurite.compile(f, fullgraph=True)(layer, x), layer(x))
    assert isinstance(layer.observer, Observer)


def test_isinstance_asks_the_metaclass_for_each_object():
    class Large(type):
        def __instancecheck__(cls, value):
            return getattr(value, "size", 0) > 1

    class IsLarge(metaclass=Large):
        pass

    class Item:
        def __init__(self, size):
            self.size = size

    def f(x, item):
        return x * 2 if isinstance(item, IsLarge) else x * 3

    compiled, x = fulgurite.compile(f, fullgraph=True), torch.ones(2)
    for item in (Item(0), Item(2), Item(1), Item(5), IsLarge()):
        assert torch.equal(compiled(x, item), f(x, item))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LazyLinear(4), (2, 3, 5)),
        (nn.LazyBatchNorm1d, (2, 3, 5)),
        (lambda: nn.LazyConv2d(4, 3), (2, 3, 6, 7)),
        (lambda: nn.LazyConvTranspose1d(4, 3), (2, 3, 6)),
    ],
)
def test_lazy_modules_whose_first_input_has_symbolic_sizes(make, shape):
    module = make()
    compiled = fulgurite.compile(nn.Sequential(module), dynamic=True, fullgraph=True)
    for batch in (2, 5):
        x = torch.rand(batch, *shape[1:])
        found = compiled(x)
        torch.testing.assert_close(found, module(x))
    assert len(compiled.graphs) == 1
    assert not any(isinstance(value, torch.SymInt) for value in vars(module).values())
    repr(module), copy.deepcopy(module)


def test_methods_that_inspect_a_compiled_method():
    class Step:
        def run(self, x):
            return x * 2 if inspect.getfullargspec(self.run).varargs else x

    dynamo_fixes.install()
    step, x = Step(), torch.randn(3)
    step.run = torch.compile(step.run, backend="eager")
    assert torch.equal(step.run(x), x * 2)
