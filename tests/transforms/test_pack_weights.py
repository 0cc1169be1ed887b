"""Packed weights: noticed changes, layouts, what is packed and what is not."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fulgurite
from fulgurite.trace.frozen import FrozenRegion


class ConvNet(nn.Module):
    """A residual block with batch norm, and a head."""

    def __init__(self, channels=24):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.inner = nn.Conv2d(channels, channels, 3, padding=1)
        self.head = nn.Linear(channels, 200)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = F.silu(x + self.inner(x))
        return self.head(x.mean((2, 3)))


def make_net():
    torch.manual_seed(0)
    net = ConvNet()
    net.norm.running_mean.uniform_(-1, 1)
    net.norm.running_var.uniform_(0.5, 2)
    return net.eval()


def frozen_regions(compiled):
    nodes = compiled.graphs[0].final_trace("inference").graph.nodes
    calls = [getattr(node.target, "call", None) for node in nodes]
    return [call for call in calls if isinstance(call, FrozenRegion)]


def check_close(compiled, module, *inputs):
    """Our error against float64 is at most twice eager's, with some room."""
    reference = copy.deepcopy(module).double()(*(x.double() for x in inputs))
    eager, ours = module(*inputs), compiled(*inputs)
    allowed = 2 * (eager - reference).abs().max() + 1e-6 * reference.abs().max()
    assert (ours - reference).abs().max() <= allowed
    assert ours.stride() == eager.stride()


def uncounted_write(net):
    net.stem.weight.data.mul_(2)  # torch does not count this one


def numpy_write(net):
    net.stem.weight.detach().numpy()[:] *= 2


def in_place(net):
    net.stem.weight.add_(1)


def one_element(net):
    net.head.weight[3, 5] = 7.0


def swapped_data(net):
    net.stem.weight.data = torch.randn_like(net.stem.weight)


def new_parameter(net):
    net.inner.weight = nn.Parameter(torch.randn_like(net.inner.weight))


def loaded_state(net):
    net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()})


def running_statistics(net):
    net.train()
    net.norm(torch.randn(4, 24, 5, 5) * 3)
    net.eval()


def bias_of_the_head(net):
    net.head.bias.fill_(9)


CHANGES = [
    uncounted_write, numpy_write, in_place, one_element, swapped_data, new_parameter, loaded_state,
    running_statistics, bias_of_the_head,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@torch.no_grad()
def test_a_changed_weight_is_noticed_at_the_next_call(change):
    net, x = make_net(), torch.randn(2, 3, 9, 7)
    compiled = fulgurite.compile(net)
    for _ in range(3):
        check_close(compiled, net, x)
    before = net(x)
    change(net)
    check_close(compiled, net, x)
    assert not torch.allclose(net(x), before), "the change has no effect"
    check_close(compiled, net, x)


def test_an_optimizer_step_between_two_evaluations():
    net, x = make_net(), torch.randn(2, 3, 9, 7)
    compiled = fulgurite.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(3):
        with torch.no_grad():
            check_close(compiled, net, x)
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        check_close(compiled, net, x)
    assert frozen_regions(compiled), "the inference graph packs"
    assert "packed_conv" not in str(compiled.last_trace("forward")), "training does not"


@torch.no_grad()
def test_weights_are_packed_once_and_freed_with_the_module():
    net, x = make_net(), torch.randn(2, 3, 9, 7)
    compiled = fulgurite.compile(net)
    for _ in range(4):
        compiled(x)
    (region,) = frozen_regions(compiled)
    assert region.times_computed == 1 and region.packed_bytes > 0
    net.stem.weight = nn.Parameter(torch.randn_like(net.stem.weight))
    compiled(x)
    gc.collect()
    assert len(region._results) == 1, "results of the old parameter are gone"


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_results_have_the_strides_of_eager(memory_format):
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(32, 20, 1)
    ).eval()
    x = torch.randn(2, 3, 16, 12).to(memory_format=memory_format)
    check_close(fulgurite.compile(net), net, x)


CASES = {
    "groups": nn.Conv2d(32, 64, 3, groups=2),
    "depthwise": nn.Conv2d(40, 40, 3, padding=1, groups=40),
    "dilated": nn.Conv2d(8, 48, 3, padding=2, dilation=2),
    "strided": nn.Conv2d(8, 33, (3, 5), stride=(2, 3), padding=(1, 0)),
    "1d": nn.Conv1d(8, 40, 3, padding=1),
    "1x1": nn.Conv2d(24, 96, 1, bias=False),
    "valid": nn.Conv2d(24, 40, 3, padding="valid"),
    "same": nn.Conv2d(24, 40, 4, padding="same"),
    "transposed": nn.ConvTranspose2d(24, 33, 4, stride=2, padding=1, output_padding=1),
    "transposed, smaller than its stride": nn.ConvTranspose2d(8, 20, 2, stride=3),
    "1d transposed": nn.ConvTranspose1d(16, 40, 3, stride=2, bias=False),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_convolutions_are_packed(name):
    conv = CASES[name]
    net = nn.Sequential(conv, nn.Hardswish()).eval()
    sizes = (13,) if "1d" in name else (13, 11)
    x = torch.randn(2, conv.in_channels, *sizes)
    compiled = fulgurite.compile(net)
    check_close(compiled, net, x)
    assert "packed_conv" in str(compiled.last_trace())
    assert "hardswish(" not in str(compiled.last_trace()), "part of the kernel"


LEFT = {
    "transposed, dilated": (nn.ConvTranspose2d(8, 24, 3, 2, dilation=2), (2, 8, 5, 6)),
    "3d": (nn.Conv3d(3, 16, 3), (1, 3, 5, 6, 7)),
    "small groups": (nn.Conv2d(32, 32, 3, groups=8), (1, 32, 6, 6)),
    "small linear": (nn.Linear(8, 16), (2, 8)),
}


@pytest.mark.parametrize("name", LEFT)
@torch.no_grad()
def test_what_is_left_to_torch(name):
    module, shape = LEFT[name]
    compiled = fulgurite.compile(nn.Sequential(module, nn.ReLU()).eval())
    x = torch.randn(shape)
    torch.testing.assert_close(compiled(x), module(x).relu(), atol=1e-5, rtol=1e-4)
    assert "packed" not in str(compiled.last_trace())


@torch.no_grad()
def test_bfloat16_is_left_to_torch():
    net = nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64)).bfloat16()
    x = torch.randn(2, 8, 6, 6, dtype=torch.bfloat16)
    compiled = fulgurite.compile(net.eval())
    torch.testing.assert_close(compiled(x), net(x), atol=0.05, rtol=0.05)
    assert "packed" not in str(compiled.last_trace())


