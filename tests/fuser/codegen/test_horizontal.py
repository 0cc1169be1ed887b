"""Horizontal fusion: kernels of one form on tensors of several sizes in one launch."""

from __future__ import annotations

import os
import re

import pytest
import torch

from fulgurite.fuser.codegen.triton.module import write_module
from fulgurite.fuser.lowering import INTERPRETER_DEVICE, has_triton
from fulgurite.fuser.runtime import compile_triton
from tests.fuser import support
from tests.fuser.codegen.test_triton import make_schedules
from tests.fuser.support import check_fused, check_fused_again

RUNS_ON_TRITON = True
SHAPES = [(8, 128), (5, 7), (3,), (1,), (16,), (2, 3, 4), (64, 16), (7,)]


def make_tensors(count=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for shape in SHAPES for _ in range(count)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def names_of_fused(region):
    return [
        name for name in (kernel.name for kernel in region.kernels) if re.search(r"_x\d+$", name)
    ]


def sine_of_each(*tensors):
    return [x.sin() * 2 + 1 for x in tensors]


def momentum(scale, *tensors):
    """Two inputs and two results for each size; `scale` is shared."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    updated = [(m * 0.9 + g, p) for m, g, p in ((m, p, p) for m, p in pairs)]
    return [value for m, p in updated for value in (m, p - scale * m)]


def test_kernels_of_one_form_share_a_launch():
    region = check_fused(sine_of_each, *make_tensors())
    if support.TARGET != "cpp":
        assert names_of_fused(region) and len(region.kernels) <= 4
    check_fused_again(region, sine_of_each, *[x.flip(0).contiguous() for x in make_tensors()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_and_separate_inputs(dtype):
    region = check_fused(momentum, torch.tensor(0.1, dtype=dtype), *make_tensors(2, dtype))
    if support.TARGET != "cpp":
        assert names_of_fused(region)


def test_unaligned_addresses():
    memory = torch.randn(4000)
    tensors = [memory[1 + 700 * k :][: 600 + k] for k in range(5)]
    check_fused(sine_of_each, *tensors)


def test_kernels_that_depend_on_each_other_stay_in_order():
    def function(*tensors):
        first = [x.exp() for x in tensors]
        sums = [x.sum() for x in first]
        return [x / total for x, total in zip(first, sums, strict=True)]

    check_fused(function, *make_tensors())


def test_different_formulas_are_not_fused():
    def function(a, b, c, d):
        return a.sin(), b.cos() * 2, c * 3, d.exp() + 1

    region = check_fused(function, *make_tensors()[:4])
    assert not names_of_fused(region)


def test_empty_tensors_and_positions():
    def function(*tensors):
        return [x + torch.arange(x.shape[-1]) for x in tensors]

    check_fused(function, *make_tensors(), torch.empty(0, 3))


def test_numbers_in_a_formula_keep_kernels_apart():
    def function(*tensors):
        return [x * (k + 2) for k, x in enumerate(tensors)]

    region = check_fused(function, *make_tensors())
    assert not names_of_fused(region)


@pytest.mark.skipif(
    not has_triton() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton's compiler"
)
def test_wide_accesses_of_aligned_sizes():
    from triton.backends.compiler import GPUTarget

    from fulgurite.fuser.codegen.triton.horizontal import fuse_horizontally
    from fulgurite.fuser.codegen.triton.kernel import write_kernels

    tensors = [torch.empty(1 << 20), torch.empty(1 << 18), torch.empty(3 << 16), torch.empty(4096)]
    schedules = make_schedules(lambda *tensors: [x * 2 + 1 for x in tensors], tensors)
    written = [write_kernels(f"kernel_{k}", s, False) for k, s in enumerate(schedules)]
    (source,) = fuse_horizontally(schedules, written, INTERPRETER_DEVICE, False)
    module = compile_triton.load_module(write_module([source]))
    function, target = getattr(module, source.name), GPUTarget("cuda", 90, 32)
    made = compile_triton.compile_for_target(function, source, compile_triton.ALIGNED, target)
    accesses = re.findall(r"(?:ld|st)\.global[.\w]*", made.asm["ptx"])
    assert accesses and all(".v4.b32" in access for access in accesses), accesses
