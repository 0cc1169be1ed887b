"""QuantTensor in torch: parameters, state dicts, devices, copies, torch.compile, errors."""

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
def test_shape_dtype_and_size(name):
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
    per_row = (32 + 8) / 256  # a scale and a zero point a row count as 0 bits
    assert stored == pytest.approx(q.format.bits_per_element, abs=per_row + 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_module_parameters(name):
    linear = layer(name)
    before = linear.weight.dequantize(torch.float32)
    assert type(linear.weight) is QuantTensor
    assert isinstance(linear.weight, nn.Parameter)
    assert dict(linear.named_parameters()).keys() == {"weight"}
    linear.to(torch.bfloat16)
    assert linear.weight.dtype == torch.bfloat16
    assert isinstance(linear.weight, nn.Parameter)
    assert torch.equal(linear.weight.dequantize(torch.float32), before)
    copied = copy.deepcopy(linear)
    assert torch.equal(copied.weight, linear.weight)
    assert copied.weight.packed.data_ptr() != linear.weight.packed.data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_load_in_place_and_by_assignment(name):
    source, target = layer(name), layer(name)
    target.weight = nn.Parameter(quantize(torch.zeros(64, 256), name), requires_grad=False)
    packed_before = target.weight.packed
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight, source.weight)
    assert target.weight.packed.data_ptr() == packed_before.data_ptr()
    new = nn.Linear(256, 64, bias=False)
    new.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(new.weight, source.weight)


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
def test_gpu_results_are_bit_identical(name):
    x = gaussian(3, 64, 512)
    x[1, 1, 1] = float("inf")
    cpu, gpu = quantize(x, name), quantize(x.cuda(), name)
    assert gpu.device.type == "cuda"
    if name not in ("q4_k", "q6_k"):  # their least-squares sums are in another order
        assert torch.equal(gpu.cpu(), cpu)
    gpu = cpu.cuda()
    assert torch.equal(gpu.cpu(), cpu)
    assert torch.equal(gpu.dequantize().cpu(), cpu.dequantize())
    x[0, 0, 0] = float("nan")  # NaN bits differ between devices
    assert torch.equal(
        quantize(x.cuda(), name).dequantize().isnan().cpu(), quantize(x, name).dequantize().isnan()
    )
    module = nn.Linear(512, 64, bias=False)
    module.weight = nn.Parameter(cpu[2], requires_grad=False)
    assert module.cuda().weight.packed.device.type == "cuda"


def test_clone_is_a_copy_and_detach_is_a_view():
    q = quantize(gaussian(64, 256), "nvfp4")
    assert q.clone().packed.data_ptr() != q.packed.data_ptr()
    assert q.detach().packed.data_ptr() == q.packed.data_ptr()
    assert q.to(torch.float16).dtype == torch.float16
    assert torch.equal(q.to(torch.float16).packed, q.packed)


@pytest.mark.parametrize("name", ["fp8_e4m3_128x128", "nvfp4", "mxfp4", "int4_g128_asym", "q4_k"])
def test_torch_compile_traces_through_it(name):
    q = quantize(gaussian(64, 256), name)
    x = gaussian(8, 256, seed=1)

    def matmul(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ weight.dequantize(torch.float32).t()

    compiled = torch.compile(matmul, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, x), matmul(q, x))
    names, context = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    assert torch.equal(QuantTensor.__tensor_unflatten__(inner, context, q.shape, q.stride()), q)


def test_torch_compile_of_a_module_with_a_quantized_weight():
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


def test_repr():
    text = repr(quantize(gaussian(64, 256).bfloat16(), "nvfp4"))
    first, *rest = text.splitlines()
    assert (
        first == "QuantTensor nvfp4 [64, 256] as bfloat16 on cpu, 9220 bytes, 4.5 bits per element"
    )
    assert rest[:3] == [
        "  packed: uint8[64, 128]",
        "  scale: float8_e4m3fn[64, 16] per 1x16",
        "  tensor_scale: float32[1, 1] per tensor",
    ]
    assert rest[3].startswith("  values: -1.086, -1.086, -0.181,")
    assert "MiB" in repr(quantize(torch.zeros(1024, 2048), "int8"))
    assert "values" not in repr(quantize(torch.zeros(0, 32), "int8"))


