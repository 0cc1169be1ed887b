"""Ops whose traced rules predicted other strides or dtypes: programs that depend on them, compiled."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fulgurite

LAST = torch.channels_last


def numbers(*shape, dtype=torch.float32):
    return (torch.arange(1.0, torch.Size(shape).numel() + 1) / 16 % 1).view(shape).to(dtype)


def image():
    return numbers(2, 4, 6, 6).to(memory_format=LAST)


def volume():
    return numbers(1, 2, 3, 3, 3).to(memory_format=torch.channels_last_3d)


def classes():
    return torch.arange(12).view(3, 4).t() % 3


def normalize(x, training=True):
    statistics = () if training else (x.new_zeros(x.size(1)), x.new_ones(x.size(1)))
    return F.batch_norm(x, *statistics or (None, None), training=training)


def unpool(x):
    return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)


def narrow(*shape):
    return numbers(*shape, dtype=torch.bfloat16)


elements = {"reduction": "none"}
CASES = {
    "batch norm": (normalize, lambda: (numbers(5, 4, 3).mT,)),
    "batch norm of a matrix": (normalize, lambda: (numbers(5, 4).t(),)),
    "batch norm of images": (normalize, lambda: (image(),)),
    "batch norm of other strides": (normalize, lambda: (numbers(5, 4, 3, 2).transpose(0, 3),)),
    "evaluated": (partial(normalize, training=False), lambda: (numbers(5, 4, 3).mT,)),
    "reflect": (partial(F.pad, pad=(1,) * 6, mode="reflect"), lambda: (volume(),)),
    "replicate": (partial(F.pad, pad=(1,) * 6, mode="replicate"), lambda: (volume(),)),
    "unpool": (unpool, lambda: (image(),)),
    "shuffle": (partial(F.channel_shuffle, groups=2), lambda: (image(),)),
    "one hot": (partial(F.one_hot, num_classes=3), lambda: (classes(),)),
    "cross entropy": (
        partial(F.binary_cross_entropy, **elements),
        lambda: (numbers(4, 3), numbers(3, 4).t()),
    ),
    "images": (
        partial(F.nll_loss, **elements),
        lambda: (numbers(1, 3, 4, 3), classes().t()[None].mT),
    ),
    "angle": (torch.angle, lambda: (numbers(3, 4, dtype=torch.complex64).t(),)),
    "copysign": (torch.copysign, lambda: (numbers(5, 4, 3).transpose(0, 2), numbers(5, 4).t())),
    "xlogy": (torch.xlogy, lambda: (numbers(5, 4, 3).transpose(0, 2), numbers(4, 5))),
    "power": (partial(torch.pow, 2.0), lambda: (numbers(3, 4).t(),)),
    "both": (torch.logical_and, lambda: (numbers(5, 1, 4).transpose(0, 2), numbers(5, 1).t())),
    "floor": (torch.floor_divide, lambda: (numbers(5, 4).t(), torch.tensor(0.5))),
    "addr": (torch.addr, lambda: (torch.tensor(1.0), narrow(3), narrow(4))),
    "blocks": (torch.block_diag, lambda: (numbers(1, 3), torch.tensor(0.5).double())),
    "huber": (F.huber_loss, lambda: (numbers(3, 4), numbers(3, 4).double() + 2)),
    "huber elements": (partial(F.huber_loss, **elements), lambda: (narrow(3, 4), numbers(3, 4))),
    "soft margin": (F.soft_margin_loss, lambda: (narrow(3, 4), numbers(3, 4))),
}


WITH_SYMBOLS = ("batch norm", "shuffle", "xlogy", "blocks")


@pytest.mark.parametrize(
    "name, dynamic", [*((n, False) for n in CASES), *((n, True) for n in WITH_SYMBOLS)]
)
def test_strides_and_dtypes_of_the_kernels(name, dynamic):
    op, make_inputs = CASES[name]
    eager = op(*make_inputs())
    is_contiguous = eager.is_contiguous()

    def program(*inputs):
        result = op(*inputs)
        return result, result.view(-1) if is_contiguous else result.is_contiguous(), result + 1

    compiled = fulgurite.compile(program, dynamic=dynamic)(*make_inputs())
    for found, expected in zip(compiled, program(*make_inputs()), strict=True):
        rounding = {"rtol": 2**-6, "atol": 2**-6} if eager.dtype is torch.bfloat16 else {}
        torch.testing.assert_close(found, expected, check_stride=True, **rounding)


def test_sparse_gradients_of_weighted_bags():
    weight, factors = numbers(9, 4).requires_grad_(), numbers(6).requires_grad_()
    indices, offsets = torch.tensor([1, 2, 2, 8, 0, 1]), torch.tensor([0, 2])

    def program(weight, factors):
        settings = {"mode": "sum", "sparse": True, "per_sample_weights": factors}
        return F.embedding_bag(indices, weight, offsets, **settings).sin().sum()

    results = [
        torch.autograd.grad(f(weight, factors), (weight, factors))
        for f in (program, fulgurite.compile(program))
    ]
    assert results[1][0].is_sparse
    torch.testing.assert_close(results[1][0].to_dense(), results[0][0].to_dense())
    torch.testing.assert_close(results[1][1], results[0][1])
