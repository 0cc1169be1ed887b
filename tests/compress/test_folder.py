"""The written folder, read by compressed-tensors, by transformers and by ourselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from fulgurite.models.loading.loader import load_model
from fulgurite.quant import QuantTensor, read_quantized_weight
from fulgurite.quant.files.compressed_tensors_writer import SCHEMES
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.compress.checkpoints import TEXT, run_quantize, save_checkpoint

STATIC = [name for name, scheme in SCHEMES.items() if scheme.input_scale]
WEIGHT_ONLY = [name for name, scheme in SCHEMES.items() if scheme.inputs is None]
CALIBRATED = ("--calibration-tokens", "256", "--sequence", "64")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in ("llama", "mixtral"):
        folders[name] = save_checkpoint(tmp_path_factory.mktemp(name), name)
    return folders


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def make_folder(sources, text, tmp_path_factory: pytest.TempPathFactory):
    """The quantized checkpoint of a model and format; each is written once."""
    folders: dict[tuple[str, str], Path] = {}

    def make(model: str, format: str) -> Path:
        if (model, format) not in folders:
            folder = tmp_path_factory.mktemp("out") / f"{model}-{format}"
            calibrate = ("--calibrate", str(text), *CALIBRATED) if format in STATIC else ()
            assert not run_quantize(
                sources[model], folder, "--format", format, "--no-eval", *calibrate
            )
            folders[model, format] = folder
        return folders[model, format]

    return make


def read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(file)
    return tensors


def decompress(folder: Path) -> dict[str, Tensor]:
    """Every weight of the folder, dequantized by the compressed-tensors package."""
    compressors = pytest.importorskip(
        "compressed_tensors.compressors", reason="compares with compressed_tensors's own output"
    )
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="compares with compressed_tensors's own output"
    )
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(config)
    (scheme,) = parsed.config_groups.values()
    compressor = compressors.BaseCompressor.get_value_from_registry(parsed.format)
    tensors = read_tensors(folder)
    names = {name.removesuffix("_packed") for name in tensors if name.endswith("weight_packed")}
    names |= {name.removesuffix("_scale") for name in tensors if name.endswith("weight_scale")}
    for name in names:
        base = name.removesuffix("weight")
        parts = {n.removeprefix(base): t for n, t in tensors.items() if n.startswith(base)}
        assert set(compressor.compression_param_names(scheme)) <= set(parts), base
        for part in parts:
            del tensors[base + part]
        tensors[name] = compressor.decompress(parts, scheme)["weight"]
    return tensors


def tolerance(format: str) -> dict[str, float]:
    """Their reader dequantizes 4-bit floats in bfloat16, with three roundings."""
    return {"rtol": 3 * 2.0**-8 if "fp4" in format else 1e-6, "atol": 1e-7}


@pytest.mark.parametrize("format", SCHEMES)
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_compressed_tensors_reads_every_weight(model, format, make_folder, sources):
    """The weights of their reader are close to the original, and those of ours are the same."""
    folder = make_folder(model, format)
    theirs, original = decompress(folder), read_tensors(sources[model])
    assert theirs.keys() == original.keys()
    bits = SCHEMES[format].format.element.bits
    for name, weight in original.items():
        error = (theirs[name].float() - weight.float()).norm() / weight.norm()
        assert error < (0.16 if bits == 4 else 0.04), name
    tensors = read_tensors(folder)
    for name in original.keys() - tensors.keys():
        ours = read_quantized_weight(tensors, name.removesuffix(".weight"), torch.float32).weight
        assert isinstance(ours, QuantTensor), name
        expected = theirs[name].float()
        torch.testing.assert_close(ours.dequantize(), expected, **tolerance(format))


@pytest.mark.parametrize("format", SCHEMES)
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_load_model_reads_the_folder(model, format, make_folder):
    folder = make_folder(model, format)
    expected, ours = decompress(folder), load_model(folder, dtype=torch.float32)

    def check(weight: Tensor, *names: str) -> None:
        whole = torch.cat([expected[f"model.layers.1.{name}.weight"].float() for name in names])
        torch.testing.assert_close(weight, whole, **tolerance(format))

    for name in ("o_proj", "q_proj"):
        check(ours.get_parameter(f"layers.1.attention.{name}.weight"), f"self_attn.{name}")
    if model == "mixtral":
        experts = ours.get_submodule("layers.1.feed_forward.experts")
        for expert in (0, 3):
            base = f"block_sparse_moe.experts.{expert}"
            check(experts.gate_up_proj[expert], f"{base}.w1", f"{base}.w3")
            check(experts.down_proj[expert], f"{base}.w2")


@pytest.mark.parametrize(
    ("model", "format"), [*(("llama", name) for name in WEIGHT_ONLY), ("mixtral", "int4")]
)
def test_transformers_loads_the_folder(model, format, make_folder, sources):
    """Logits equal those of the original model with the dequantized weights."""
    pytest.importorskip(
        "compressed_tensors", reason="compares with compressed_tensors's own output"
    )
    folder, dtype = make_folder(model, format), torch.float32
    if "fp4" in format:
        dtype = torch.bfloat16  # the only dtype of their 4-bit floats
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded, reference = load(folder, dtype=dtype), load(sources[model], dtype=dtype)
    ids = torch.arange(48)[None] * 5 % 256
    with torch.no_grad():
        _replace_weights(reference, decompress(folder))
        expected, actual = reference(ids).logits, loaded(ids).logits
    assert (actual - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_llm_generates_what_transformers_generates(model, make_folder, sources):
    """Greedy tokens of the folder, dequantized, against transformers with the same weights."""
    pytest.importorskip(
        "compressed_tensors", reason="compares with compressed_tensors's own output"
    )
    folder = make_folder(model, "int8_w8a16")
    reference = transformers.AutoModelForCausalLM.from_pretrained(sources[model])
    with torch.no_grad():
        _replace_weights(reference, decompress(folder))
    ids = torch.arange(7, 27)[None]
    expected = reference.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    with LLM(folder, device="cpu", keep_quantized=False, context=64) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        (result,) = llm.generate([ids[0].tolist()], params)
    assert list(result.token_ids) == expected[0, 20:].tolist()


def test_transformers_loads_fp8_experts(make_folder, sources):
    """Inputs are rounded there, too: the weights are compared."""
    pytest.importorskip(
        "compressed_tensors", reason="compares with compressed_tensors's own output"
    )
    folder = make_folder("mixtral", "fp8")
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded, reference = load(folder, dtype=torch.float32), load(sources["mixtral"])
    _replace_weights(reference, decompress(folder))
    stacks = {name: p for name, p in reference.named_parameters() if ".experts." in name}
    assert stacks
    for name, expected in stacks.items():
        torch.testing.assert_close(loaded.get_parameter(name), expected, rtol=1e-6, atol=1e-7)


def _replace_weights(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy checkpoint tensors into a transformers model, which stacks the experts of Mixtral."""
    state = model.state_dict()
    for name, value in weights.items():
        if name in state:
            state[name].copy_(value)
    for name, stack in state.items():
        if ".experts." not in name or name in weights:
            continue
        prefix = name.rpartition("experts.")[0].replace("mlp", "block_sparse_moe") + "experts"
        for expert, target in enumerate(stack):
            parts = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
            target.copy_(torch.cat([weights[f"{prefix}.{expert}.{p}.weight"] for p in parts]))


