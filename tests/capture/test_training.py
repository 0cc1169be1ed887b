"""Training graphs in the small autograd function: gradients and errors as in eager mode."""

from __future__ import annotations

import contextvars
import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import fulgurite


def skips_wrapper(result):
    """Whether a result comes from our autograd function, not from AOTAutograd's."""
    function = getattr(type(result.grad_fn), "_forward_cls", None)
    return function is not None and not hasattr(function, "_aot_id")


def leaves(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def compile_warm(function, *inputs, **options):
    """`function` compiled, after one call and its backward."""
    compiled = fulgurite.compile(function, **options)
    result = compiled(*inputs)
    first = result[0] if isinstance(result, tuple) else result
    first.backward(torch.ones_like(first))
    for value in inputs:
        if isinstance(value, torch.Tensor):
            value.grad = None
    return compiled


def gradients(function, inputs, grad_outputs=None):
    result = function(*inputs)
    results = result if isinstance(result, tuple) else (result,)
    wanted = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    differentiable = [value for value in results if value.requires_grad]
    given = grad_outputs or [torch.ones_like(value) for value in differentiable]
    return results, torch.autograd.grad(differentiable, wanted, given, allow_unused=True)


def check(function, inputs, *, plain=True, grad_outputs=None):
    compiled = fulgurite.compile(function)
    expected = gradients(function, inputs, grad_outputs)
    for call in range(3):
        found = gradients(compiled, inputs, grad_outputs)
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert [f.requires_grad for f in found[0]] == [e.requires_grad for e in expected[0]]
        recorded = [value for value in found[0] if value.grad_fn is not None]
        assert all(skips_wrapper(value) == (plain and call > 0) for value in recorded)


# ---- which graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.silu(x @ w),
        lambda x, w: (x @ w).relu().sum(),
        lambda x, w: (x @ w, x.sin(), (w * 2).detach()),
        lambda x, w: (x @ w).view(-1),
        lambda x, w: (x @ w).t(),
        lambda x, w: torch.unbind((x @ w).exp()),
        lambda x, w: (x * 2, w.argmax(-1)),
        lambda x, w: x.unbind(0),
        lambda x, w: (x.detach() * 3, w.cos()),
    ],
)
def test_plain_graphs_skip_the_wrapper(function):
    check(function, leaves((4, 5), (5, 6)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x.view(-1),
        lambda x, w: (x * 2, x.t()),
        lambda x, w: (x[1:], w * 2),
        lambda x, w: (lambda y: (y, y.view(-1), y.detach()))(x @ w),
    ],
)
def test_results_that_alias_keep_the_wrapper(function):
    check(function, leaves((4, 5), (5, 6)), plain=False)


def test_one_tensor_as_two_inputs():
    (x,) = leaves((3, 4))
    check(lambda a, b: a * 2 + b.sin(), [x, x])


def test_a_mutated_input_that_autograd_sees_keeps_the_wrapper():
    def function(x, w):
        y = x * 1
        y.mul_(w)
        x.add_(y)
        return x * w

    compiled = fulgurite.compile(function)
    for _ in range(3):
        for each in (function, compiled):
            a, w = leaves((3,), (3,))
            x = a * 2
            result = each(x, w)
            result.sum().backward()
            if each is function:
                expected = (x.detach(), a.grad, w.grad)
        torch.testing.assert_close((x.detach(), a.grad, w.grad), expected)
    assert not skips_wrapper(result)


def test_subclasses_keep_the_wrapper():
    a, b = leaves((3, 4), (3, 4))
    compiled = fulgurite.compile(lambda x: x * 2 + 1)
    for _ in range(3):
        x = TwoTensor(a.detach(), b.detach()).requires_grad_()
        compiled(x).sum().backward()
        assert torch.equal(x.grad.a, torch.full_like(a, 2))
    plain = compiled(a)
    plain.sum().backward()
    assert torch.equal(a.grad, torch.full_like(a, 2))


def test_symbolic_sizes():
    compiled = fulgurite.compile(lambda x: F.softmax(x, -1) * x.shape[0], dynamic=True)
    for size in (3, 5, 8):
        (x,) = leaves((size, 4))
        (y,) = leaves((size, 4))
        F.softmax(x, -1).mul(size).square().sum().backward()
        result = compiled(y)
        result.square().sum().backward()
        torch.testing.assert_close(y.grad, x.grad)
    assert skips_wrapper(result)
    assert len(compiled.session.graphs) == 1


