"""Standalone scripts that reproduce one captured graph.

In: a captured Trace. Out: a Python file that does not need the user's program. It sets the options, the
environment variables and torch's settings of the original. Running it compiles the graph, forward and
backward (and reproduces its failure, if any), compares it with eager, and times it against eager and
torch.compile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fulgurite import environment, timing
from fulgurite.config import settings
from fulgurite.errors import TraceTextError
from fulgurite.files import write_atomically
from fulgurite.op import find_module
from fulgurite.options import Options
from fulgurite.trace import Trace, describe
from fulgurite.trace.cost import format_seconds, size_hint
from fulgurite.trace.metadata import find_fake_mode, same_metadata, use_fake_mode
from fulgurite.trace.node_meta import fake_value

STRICT = "FULGURITE_STRICT"


@dataclass(frozen=True)
class TorchState:
    """Global settings of torch that a graph was captured under."""

    grad_enabled: bool
    autocast: dict[str, torch.dtype]  # by device type, where it is enabled
    matmul_precision: str
    deterministic: bool
    default_dtype: torch.dtype
    num_threads: int

    @classmethod
    def read(cls) -> TorchState:
        """The settings of this thread, now."""
        return cls(
            grad_enabled=torch.is_grad_enabled(),
            autocast={
                kind: torch.get_autocast_dtype(kind)
                for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            },
            matmul_precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            default_dtype=torch.get_default_dtype(),
            num_threads=torch.get_num_threads(),
        )

    def lines(self) -> list[str]:
        """Statements that set all but the modes."""
        return [
            f"torch.set_float32_matmul_precision({self.matmul_precision!r})",
            f"torch.use_deterministic_algorithms({self.deterministic})",
            f"torch.set_default_dtype({self.default_dtype})",
            f"torch.set_num_threads({self.num_threads})",
        ]

    def modes(self) -> str:
        """The context managers to call the graph in, as one `with` statement."""
        entries = [f"torch.set_grad_enabled({self.grad_enabled})"]
        entries += [f"torch.autocast({k!r}, {dtype})" for k, dtype in self.autocast.items()]
        return f"with {', '.join(entries)}:"


def build_script(
    trace: Trace, options: Options, state: TorchState, variables: Mapping[str, str]
) -> str:
    """The script for a captured trace.

    state       settings of torch to run it under
    variables   environment variables to run it under
    """
    rows = [f"    {_input_text(fake_value(node))},  # {node.name}" for node in trace.inputs]
    lines = [
        '"""One captured graph: `python THIS_FILE` compiles it, compares it with eager, times it.',
        "",
        *(f"{label}: {text}" for label, text in environment.versions().items()),
        '"""',
        "",
        "import os",
        "",
        f"os.environ.update({dict(variables)!r})",
        "",
        *(f"# compiled with {text}, not in this file" for text in _missing_parts(options)),
        trace.text,
        "",
        "INPUTS = [",
        *rows,
        "]",
        "",
        'if __name__ == "__main__":',
        "    import fulgurite",
        "    from fulgurite.repro import compare_with_eager",
        *(f"    import {name}  # has operators of the graph" for name in _operator_modules(trace)),
        "",
        *(f"    {line}" for line in state.lines()),
        f"    options = {_option_text(trace, options)}",
        f"    {state.modes()}",
        "        compare_with_eager(forward, fulgurite.compile(forward, **options), INPUTS)",
    ]
    return "\n".join(lines) + "\n"


def _operator_modules(trace: Trace) -> list[str]:
    """The modules that define the custom operators of a graph and of the graphs inside it."""
    graphs = [one.graph for one in trace.module.modules() if isinstance(one, fx.GraphModule)]
    found = {find_module(node.target) for graph in graphs for node in graph.nodes}
    return sorted(name for name in found if name not in (None, "__main__"))


def _missing_parts(options: Options) -> list[str]:
    """What a script can't carry: the user's own transforms."""
    names = [transform.name for transform in options.transforms]
    return [f"the transforms {', '.join(names)}"] if names else []


def _option_text(trace: Trace, options: Options) -> str:
    """The options of `compile`, all but transforms. Symbolic sizes stay symbolic."""
    values = [fake_value(node) for node in trace.inputs]
    sizes = [n for v in values for n in (v.shape if isinstance(v, torch.Tensor) else [v])]
    has_symbols = any(isinstance(size, torch.SymInt) for size in sizes)
    chosen = {
        "executors": [executor.name for executor in options.executors],
        "dynamic": True if has_symbols else options.dynamic,
        "fullgraph": options.fullgraph,
        "remat": options.remat,
        "autotune": options.autotune,
        "cudagraph": options.cudagraph,
    }
    return f"dict({', '.join(f'{name}={value!r}' for name, value in chosen.items())})"


def _input_text(value: Any) -> str:
    """An entry of INPUTS: (shape, strides, dtype, device, requires_grad), or the value itself."""
    if isinstance(value, torch.Tensor):
        shape = [size_hint(size) for size in value.shape]
        strided = value.layout is torch.strided
        strides = [size_hint(stride) for stride in value.stride()] if strided else None
        return f"({shape}, {strides}, {value.dtype}, {str(value.device)!r}, {value.requires_grad})"
    return repr(size_hint(value) if isinstance(value, torch.SymInt) else value)


def save_script(trace: Trace, options: Options, state: TorchState, path: str | Path) -> Path:
    """Save the script of a graph."""
    text = build_script(trace, options, state, environment.variables())
    return write_atomically(Path(path), text)


def save_failure(trace: Trace, options: Options, state: TorchState) -> Path:
    """Save the script of a failed graph into the repro folder. It raises what failed."""
    text = build_script(trace, options, state, environment.variables() | {STRICT: "1"})
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
    """Compare `compiled` with eager, results and gradients, and time both and torch.compile."""
    expected, actual = run_with_gradients(forward, entries), run_with_gradients(compiled, entries)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    print("fulgurite agrees with eager")
    inputs = make_inputs(entries)
    candidates = {"eager": forward, "torch.compile": torch.compile(forward), "fulgurite": compiled}
    for name, seconds in timing.median_times_on(candidates, *inputs).items():
        print(f"{name:<14} {format_seconds(seconds)}")


def run_with_gradients(function: Callable[..., Any], entries: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a function, and the gradients of its inputs if they need any."""
    torch.manual_seed(0)
    inputs = make_inputs(entries)
    result = function(*inputs)
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if not differentiable or not leaves:
        return tuple(tensors)
    ones = [torch.ones_like(tensor) for tensor in differentiable]
    gradients = torch.autograd.grad(differentiable, leaves, ones, allow_unused=True)
    return (*(tensor.detach() for tensor in tensors), *(g for g in gradients if g is not None))


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
