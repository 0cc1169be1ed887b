"""torch's operator database, compiled against eager.

Every sample input of every operator, in float32 and one other dtype, forward and gradient.
The normal run takes a fixed sample of the operators. All of them: pytest -m slow tests/suites/test_op_db.py
All dtypes, also on a GPU: scripts/fuzz --opdb
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from tests.suites.operator_database import (
    BREAKING,
    EXCEPTIONS,
    OPS,
    Setting,
    check,
    differentiable,
)

EXECUTORS = [["torch"], ["fuser", "torch"]]  # the suite runs once with each


def other_dtype(op: OpInfo) -> torch.dtype | None:
    """The second dtype of an operator: one of four, chosen by the operator's name."""
    supported = op.supported_dtypes("cpu")
    able = [d for d in (torch.bfloat16, torch.int64, torch.bool, torch.complex64) if d in supported]
    return able[sum(map(ord, op.formatted_name)) % len(able)] if able else None


def dtypes(op: OpInfo) -> list[torch.dtype]:
    wanted = (torch.float32, other_dtype(op))
    return [dtype for dtype in wanted if dtype in op.supported_dtypes("cpu")]


SAMPLE = sorted(OPS)[4::16]  # by name, so that every family is in it
SAMPLES = [(name, ["torch"]) for name in SAMPLE]
SAMPLES += [(name, ["fuser", "torch"]) for name in SAMPLE[1::4]]  # a compiler runs for each


def check_all(name: str, executors: list[str], modes: Sequence[bool], limit: int | None) -> None:
    """Check one operator in its dtypes. `modes`: without and with gradients."""
    op = OPS[name]
    for dtype in dtypes(op):
        for gradient in modes:
            if gradient and not differentiable(op, dtype):
                continue
            tally = check(Setting(op, dtype, gradient, executors), limit)
            assert tally.graphs or tally.uncaptured or not tally.samples, "nothing was compiled"
            assert not tally.uncaptured or name in BREAKING, (
                f"{name} in {dtype} runs in eager: {tally.uncaptured}"
            )


@pytest.mark.parametrize(
    ("name", "executors"),
    SAMPLES,
    ids=lambda part: part if isinstance(part, str) else "-".join(part),
)
def test_sample_of_operators(name: str, executors: list[str]) -> None:
    """The first samples of every sixteenth operator, with gradients if it has any."""
    op = OPS[name]
    modes = (True,) if all(differentiable(op, dtype) for dtype in dtypes(op)) else (False, True)
    check_all(name, executors, modes, limit=2)


@pytest.mark.slow
@pytest.mark.parametrize("executors", EXECUTORS, ids="-".join)
@pytest.mark.parametrize("name", OPS)
def test_operator(name: str, executors: list[str]) -> None:
    """All samples of an operator."""
    check_all(name, executors, (False, True), limit=None)


def test_exceptions_are_known_operators() -> None:
    assert len(EXCEPTIONS) <= 10
    assert {name.partition("-")[0] for name in EXCEPTIONS} | BREAKING <= OPS.keys()
    assert len(OPS) == len(op_db), "two operators have one name"
