"""`LLM` of checkpoints in published layouts: it runs them packed, and plans what they hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from fulgurite.errors import ArgumentError, CapacityError
from fulgurite.kernels.gemm.cpu_layout import pack_panels
from fulgurite.kernels.gemm.modules import NATIVE_ACTIVATION_FORMATS
from fulgurite.models import load_model
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading import loader
from fulgurite.plan import rank_memory
from fulgurite.quant import QuantTensor, compute_sqnr, get_device_features
from fulgurite.quant import is_native as is_native_format
from fulgurite.quant.config import QuantConfig
from fulgurite.quantize import quantize, save
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM, LLMConfig, choose_limits
from tests.models.loading.published_layouts import LAYOUTS, write_checkpoints

PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6]]
GREEDY = SamplingParams(max_tokens=4, logprobs=1, ignore_eos=True)


def held_bytes(model: CausalLM) -> int:
    """Parameters and buffers, and the layouts that the CPU kernels pack."""
    total = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for tensor in model.parameters():
        if isinstance(tensor, QuantTensor):
            matrices = [tensor] if tensor.dim() == 2 else [tensor[i] for i in range(len(tensor))]
            total += sum(pack_panels(matrix).nbytes for matrix in matrices)
    return total


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts_run_packed(tmp_path: Path, name: str) -> None:
    folder, reference = write_checkpoints(tmp_path, name, moe=name.startswith("ct_"))
    with LLM(folder, device="cpu", context=32) as llm, LLM(reference, device="cpu") as dense:
        assert any(isinstance(p, QuantTensor) for p in llm.model.parameters())
        assert llm.model.load_report is not None and not llm.model.load_report.dequantized
        (result,), (expected,) = llm.generate(PROMPT, GREEDY), dense.generate(PROMPT, GREEDY)
        assert len(result.token_ids) == 4
        first, other = result.logprobs[0], expected.logprobs[0]
        assert first.logprob == pytest.approx(other.logprob, abs=0.3)  # int8 activations
        assert llm.plan.weights == pytest.approx(held_bytes(llm.model), rel=0.05)


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    folder, _ = write_checkpoints(tmp_path, "ct_fp8_channel", moe=False)
    with LLM(folder, device="cpu", context=32) as llm:
        assert llm.tokenizer is None and llm.generate([[1, 2, 3]])[0].text == ""
        with pytest.raises(ArgumentError, match="text prompt needs a tokenizer"):
            llm.generate("hello")
        with pytest.raises(ArgumentError, match=r"no tokenizer\.json(.|\n)*token ids"):
            llm.chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("name", ["ct_fp8_static", "modelopt_fp8"])
def test_kv_cache_scales(tmp_path: Path, name: str) -> None:
    """An FP8 cache with the checkpoint's scales: values beyond 448 don't saturate."""
    folder, _ = write_checkpoints(tmp_path, name, moe=False)
    with LLM(folder, device="cpu", context=32, kv_dtype="fp8") as llm:
        spec = llm.model.attention_specs[1]
        assert (spec.key_scale, spec.value_scale) == pytest.approx((0.03, 0.05))
        scaled = llm.generate(PROMPT, GREEDY)[0].logprobs[0].logprob
    with LLM(folder, device="cpu", context=32) as llm:
        assert llm.plan.limits.kv_dtype == torch.float16  # FP8 is for GPUs
        exact = llm.generate(PROMPT, GREEDY)[0].logprobs[0].logprob
    assert scaled == pytest.approx(exact, abs=0.2) and scaled != exact


def test_kv_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    model = loader.build_meta_model(
        loader.open_checkpoint(write_checkpoints(tmp_path, "modelopt_fp8", moe=False)[0]),
        torch.bfloat16,
        True,
        "cuda",
    )
    cuda = torch.device("cuda")
    assert choose_limits(LLMConfig(), model, cuda, "fp8").kv_dtype == torch.float8_e4m3fn
    assert choose_limits(LLMConfig(), model, cuda, None).kv_dtype == torch.bfloat16
    own = LLMConfig(kv_dtype="bfloat16")
    assert choose_limits(own, model, cuda, "fp8").kv_dtype == torch.bfloat16


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("format", ["int8", "fp8", "q8_0", "nvfp4"])
def test_quantize_while_loading(tmp_path: Path, format: str, moe: bool) -> None:
    """The same weights as quantizing the loaded model; planned as they are held."""
    _, dense = write_checkpoints(tmp_path, "ct_int8", moe=moe)
    expected = load_model(dense)
    quantize(expected, format, progress=False)
    with LLM(dense, device="cpu", context=32, quantize=format) as llm:
        assert llm.plan.weights == pytest.approx(held_bytes(llm.model), rel=0.05)
        largest = max(p.numel() * 4 for p in llm.model.parameters() if isinstance(p, QuantTensor))
        assert llm.plan.loading == largest
        ours = dict(llm.model.named_parameters())
        for name, parameter in expected.named_parameters():
            assert torch.equal(ours[name], parameter), name
        assert len(llm.generate(PROMPT, GREEDY)[0].token_ids) == 4


def test_a_model_that_fits_quantized_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, dense = write_checkpoints(tmp_path, "ct_int8", moe=True)
    options = {"device": "cpu", "context": 16, "max_sequences": 1, "max_batched_tokens": 16}
    with LLM(dense, quantize="nvfp4", **options) as llm:
        plan = llm.plan
    needed = max(plan.total, plan.weights + plan.loading)
    monkeypatch.setattr(rank_memory, "available_bytes", lambda device: needed)
    with LLM(dense, quantize="nvfp4", **options) as llm:
        assert llm.plan.weights == plan.weights
    with pytest.raises(CapacityError, match="does not fit"):
        LLM(dense, **options)
    monkeypatch.setattr(rank_memory, "available_bytes", lambda device: plan.weights + 1)
    with pytest.raises(CapacityError, match="loading them"):
        LLM(dense, quantize="nvfp4", **options)


def test_static_activations_need_calibration(tmp_path: Path) -> None:
    _, dense = write_checkpoints(tmp_path, "ct_int8", moe=False)
    with pytest.raises(ArgumentError, match="need calibration batches"):
        LLM(dense, device="cpu", quantize="fp8_static")


@torch.inference_mode()
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_saved_models_load(tmp_path: Path, moe: bool) -> None:
    """What `fulgurite.quantize.save` wrote, beside the config.json of the original."""
    _, dense = write_checkpoints(tmp_path, "ct_int8", moe=moe)
    model = load_model(dense)
    quantize(model, QuantConfig("int8", activations="none"), progress=False)
    folder = tmp_path / "saved"
    folder.mkdir()
    save(model, folder / "model.safetensors")
    shutil.copy(dense / "config.json", folder)
    loaded = load_model(folder, keep_quantized=True)
    ids, positions = torch.tensor(PROMPT[0]), torch.arange(8)
    assert torch.equal(loaded(ids, positions), model(ids, positions))
    with LLM(folder, device="cpu", context=32) as llm:
        assert len(llm.generate(PROMPT, GREEDY)[0].token_ids) == 4


@torch.inference_mode()
def test_saved_static_scales_load(tmp_path: Path) -> None:
    _, dense = write_checkpoints(tmp_path, "ct_int8", moe=False)
    ids, positions = torch.tensor(PROMPT[0]), torch.arange(8)
    model = load_model(dense)
    quantize(model, "fp8_static", calibrate=[(ids, positions)], progress=False)
    save(model, tmp_path / "model.safetensors")
    shutil.copy(dense / "config.json", tmp_path)
    loaded = load_model(tmp_path, keep_quantized=True)
    assert torch.equal(loaded(ids, positions), model(ids, positions))


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts_on_a_gpu(tmp_path: Path, name: str, moe: bool) -> None:
    """Packed weights, and static input scales where the GPU multiplies the format."""
    folder, reference = write_checkpoints(tmp_path, name, moe)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    model = load_model(folder, keep_quantized=True, **options)
    ids, positions = torch.tensor(PROMPT[0]).cuda(), torch.arange(8).cuda()
    expected = load_model(reference, **options)(ids, positions).float()
    assert compute_sqnr(expected, model(ids, positions).float()) > 10
    q_proj = model.layers[0].attention.q_proj
    assert q_proj.activations in ("none", *NATIVE_ACTIVATION_FORMATS.values(), "fp8_e4m3_tensor")
    is_static = name in (
        *("ct_fp8_static", "modelopt_fp8", "fp8_static"),
        *("ct_nvfp4", "modelopt_nvfp4"),
    )
    is_native = is_native_format(q_proj.weight.format, get_device_features(q_proj.weight.device))
    assert (q_proj.static_scale is not None) == (is_static and is_native)
    with LLM(folder, device="cuda", context=32, dtype=torch.bfloat16) as llm:
        assert len(llm.generate(PROMPT, GREEDY)[0].token_ids) == 4