def test_arithmetic_is_rejected():
    q = quantize(gaussian(64, 256), "int8")
    for compute in (lambda: q + 1, lambda: gaussian(2, 256) @ q.t(), lambda: q.sum()):
        with pytest.raises(FormatError, match="is not supported on a QuantTensor") as caught:
            compute()
        assert "QuantTensor int8 [64, 256]" in str(caught.value)
        assert ".dequantize()" in str(caught.value)


def test_copying_another_format_is_rejected():
    q = quantize(gaussian(64, 256), "int8")
    with pytest.raises(FormatError, match="float32 tensor of shape"):
        q.copy_(gaussian(64, 256))
    with pytest.raises(FormatError, match="nvfp4 tensor of shape"):
        q.copy_(quantize(gaussian(64, 256), "nvfp4"))


def test_equal_compares_bits():
    q = quantize(gaussian(64, 256), "mxfp8_e4m3")
    other = q.clone()
    assert torch.equal(q, other)
    other.packed.view(torch.uint8)[3, 3] ^= 1
    assert not torch.equal(q, other)
    assert not torch.equal(q, quantize(gaussian(64, 256), "mxfp8_e5m2"))
    assert not torch.equal(q, q.dequantize())


@pytest.mark.parametrize("name", [n for n in NAMES if FORMATS[n].scales])
def test_nan_scales_are_detected(name):
    x = gaussian(64, 512)
    assert quantize(x, name).check_scales() is not None
    format = FORMATS[name]
    x[5, 300] = float("nan")
    bad = quantize(x, name)
    if format.element.has_nan:
        bad.check_scales()
        getattr(bad, "scale").view(torch.uint8).fill_(255)  # noqa: B009
    with pytest.raises(WeightsError, match="is not finite: nan at index") as caught:
        bad.check_scales("model.layers.0.up_proj")
    assert "model.layers.0.up_proj" in str(caught.value)
    assert "quantize again" in str(caught.value)


@pytest.mark.parametrize("name", ["fp8_e4m3_row", "fp8_e5m2_128x128", "nvfp4", "int8", "int4_g32",
                                  "int4_g32_asym"])  # fmt: skip
def test_zero_scales_are_rejected_only_over_nonzero_data(name):
    x = gaussian(200, 512)
    x[128:, 256:] = 0.0
    x[199] = 0.0
    q = quantize(x, name)
    empty = {"fp8_e4m3_row": (199, 0), "int8": (199, 0), "fp8_e5m2_128x128": (1, 3)}
    q.scale[empty.get(name, (150, q.scale.shape[1] - 1))] = 0.0
    q.check_scales()
    q.scale[(0, 0)] = 0.0
    with pytest.raises(
        WeightsError, match=r"scale is zero over nonzero data: 0.0 at index \[0, 0\]"
    ):
        q.check_scales()


def test_zero_tensor_scale_is_rejected():
    q = quantize(gaussian(4, 32), "nvfp4")
    q.tensor_scale.zero_()
    with pytest.raises(WeightsError, match="tensor_scale is zero"):
        q.check_scales()


def test_gguf_blocks_too_small_for_float16_are_valid():
    q = quantize(torch.full((1, 32), 1e-9), "q4_0")
    assert q.check_scales().dequantize().abs().max() == 0


def test_negative_zero_is_not_nonzero_data():
    x = gaussian(4, 32)
    x[1, 16:] = -0.0
    q = quantize(x, "nvfp4")
    assert q.packed[1, 8:].unique().tolist() == [0x88]
    q.scale[1, 1] = 0.0
    assert q.check_scales() is q


@pytest.mark.parametrize("inference", [False, True])
def test_to_with_copy(inference):
    q = quantize(torch.randn(4, 32), "nvfp4")
    with torch.inference_mode(inference):
        for copy in (q.to(torch.float32, copy=True), q.to("cpu", copy=True)):
            assert copy.packed.data_ptr() != q.packed.data_ptr() and torch.equal(copy, q)
        assert q.to(torch.float32) is q and q.to("cpu") is q