def test_running_statistics_are_written():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
    reference = copy.deepcopy(model)
    compiled = fulgurite.compile(model)
    for _ in range(4):
        x = torch.randn(5, 4)
        version = model[1].running_mean._version
        result = compiled(x)
        result.sum().backward()
        reference(x).sum().backward()
        assert model[1].running_mean._version > version
        torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert skips_wrapper(result)


# ---- the gradients that backward is given -------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda y: torch.ones(()).expand_as(y),
        lambda y: torch.randn(y.shape[1], y.shape[0]).t(),
        lambda y: torch.randn(y.shape[0], 2 * y.shape[1])[:, ::2],
        lambda y: torch.randn(y.numel() + 1)[1:].view_as(y),
        lambda y: torch.full_like(y, float("nan")),
    ],
)
def test_layouts_of_gradients(make):
    torch.manual_seed(0)
    x, w = leaves((4, 5), (5, 6))
    gradient = make(torch.empty(4, 6))
    check(lambda x, w: torch.tanh(x @ w), [x, w], grad_outputs=[gradient])


def test_a_parameter_as_gradient():
    (x,) = leaves((4, 5))
    compiled = compile_warm(lambda x: x.sin(), x)
    compiled(x).backward(nn.Parameter(torch.ones(4, 5)))
    torch.testing.assert_close(x.grad, x.cos())


def test_gradient_of_another_dtype():
    (x,) = leaves((4, 5), dtype=torch.float32)
    (y,) = leaves((4, 5), dtype=torch.float32)
    compiled = compile_warm(lambda x: x.exp().bfloat16(), y)
    gradient = torch.randn(4, 5, dtype=torch.float64)
    x.exp().bfloat16().backward(gradient)
    compiled(y).backward(gradient)
    torch.testing.assert_close(y.grad, x.grad)


def test_channels_last_gradients_and_results():
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    for gradient in (torch.randn(2, 4, 5, 5), torch.randn(2, 5, 5, 4).permute(0, 3, 1, 2)):
        check(lambda x: layer(x).relu(), [x], grad_outputs=[gradient])


@pytest.mark.parametrize("conjugate", [True, False])
def test_lazily_conjugated_gradients(conjugate):
    torch.manual_seed(0)
    (x,) = [torch.randn(4, 5, dtype=torch.complex64).requires_grad_()]
    gradient = torch.randn(4, 5, dtype=torch.complex64)
    gradient = gradient.conj() if conjugate else gradient
    check(lambda x: x * x * 2, [x], grad_outputs=[gradient])
    real = torch.randn(4, 5).requires_grad_()
    negative = torch.randn(4, 5, dtype=torch.complex64).conj().imag
    check(lambda x: x * x * 2, [real], grad_outputs=[negative])


def test_inputs_of_results_without_gradient_get_none():
    x, w = leaves((4, 5), (5, 6))
    compiled = compile_warm(lambda x, w: (x @ w, x.sin(), w.cos()), x, w)
    for used in range(3):
        x.grad = w.grad = None
        results = compiled(x, w)
        assert skips_wrapper(results[used])
        results[used].sum().backward()
        expected = torch.autograd.grad(
            (x @ w, x.sin(), w.cos())[used].sum(), (x, w), allow_unused=True
        )
        for found, wanted in zip((x.grad, w.grad), expected, strict=True):
            assert (found is None) == (wanted is None)
            torch.testing.assert_close(found, wanted)


def test_subsets_of_inputs_and_unused_ones():
    x, w = leaves((4, 5), (5, 6))
    (unused,) = leaves((3,))
    compiled = compile_warm(lambda x, w: x @ w, x, w)
    result = compiled(x, w)
    (found,) = torch.autograd.grad(result.sum(), [w], retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad((x @ w).sum(), [w])[0])
    found = torch.autograd.grad(result.sum(), [x, unused], allow_unused=True, retain_graph=True)
    assert found[1] is None and found[0] is not None
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(result.sum(), [x, unused])


def test_an_input_that_gets_no_gradient_does_not_run_its_producer():
    runs = []

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            runs.append(1)
            return gradient * 2

    x, w = leaves((4,), (4,))
    compiled = fulgurite.compile(lambda a, b: a.detach() * b)
    for _ in range(3):
        result = compiled(Recorded.apply(x), w)
        result.sum().backward()
    assert skips_wrapper(result) and not runs and x.grad is None
    torch.testing.assert_close(w.grad, 3 * 2 * x.detach())


