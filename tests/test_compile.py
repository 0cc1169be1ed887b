"""`fulgurite.compile` against eager: containers, training, mutation, dtypes, dynamic shapes, breaks."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fulgurite
from fulgurite.errors import FallbackWarning, GraphBreakError
from fulgurite.models import tiny


def run_both(function, *inputs, **keywords):
    """Results of eager and compiled on clones of the same inputs, and those inputs afterwards."""
    results = []
    for call in (function, fulgurite.compile(function)):
        torch.manual_seed(7)
        own = [i.detach().clone() if isinstance(i, torch.Tensor) else i for i in inputs]
        results.append((call(*own, **keywords), own))
    return results


def assert_matches_eager(function, *inputs, **keywords):
    """Assert that results and mutated inputs are bitwise equal to eager's."""
    (eager, eager_inputs), (ours, our_inputs) = run_both(function, *inputs, **keywords)
    torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)
    for mine, theirs in zip(our_inputs, eager_inputs, strict=True):
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)


# ---- arguments and results -----------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Box:
    value: torch.Tensor
    scale: float = 2.0


def test_containers_in_and_out():
    def f(tree, *, scale):
        x = tree["x"][0] * scale
        return {"a": [x, (x + 1, None)], "b": Pair(x - 1, OrderedDict(c=x * 2))}, 3, True, 2.5, None

    assert_matches_eager(f, {"x": (torch.randn(3),)}, scale=1.5)


def test_dataclasses_in_and_out():
    def f(box):
        return Box(box.value * box.scale, box.scale + 1)

    ours = fulgurite.compile(f)(Box(torch.ones(3), 4.0))
    assert isinstance(ours, Box) and ours.scale == 5.0
    assert torch.equal(ours.value, torch.full((3,), 4.0))


def test_closures_globals_and_non_tensor_arguments():
    offset = torch.arange(3.0)
    name = "add"

    def f(x, how, times=2, flag=None):
        for _ in range(times):
            x = x + offset if how == name else x * offset
        return x if flag is None else -x

    assert_matches_eager(f, torch.randn(3), "add")
    assert_matches_eager(f, torch.randn(3), "mul", times=3, flag=True)


def test_methods_and_decorator():
    class Scaler:
        def __init__(self, factor):
            self.factor = factor

        @fulgurite.compile
        def scale(self, x):
            return x * self.factor

        def plain(self, x):
            return x * self.factor + 1

    scaler, x = Scaler(3.0), torch.randn(4)
    assert torch.equal(scaler.scale(x), x * 3)
    assert torch.equal(fulgurite.compile(scaler.plain)(x), x * 3 + 1)

    @fulgurite.compile(dynamic=False)
    def g(x):
        """Doc."""
        return x + 1

    assert torch.equal(g(x), x + 1) and g.__doc__ == "Doc." and g.__name__ == "g"


def test_many_shapes_and_dtypes():
    f = fulgurite.compile(lambda x: x.sum(-1, keepdim=True) * 2)
    for shape in ((3,), (2, 3), (5, 7), (0, 4), (1, 1, 1)):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
            x = torch.ones(shape, dtype=dtype)
            assert torch.equal(f(x), x.sum(-1, keepdim=True) * 2)


# ---- training ------------------------------------------------------------------------------------


def gradients(call, model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    loss = call(x).square().sum()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), x.grad, *(g.clone() for g in grads)]


@pytest.mark.usefixtures("torch_only")
@pytest.mark.parametrize("remat", ["none", "mincut", "full"])
def test_gradients_under_every_remat_policy(remat):
    model = nn.Sequential(
        nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Dropout(0.3), nn.Linear(7, 3)
    )
    x = torch.randn(6, 5)
    ours = gradients(fulgurite.compile(model, remat=remat), model, x)
    torch.testing.assert_close(ours, gradients(model, model, x))


def test_remat_policies_save_the_reported_bytes():
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    compiled = fulgurite.compile(model)
    compiled(torch.randn(32, 8)).sum().backward()
    saved = compiled.explain().graphs[0].saved_bytes
    assert saved["full"] < saved["mincut"] <= saved["none"]
    for policy, count in saved.items():
        other = fulgurite.compile(model, remat=policy)
        held = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (held.append(t), t)[1], lambda t: t
        ):
            other(torch.randn(32, 8))
        inputs = {p.untyped_storage().data_ptr() for p in model.parameters()}
        fresh = {t.untyped_storage().data_ptr(): t.nbytes for t in held if t.shape != (32, 8)}
        assert sum(n for p, n in fresh.items() if p not in inputs) == count, policy


def test_no_grad_and_inference_mode_compile_no_backward():
    model = nn.Linear(3, 3)
    compiled = fulgurite.compile(model)
    x = torch.randn(2, 3)
    with torch.no_grad():
        compiled(x)
    with torch.inference_mode():
        assert torch.equal(compiled(x), model(x))
    assert {kind for record in compiled.graphs for kind in record.compiled_graphs} == {"inference"}


