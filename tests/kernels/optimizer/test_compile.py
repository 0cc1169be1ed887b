"""Optimizer kernels as machine code for an H200, compiled without a GPU: wide accesses, no spills."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from fulgurite.fuser.lowering import has_triton
from fulgurite.kernels.optimizer import triton_adamw, triton_muon, triton_scale
from fulgurite.kernels.optimizer.triton_adamw import AdamWStep, MasterWeight

pytestmark = pytest.mark.skipif(
    not has_triton() or "TRITON_INTERPRET" in os.environ, reason="needs Triton's compiler"
)
STEP = AdamWStep(1e-3, (0.9, 0.95), 1e-8, 0.1, 1)


def count_accesses(ptx: str, width: str) -> int:
    return len(re.findall(rf"(?:ld|st)\.global\S*\.{width}\.", ptx))


@pytest.mark.parametrize("odd", [0, 1])
def test_adamw_of_many_weights(odd: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.kernels.compile_support import compile_launches, stack_bytes  # needs Triton

    (kernel,) = [k for k in compile_launches(triton_adamw, monkeypatch) if "adamw" in str(k)]
    size = 64 + odd
    weight, low = torch.zeros(size).bfloat16(), torch.zeros(size, dtype=torch.int16)
    floats = [torch.zeros(size) for _ in range(3)]
    triton_adamw.adamw_step([MasterWeight(weight, low, floats[0].bfloat16(), *floats[1:])], STEP)
    (compiled,) = kernel.kernels
    assert stack_bytes(compiled, tmp_path) == 0
    wide = count_accesses(compiled.asm["ptx"], "v4")
    assert wide == 0 if odd else wide >= 9, "five loads and four stores"


def test_scale_of_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kernels.compile_support import compile_launches  # needs Triton

    (kernel,) = [k for k in compile_launches(triton_scale, monkeypatch) if "scale" in str(k)]
    triton_scale.scale_in_place([torch.zeros(64).bfloat16()] * 3, torch.ones(()))
    (compiled,) = kernel.kernels
    assert count_accesses(compiled.asm["ptx"], "v4") >= 2


@pytest.mark.parametrize("has_low", [True, False])
def test_muon_of_many_matrices(
    has_low: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.kernels.compile_support import compile_launches, stack_bytes  # needs Triton

    kernels = compile_launches(triton_muon, monkeypatch)
    floats = [torch.zeros(8, 8) for _ in range(2)]
    weight, low = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.int16)
    made = triton_muon.MuonWeight(
        weight.bfloat16() if has_low else weight,
        low if has_low else None,
        floats[0].bfloat16(),
        floats[1],
    )
    update = torch.zeros(8, 8).bfloat16()
    triton_muon.add_momentum([made] * 3, [update] * 3, 0.9)
    triton_muon.apply_updates([made] * 3, [update] * 3, 0.99, 0.1)
    for kernel in kernels:
        (compiled,) = kernel.kernels
        assert stack_bytes(compiled, tmp_path) == 0
        assert count_accesses(compiled.asm["ptx"], "v4") >= 3
