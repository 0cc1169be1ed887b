"""Stress test of CUDA graphs: random programs, called in random ways, against eager.

    python -m tests.cudagraph.stress --steps 10000 --device cuda --seed 0

Each step calls one of several compiled programs: inference in several modes, training, accumulated
gradients, two forwards before their backwards, other sizes, results that are held, parameters that change
in place or move, other streams and threads. Results and gradients must be eager's, held results must not
change, and memory must not grow. Without a GPU, fake captures are used. With an odd seed, the limits for large
tensors are 0: results are made after a replay, and no layer has two captures.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import fulgurite
from fulgurite.cudagraph import state
from fulgurite.executors import result_tail
from tests.cudagraph.fake import use_fake_captures

WIDTH = 16
ROWS = (4, 7, 1)
TOLERANCE = {"rtol": 1e-6, "atol": 1e-8}  # of float64, whose reductions are ordered differently
MAX_HELD = 6
MIN_SETTLED_STEPS = 1000
UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    torch.relu,
    F.gelu,
    torch.tanh,
    lambda x: torch.softmax(x, -1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x.flip(0),
    lambda x: x - x.mean(0, keepdim=True),
    lambda x: x * x.amax(-1, keepdim=True),
]


class RandomProgram(nn.Module):
    """A chain of random ops and matmuls, with residuals and several outputs."""

    def __init__(self, generator: random.Random) -> None:
        super().__init__()
        count = generator.randint(2, 4)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(count)
        )
        self.ops = [generator.sample(UNARY, generator.randint(1, 3)) for _ in range(count)]
        self.residual = [generator.random() < 0.5 for _ in range(count)]
        self.extra = generator.randint(0, 2)  # what else is returned

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for weight, ops, residual in zip(self.weights, self.ops, self.residual, strict=True):
            y = values[-1] @ weight
            for op in ops:
                y = op(y)
            values.append(values[-1] + y if residual else y)
        return (values[-1], values[1].sum(-1), x)[: 1 + self.extra]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = []
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        return (x, hidden[0])


class Layers(Stack):
    """Its layers call one compiled graph one after the other."""


class Statistics(nn.Module):
    """Running statistics, which forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x).relu()
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return (self.last(y - self.average),)


