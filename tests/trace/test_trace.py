"""Every stage prints, and runs from its text."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fulgurite
from fulgurite.errors import TraceTextError
from fulgurite.models import tiny
from fulgurite.trace.describe import clean_path, describe
from fulgurite.trace.literal import format_constant


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.up(h)))


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = MLP()
    compiled = fulgurite.compile(model)
    x = torch.randn(4, 8, requires_grad=True)
    compiled(x).sum().backward()
    return model, compiled, x


def run_as_file(trace, tmp_path, inputs):
    """Save the trace to a file, import it and run it."""
    path = trace.save(tmp_path / f"{trace.kind}_{trace.stage}.py")
    spec = importlib.util.spec_from_file_location("printed_trace", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.forward(*inputs)


def inputs_of(trace, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n.meta["val"].shape, generator=generator) for n in trace.inputs]


def test_every_stage_runs_from_its_file(trained, tmp_path):
    _, compiled, _ = trained
    stages = compiled.history
    assert {t.kind for t in stages} == {"captured", "forward", "backward"}
    for kind in ("captured", "forward", "backward"):
        of_kind = [t for t in stages if t.kind == kind]
        inputs = inputs_of(of_kind[0])
        expected = of_kind[0].run(*inputs)
        for trace in of_kind:
            torch.testing.assert_close(run_as_file(trace, tmp_path, inputs), expected)


@pytest.mark.usefixtures("torch_only")
def test_final_text(trained):
    _, compiled, _ = trained
    text = str(compiled.last_trace())
    assert text.startswith("# forward 0 · final\n")
    assert 'x: "f32[4, 8]"' in text and 'up_weight: "f32[16, 8]"' in text
    assert "# self.up " in text and "test_trace.py:" in text and "F.silu(self.up(h))" in text
    assert "h, " in text.split("native_layer_norm")[0]  # the user's variable name
    assert "# torch " in text and "FLOP" in text
    assert "; del " in text
    lines = [line for line in text.splitlines() if "= torch." in line]
    assert len(lines) == len({line.split(" = ")[0] for line in lines})


@pytest.mark.usefixtures("torch_only")
def test_dead_values_are_deleted(trained):
    _, compiled, _ = trained
    for trace in compiled.history:
        text = [line.split("  #")[0] for line in trace.text.splitlines()]
        body = [line for line in text if line.startswith("    ") and line.strip()[:1] != "#"]
        for position, line in enumerate(body):
            if "; del " not in line:
                continue
            gone = line.split("; del ")[1].split("  #")[0].split(", ")
            rest = "\n".join(body[position + 1 :])
            for name in gone:
                uses = rest.replace("(", " ").replace(",", " ").replace(")", " ").split()
                assert name.strip() not in uses, (trace.name, name)


@pytest.mark.usefixtures("torch_only")
def test_replace_trace(trained, tmp_path):
    model, compiled, x = trained
    text = str(compiled.last_trace("forward"))
    assert "torch._C._nn.silu(" in text
    edited = text.replace("torch._C._nn.silu(", "torch.nn.functional.relu(")
    compiled.replace_trace(edited, kind="forward")
    expected = x + model.down(F.relu(model.up(model.norm(x))))
    torch.testing.assert_close(compiled(x), expected)
    path = tmp_path / "edited.py"
    path.write_text(text)
    compiled.replace_trace(path, kind="forward")
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.usefixtures("torch_only")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace("def forward", "def backward"), "no function called forward"),
        (lambda t: t.replace("import torch", "import torch, no_such_module"), "no_such_module"),
        (lambda t: t.replace("return (", "return (("), "not Python"),
        (lambda t: t.replace('x: "f32[4, 8]",', ""), "fails on the original"),
        (lambda t: t.replace("return (", "return (x, "), "other values"),
    ],
)
def test_invalid_edits_raise(trained, change, message):
    model, compiled, x = trained
    with pytest.raises(TraceTextError, match=message):
        compiled.replace_trace(change(str(compiled.last_trace("forward"))), kind="forward")
    torch.testing.assert_close(compiled(x), model(x))  # the previous trace still runs


@pytest.mark.usefixtures("torch_only")
def test_traceback_shows_the_trace(trained):
    _, compiled, _ = trained
    with pytest.raises(RuntimeError) as caught:
        compiled.last_trace("forward").run(*[torch.zeros(3)] * 7)
    frames = [entry for entry in caught.traceback if "fulgurite forward 0" in str(entry.path)]
    assert frames and "native_layer_norm" in str(frames[-1].statement)


def test_save_is_atomic(trained, tmp_path, monkeypatch):
    _, compiled, _ = trained
    path = tmp_path / "trace.py"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        compiled.last_trace().save(path)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["trace.py"]


def test_constants_round_trip_bitwise(tmp_path):
    values = [
        torch.tensor([1.5, -0.0, math.inf, 1e-45]),
        torch.tensor([math.nan, 1.0]),
        torch.arange(300, dtype=torch.int16).reshape(20, 15).t(),
        torch.randn(7, 11, dtype=torch.float64),
        torch.randn(3, 5, dtype=torch.complex64),
        torch.tensor(True),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.randn(70).to(torch.float8_e4m3fn),
        torch.tensor([2**63 - 1, -(2**63)]),
        torch.arange(5).to(torch.uint16),
    ]
    for value in values:
        names = {"torch": torch, "math": math}
        exec("import zlib, base64", names)
        back = eval(format_constant(value), names)
        assert back.dtype == value.dtype and back.shape == value.shape
        assert back.stride() == value.stride() or value.numel() == 0
        same = (
            back.contiguous().view(-1).view(torch.uint8),
            value.contiguous().view(-1).view(torch.uint8),
        )
        assert torch.equal(*same)


def test_captured_constants_control_flow_and_symbols_round_trip(tmp_path):
    table = torch.randn(100)

    def f(x, flag):
        y = x + table[: x.shape[0]] + torch.tensor([1.0])
        y = torch.cond(flag, lambda v: v * 2, lambda v: v - 1, (y,))
        return y.view(-1, 1).expand(-1, x.shape[0]) * x.shape[0]

    compiled = fulgurite.compile(f, dynamic=True)
    x, flag = torch.randn(6), torch.tensor(True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, flag), f(x, flag))
    final = compiled.last_trace()
    assert "def true" in final.text or "def " in final.text.split("def forward")[0]
    values = {"flag": flag, "table": table, "x": x}
    inputs = [
        next((v for k, v in values.items() if n.name.startswith(k)), None)
        if isinstance(n.meta["val"], torch.Tensor)
        else 6
        for n in final.inputs
    ]
    torch.testing.assert_close(final.load()(*inputs)[0], f(x, flag))


def test_tiny_transformer_golden(golden):
    model, inputs = tiny.build_example()
    compiled = fulgurite.compile(model, granularity="model")
    with torch.no_grad():
        compiled(*inputs)
    text = compiled.last_trace().text
    stable = "\n".join(line for line in text.splitlines() if "to compile" not in line) + "\n"
    golden("tiny_transformer.py", stable)


def test_describe():
    assert describe(torch.zeros(2, 3)) == "f32[2, 3]"
    assert describe(torch.zeros(2, 3).t()) == "f32[3, 2] strides [1, 3]"
    assert (
        describe(torch.zeros(1, 3, dtype=torch.bfloat16).expand(4, 3))
        == "bf16[4, 3] strides [0, 1]"
    )
    assert describe((torch.zeros(()), 3, 2.0, None, True)) == "(f32[], int, float, None, bool)"
    assert clean_path("L['self']._modules['layers']._modules['0'].mlp") == "self.layers.0.mlp"
    assert clean_path("L['self'].layers[3].attention") == "self.layers.3.attention"
