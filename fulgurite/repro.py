"""Scripts that stand alone: a captured graph, inputs that look like the ones it saw, and a comparison.

In: a captured Trace. Out: a Python file with nothing of the user's program in it. Running it compiles the graph
(and so fails the same way, if it failed) and times it beside eager and torch.compile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fulgurite import timing
from fulgurite.config import settings
from fulgurite.errors import TraceTextError
from fulgurite.options import Options
from fulgurite.trace import Trace, describe
from fulgurite.trace.cost import seconds_text, size_hint
from fulgurite.trace.metadata import fake_mode_of, faking, same_metadata
from fulgurite.trace.text import write_text


def script(trace: Trace, options: Options) -> str:
    """The text of the script for a captured trace."""
    rows = [f"    {_input_text(node.meta.get('val'))},  # {node.name}" for node in trace.inputs]
    executors = [executor.name for executor in options.executors]
    left_out = [transform.name for transform in options.transforms]
    note = f"# compiled with the transforms {', '.join(left_out)}, which are not in this file\n"
    return (
        '"""One captured graph by itself: python THIS_FILE compiles, compares and times it."""\n\n'
        + (note if left_out else "")
        + trace.text
        + "\n\nINPUTS = [\n"
        + "\n".join(rows)
        + "\n]\n\n"
        + 'if __name__ == "__main__":\n'
        + "    import fulgurite\n"
        + "    from fulgurite.repro import compare\n\n"
        + f"    options = dict(executors={executors!r}, remat={options.remat!r}, "
        + f"dynamic={options.dynamic!r})\n"
        + "    compare(forward, fulgurite.compile(forward, **options), INPUTS)\n"
    )


def _input_text(value: Any) -> str:
    """An entry of INPUTS: what the input looks like."""
    if isinstance(value, torch.Tensor):
        shape = [size_hint(size) for size in value.shape]
        strided = value.layout is torch.strided
        strides = [size_hint(stride) for stride in value.stride()] if strided else None
        return f"({shape}, {strides}, {value.dtype}, {str(value.device)!r}, {value.requires_grad})"
    return repr(size_hint(value) if isinstance(value, torch.SymInt) else value)


def save(trace: Trace, options: Options, path: str | Path) -> Path:
    return write_text(Path(path), script(trace, options))


def save_failing(trace: Trace, options: Options) -> Path:
    """Save next to the user's work, under a name of its own."""
    text = script(trace, options)
    name = f"graph_{trace.index}_{hashlib.sha256(text.encode()).hexdigest()[:10]}.py"
    return write_text(settings().repro_folder / name, text)


def make_inputs(entries: Sequence[Any]) -> list[Any]:
    """Real inputs for the entries of INPUTS, the same every time."""
    generator = torch.Generator().manual_seed(0)
    return [_make_input(entry, generator) for entry in entries]


def _make_input(entry: Any, generator: torch.Generator) -> Any:
    if not isinstance(entry, tuple):
        return entry
    shape, strides, dtype, device, requires_grad = entry
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(shape, generator=generator)
    else:
        values = torch.randint(0, 2, shape, generator=generator)  # also right as indices
    if strides is None:
        tensor = values.to(dtype=dtype, device=device)
    else:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if any(stride == 0 and size > 1 for stride, size in zip(strides, shape, strict=True)):
            once = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
            tensor.as_strided(once, strides).copy_(values[tuple(slice(0, n) for n in once)])
        else:
            tensor.copy_(values)
    return tensor.requires_grad_(requires_grad)


def compare(
    forward: Callable[..., Any], compiled: Callable[..., Any], entries: Sequence[Any]
) -> None:
    """Compare `compiled` with eager, and time both beside torch.compile."""
    torch.manual_seed(0)
    expected = forward(*make_inputs(entries))
    torch.manual_seed(0)
    actual = compiled(*make_inputs(entries))
    torch.testing.assert_close(actual, expected, equal_nan=True)
    print("fulgurite agrees with eager")
    inputs = make_inputs(entries)
    candidates = {"eager": forward, "torch.compile": torch.compile(forward), "fulgurite": compiled}
    for name, seconds in timing.compare_on(candidates, *inputs).items():
        print(f"{name:<14} {seconds_text(seconds)}")


def check_replacement(trace: Trace, forward: Callable[..., Any]) -> None:
    """Whether an edited function takes and gives what the trace does, tried on FakeTensors."""
    inputs = [node.meta.get("val") for node in trace.inputs]
    expected = [getattr(node, "meta", {}).get("val") for node in trace.outputs]
    try:
        with faking(fake_mode_of(trace.module)):
            result = forward(*inputs)
    except Exception as error:
        raise TraceTextError(
            f"the edited trace fails on inputs like the original's: {type(error).__name__}: {error}",
            trace=trace.name,
            next="its signature must stay; try it on real tensors with fulgurite.trace.text.load",
        ) from error
    actual = list(result) if isinstance(result, (list, tuple)) else [result]
    if len(actual) != len(expected) or not all(map(same_metadata, expected, actual)):
        raise TraceTextError(
            "the edited trace returns something else than the original",
            original=", ".join(map(describe, expected)),
            edited=", ".join(map(describe, actual)),
            next="return as many values, of the same dtypes, shapes and strides",
        )