@torch.no_grad()
def test_a_weight_that_is_an_input_is_not_packed():
    x, weight = torch.randn(4, 128), torch.randn(64, 128)
    compiled = fulgurite.compile(F.linear)
    torch.testing.assert_close(compiled(x, weight), F.linear(x, weight), atol=1e-4, rtol=1e-4)
    assert "packed" not in str(compiled.last_trace())


@pytest.mark.parametrize("executors", [None, ["torch"]])
@pytest.mark.parametrize("dims", [1, 2, 3])
@torch.no_grad()
def test_group_norm_of_a_convolution(dims, executors):
    """torch's kernel refuses other layouts than contiguous and channels-last ones."""
    torch.manual_seed(0)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = nn.Sequential(conv(3, 8, 3), nn.GroupNorm(4, 8), nn.GELU(), conv(8, 8, 3)).eval()
    x = torch.randn(2, 3, *[9] * dims)
    compiled = fulgurite.compile(model, executors=executors)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("executors", [None, ["torch"]])
@torch.no_grad()
def test_a_layout_that_reaches_the_next_1d_convolution(executors):
    """The view before the second convolution must have the strides that its input has now."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 16, 1), nn.GLU(1), nn.Conv1d(8, 8, 3, groups=8)).eval()
    x = torch.randn(2, 4, 24)
    compiled = fulgurite.compile(model, executors=executors)
    for _ in range(3):  # the second call runs the host program
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_views_of_convolutions():
    """Flattened and viewed as patches: the memory is copied to the layout that the view needs."""

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 32, 4, stride=4)
            self.proj = nn.Linear(32 * 9, 50)

        def forward(self, x):
            y = self.conv(x)
            return self.proj(y.view(y.shape[0], -1)), y.flatten(2).transpose(1, 2), y

    net, x = Patches().eval(), torch.randn(2, 3, 12, 12)
    ours, eager = fulgurite.compile(net)(x), net(x)
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
        assert a.stride() == b.stride()


@torch.no_grad()
def test_the_trace_says_what_was_packed_and_runs_when_edited():
    net, x = make_net(), torch.randn(2, 3, 9, 7)
    compiled = fulgurite.compile(net)
    expected = compiled(x)
    text = str(compiled.last_trace())
    assert "def packed_weights(" in text and "3 weights packed once" in text
    assert "stem_packed_weight" in text and "batch_norm" not in text
    explanation = str(compiled.explain())
    assert "weights packed      3 of" in explanation
    assert "torch ops           fulgurite.packed_conv ×2, fulgurite.packed_linear" in explanation
    compiled.replace_trace(text)
    torch.testing.assert_close(compiled(x), expected)


@torch.no_grad()
def test_weights_beyond_the_memory_budget_are_not_packed(monkeypatch):
    net, x = make_net(), torch.randn(2, 3, 9, 7)
    total = 8 * net.inner.weight.nbytes  # less than all three weights
    monkeypatch.setattr("os.sysconf", lambda name: total if name == "SC_PHYS_PAGES" else 1)
    compiled = fulgurite.compile(net)
    check_close(compiled, net, x)
    text = str(compiled.last_trace())
    assert text.count("packed_conv(") == 1 and "packed_linear(" not in text


@torch.no_grad()
def test_dynamic_batch():
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 1), nn.Flatten()).eval()
    compiled = fulgurite.compile(net, dynamic=True)
    for batch in (2, 5, 3):
        check_close(compiled, net, torch.randn(batch, 3, 8, 8))
    assert "packed_conv" in str(compiled.last_trace())


@torch.no_grad()
def test_dynamic_images():
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU()).eval()
    compiled = fulgurite.compile(net, dynamic=True)
    for height, width in ((16, 16), (9, 12), (7, 5)):
        check_close(compiled, net, torch.randn(2, 3, height, width))
    assert "packed_conv" in str(compiled.last_trace())


def test_inference_mode_and_modules_made_in_it():
    with torch.inference_mode():
        net, x = make_net(), torch.randn(2, 3, 9, 7)
        compiled = fulgurite.compile(net)
        check_close(compiled, net, x)
        net.stem.weight.mul_(2)  # an inference tensor: torch counts no writes
        check_close(compiled, net, x)


@torch.no_grad()
def test_two_modules_of_one_graph():
    """Layers that share a graph have packed weights each."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(4))).eval()
    x = torch.randn(3, 96)
    compiled = fulgurite.compile(layers)
    for _ in range(3):
        check_close(compiled, layers, x)
    layers[2][0].weight.neg_()
    check_close(compiled, layers, x)