# ---- several backward passes --------------------------------------------------------------------


def test_gradients_accumulate():
    x, w = leaves((4, 5), (5, 6))
    compiled = fulgurite.compile(lambda x, w: torch.tanh(x @ w))
    for _ in range(3):
        compiled(x, w).sum().backward()
    found, x.grad, w.grad = (x.grad, w.grad), None, None
    for _ in range(3):
        torch.tanh(x @ w).sum().backward()
    torch.testing.assert_close(found, (x.grad, w.grad))


def test_backward_twice():
    x, w = leaves((4, 5), (5, 6))
    compiled = compile_warm(lambda x, w: torch.tanh(x @ w), x, w)
    result = compiled(x, w)
    first = torch.autograd.grad(result.sum(), [x, w], retain_graph=True)
    second = torch.autograd.grad(result.sum(), [x, w])
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(result.sum(), [x, w])


def test_backward_is_built_when_it_is_first_needed():
    (x,) = leaves((4, 5))
    compiled = fulgurite.compile(lambda x: F.gelu(x) * 2)
    for _ in range(3):
        result = compiled(x)
    assert skips_wrapper(result)
    record = compiled.session.graphs[0] if hasattr(compiled, "session") else None
    assert record is None or "backward" not in record.compiled_graphs
    result.sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad((F.gelu(x) * 2).sum(), x)[0])
    x.grad = None
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad((F.gelu(x) * 2).sum(), x)[0])


# ---- what is saved ------------------------------------------------------------------------------


def test_a_saved_input_that_is_modified_raises():
    (x,) = leaves((4,))
    compiled = compile_warm(lambda x, y: (x * y).sin(), x, torch.ones(4))
    y = torch.ones(4)
    result = compiled(x, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_results_may_be_modified():
    (x,) = leaves((4, 6))
    for function in (lambda x: x * 3, lambda x: (x * 3).view(-1), lambda x: (x * 3).t()):
        compiled = compile_warm(function, x)
        found, expected = compiled(x), function(x)
        assert skips_wrapper(found)
        for result in (found, expected):
            result.mul_(2)
            result.unsqueeze_(0)
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x)
        )


def test_saved_tensor_hooks():
    x, w = leaves((4, 5), (5, 6))
    compiled = compile_warm(lambda x, w: torch.tanh(x @ w), x, w)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    def unpack(tensor):
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = compiled(x, w)
    found = torch.autograd.grad(result.sum(), [x, w])
    assert len(packed) == len(unpacked) > 0
    torch.testing.assert_close(found, torch.autograd.grad(torch.tanh(x @ w).sum(), [x, w]))


def test_saved_tensors_are_freed():
    (x,) = leaves((64, 64))
    compiled = compile_warm(lambda x: (x.exp() @ x).sin(), x)
    saved = []

    def pack(tensor):
        saved.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compiled(x)
    result.sum().backward()
    gc.collect()
    own = [one() for one in saved if one() is not None and one() is not x]
    assert all(one.data_ptr() == x.data_ptr() for one in own)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_around_a_compiled_module(reentrant):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    compiled = fulgurite.compile(layer)
    (x,) = leaves((3, 8))
    eager = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    exact_layer, exact_x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    exact_inputs = [exact_x, *exact_layer.parameters()]
    exact = torch.autograd.grad(exact_layer(exact_x).square().sum(), exact_inputs)
    scale = max(float(right.abs().max()) for right in exact)  # of what cancels
    for _ in range(3):
        x.grad = None
        layer.zero_grad()
        checkpoint(compiled, x, use_reentrant=reentrant).square().sum().backward()
        for leaf, theirs, right in zip((x, *layer.parameters()), eager, exact, strict=True):
            allowed = 2 * (theirs - right).abs().max() + 1e-6 * scale
            assert (leaf.grad - right).abs().max() <= allowed


# ---- hooks, modes, threads ----------------------------------------------------------------------


def test_hooks_of_leaves_and_results():
    (x,) = leaves((4,))
    compiled = compile_warm(lambda x: x.sin(), x)
    calls = []
    x.register_hook(lambda gradient: calls.append("leaf") or gradient * 2)
    x.register_post_accumulate_grad_hook(lambda leaf: calls.append("accumulated"))
    result = compiled(x)
    result.register_hook(lambda gradient: calls.append("result") or gradient * 3)
    result.grad_fn.register_hook(lambda inputs, outputs: calls.append("node"))
    result.sum().backward()
    assert calls == ["result", "node", "leaf", "accumulated"]
    torch.testing.assert_close(x.grad, 6 * x.cos())


