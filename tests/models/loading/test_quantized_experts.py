"""Quantized experts, from loading or from fulgurite.quantize, against the dequantized model."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fulgurite.models import load_model
from fulgurite.models.loading import load_plan
from fulgurite.models.loading.checkpoint import open_checkpoint
from fulgurite.models.loading.loader import build_meta_model
from fulgurite.models.loading.safetensors_checkpoint import SINGLE_FILE
from fulgurite.models.moe import Experts
from fulgurite.quant import QuantTensor
from fulgurite.quant import quantize as quantize_tensor
from fulgurite.quant.config import QuantConfig
from fulgurite.quantize import load, quantize, save
from tests.models.loading.checkpoint_files import edit_config, replace_tensors
from tests.models.loading.gguf_export import write_gguf
from tests.models.reference_models import build_reference, make_prompt

IDS, POSITIONS = make_prompt(19), torch.arange(19)
MODELS = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4"]


def find_experts(model: nn.Module) -> dict[str, Experts]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Experts)}


def dequantized(model: nn.Module) -> nn.Module:
    """The same model with dequantized expert weights."""
    dense = copy.deepcopy(model)
    for module in find_experts(dense).values():
        for name in module.quantizable:
            weight = getattr(module, name)
            if isinstance(weight, QuantTensor):
                setattr(module, name, nn.Parameter(weight.dequantize(), requires_grad=False))
    return dense


def assert_matches_dequantized(model: nn.Module, tolerance: float = 1e-4) -> None:
    expected, actual = dequantized(model)(IDS, POSITIONS), model(IDS, POSITIONS)
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3_row", "q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_quantize_experts(get_pair, name, format):
    model = load_model(get_pair(name).path, dtype=torch.float32)
    before = {
        n: (m.gate_up_proj.detach().clone(), m.down_proj.detach())
        for n, m in find_experts(model).items()
    }
    report = quantize(model, QuantConfig(format, activations="none"), progress=False)
    names = {layer.name for layer in report.layers}
    skipped = {parameter.name: parameter.reason for parameter in report.skipped}
    assert before
    for path, module in find_experts(model).items():
        for parameter_name, dense in zip(module.quantizable, before[path], strict=True):
            if dense.shape[-1] % (32 if format == "q8_0" else 1):
                assert "not a multiple" in skipped[f"{path}.{parameter_name}"]
                continue
            assert f"{path}.{parameter_name}" in names
            assert torch.equal(getattr(module, parameter_name), quantize_tensor(dense, format))
    assert_matches_dequantized(model)


@pytest.mark.parametrize("layout", ["linears", "stacks"])
@pytest.mark.parametrize("name", ["mixtral", "phi_moe", "minimax_m2", "granite_moe", "gpt_oss"])
def test_other_names_of_experts(get_pair, tmp_path, name, layout):
    """llm-compressor stores one linear an expert, under the same names for every family."""
    pair = get_pair(name)
    if layout == "stacks" and name == "gpt_oss":
        pytest.skip("its own checkpoints have stacks")
    folder = shutil.copytree(pair.path, tmp_path / name)
    tensors = load_file(folder / SINGLE_FILE)
    own = [key for key in tensors if ".experts." in key or "sparse_moe.input_linear" in key]
    own += [key for key in tensors if "sparse_moe.output_linear" in key]
    prefix = re.sub(r"layers\.\d+", "layers.{}", own[0])
    prefix = re.sub(r"(experts\.|(input|output)_linear).*", "experts.", prefix)
    others = {key: value for key, value in tensors.items() if key not in own}
    for index, layer in enumerate(pair.model.layers):
        others |= name_experts(layer.feed_forward.experts, prefix.format(index), layout)
    save_file(others, folder / SINGLE_FILE)
    assert own and not any(key in others for key in own)
    loaded = load_model(folder, dtype=torch.float32)
    assert torch.equal(loaded(IDS, POSITIONS), pair.model(IDS, POSITIONS))


def name_experts(experts: Experts, prefix: str, layout: str) -> dict[str, Tensor]:
    """The tensors of experts, one linear each or stacked."""
    named = dict(experts.named_parameters())
    if layout == "stacks":
        return {prefix + name: parameter.data for name, parameter in named.items()}
    tensors = {}
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        if "gate_up_proj" + suffix not in named:
            continue
        gates, ups = named["gate_up_proj" + suffix].chunk(2, dim=1)
        for proj, stack in ("gate", gates), ("up", ups), ("down", named["down_proj" + suffix]):
            for expert, value in enumerate(stack):
                tensors[f"{prefix}{expert}.{proj}_proj.{kind}"] = value.detach().clone()
    return tensors


def test_quantized_activations(get_pair):
    model = load_model(get_pair("mixtral").path, dtype=torch.float32)
    quantize(model, "q8_0", skip=["*attention*", "lm_head"], progress=False)
    layer, dense = (m.layers[1].feed_forward for m in (model, dequantized(model)))
    x = torch.randn(11, 64)
    routes = layer.router(x)
    actual, expected = layer.experts(x, routes), dense.experts(x, routes)
    assert 1e-5 < (actual - expected).norm() / expected.norm() < 0.02


def test_save_and_load(get_pair, tmp_path):
    path = get_pair("qwen3_moe").path
    model = load_model(path, dtype=torch.float32)
    quantize(model, QuantConfig("int8", activations="none"), progress=False)
    save(model, tmp_path / "small.safetensors")
    loaded = load(load_model(path, dtype=torch.float32), tmp_path / "small.safetensors")
    assert torch.equal(loaded(IDS, POSITIONS), model(IDS, POSITIONS))
    assert all(m.activations == "none" for m in find_experts(loaded).values())


@pytest.mark.parametrize(("intermediate_size", "format"), [(256, "128x128"), (160, "1x128")])
def test_fp8_experts_stay_quantized(tmp_path: Path, intermediate_size: int, format: str) -> None:
    """If the halves of gate_up_proj end inside a 128-row block, each row gets its own scales."""
    build_reference("deepseek_v3", moe_intermediate_size=intermediate_size).save_pretrained(
        tmp_path
    )
    tensors: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(tmp_path / SINGLE_FILE).items():
        if ".experts." in name:
            quantized = quantize_tensor(weight, "fp8_e4m3_128x128")
            tensors |= {name: quantized.packed, f"{name}_scale_inv": quantized.scales["scale"]}
    replace_tensors(tmp_path, **tensors)
    edit_config(
        tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    model = load_model(tmp_path, dtype=torch.float32, keep_quantized=True, activations="none")
    experts = find_experts(model)
    assert experts
    for module in experts.values():
        assert isinstance(module.gate_up_proj, QuantTensor)
        assert module.gate_up_proj.format.name == f"fp8_e4m3_{format}"
        assert isinstance(module.down_proj, QuantTensor)
    dense_model = load_model(tmp_path, dtype=torch.float32)
    for path, module in find_experts(dequantized(model)).items():
        for parameter_name in module.quantizable:
            assert torch.equal(
                getattr(module, parameter_name),
                getattr(find_experts(dense_model)[path], parameter_name),
            )
    assert_matches_dequantized(model)


def test_gpt_oss_experts_stay_mxfp4(get_pair, tmp_path: Path) -> None:
    folder = tmp_path / "mxfp4"
    shutil.copytree(get_pair("gpt_oss").path, folder)
    tensors: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(folder / SINGLE_FILE).items():
        if name.endswith(("gate_up_proj", "down_proj")) and weight.dim() == 3:
            quantized = quantize_tensor(weight.transpose(-1, -2).contiguous(), "mxfp4")
            blocks = quantized.packed.unflatten(-1, (-1, 16))
            scales = quantized.scales["scale"].view(torch.uint8)
            tensors |= {name: None, f"{name}_blocks": blocks, f"{name}_scales": scales}
    replace_tensors(folder, **tensors)
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    model = load_model(folder, dtype=torch.float32, keep_quantized=True, activations="none")
    dense_model = load_model(folder, dtype=torch.float32)
    for path, module in find_experts(model).items():
        for parameter_name in module.quantizable:
            weight = getattr(module, parameter_name)
            assert isinstance(weight, QuantTensor) and weight.format.name == "mxfp4"
            assert torch.equal(
                weight.dequantize(), getattr(find_experts(dense_model)[path], parameter_name)
            )
    assert_matches_dequantized(model)


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch) -> Path:
    """A Mixtral GGUF file with quantized experts."""
    gguf = pytest.importorskip("gguf", reason="the gguf package writes the file")
    add_tensor = gguf.GGUFWriter.add_tensor

    def add(writer, name, data, **options):
        if name.endswith("_exps.weight"):
            gguf_type = (
                gguf.GGMLQuantizationType.Q8_0 if "down" in name else gguf.GGMLQuantizationType.Q4_1
            )
            return add_tensor(
                writer, name, gguf.quants.quantize(data, gguf_type), raw_dtype=gguf_type
            )
        return add_tensor(writer, name, data, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    return write_gguf(build_reference("mixtral"), "llama", tmp_path)


def test_gguf_experts_stay_quantized(gguf_file: Path) -> None:
    model = load_model(gguf_file, dtype=torch.float32, keep_quantized=True, activations="none")
    dense_model = load_model(gguf_file, dtype=torch.float32)
    assert find_experts(model)
    for path, module in find_experts(model).items():
        assert module.gate_up_proj.format.name == "q4_1" and module.down_proj.format.name == "q8_0"
        for parameter_name in module.quantizable:
            assert torch.equal(
                getattr(module, parameter_name).dequantize(),
                getattr(find_experts(dense_model)[path], parameter_name),
            )
    assert_matches_dequantized(model)


def test_gguf_experts_are_repacked_for_gpus(gguf_file: Path, monkeypatch) -> None:
    """The memory plan counts the repacked sizes."""
    meta_experts = find_experts(
        build_meta_model(open_checkpoint(gguf_file), torch.bfloat16, True, "cuda")
    )
    monkeypatch.setattr(load_plan, "needs_repacking", lambda device, dtype: True)
    model = load_model(gguf_file, dtype=torch.bfloat16, keep_quantized=True, activations="none")
    dense_model = load_model(gguf_file, dtype=torch.bfloat16)
    assert find_experts(model).keys() == meta_experts.keys()
    for path, module in find_experts(model).items():
        for parameter_name in module.quantizable:
            weight = getattr(module, parameter_name)
            assert (
                weight.format.name
                == {"gate_up_proj": "int4_g32_min", "down_proj": "int8_g32"}[parameter_name]
            )
            assert torch.equal(
                weight.dequantize(), getattr(find_experts(dense_model)[path], parameter_name)
            )
            assert getattr(meta_experts[path], parameter_name).nbytes == weight.nbytes
    assert_matches_dequantized(
        load_model(gguf_file, dtype=torch.float32, keep_quantized=True, activations="none")
    )