class Dropout(nn.Module):
    """Random numbers: its reference is compiled without CUDA graphs, and seeded alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.dropout(self.first(x).relu(), 0.3)
        return (F.dropout(self.last(y), 0.5), torch.rand_like(x) + x)


@dataclass
class Program:
    """A program in eager mode and compiled, with a copy of its parameters each."""

    eager: nn.Module
    original: nn.Module
    compiled: Any
    reference: Any  # what runs the eager module
    held: list[tuple[Any, Any]] = field(default_factory=list)  # results, and what they must be

    def both(self) -> list[tuple[nn.Module, Any]]:
        return [(self.eager, self.reference), (self.original, self.compiled)]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.eager.parameters(), self.original.parameters(), strict=True))


class Stress:
    """Runs random steps, and counts what they were."""

    def __init__(self, device: str, seed: int, mode: Any = True) -> None:
        self.device, self.random = torch.device(device), random.Random(seed)
        self.counts: Counter[str] = Counter()
        torch.manual_seed(seed)
        modules = [RandomProgram(self.random) for _ in range(3)] + [
            Stack(),
            Statistics(),
            Dropout(),
        ]
        self.programs = [self._compile(module, mode) for module in modules]
        self.side = torch.cuda.Stream() if self.device.type == "cuda" else None
        self.actions: list[Callable[[Program], None]] = [
            *[self.infer] * 4,
            *[self.train] * 4,
            self.train_two,
            self.update,
            self.move_parameter,
            self.hold,
            self.use_threads,
            self.use_stream,
            self.release,
        ]

    def _compile(self, module: nn.Module, mode: Any) -> Program:
        eager = module.to(self.device, torch.float64)
        original = copy.deepcopy(eager)
        granularity = "blocks" if isinstance(module, Layers) else "auto"
        compiled = fulgurite.compile(original, cudagraph=mode, granularity=granularity)
        is_random = isinstance(module, Dropout)
        reference = fulgurite.compile(eager, cudagraph=False) if is_random else eager
        return Program(eager, original, compiled, reference)

    def run(self, run: Any, x: Tensor) -> Any:
        """Call a program with the seed of this step."""
        torch.manual_seed(self.counts.total())
        return run(x)

    def draw(self, rows: int | None = None) -> Tensor:
        rows = rows or self.random.choice((ROWS[0],) * 6 + ROWS[1:])
        return torch.randn(rows, WIDTH, dtype=torch.float64, device=self.device)

    def step(self) -> None:
        program, action = self.random.choice(self.programs), self.random.choice(self.actions)
        self.counts[action.__name__] += 1
        action(program)
        for results, expected in program.held:
            torch.testing.assert_close(results, expected, rtol=0, atol=0)

    def compare(self, program: Program, results: Any, expected: Any) -> None:
        torch.testing.assert_close(results, expected, **TOLERANCE)
        buffers = [dict(m.named_buffers()) for m in (program.original, program.eager)]
        torch.testing.assert_close(*buffers, **TOLERANCE)

    def compare_gradients(self, program: Program) -> None:
        for eager, ours in program.pairs():
            torch.testing.assert_close(ours.grad, eager.grad, **TOLERANCE)

    # ---- the actions -------------------------------------------------------------------------------

    def infer(self, program: Program) -> None:
        x = self.draw()
        mode = self.random.choice([torch.no_grad, torch.inference_mode])
        with mode():
            results, expected = [self.run(run, x) for _, run in program.both()][::-1]
        self.compare(program, results, expected)

    def hold(self, program: Program) -> None:
        x = self.draw()
        with torch.no_grad():
            results, expected = [self.run(run, x) for _, run in program.both()][::-1]
        self.compare(program, results, expected)
        copies = [result.clone() for result in results]
        program.held = [*program.held, (list(results), copies)][-MAX_HELD:]

    def release(self, program: Program) -> None:
        program.held.clear()

    def train(self, program: Program) -> None:
        x = self.draw()
        for _, run in program.both():
            self._loss(self.run(run, x)).backward()
        self.compare_gradients(program)
        self._maybe_zero(program)

    def train_two(self, program: Program) -> None:
        x, y = self.draw(), self.draw()
        for _, run in program.both():
            first, second = (self._loss(self.run(run, one)) for one in (x, y))
            (second * 2).backward()
            first.backward()
        self.compare_gradients(program)
        self._maybe_zero(program)

    def update(self, program: Program) -> None:
        with torch.no_grad():
            for eager, ours in program.pairs():
                if eager.grad is not None:
                    eager.sub_(eager.grad, alpha=1e-3)
                ours.copy_(eager)  # in place, and without a difference that grows

    def move_parameter(self, program: Program) -> None:
        if self.random.random() < 0.8:
            return
        _, ours = self.random.choice(program.pairs())
        ours.data = ours.data.clone()

    def use_threads(self, program: Program) -> None:
        if any(True for _ in program.eager.buffers()) or program.reference is not program.eager:
            return  # the order of writes, or of random numbers, is not defined in eager either
        rows, errors = ROWS[0], []
        inputs = [self.draw(rows) for _ in range(4)]

        def work(x: Tensor) -> None:
            try:
                with torch.no_grad():
                    for _ in range(3):
                        torch.testing.assert_close(
                            program.compiled(x), program.eager(x), **TOLERANCE
                        )
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def use_stream(self, program: Program) -> None:
        if self.side is None:
            return
        x = self.draw()
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side), torch.no_grad():
            results = self.run(program.compiled, x)
        current.wait_stream(self.side)
        with torch.no_grad():
            self.compare(program, results, self.run(program.reference, x))
        torch.cuda.synchronize()

    def _loss(self, results: Any) -> Tensor:
        return sum(result.square().mean() for result in results if result.requires_grad)  # type: ignore[return-value]

    def _maybe_zero(self, program: Program) -> None:
        chance = self.random.random()
        for module, _ in program.both():
            if chance < 0.5:
                module.zero_grad(set_to_none=True)
            elif chance < 0.6:
                module.zero_grad(set_to_none=False)

    # ---- the report --------------------------------------------------------------------------------

    def graphs(self) -> list[Any]:
        compiled = [
            graph
            for program in self.programs
            for record in program.compiled.graphs
            for graph in record.compiled_graphs.values()
        ]
        return [graph.graphed for graph in compiled if graph.graphed is not None]

    def report(self) -> str:
        graphs = self.graphs()
        replays, captures = sum(g.replays for g in graphs), sum(g.captures for g in graphs)
        plain = sum(g.plain_calls for g in graphs)
        actions = ", ".join(f"{name} {count}" for name, count in self.counts.most_common())
        return f"{captures} captures, {replays} replays, {plain} plain calls; {actions}"


def used_memory(device: torch.device) -> int:
    """Allocated bytes on a GPU; tensors that exist on a CPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@contextlib.contextmanager
def treat_tensors_as_large(seed: int) -> Iterator[None]:
    """Set the limits above which memory counts to 0, if the seed is odd."""
    with pytest.MonkeyPatch.context() as patch:
        if seed % 2:
            patch.setattr(result_tail, "MIN_RESULT_BYTES", 0)
            patch.setattr(state, "MAX_DUPLICATED_BYTES", 0)
        yield


def run_stress(
    device: str, steps: int, seed: int, mode: Any = True, seconds: float = float("inf")
) -> str:
    """Run the steps; returns a summary. Raises for a wrong result or memory that grows.

    seconds   run fewer steps after this time
    """
    fake = use_fake_captures() if device == "cpu" else contextlib.nullcontext()
    large = treat_tensors_as_large(seed)
    with (
        fake,
        large,
        torch._dynamo.config.patch(recompile_limit=64),
    ):  # programs of one class share code
        stress = Stress(device, seed, mode)
        middle, started = 0, time.perf_counter()
        for step in range(steps):
            if time.perf_counter() - started > seconds:
                return f"{step} steps: {stress.report()}; memory {_memory_at_rest(stress)}"
            try:
                stress.step()
            except AssertionError as error:
                raise AssertionError(f"step {step} of seed {seed}: {error}") from error
            if step == steps // 2:
                middle = _memory_at_rest(stress)
        end = _memory_at_rest(stress)
        is_settled = steps >= MIN_SETTLED_STEPS  # programs and shapes are compiled and captured
        if is_settled and end > 1.05 * middle + (1 << 20 if device == "cuda" else 100):
            raise AssertionError(
                f"memory grew from {middle} to {end} in the last {steps // 2} steps"
            )
        return f"{steps} steps: {stress.report()}; memory {middle} → {end}"


def _memory_at_rest(stress: Stress) -> int:
    for program in stress.programs:
        program.held.clear()
        for module, _ in program.both():
            module.zero_grad(set_to_none=True)
    return used_memory(stress.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--mode", default="True", choices=["True", "auto"])
    options = parser.parse_args()
    mode = True if options.mode == "True" else "auto"
    print(run_stress(options.device, options.steps, options.seed, mode, options.seconds))


if __name__ == "__main__":
    main()
