"""Standalone scripts that reproduce one captured graph.

In: a captured Trace. Out: a Python file that does not need the user's program. Running it compiles the
graph (and reproduces its failure, if any), compares it with eager, and times it against eager and
torch.compile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fulgurite import timing
from fulgurite.config import settings
from fulgurite.errors import TraceTextError
from fulgurite.options import Options
from fulgurite.trace import Trace, describe
from fulgurite.trace.cost import format_seconds, size_hint
from fulgurite.trace.metadata import find_fake_mode, same_metadata, use_fake_mode
from fulgurite.trace.node_meta import fake_value
from fulgurite.trace.source import write_atomically


def build_script(trace: Trace, options: Options) -> str:
    """The script for a captured trace."""
    rows = [f"    {_input_text(fake_value(node))},  # {node.name}" for node in trace.inputs]
    executors = [executor.name for executor in options.executors]
    transforms = [transform.name for transform in options.transforms]
    note = f"# compiled with the transforms {', '.join(transforms)}, which are not in this file\n"
    return (
        '"""One captured graph: `python THIS_FILE` compiles it, compares it with eager, times it."""\n\n'
        + (note if transforms else "")
        + trace.text
        + "\n\nINPUTS = [\n"
        + "\n".join(rows)
        + "\n]\n\n"
        + 'if __name__ == "__main__":\n'
        + "    import fulgurite\n"
        + "    from fulgurite.repro import compare_with_eager\n\n"
        + f"    options = dict(executors={executors!r}, remat={options.remat!r}, "
        + f"dynamic={options.dynamic!r})\n"
        + "    compare_with_eager(forward, fulgurite.compile(forward, **options), INPUTS)\n"
    )


def _input_text(value: Any) -> str:
    """An entry of INPUTS: (shape, strides, dtype, device, requires_grad), or the value itself."""
    if isinstance(value, torch.Tensor):
        shape = [size_hint(size) for size in value.shape]
        strided = value.layout is torch.strided
        strides = [size_hint(stride) for stride in value.stride()] if strided else None
        return f"({shape}, {strides}, {value.dtype}, {str(value.device)!r}, {value.requires_grad})"
    return repr(size_hint(value) if isinstance(value, torch.SymInt) else value)


def save_script(trace: Trace, options: Options, path: str | Path) -> Path:
    return write_atomically(Path(path), build_script(trace, options))


def save_failure(trace: Trace, options: Options) -> Path:
    """Save the script of a failed graph into the repro folder."""
    text = build_script(trace, options)
    name = f"graph_{trace.index}_{hashlib.sha256(text.encode()).hexdigest()[:10]}.py"
    return write_atomically(settings().repro_dir / name, text)


def make_inputs(entries: Sequence[Any]) -> list[Any]:
    """Real inputs for the entries of INPUTS, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [_make_input(entry, generator) for entry in entries]


def _make_input(entry: Any, generator: torch.Generator) -> Any:
    if not isinstance(entry, tuple):
        return entry
    shape, strides, dtype, device, requires_grad = entry
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(shape, generator=generator)
    else:
        values = torch.randint(0, 2, shape, generator=generator)  # valid as indices, too
    if strides is None:
        tensor = values.to(dtype=dtype, device=device)
    else:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if any(stride == 0 and size > 1 for stride, size in zip(strides, shape, strict=True)):
            unique = [1 if stride == 0 else n for n, stride in zip(shape, strides, strict=True)]
            tensor.as_strided(unique, strides).copy_(values[tuple(slice(0, n) for n in unique)])
        else:
            tensor.copy_(values)
    return tensor.requires_grad_(requires_grad)


def compare_with_eager(
    forward: Callable[..., Any], compiled: Callable[..., Any], entries: Sequence[Any]
) -> None:
    """Compare `compiled` with eager, and time both and torch.compile."""
    torch.manual_seed(0)
    expected = forward(*make_inputs(entries))
    torch.manual_seed(0)
    actual = compiled(*make_inputs(entries))
    torch.testing.assert_close(actual, expected, equal_nan=True)
    print("fulgurite agrees with eager")
    inputs = make_inputs(entries)
    candidates = {"eager": forward, "torch.compile": torch.compile(forward), "fulgurite": compiled}
    for name, seconds in timing.median_times_on(candidates, *inputs).items():
        print(f"{name:<14} {format_seconds(seconds)}")


def check_replacement(trace: Trace, forward: Callable[..., Any]) -> None:
    """Raise if an edited function does not take and return what the trace does, on FakeTensors."""
    inputs = [fake_value(node) for node in trace.inputs]
    expected = [fake_value(out) if isinstance(out, fx.Node) else None for out in trace.outputs]
    try:
        with use_fake_mode(find_fake_mode(trace.module)):
            result = forward(*inputs)
    except Exception as error:
        raise TraceTextError(
            f"the edited trace fails on the original's inputs: {type(error).__name__}: {error}",
            trace=trace.name,
            next="keep its signature; try it on tensors with fulgurite.trace.source.load_source",
        ) from error
    actual = list(result) if isinstance(result, (list, tuple)) else [result]
    if len(actual) != len(expected) or not all(map(same_metadata, expected, actual)):
        raise TraceTextError(
            "the edited trace returns other values than the original",
            original=", ".join(map(describe, expected)),
            edited=", ".join(map(describe, actual)),
            next="return the same number of values, with the same dtypes, shapes and strides",
        )
