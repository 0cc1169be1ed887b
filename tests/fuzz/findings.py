"""A failing program → a script that shows it, and a line that groups it with others like it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.fuzz.check import Failure
from tests.fuzz.inputs import make_arguments, make_tensor
from tests.fuzz.program import Input, Number, Program

SCRIPT = '''"""Fuzzer finding: seed {seed}, kind {kind}, target {target}.

{category}: {what}
{detail}
"""
import torch
from torch import inf, nan
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
import math
import fulgurite
from tests.fuzz.functions import *

{program}


{arguments}

compiled = fulgurite.compile(program, dynamic={dynamic})
for make_arguments in ({calls},):
    {block}
'''
COMPARISON = """given = make_arguments()
    expected = program(*given)
    leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    ours = make_arguments()
    results = compiled(*ours)
    print("expected", expected, "\\ngot     ", results)
    torch.testing.assert_close(results, expected, equal_nan=True, check_stride=False)
    torch.testing.assert_close(ours, given, equal_nan=True, check_stride=False)
    print("strides", [x.stride() for x in results], "expected", [x.stride() for x in expected])
    if leaves:
        ends = [(a, b) for a, b in zip(expected, results) if a.grad_fn is not None]
        cotangents = [(torch.arange(a.numel()) * 7 % 13 - 6).view(a.shape).to(a) / 4 for a, _ in ends]
        wanted = torch.autograd.grad([a for a, _ in ends], leaves, cotangents, allow_unused=True)
        leaves = [x for x in ours if isinstance(x, torch.Tensor) and x.requires_grad]
        got = torch.autograd.grad([b for _, b in ends], leaves, cotangents, allow_unused=True)
        print("expected gradients", wanted, "\\ngot     ", got)
        torch.testing.assert_close(got, wanted, equal_nan=True, check_stride=False)"""
ERROR = """try:
        print("eager gives", program(*make_arguments()))
    except (IndexError, RuntimeError) as error:
        print("eager raises", error)
    print("compiled gives", compiled(*make_arguments()))"""


@dataclass(frozen=True)
class Finding:
    """One failing program, as it is reported and stored."""

    seed: int
    kind: str
    category: str
    what: str
    group: str
    path: str


def group_of(program: Program, failure: Failure) -> str:
    """Equal for programs that probably fail for one reason."""
    if failure.category == "raises":
        return f"raises {failure.what}"
    lines = [re.sub(r"\b[a-z]\d+(_\d+)?\b", "_", line.text) for line in program.lines[-2:]]
    return f"{failure.category} ({failure.what}): " + " ; ".join(lines)


def literal(tensor: Tensor, device: str, shared: str = "", is_known: bool = False) -> str:
    """An expression of the tensor: its memory, and a strided view of it.

    `shared` names memory that other tensors view, too; it `is_known` after the first of them.
    """
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().cpu().untyped_storage())
    narrow = memory.dtype.is_floating_point and memory.dtype.itemsize == 1
    numbers = (memory.float() if narrow else memory).tolist()
    place = "" if device == "cpu" else f", device={device!r}"
    text = f"torch.tensor({numbers}, dtype={tensor.dtype}{place})"
    if shared:
        text = shared if is_known else f"({shared} := {text})"
    contiguous = torch.empty(tensor.shape).stride()
    is_whole = tensor.shape == memory.shape and tensor.stride() == contiguous
    if not is_whole or tensor.storage_offset():
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        text += f".as_strided({shape}, {stride}, {tensor.storage_offset()})"
    return text


def expressions(inputs: Sequence[Input], call: dict[str, Number], device: str) -> list[str]:
    """An expression for each input."""
    known: set[str] = set()
    texts = []
    for given, value in zip(inputs, make_arguments(tuple(inputs), call, (), "cpu"), strict=True):
        if not given.memory:
            texts.append(expression(given, call, device))
            continue
        name = f"{given.memory}_{given.dtype}"
        texts.append(literal(value, device, name, name in known))
        known.add(name)
    return texts


def expression(given: Input, call: dict[str, Number], device: str) -> str:
    """An expression of an input that shares no memory."""
    if given.layout == "two":
        value = make_tensor(given, call, "cpu")
        text = f"TwoTensor({literal(value.a, device)}, {literal(value.b, device)})"
    else:
        text = literal(make_tensor(given, call, "cpu"), device)
    return f"{text}.requires_grad_()" if given.requires_grad else text


def script(program: Program, failure: Failure, target: str) -> str:
    """A script that runs alone, prints what is expected and got, and fails."""
    device = "cuda" if target == "cuda" else "cpu"
    makers = []
    for number, call in enumerate(program.calls):
        texts = expressions(program.inputs, call, device)
        lines = [
            f"    {text},  # {given.name}"
            for text, given in zip(texts, program.inputs, strict=True)
        ]
        lines += [f"    {call[name]!r},  # {name}" for name in program.scalars]
        makers.append(f"make_{number} = lambda: [\n" + "\n".join(lines) + "\n]")
    return SCRIPT.format(
        seed=program.seed,
        kind=program.kind,
        target=target,
        category=failure.category,
        what=failure.what.replace("\\", "/"),
        detail=failure.detail.replace("\\", "/").replace('"""', "'''"),
        program=program,
        arguments="\n".join(makers),
        dynamic=program.dynamic,
        calls=", ".join(f"make_{number}" for number in range(len(program.calls))),
        block=ERROR if program.raises else COMPARISON,
    )


def script_path(seed: int, target: str, folder: Path) -> Path:
    return folder / f"{target}-{seed}.py"


def save(program: Program, failure: Failure, target: str, folder: Path) -> Finding:
    """Write the script of a finding."""
    folder.mkdir(parents=True, exist_ok=True)
    path = script_path(program.seed, target, folder)
    path.write_text(script(program, failure, target))
    return Finding(
        program.seed,
        program.kind,
        failure.category,
        failure.what,
        group_of(program, failure),
        str(path),
    )
