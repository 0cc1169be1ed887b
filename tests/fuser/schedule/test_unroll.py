"""GPU schedules unroll short loops that select between formulas, if each step has enough work."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite import fuser
from fulgurite.device import DeviceInfo
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.gpu.unroll import unroll_select_loops
from fulgurite.fuser.segment import segment_region
from fulgurite.fuser.segment.build_loop_nest import build_loop_nest
from tests.fuser import support
from tests.fuser.frontend.test_input_mutations import check_mutations
from tests.fuser.support import check_fused

RUNS_ON_TRITON = True

DEVICE = DeviceInfo("four SMs", 4, 4e12, 3e13, 256 << 10, 50 << 20, (torch.float32,))


def rope_backward(g, cos, sin):
    """The gradient of a rotary embedding."""
    half = g.shape[-1] // 2
    scaled = g * sin
    return g * cos + torch.cat([scaled[..., half:], -scaled[..., :half]], -1)


def unbind_backward(q, k, v, cos, sin):
    """The gradient of `q, k, v = qkv`, as autograd computes it."""
    total = torch.zeros(())
    gradients = ((2, v), (1, rope_backward(k, cos, sin)), (0, rope_backward(q, cos, sin)))
    for position, gradient in gradients:
        padded = torch.select_scatter(v.new_zeros(3, *v.shape), gradient, 0, position)
        total = total + padded
    return total.permute(1, 3, 0, 2, 4).contiguous()


def stack_formulas(q, k, v, cos, sin):
    """A stack of three formulas with a common subexpression."""
    shared = torch.tanh(cos)
    formulas = [rope_backward(q, cos, sin), k * shared, v + shared]
    stacked = torch.stack(formulas).permute(1, 3, 0, 2, 4).contiguous()
    return stacked * shared[None, :, None, None]


def make_gradients(batch=2, length=34, heads=4, width=64):
    torch.manual_seed(0)
    heads_first = [torch.randn(batch, length, heads, width).transpose(1, 2) for _ in range(3)]
    return (*heads_first, torch.randn(length, width), torch.randn(length, width))


def make_nest(function, *arguments) -> LoopNest:
    """The nest of a function that is one kernel; scatters are not decomposed."""
    region = split_axes.split_axes(
        lower_graph.lower_graph(make_fx(function, tracing_mode="fake")(*arguments))
    )
    (part,) = segment_region(region)
    return build_loop_nest(region, part)


def test_gradient_of_unbind() -> None:
    with support.target_device():
        arguments = tuple(map(support.to_target, make_gradients()))
        graph = make_fx(unbind_backward, tracing_mode="fake")(*arguments)
        region = fuser.lower_region(graph, use_triton=support.TARGET == "triton")
        support.check_against_eager(region(*arguments), unbind_backward, arguments)
    if support.TARGET == "triton":
        (kernel,) = region.kernels
        assert kernel.source.count("tl.store") == 3
        assert "// 3)" not in kernel.source


def test_stack_of_three_formulas() -> None:
    region = check_fused(stack_formulas, *make_gradients())
    if support.TARGET == "triton":
        assert region.kernels[-1].source.count("tl.store") == 3


def test_two_loops_are_unrolled() -> None:
    def stack_twice(a, b, c):
        return torch.stack([torch.stack([a, b * 2]), torch.stack([c.exp(), a + c])])

    region = check_fused(stack_twice, *(torch.randn(96, 256) for _ in range(3)))
    if support.TARGET == "triton":
        assert region.kernels[-1].source.count("tl.store") == 4


def test_input_mutation() -> None:
    """Every step reads and writes its own part of the input, and stores another result."""

    def scale_buffer(a, b, buffer):
        old = buffer * 2
        buffer.mul_(torch.stack([a, b.exp()]))
        return old

    torch.manual_seed(0)
    region = check_mutations(
        scale_buffer, torch.randn(96, 256), torch.randn(96, 256), torch.randn(2, 96, 256)
    )
    if support.TARGET == "triton":
        assert region.kernels[-1].source.count("tl.store") == 4


def test_every_step_has_its_own_formula() -> None:
    nest = make_nest(unbind_backward, *make_gradients())
    unrolled = unroll_select_loops(nest, DEVICE)
    assert len(unrolled.grid) == len(nest.grid) - 1
    assert len(unrolled.stores) == 3
    reads = [(t.name, index) for t, index, stores in unrolled.accesses() if not stores]
    assert len({index for name, index in reads if name == "v_1"}) == 1  # only at its own index


def test_small_kernels_are_not_unrolled() -> None:
    """Each step would leave SMs without work."""
    nest = make_nest(unbind_backward, *make_gradients(batch=1, length=5))
    assert unroll_select_loops(nest, DEVICE) is nest


def test_interleaved_stores_are_not_unrolled() -> None:
    """A step would store every other element."""
    nest = make_nest(lambda a, b: torch.stack([a, b.exp()], -1), *torch.randn(2, 256, 256))
    assert unroll_select_loops(nest, DEVICE) is nest


def test_long_loops_are_not_unrolled() -> None:
    nest = make_nest(lambda a, b: torch.cat([a, b.exp()]), *torch.randn(2, 64, 256))
    assert unroll_select_loops(nest, DEVICE) is nest
