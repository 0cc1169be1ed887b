"""Peak memory of captured models on a GPU, against the same models without CUDA graphs.

    python -m pytest -s tests/cudagraph/test_memory_on_gpu.py

Prints the figures. Peaks count the memory pools of CUDA graphs whole, as `fulgurite bench zoo` does.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fulgurite
from fulgurite.bench.zoo.candidates import _unused_in_graph_pools, _used_memory
from tests.cudagraph.programs import graphed

pytestmark = pytest.mark.gpu
WIDTH, HEADS, LAYERS, VOCABULARY, BATCH, TOKENS = 256, 4, 4, 30522, 8, 256
# cuBLAS has a workspace of 32 MiB for each thread and stream; captures have their own.
WORKSPACES = 72 << 20
ROUNDING = 44 << 20  # the allocator reserves 20 MiB at a time, in each pool


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(-2)
        x = self.first(x + self.out(attended))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Logits of an odd vocabulary: 128 MB of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Classifier(nn.Module):
    def __init__(self, layers: int = 2 * LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def measure_peak(step, warmups: int = 30) -> int:
    """Bytes in use at most during a step, with the pools, above what was in use before the first one."""
    for _ in range(warmups):
        step()
    _used_memory()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() + _unused_in_graph_pools()


def measure_both(module: nn.Module, make_step) -> dict[str, int]:
    """Peaks without and with CUDA graphs."""
    found = {}
    for name, mode in (("plain", False), ("captured", True)):
        torch._dynamo.reset()
        gc.collect()
        compiled = fulgurite.compile(copy.deepcopy(module), cudagraph=mode)
        before = _used_memory()
        found[name] = measure_peak(make_step(compiled)) - before
        if mode:
            print([str(graphed(compiled, kind)) for kind in compiled.graphs[-1].compiled_graphs])
        del compiled
    print({name: f"{count / 1e6:.0f} MB" for name, count in found.items()})
    return found


def draw_tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), device="cuda")


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    torch.manual_seed(0)
    return Bert().cuda().bfloat16()


def test_inference_needs_no_second_buffer_of_its_result(bert):
    tokens = draw_tokens()

    def make_step(compiled):
        def step() -> None:
            with torch.no_grad():
                compiled(tokens)

        return step

    peaks = measure_both(bert, make_step)
    logits = 2 * BATCH * TOKENS * VOCABULARY
    assert peaks["plain"] < 1.5 * logits + WORKSPACES, "a padded copy of the logits"
    assert peaks["captured"] < 1.15 * peaks["plain"] + WORKSPACES + ROUNDING


def test_held_results_stay_valid_and_are_ordinary_tensors(bert):
    compiled = fulgurite.compile(copy.deepcopy(bert), cudagraph=True)
    side, held = torch.cuda.Stream(), []
    with torch.no_grad():
        for step in range(12):
            tokens = draw_tokens()
            logits = compiled(tokens)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # read elsewhere, while the next calls run
                torch.cuda._sleep(10_000_000)
                read = logits[:, ::16].clone()
            logits.record_stream(side)
            shared = torch.from_dlpack(logits)[:, 3]
            held.append((read, shared, logits if step % 3 == 0 else None, bert(tokens)))
            del logits, shared, read
    torch.cuda.synchronize()
    for read, shared, logits, expected in held:
        torch.testing.assert_close(read, expected[:, ::16], rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(shared, expected[:, 3], rtol=3e-2, atol=3e-2)
        if logits is not None:
            torch.testing.assert_close(logits, expected, rtol=3e-2, atol=3e-2)
    graph = graphed(compiled)
    assert graph.tail is not None and graph.replays >= 8, str(graph)


def test_results_are_freed(bert):
    compiled = fulgurite.compile(copy.deepcopy(bert), cudagraph=True)
    sizes = []
    with torch.no_grad():
        for _ in range(40):
            result = compiled(draw_tokens())
            dead = weakref.ref(result)
            del result
            assert dead() is None
            sizes.append(_used_memory())
    assert sizes[-1] <= sizes[15], sizes


@pytest.mark.parametrize("addresses", [1, 3])
def test_training_step(addresses):
    """Inputs at other addresses must not add captures with outputs of their own."""
    torch.manual_seed(0)
    module = Classifier().cuda().bfloat16()
    batches = [
        torch.randn(64, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
        for _ in range(addresses)
    ]
    order = [x for x in batches for _ in range(12)] + batches * 20

    def make_step(compiled):
        remaining = itertools.chain(order, itertools.cycle(batches))

        def step() -> None:
            compiled(next(remaining)).float().square().mean().backward()
            compiled.zero_grad(set_to_none=True)

        return step

    peaks = measure_both(module, make_step)
    gradients = sum(p.nbytes for p in module.parameters())
    assert peaks["captured"] < 1.35 * peaks["plain"] + gradients + 2 * WORKSPACES + 2 * ROUNDING


def test_gradients_of_captured_steps_are_those_without():
    torch.manual_seed(0)
    module = Classifier(layers=1).cuda()  # compiling is most of the time
    plain, captured = copy.deepcopy(module), copy.deepcopy(module)
    pairs = [(plain, fulgurite.compile(plain, cudagraph=False))]
    pairs += [(captured, fulgurite.compile(captured, cudagraph=True))]
    batches = [torch.randn(2, 64, WIDTH, device="cuda") for _ in range(3)]
    for x in [x for x in batches for _ in range(6)] + batches * 3:
        for original, compiled in pairs:
            original.zero_grad(set_to_none=True)
            compiled(x).square().mean().backward()
        for ours, theirs in zip(captured.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
