"""The dispatch kernels built for a Hopper GPU, which needs none: what must be in the machine's code.

Their results are compared in the interpreter, which knows nothing of memory orders and alignment.
"""

from __future__ import annotations

import os

import pytest

triton = pytest.importorskip("triton", reason="needs triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter builds nothing", allow_module_level=True)

from triton.compiler import ASTSource  # noqa: E402

from fulgurite.kernels.dispatch import triton_dispatch as kernels  # noqa: E402
from tests.kernels.compile_support import TARGET  # noqa: E402

pytestmark = pytest.mark.slow

TYPES = {
    "*i32": "rows row_index step sent_step counter status counts experts",
    "*i64": "slots peers",
    "*fp32": "weights x_scales",
    "*bf16": "x y out",
}
POINTERS = {f"{name}_ptr": type for type, names in TYPES.items() for name in names.split()}
NUMBERS = dict.fromkeys(["tokens", "rank", "experts", "capacity", "max_polls"], "i32")
NUMBERS |= dict.fromkeys(["scales_offset", "token_scale_offset"], "i32")
ALIGNED = dict.fromkeys(["buffer_bytes", "rows_offset", "flags_offset", "returns_offset"], "i64")
SHAPE = dict(
    K=8,
    K_PADDED=8,
    V=8,
    V_PADDED=8,
    M=8,
    W=8,
    W_PADDED=8,
    HEADER_BYTES=80,
    ROW_BYTES=14336,
    D=7168,
    ROW_WORDS=3584,
    BLOCK=8192,
    NUM_SCALES=0,
    SCALES_PADDED=1,
    PDL=True,
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
    return triton.compile(source, target=TARGET).asm["ptx"]


def test_rows_are_copied_in_16_byte_vectors():
    text = build(kernels.dispatch_send_kernel)
    assert text.count("ld.global.v4") >= 4 and text.count("st.global.v4") >= 4
    assert build(kernels.dispatch_receive_kernel, FORMAT="bf16").count("st.global.v4") >= 8
    for kernel in (
        kernels.combine_reduce_kernel,
        kernels.combine_send_kernel,
    ):  # of all 8 results of a sum
        text = build(kernel, FORMAT="bf16", BLOCK=1024)
        assert text.count("ld.global.v4") >= 8 and "ld.global.b16" not in text


def test_flags_are_released_and_acquired_at_system_scope():
    for kernel in (kernels.dispatch_send_kernel, kernels.combine_send_kernel):
        text = build(kernel, FORMAT="bf16")
        assert "atom.global.sys.acq_rel.add" in text and "atom.global.sys.release.exch" in text
    assert "atom.global.sys.acquire.add" in build(kernels.wait_flags_kernel, IS_COMBINE=False)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_every_wire_format_compiles(kind):
    assert build(kernels.dispatch_receive_kernel, FORMAT=kind)


def test_sizes_of_one():
    """One expert a token, one a rank: everything must build with them too."""
    ones = dict(V=1, V_PADDED=1, M=1, K=1, K_PADDED=1)
    assert build(kernels.dispatch_layout_kernel, **ones | dict(BLOCK=512))
    assert build(kernels.dispatch_send_kernel, **ones)
    assert build(kernels.dispatch_receive_kernel, FORMAT="f32", **ones)
    assert build(kernels.combine_send_kernel, FORMAT="f32", **ones)


def test_fp8_rows_are_copied_as_they_are():
    """Bytes and scales, with no value converted."""
    constants = {"FORMAT": "fp8", "NUM_SCALES": 56, "SCALES_PADDED": 64}
    assert "cvt.rn" not in build(kernels.dispatch_receive_kernel, **constants)


def test_the_next_kernel_starts_after_the_flags():
    """PDL: programs that wait would take the place of those that send. Other kernels start it first."""
    before, _ = build(kernels.wait_flags_kernel, IS_COMBINE=False).split("launch_dependents")
    assert "griddepcontrol.wait" in before and "acquire" in before
    before, _ = build(kernels.dispatch_send_kernel).split("griddepcontrol.wait")
    assert "launch_dependents" in before and "ld.global" not in before