def test_gradient_accumulation_frozen_parameters_and_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    seen = []
    model[2].register_forward_hook(lambda m, a, out: seen.append(out.shape) or out * 2)
    model[0].bias.register_hook(lambda g: g * 3)

    def run(call):
        seen.clear()
        model.zero_grad()
        for step in range(3):
            x = torch.full((2, 4), 0.1 * (step + 1))
            (call(call(x)) * 2).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None], len(seen)

    ours, calls = run(fulgurite.compile(model))
    expected, expected_calls = run(model)
    torch.testing.assert_close(ours, expected)
    assert calls == expected_calls == 6 and model[0].weight.grad is None


@pytest.mark.usefixtures("torch_only")
def test_checkpoint_and_autocast():
    block = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(block, x, use_reentrant=False).float()

    x = torch.randn(3, 4)
    torch.testing.assert_close(
        gradients(fulgurite.compile(f), block, x), gradients(f, block, x), rtol=2e-2, atol=2e-2
    )
    compiled = fulgurite.compile(block)
    outside = gradients(lambda x: checkpoint(compiled, x, use_reentrant=False), block, x)
    torch.testing.assert_close(outside, gradients(block, block, x))


# ---- mutation, views, randomness, dtypes -----------------------------------------------------------


def test_mutation_views_and_aliases():
    def f(x, y):
        x.add_(1)
        view = y[::2]
        view.mul_(3)
        x[0] = 7
        return x, x.t(), view, y, x.clone()

    assert_matches_eager(f, torch.randn(3, 4), torch.randn(5))
    x, y = torch.randn(3, 4), torch.randn(5)
    out = fulgurite.compile(f)(x, y)
    assert out[0] is x and out[3] is y
    assert out[1].data_ptr() == x.data_ptr() and out[2].data_ptr() == y.data_ptr()
    assert out[4].data_ptr() != x.data_ptr()


def test_duplicate_inputs_and_views_of_one_base():
    def f(a, b):
        a.add_(1)
        return a * b

    x, y = torch.arange(4.0), torch.arange(4.0)
    assert torch.equal(fulgurite.compile(f)(x, x), f(y, y)) and torch.equal(x, y)
    x, y = torch.arange(6.0), torch.arange(6.0)
    compiled = fulgurite.compile(f)
    assert torch.equal(compiled(x[:4], x[2:]), f(y[:4], y[2:])) and torch.equal(x, y)


def test_outputs_are_not_shared_between_calls():
    table = torch.arange(4.0)
    f = fulgurite.compile(lambda x: (torch.tensor([1.0, 2.0]), table + 0, x.expand(3, 2)))
    first = f(torch.zeros(2))
    first[0].fill_(9), first[1].fill_(9)
    second = f(torch.zeros(2))
    assert second[0].tolist() == [1.0, 2.0] and second[1].tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("torch_only")
def test_random_ops_match_eager():
    def f(x):
        noise = torch.randn_like(x) + torch.rand(x.shape)
        return (
            F.dropout(x + noise, 0.4),
            torch.bernoulli(torch.full_like(x, 0.3)),
            torch.randperm(5),
        )

    assert_matches_eager(f, torch.randn(4, 4))


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
        *(
            torch.complex128,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
        ),
    ],
)
def test_compute_dtypes(dtype):
    x = torch.tensor([0, 1, 1, 0, 1, 1]).to(dtype).reshape(2, 3)

    def f(x):
        y = torch.logical_not(x) if x.dtype == torch.bool else x * x + x
        return y, torch.cat([y, y]), y.to(torch.float32 if not x.is_complex() else x.dtype), x == y

    assert_matches_eager(f, x)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    ],
)
def test_storage_only_dtypes(dtype):
    x = torch.tensor([0, 1, 2, 4, 8, 16]).to(torch.float32).to(dtype).reshape(2, 3)

    def f(x):
        return x.to(torch.float32) + 1, x.t(), (x.to(torch.float32) * 2).to(dtype)

    eager, ours = f(x), fulgurite.compile(f)(x)
    for mine, theirs in zip(ours, eager, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.to(torch.float32), theirs.to(torch.float32))


def test_packed_float4_is_unchanged():
    codes = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    packed = codes.view(torch.float4_e2m1fn_x2)
    f = fulgurite.compile(lambda p, x: (p, p.view(torch.uint8), x + 1))
    out, bits, _ = f(packed, torch.zeros(2))
    assert out.dtype == torch.float4_e2m1fn_x2 and torch.equal(out.view(torch.uint8), codes)
    assert torch.equal(bits, codes)


# ---- dynamic shapes --------------------------------------------------------------------------------


def test_dynamic_compiles_once_for_twenty_shapes():
    model = tiny.Transformer(
        num_layers=1, hidden_size=16, num_heads=2, intermediate_size=24, vocab_size=32
    )
    compiled = fulgurite.compile(model, dynamic=True)
    for case in range(20):
        tokens = torch.randint(0, 32, (2 + case % 5, 3 + case))
        torch.testing.assert_close(compiled(tokens), model(tokens))
    assert len(compiled.graphs) == 1
    assert re.search(r': "i64\[s\d+, s\d+\]"', compiled.last_trace().text)  # symbolic sizes


