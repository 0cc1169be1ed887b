"""QuantTensor inside torch: parameters, state dicts, moving, copying, capture, refusals."""

import copy

import pytest
import torch
from torch import nn

from fulgurite.errors import FormatError, WeightsError
from fulgurite.quant import FORMATS, QuantTensor, quantize

NAMES = list(FORMATS)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(name: str) -> nn.Linear:
    linear = nn.Linear(256, 64, bias=False)
    packed = quantize(gaussian(64, 256), name)
    linear.weight = nn.Parameter(packed, requires_grad=False)
    return linear


@pytest.mark.parametrize("name", NAMES)
def test_it_looks_like_the_tensor_it_stands_for(name):
    x = gaussian(64, 256)
    q = quantize(x.bfloat16(), name)
    assert (q.shape, q.dtype, q.device) == (x.shape, torch.bfloat16, x.device)
    assert q.is_contiguous()
    assert q.dequantize().dtype == torch.bfloat16
    exact = q.dequantize(torch.float32)
    assert torch.equal(q.dequantize(), exact.bfloat16())
    assert torch.equal(torch.dequantize(q), exact.bfloat16())
    parts = [q.packed, *q.scales.values()]
    assert q.nbytes == sum(part.untyped_storage().nbytes() for part in parts)
    stored = q.nbytes * 8 / x.numel()
    assert stored == pytest.approx(q.format.bits_per_element, abs=32 / 256 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_it_lives_in_a_module(name):
    linear = layer(name)
    before = linear.weight.dequantize(torch.float32)
    assert type(linear.weight) is QuantTensor
    assert isinstance(linear.weight, nn.Parameter)
    assert dict(linear.named_parameters()).keys() == {"weight"}
    linear.to(torch.bfloat16)
    assert linear.weight.dtype == torch.bfloat16
    assert isinstance(linear.weight, nn.Parameter)
    assert torch.equal(linear.weight.dequantize(torch.float32), before)
    twin = copy.deepcopy(linear)
    assert torch.equal(twin.weight, linear.weight)
    assert twin.weight.packed.data_ptr() != linear.weight.packed.data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_load_in_place_and_by_assignment(name):
    source, target = layer(name), layer(name)
    target.weight = nn.Parameter(quantize(torch.zeros(64, 256), name), requires_grad=False)
    kept = target.weight.packed
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight, source.weight)
    assert target.weight.packed.data_ptr() == kept.data_ptr()
    fresh = nn.Linear(256, 64, bias=False)
    fresh.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(fresh.weight, source.weight)


@pytest.mark.parametrize("name", NAMES)
def test_meta_device_and_empty_like(name):
    linear = layer(name)
    meta = linear.weight.to("meta")
    assert meta.device.type == "meta"
    assert {part.device.type for part in (meta.packed, *meta.scales.values())} == {"meta"}
    assert meta.dequantize().shape == (64, 256)
    assert "values" not in repr(meta)
    linear.to("meta").to_empty(device="cpu")
    assert linear.weight.packed.device.type == "cpu"
    assert linear.weight.packed.shape == meta.packed.shape


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_same_bits(name):
    x = gaussian(3, 64, 512)
    x[1, 1, 1] = float("inf")
    here, there = quantize(x, name), quantize(x.cuda(), name)
    assert there.device.type == "cuda"
    if name not in ("q4_k", "q6_k"):  # their least squares sum in another order
        assert torch.equal(there.cpu(), here)
    there = here.cuda()
    assert torch.equal(there.cpu(), here)
    assert torch.equal(there.dequantize().cpu(), here.dequantize())
    x[0, 0, 0] = float("nan")  # the bits of a NaN are a device's own
    assert torch.equal(
        quantize(x.cuda(), name).dequantize().isnan().cpu(), quantize(x, name).dequantize().isnan()
    )
    module = nn.Linear(512, 64, bias=False)
    module.weight = nn.Parameter(here[2], requires_grad=False)
    assert module.cuda().weight.packed.device.type == "cuda"


def test_clone_is_a_copy_and_detach_is_a_view():
    q = quantize(gaussian(64, 256), "nvfp4")
    assert q.clone().packed.data_ptr() != q.packed.data_ptr()
    assert q.detach().packed.data_ptr() == q.packed.data_ptr()
    assert q.to(torch.float16).dtype == torch.float16
    assert torch.equal(q.to(torch.float16).packed, q.packed)


@pytest.mark.parametrize("name", ["fp8_e4m3_128x128", "nvfp4", "mxfp4", "int4_g128_asym", "q4_k"])
def test_capture_sees_through_it(name):
    q = quantize(gaussian(64, 256), name)
    x = gaussian(8, 256, seed=1)

    def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ weight.dequantize(torch.float32).t()

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, x), product(q, x))
    names, context = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    assert torch.equal(QuantTensor.__tensor_unflatten__(inner, context, q.shape, q.stride()), q)


