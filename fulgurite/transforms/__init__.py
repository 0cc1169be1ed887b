"""Trace → Trace.

In and out: a Trace. A transform runs in one of three phases: before autograd (on the captured program),
after autograd (on functional ATen graphs), or after claiming (each call has its executor).

    base.py             the contract: Transform, @transform
    simplify.py         dead code, constants, algebra, common subexpressions
    attention_masks.py  constant-fold attention masks, for example to is_causal=True
    decompose.py        one op → smaller ops
    remat.py            split forward and backward: what is saved, what is recomputed
    max_pool.py         max pooling that saves int8 offsets instead of int64 indices
    relu_backward.py    recompute ReLU masks from batch-norm inputs
    nll_loss.py         elementwise gradient of the negative log likelihood
    cross_entropy.py    recompute log-softmax in backward instead of saving it
    scaled_mm.py        scaled and grouped matmuls of user code → our kernels
    pack_weights.py     convolutions and linears with packed weights on the CPU
                        (library_calls.py: which ones; layouts.py: channels-last)
    conv_training.py    channels-last convolutions in training, and their weight gradients
    matmuls.py, convolutions.py   our float32 kernels in training, where measured.py finds them faster
    fp8.py              FP8 training
    false_schemas.py    catch custom operators that mutate an argument against their schema
    nonfinite.py, annotation.py, op_times.py   debugging and profiling, on top of instrument.py
"""

from fulgurite.transforms.annotation import annotate
from fulgurite.transforms.base import Phase, Transform, as_transform, transform
from fulgurite.transforms.fp8 import fp8_training
from fulgurite.transforms.nonfinite import find_nonfinite
from fulgurite.transforms.op_times import TimeOps
from fulgurite.transforms.simplify import SIMPLIFY

__all__ = [
    "SIMPLIFY",
    "Phase",
    "TimeOps",
    "Transform",
    "annotate",
    "as_transform",
    "find_nonfinite",
    "fp8_training",
    "transform",
]
