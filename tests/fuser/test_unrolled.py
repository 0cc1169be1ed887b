"""Short loops that choose between formulas are written out on a GPU, where each step is work enough."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite import fuser
from fulgurite.device import Device
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import split_axes
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.gpu.unroll import unrolled
from fulgurite.fuser.segment import segment
from fulgurite.fuser.segment.build_loop_nest import build
from tests.fuser import support
from tests.fuser.support import fused
from tests.fuser.test_writes import run

DEVICE = Device("four multiprocessors", 4, 4e12, 3e13, 256 << 10, 50 << 20, (torch.float32,))


def turned_back(g, cos, sin):
    """The gradient of rotary positions."""
    half = g.shape[-1] // 2
    turned = g * sin
    return g * cos + torch.cat([turned[..., half:], -turned[..., :half]], -1)


def scattered(q, k, v, cos, sin):
    """The gradient of `q, k, v = qkv`, as autograd makes it."""
    total = torch.zeros(())
    for place, part in ((2, v), (1, turned_back(k, cos, sin)), (0, turned_back(q, cos, sin))):
        total = total + torch.select_scatter(v.new_zeros(3, *v.shape), part, 0, place)
    return total.permute(1, 3, 0, 2, 4).contiguous()


def stacked(q, k, v, cos, sin):
    """A join of three formulas, and what all of them have in common."""
    shared = torch.tanh(cos)
    parts = [turned_back(q, cos, sin), k * shared, v + shared]
    return torch.stack(parts).permute(1, 3, 0, 2, 4).contiguous() * shared[None, :, None, None]


def gradients(batch=2, length=34, heads=4, width=64):
    torch.manual_seed(0)
    parts = [torch.randn(batch, length, heads, width).transpose(1, 2) for _ in range(3)]
    return (*parts, torch.randn(length, width), torch.randn(length, width))


def nest_of(function, *arguments) -> Nest:
    """The nest of a function that is one kernel, scatters not taken apart."""
    region = split_axes.refine(lower_graph.read(make_fx(function, tracing_mode="fake")(*arguments)))
    (part,) = segment(region)
    return build(region, part)


def test_a_gradient_of_three_parts() -> None:
    with support.place():
        arguments = tuple(map(support.placed, gradients()))
        graph = make_fx(scattered, tracing_mode="fake")(*arguments)
        lowered = fuser.lower(graph, use_triton=support.TARGET == "triton")
        support.compare(lowered(*arguments), scattered, arguments)
    if support.TARGET == "triton":
        (kernel,) = lowered.kernels
        assert kernel.source.count("tl.store") == 3
        assert "// 3)" not in kernel.source


def test_a_join_of_three_parts() -> None:
    region = fused(stacked, *gradients())
    if support.TARGET == "triton":
        assert region.kernels[-1].source.count("tl.store") == 3


def test_two_loops() -> None:
    def four(a, b, c):
        return torch.stack([torch.stack([a, b * 2]), torch.stack([c.exp(), a + c])])

    parts = [torch.randn(96, 256) for _ in range(3)]
    region = fused(four, *parts)
    if support.TARGET == "triton":
        assert region.kernels[-1].source.count("tl.store") == 4


def test_a_write_to_an_input() -> None:
    """Every step reads and writes its own part of it, once more for another result."""

    def scaled(a, b, buffer):
        old = buffer * 2
        buffer.mul_(torch.stack([a, b.exp()]))
        return old

    torch.manual_seed(0)
    region = run(scaled, torch.randn(96, 256), torch.randn(96, 256), torch.randn(2, 96, 256))
    if support.TARGET == "triton":
        assert region.kernels[-1].source.count("tl.store") == 4


def test_every_step_has_its_own_formula() -> None:
    nest = nest_of(scattered, *gradients())
    changed = unrolled(nest, DEVICE)
    assert len(changed.grid) == len(nest.grid) - 1
    assert len(changed.stores) == 3
    reads = [(t.name, index) for t, index, stores in changed.accesses() if not stores]
    of_v = {index for name, index in reads if name == "v_1"}
    assert len(of_v) == 1  # at its own place alone


def test_few_points_stay_a_loop() -> None:
    """Each step would leave multiprocessors without work."""
    nest = nest_of(scattered, *gradients(batch=1, length=5))
    assert unrolled(nest, DEVICE) is nest


def test_neighbours_stay_a_loop() -> None:
    """A step would store every other element."""
    nest = nest_of(lambda a, b: torch.stack([a, b.exp()], -1), *torch.randn(2, 256, 256))
    assert unrolled(nest, DEVICE) is nest


def test_a_long_loop_stays_one() -> None:
    nest = nest_of(lambda a, b: torch.cat([a, b.exp()]), *torch.randn(2, 64, 256))
    assert unrolled(nest, DEVICE) is nest