def test_capture_of_a_module_that_holds_one():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            packed = quantize(gaussian(64, 256), "nvfp4")
            self.weight = nn.Parameter(packed, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.dequantize(x.dtype))

    module, x = Layer(), gaussian(3, 256, seed=1)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))


def test_it_prints_itself():
    text = repr(quantize(gaussian(64, 256).bfloat16(), "nvfp4"))
    first, *rest = text.splitlines()
    assert (
        first == "QuantTensor nvfp4 [64, 256] as bfloat16 on cpu, 9220 bytes, 4.5 bits an element"
    )
    assert rest[:3] == [
        "  packed: uint8[64, 128]",
        "  scale: float8_e4m3fn[64, 16] a 1x16",
        "  tensor_scale: float32[1, 1] a tensor",
    ]
    assert rest[3].startswith("  values: -1.086, -1.086, -0.181,")
    assert "MiB" in repr(quantize(torch.zeros(1024, 2048), "int8"))
    assert "values" not in repr(quantize(torch.zeros(0, 32), "int8"))


def test_arithmetic_is_refused_with_a_way_out():
    q = quantize(gaussian(64, 256), "int8")
    for compute in (lambda: q + 1, lambda: gaussian(2, 256) @ q.t(), lambda: q.sum()):
        with pytest.raises(FormatError, match="is not defined on a QuantTensor") as caught:
            compute()
        assert "QuantTensor int8 [64, 256]" in str(caught.value)
        assert ".dequantize()" in str(caught.value)


def test_copying_something_else_into_it_is_refused():
    q = quantize(gaussian(64, 256), "int8")
    with pytest.raises(FormatError, match="float32 tensor of shape"):
        q.copy_(gaussian(64, 256))
    with pytest.raises(FormatError, match="nvfp4 tensor of shape"):
        q.copy_(quantize(gaussian(64, 256), "nvfp4"))


def test_equality_is_of_bits():
    q = quantize(gaussian(64, 256), "mxfp8_e4m3")
    other = q.clone()
    assert torch.equal(q, other)
    other.packed.view(torch.uint8)[3, 3] ^= 1
    assert not torch.equal(q, other)
    assert not torch.equal(q, quantize(gaussian(64, 256), "mxfp8_e5m2"))
    assert not torch.equal(q, q.dequantize())


@pytest.mark.parametrize("name", [n for n in NAMES if FORMATS[n].scales])
def test_a_nan_scale_is_found(name):
    x = gaussian(64, 512)
    assert quantize(x, name).check() is not None
    format = FORMATS[name]
    x[5, 300] = float("nan")
    bad = quantize(x, name)
    if format.element.has_nan:
        bad.check()
        getattr(bad, "scale").view(torch.uint8).fill_(255)  # noqa: B009
    with pytest.raises(WeightsError, match="is not a finite number: nan at") as caught:
        bad.check("model.layers.0.up_proj")
    assert "model.layers.0.up_proj" in str(caught.value)
    assert "quantize again" in str(caught.value)


@pytest.mark.parametrize("name", ["fp8_e4m3_row", "fp8_e5m2_128x128", "nvfp4", "int8", "int4_g32",
                                  "int4_g32_asym"])  # fmt: skip
def test_a_zero_scale_is_refused_only_over_data(name):
    x = gaussian(200, 512)
    x[128:, 256:] = 0.0
    x[199] = 0.0
    q = quantize(x, name)
    empty = {"fp8_e4m3_row": (199, 0), "int8": (199, 0), "fp8_e5m2_128x128": (1, 3)}
    q.scale[empty.get(name, (150, q.scale.shape[1] - 1))] = 0.0
    q.check()
    q.scale[(0, 0)] = 0.0
    with pytest.raises(WeightsError, match=r"scale is zero over data that isn't: 0.0 at \[0, 0\]"):
        q.check()


def test_a_zero_tensor_scale_is_refused():
    q = quantize(gaussian(4, 32), "nvfp4")
    q.tensor_scale.zero_()
    with pytest.raises(WeightsError, match="tensor_scale is zero"):
        q.check()


def test_a_gguf_block_too_small_for_float16_is_no_error():
    q = quantize(torch.full((1, 32), 1e-9), "q4_0")
    assert q.check().dequantize().abs().max() == 0


def test_minus_zero_under_a_zero_scale_is_no_data():
    x = gaussian(4, 32)
    x[1, 16:] = -0.0
    q = quantize(x, "nvfp4")
    assert q.packed[1, 8:].unique().tolist() == [0x88]
    q.scale[1, 1] = 0.0
    assert q.check() is q


@pytest.mark.parametrize("inference", [False, True])
def test_to_copies_where_a_copy_is_asked_for(inference):
    q = quantize(torch.randn(4, 32), "nvfp4")
    with torch.inference_mode(inference):
        for copy in (q.to(torch.float32, copy=True), q.to("cpu", copy=True)):
            assert copy.packed.data_ptr() != q.packed.data_ptr() and torch.equal(copy, q)
        assert q.to(torch.float32) is q and q.to("cpu") is q