def test_config_tokenizer_and_index(make_folder, sources, tmp_path):
    folder = make_folder("mixtral", "nvfp4")
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert quantization["format"] == "nvfp4-pack-quantized"
    assert quantization["quant_method"] == "compressed-tensors"
    assert "lm_head" in quantization["ignore"]
    assert "model.layers.0.block_sparse_moe.gate" in quantization["ignore"]
    assert "model.embed_tokens" not in quantization["ignore"]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (sources["mixtral"] / name).read_bytes()
    small = tmp_path / "sharded"
    options = ("--format", "nvfp4", "--no-eval", "--max-shard-size", "100K")
    assert not run_quantize(sources["mixtral"], small, *options)
    index = json.loads((small / "model.safetensors.index.json").read_text())
    whole, parts = read_tensors(folder), read_tensors(small)
    assert whole.keys() == parts.keys() == index["weight_map"].keys()
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    assert all(torch.equal(_bytes(whole[n]), _bytes(parts[n])) for n in whole)
    for file in set(index["weight_map"].values()):
        names = set(safetensors.torch.load_file(small / file))
        assert names == {n for n, f in index["weight_map"].items() if f == file}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_fused_linears_share_the_global_scale(model, make_folder):
    """vLLM runs query, key and value, and gate and up, as one matmul with one scale."""
    tensors = read_tensors(make_folder(model, "nvfp4_w4a4"))
    layer = "model.layers.0."
    experts = "block_sparse_moe.experts.1."
    groups = [[f"{layer}self_attn.{n}_proj" for n in "qkv"]]
    if model == "llama":
        groups.append([f"{layer}mlp.{n}_proj" for n in ("gate", "up")])
    else:
        groups.append([f"{layer}{experts}{n}" for n in ("w1", "w3")])
    for group in groups:
        for name in ("weight_global_scale", "input_global_scale"):
            assert len({float(tensors[f"{base}.{name}"]) for base in group}) == 1, group