def test_modes_of_gradient_recording():
    x, w = leaves((4, 5), (5, 6))
    compiled = compile_warm(lambda x, w: torch.tanh(x @ w), x, w)
    with torch.no_grad():
        assert compiled(x, w).grad_fn is None
    with torch.inference_mode():
        assert compiled(x, w).is_inference()
    with torch.no_grad(), torch.enable_grad():
        assert skips_wrapper(compiled(x, w))
    assert not compiled(x.detach(), w.detach()).requires_grad
    assert compiled(x, w.detach()).requires_grad


def test_gradients_enabled_inside_a_function_called_without():
    (x,) = leaves((4,))

    def function(x):
        with torch.enable_grad():
            return x.sin()

    compiled = fulgurite.compile(function)
    for _ in range(3):
        x.grad = None
        with torch.no_grad():
            result = compiled(x)
        result.sum().backward()
        torch.testing.assert_close(x.grad, x.cos())


def test_autocast():
    torch.manual_seed(0)
    x, w = leaves((4, 8), (8, 6))
    compiled = fulgurite.compile(lambda x, w: torch.tanh(x @ w) + x.sum())
    for _ in range(3):
        for backward_inside in (False, True):
            with torch.autocast("cpu", torch.bfloat16):
                found, expected = compiled(x, w), torch.tanh(x @ w) + x.sum()
                assert found.dtype == expected.dtype
                if backward_inside:
                    grads = torch.autograd.grad(found.sum(), [x, w])
            if not backward_inside:
                grads = torch.autograd.grad(found.sum(), [x, w])
            wanted = torch.autograd.grad(expected.sum(), [x, w])
            torch.testing.assert_close(grads, wanted, rtol=0.02, atol=0.02)
    assert skips_wrapper(found)


def test_backward_inside_autocast_of_a_graph_captured_without():
    x, w = leaves((4, 8), (8, 6))
    compiled = compile_warm(lambda x, w: torch.tanh(x @ w), x, w)
    result = compiled(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(result.sum(), [x, w])
    torch.testing.assert_close(found, torch.autograd.grad(torch.tanh(x @ w).sum(), [x, w]))


def test_deterministic_algorithms_enabled_before_backward_raise():
    (x,) = leaves((4,))
    compiled = compile_warm(lambda x: x.sin(), x)
    result = compiled(x)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
            result.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_backward_sees_the_context_variables_of_its_caller():
    variable = contextvars.ContextVar("variable", default=0)
    seen = []

    @torch.library.custom_op("fulgurite_test::seen_in_backward", mutates_args=())
    def seen_in_backward(x: torch.Tensor) -> torch.Tensor:
        seen.append(variable.get())
        return x.clone()

    seen_in_backward.register_fake(torch.empty_like)
    seen_in_backward.register_autograd(lambda ctx, gradient: seen_in_backward(gradient) * 2)
    (x,) = leaves((4,))
    compiled = compile_warm(lambda x: seen_in_backward(x), x)
    result = compiled(x)
    seen.clear()
    variable.set(7)
    result.sum().backward()
    variable.set(0)
    assert seen == [7]
    assert torch.equal(x.grad, torch.full((4,), 2.0))


def test_threads():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 4))
    compiled = fulgurite.compile(layer)
    compiled(torch.randn(8, 16)).sum().backward()
    errors = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            x = torch.randn(8, 16, generator=generator)
            found = torch.autograd.grad(compiled(x).sum(), [*layer.parameters()])
            wanted = torch.autograd.grad(layer(x).sum(), [*layer.parameters()])
            try:
                torch.testing.assert_close(found, wanted)
            except AssertionError as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_functorch_around_a_compiled_function():
    (x,) = leaves((4,))
    compiled = compile_warm(lambda x: x.sin(), x)
    torch.testing.assert_close(torch.func.grad(lambda x: compiled(x).sum())(x), x.cos())
    torch.testing.assert_close(torch.vmap(compiled)(x), x.sin())
    torch.testing.assert_close(compiled(x), x.sin())


def test_an_exception_in_forward_leaves_the_function_usable():
    (x,) = leaves((4, 4))
    compiled = compile_warm(lambda x, i: x[i] * 2, x, torch.tensor([1]))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([9]))
    assert torch.is_grad_enabled()
    compiled(x, torch.tensor([3])).sum().backward()
    assert torch.equal(x.grad[3], torch.full((4,), 2.0))
