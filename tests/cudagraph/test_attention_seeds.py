"""Seeds of attention with dropout: on the host, in a capture on the device, and read where they are."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fulgurite.cudagraph import CaptureMemory, GraphedFunction, GraphInterface, StaticAddresses
from fulgurite.cudagraph import attention_seeds as module
from fulgurite.cudagraph.seeds import captured_seeds
from fulgurite.executors.torch import TORCH
from fulgurite.trace.node_meta import aten_op, set_fake_value
from tests.cudagraph.fake import is_on_fake_device, make_fake_backend, put_on_fake_host

aten = torch.ops.aten


def is_capturing() -> bool:
    return captured_seeds() is not None


def forward(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """As attention with dropout: the seed is on the device inside a capture only."""
    (x,) = inputs
    value = int(x.sum())
    seed = torch.tensor(value) if is_capturing() else put_on_fake_host(value)
    return x * 2, seed, x + 1


def backward(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    seed, saved, gradient = inputs
    if not is_capturing():
        seed = put_on_fake_host(int(seed))  # as `place_seed`
    assert is_on_fake_device(seed) == is_capturing()
    return (seed * gradient + saved,)


class Step:
    """A forward and a backward pass that share memory as those of a program do."""

    def __init__(self, forced: bool = True) -> None:
        addresses = StaticAddresses()
        device = torch.device("cpu")
        self.forward = GraphedFunction(
            "forward",
            forward,
            GraphInterface(("copied", "shared", "shared"), device),
            CaptureMemory(make_fake_backend(), addresses),
            forced=forced,
        )
        self.backward = GraphedFunction(
            "backward",
            backward,
            GraphInterface(("shared",), device),
            CaptureMemory(make_fake_backend(), addresses),
            forced=forced,
        )

    def __call__(self, value: float) -> None:
        self.finish(self.start(value))

    def start(self, value: float) -> tuple[float, Tensor, Tensor]:
        result, seed, saved = self.forward([torch.full((2,), value)])
        assert result.tolist() == [2 * value] * 2
        return value, seed, saved

    def finish(self, started: tuple[float, Tensor, Tensor]) -> None:
        value, seed, saved = started
        (gradient,) = self.backward([seed, saved, torch.full((2,), 3.0)])
        assert gradient.tolist() == [6 * value + value + 1] * 2


@pytest.mark.parametrize("forced", [True, False])
def test_both_passes_are_captured(forced):
    step = Step(forced)
    for value in range(40):
        step(float(value))
    assert step.forward.replays >= 20 and step.backward.replays >= 15, (step.forward, step.backward)
    seeds = [call.copied for state in step.backward._states.values() for call in state.calls()]
    assert any(0 not in copied for copied in seeds), "a captured forward's seed is read in place"


@pytest.mark.parametrize("captured", ["forward", "backward"])
def test_only_one_pass_is_captured(captured):
    step = Step()
    other = step.backward if captured == "forward" else step.forward
    other._add_state([]).disable()
    for value in range(12):
        step(float(value))
    assert getattr(step, captured).replays >= 8 and other.replays == 0


def test_seed_at_one_place_of_the_host_is_copied():
    step = Step()
    host, saved, gradient = torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.ones(2)
    for value in range(8):
        host[1] = value
        assert step.backward([host[1], saved, gradient])[0].tolist() == [value + 1.0] * 2
    assert step.backward.replays == 6


def test_forward_passes_without_backward_and_backward_passes_twice():
    """Gradient accumulation, results that are dropped, retain_graph, several forwards before a backward."""
    step, draw = Step(), random.Random(0)
    started = []
    for value in range(200):
        if draw.random() < 0.6 or not started:
            started.append(step.start(float(value)))
        elif draw.random() < 0.8:
            step.finish(started.pop(draw.randrange(len(started))))
        elif draw.random() < 0.5:
            step.finish(started[-1])
        else:
            started.clear()
    for one in started:
        step.finish(one)
    assert step.forward.replays > 20 and step.backward.replays > 10, (step.forward, step.backward)


def test_threads():
    step, wrong = Step(), []

    def work(first: int) -> None:
        try:
            for value in range(60):
                step(float(first + value))
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_user_who_gets_the_seed_gets_it_where_a_call_without_a_graph_returns_it():
    step = Step()
    step.forward.interface = GraphInterface(("copied",) * 3, torch.device("cpu"))
    for value in range(6):
        _, seed, _ = step.forward([torch.full((2,), float(value))])
        assert not is_on_fake_device(seed)
    assert "would be on the device" in str(step.forward)


def test_seed_is_placed_for_the_op(monkeypatch):
    seed = torch.tensor(5)
    assert module.place_seed(seed) is seed
    monkeypatch.setattr(module, "_is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="on the host"):
        module.place_seed(seed)
    with FakeTensorMode():
        on_device = torch.empty((), dtype=torch.int64, device="cuda")
        assert module.place_seed(on_device) is on_device
        monkeypatch.setattr(module, "_is_capturing", lambda: False)
        assert module.place_seed(on_device).device.type == "cpu"


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    "op",
    [
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._efficient_attention_backward.default,
    ],
)
def test_backward_ops_with_dropout_become_functions(op, dropout, monkeypatch):
    """The direct function is found by the op, and passes all arguments on."""
    graph = fx.Graph()
    with FakeTensorMode():
        x = graph.placeholder("x")
        set_fake_value(x, torch.empty(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16))
        names = [argument.name for argument in op._schema.arguments]
        values = {"dropout_p": dropout, "max_seqlen_q": 64, "max_seqlen_k": 64}
        values |= {"grad_input_mask": [True] * 4, "is_causal": False, "custom_mask_type": 0}
        values |= {"bias_requires_grad": False, "cu_seqlens_q": None, "cu_seqlens_k": None}
        plain = [a.name for a in op._schema.arguments if not a.kwarg_only]
        node = graph.call_function(op, tuple(values.get(name, x) for name in plain))
        set_fake_value(node, (x.meta["val"],) * 4)
    TORCH.use_direct_function(fx.GraphModule({}, graph), node)
    assert (node.target in module.SEEDED_FUNCTIONS.values()) == bool(dropout)
    if dropout:
        assert aten_op(node) is op
        placed, passed = [], []
        monkeypatch.setattr(module, "place_seed", lambda seed: placed.append(seed) or f"p{seed}")
        monkeypatch.setattr(module.aten, op._schema.name.split("::")[1], make_recorder(passed))
        given = [name for name in names if name in plain]
        node.target(*given, scale=2.0)
        assert placed == ["philox_seed", "philox_offset"]
        expected = [f"p{name}" if name.startswith("philox") else name for name in given]
        assert passed == [(tuple(expected), {"scale": 2.0})]


def make_recorder(passed: list):
    class Packet:
        @staticmethod
        def default(*args, **kwargs):
            passed.append((args, kwargs))

    return Packet