def test_second_shape_makes_the_graph_dynamic():
    compiled = fulgurite.compile(lambda x: x.softmax(-1) @ x)
    for size in (3, 5, 7, 11, 13):
        x = torch.randn(size, size)
        torch.testing.assert_close(compiled(x), x.softmax(-1) @ x)
    assert len(compiled.graphs) == 2


# ---- graph breaks ------------------------------------------------------------------------------------


def breaks_here(x):
    y = x + 1
    print("shape", x.shape)  # breaks the graph
    return y * 2


def test_graph_breaks_run_and_are_reported(capsys):
    compiled = fulgurite.compile(breaks_here)
    x = torch.randn(3)
    assert torch.equal(compiled(x), (x + 1) * 2)
    assert "shape" in capsys.readouterr().out
    (found,) = compiled.breaks
    assert found.file == __file__ and "breaks the graph" in found.code
    assert found.reason and found.hint
    assert len(compiled.graphs) == 2
    assert f"test_compile.py:{found.line}" in str(compiled.explain())


def test_graph_breaks_in_a_loop_are_reported():
    def f(x):
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    compiled = fulgurite.compile(f)
    assert compiled(torch.zeros(1)) == 2
    assert compiled.breaks and compiled.breaks[0].file == __file__


def test_fullgraph_error_names_the_user_line():
    with pytest.raises(GraphBreakError) as caught:
        fulgurite.compile(breaks_here, fullgraph=True)(torch.randn(3))
    assert (
        "print" in caught.value.details["where"]
        and "test_compile.py" in caught.value.details["where"]
    )
    assert caught.value.details["next"]


# ---- repeated blocks ---------------------------------------------------------------------------------


def test_repeated_layers_are_compiled_once():
    model = tiny.Transformer(
        num_layers=4, hidden_size=16, num_heads=2, intermediate_size=24, vocab_size=32
    )
    tokens = torch.randint(0, 32, (2, 9))
    expected = model(tokens)
    expected.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    for granularity in ("blocks", "model", "auto"):
        compiled = fulgurite.compile(model, granularity=granularity)
        model.zero_grad()
        loss = compiled(tokens)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
        assert len(compiled.graphs) == (
            1 if granularity == "model" else 2
        )  # and one for the final norm
        assert ("4 × Layer" in compiled.explain().granularity) == (granularity != "model")


def test_original_model_stays_eager():
    model = tiny.Transformer(
        num_layers=4, hidden_size=16, num_heads=2, intermediate_size=24, vocab_size=32
    )
    compiled = fulgurite.compile(model, granularity="blocks")
    tokens = torch.randint(0, 32, (1, 5))
    model(tokens)
    assert not compiled.graphs
    compiled(tokens)
    other = fulgurite.compile(model, granularity="blocks", remat="none")
    other(tokens), compiled(tokens)
    assert len(compiled.graphs) == len(other.graphs) == 2  # a layer, and the norm behind them


@pytest.mark.usefixtures("torch_only")
def test_checkpointed_blocks_recompute_with_compiled_code():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()

            def make():
                return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.GELU(), nn.Linear(8, 4))

            self.layers = nn.ModuleList(make() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Checkpointed()
    x = torch.randn(3, 4)
    ours = gradients(fulgurite.compile(model, granularity="blocks"), model, x)
    torch.testing.assert_close(ours, gradients(model, model, x))


def test_each_distinct_layer_is_compiled():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU() if i % 2 else nn.Tanh()) for i in range(8)]
    model = nn.Sequential(*layers)
    compiled = fulgurite.compile(model, granularity="blocks")
    x = torch.randn(2, 4, requires_grad=True)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(compiled.graphs) == 2


# ---- subclasses --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("torch_only")
def test_tensor_subclasses():
    from torch.testing._internal.two_tensor import TwoTensor

    def f(x, y):
        return (x * y).sin() + 1

    x = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
    y = torch.randn(4)
    ours, eager = fulgurite.compile(f)(x, y), f(x, y)
    assert isinstance(ours, TwoTensor)
    assert torch.equal(ours.a, eager.a) and torch.equal(ours.b, eager.b)


def test_dtensors(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(torch.randn(6, 3), mesh, [Shard(1)]).requires_grad_()

        def f(x, w):
            return F.silu(x @ w).sum()

        ours = fulgurite.compile(f)(x, w)
        ours.backward()
        grad, x.grad = x.grad, None
        f(x, w).backward()
        assert isinstance(ours, DTensor) and isinstance(grad, DTensor)
        torch.testing.assert_close(grad.full_tensor(), x.grad.full_tensor())

        def views(x):
            return x * 2, x.t(), x[1:]

        for given in (x, x.detach()):
            compiled = fulgurite.compile(views)
            with pytest.warns(FallbackWarning, match="views of DTensors"):
                results = compiled(given)
            for found, expected in zip(results, views(given), strict=True):
                assert torch.equal(found.full_tensor(), expected.full_tensor())
                assert found.placements == expected.placements
            assert results[1].to_local().data_ptr() == given.to_local().data_ptr()
    finally:
        dist.destroy_process_group()
