"""The dispatch kernels built for a Hopper GPU, which needs none: what must be in the machine's code.

Their results are compared in the interpreter, which knows nothing of memory orders and alignment.
"""

from __future__ import annotations

import os

import pytest

triton = pytest.importorskip("triton", reason="needs triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter builds nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fulgurite.kernels.dispatch import triton_dispatch as kernels  # noqa: E402

pytestmark = pytest.mark.slow

TYPES = {
    "*i32": "rows place step sent_step counter status counts experts",
    "*i64": "slots peers",
    "*fp32": "weights",
    "*bf16": "x y out",
}
POINTERS = {f"{name}_ptr": type for type, names in TYPES.items() for name in names.split()}
NUMBERS = dict.fromkeys(["tokens", "rank", "experts", "capacity", "polls"], "i32")
NUMBERS |= dict.fromkeys(["scales_at", "factor_at"], "i32")
ALIGNED = dict.fromkeys(["copy_bytes", "rows_at", "flags_at", "returns_at"], "i64")
SHAPE = dict(
    K=8, KS=8, V=8, VS=8, M=8, W=8, LANES=8, HEAD=80, ROW=14336, D=7168, WORDS=3584, BLOCK=8192
)


def build(kernel, **constants) -> str:
    names = kernel.arg_names
    constants = {name: value for name, value in (SHAPE | constants).items() if name in names}
    types = POINTERS | NUMBERS | ALIGNED
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants and (name in ALIGNED or name.endswith("_ptr"))
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_rows_move_sixteen_bytes_at_a_time():
    text = build(kernels.send_kernel)
    assert text.count("ld.global.v4") >= 4 and text.count("st.global.v4") >= 4
    assert build(kernels.receive_kernel, KIND="bf16").count("st.global.v4") >= 8
    for kernel in (kernels.sum_up_kernel, kernels.send_back_kernel):  # of all 8 results of a sum
        text = build(kernel, KIND="bf16", BLOCK=1024)
        assert text.count("ld.global.v4") >= 8 and "ld.global.b16" not in text


def test_flags_are_released_and_acquired_at_system_scope():
    for kernel in (kernels.send_kernel, kernels.send_back_kernel):
        text = build(kernel, KIND="bf16")
        assert "atom.global.sys.acq_rel.add" in text and "atom.global.sys.release.exch" in text
    assert "atom.global.sys.acquire.add" in build(kernels.wait_kernel, RETURNS=False)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_every_wire_builds(kind):
    assert build(kernels.receive_kernel, KIND=kind)


def test_sizes_of_one():
    """One expert a token, one a rank: everything must build with them too."""
    ones = dict(V=1, VS=1, M=1, K=1, KS=1)
    assert build(kernels.ways_kernel, **ones | dict(BLOCK=512))
    assert build(kernels.send_kernel, **ones)
    assert build(kernels.receive_kernel, KIND="f32", **ones)
    assert build(kernels.send_back_kernel, KIND="f32", **ones)
