"""Loading safetensors checkpoints: valid ones, invalid ones and their error messages."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models import ARCHITECTURES, build_random_model, load_model, open_checkpoint
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor
from fulgurite.models.loading.safetensors_checkpoint import INDEX_FILE, SINGLE_FILE
from fulgurite.quant import QuantTensor
from tests.models.loading.checkpoint_files import edit_config, replace_tensors
from tests.models.reference_models import build_reference, make_prompt


@pytest.fixture
def folder(get_pair, tmp_path: Path) -> Path:
    """A copy of the llama checkpoint, to be damaged."""
    copy = tmp_path / "llama"
    shutil.copytree(get_pair("llama").path, copy)
    return copy


def test_one_error_lists_all_wrong_tensors(folder: Path) -> None:
    replace_tensors(
        folder,
        **{
            "model.layers.0.self_attn.q_proj.weight": None,
            "model.layers.3.mlp.up_proj.bias": None,
            "model.norm.weight": torch.ones(63),
            "model.layers.1.self_attn.k_proj.weight": torch.ones(32, 65),
            "surprise.weight": torch.ones(2),
        },
    )
    with pytest.raises(WeightsError) as caught:
        load_model(folder)
    text = str(caught.value)
    assert "does not match the llama architecture: 2 missing, 1 unexpected, 2 mismatched" in text
    for expected in (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.3.mlp.up_proj.bias",
        "surprise.weight",
        "model.norm.weight: shape [63]; norm.weight needs [64]",
        "model.layers.1.self_attn.k_proj.weight: shape [32, 65]",
        str(folder),
    ):
        assert expected in text


def test_errors_name_experts_and_fused_weights(get_pair, tmp_path: Path) -> None:
    for name, missing, mismatched in (
        ("mixtral", "model.layers.2.block_sparse_moe.experts.5.w3.weight", None),
        ("phi3", None, "model.layers.1.self_attn.qkv_proj.weight"),
        ("gpt_oss", None, "model.layers.1.mlp.experts.gate_up_proj"),
    ):
        copy = tmp_path / name
        shutil.copytree(get_pair(name).path, copy)
        changes = {missing: None} if missing else {mismatched: torch.ones(6, 5, 7)}
        replace_tensors(copy, **changes)
        with pytest.raises(WeightsError, match=(missing or mismatched).replace(".", r"\.")):
            load_model(copy)


def test_sharded_checkpoint(get_pair, tmp_path: Path) -> None:
    pair = get_pair("qwen3_moe")
    pair.reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ids, positions = make_prompt(9), torch.arange(9)
    assert torch.equal(load_model(tmp_path)(ids, positions), pair.model(ids, positions))
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[0].unlink()
    shards[2].unlink()
    with pytest.raises(WeightsError) as caught:
        load_model(tmp_path)
    assert shards[0].name in str(caught.value) and shards[2].name in str(caught.value)


@pytest.mark.parametrize("name", ["../llama/model.safetensors", "/etc/passwd", "code.bin"])
def test_index_must_stay_in_its_folder(folder: Path, name: str) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(WeightsError, match="must be a .safetensors file in the same folder"):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map'])
def test_invalid_index_is_an_error(folder: Path, text: str) -> None:
    (folder / INDEX_FILE).write_text(text)
    with pytest.raises(WeightsError, match="cannot parse the index"):
        load_model(folder)


@pytest.mark.parametrize("length", [0, 5, 100, 5000, -1])
def test_truncated_file_is_an_error(folder: Path, length: int) -> None:
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data[:length])
    with pytest.raises(WeightsError, match="damaged or truncated"):
        load_model(folder)


class MaliciousPickle:
    """A malicious pickle."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def test_pickles_are_rejected(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    file = folder / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(MaliciousPickle()))
    for path in (folder, file):
        with pytest.raises(WeightsError) as caught:
            load_model(path)
        assert "pytorch_model.bin" in str(caught.value)
        assert "save_file" in str(caught.value)


def test_folder_without_weights_or_config(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="no weights"):
        load_model(tmp_path)


def test_dtype(get_pair, tmp_path: Path) -> None:
    pair = get_pair("deepseek_v3")
    assert {p.dtype for p in pair.model.parameters()} == {torch.float32}
    model = load_model(pair.path, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        expected = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
        assert parameter.dtype == expected
    reference = dict(pair.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reference[name].to(parameter.dtype))
    with pytest.raises(ArgumentError, match="is not a floating-point dtype"):
        load_model(pair.path, dtype=torch.int8)
    half = build_reference("llama").half()
    half.save_pretrained(tmp_path)
    assert load_model(tmp_path).embed_tokens.weight.dtype == torch.float16


def test_tied_lm_head_in_the_file_is_ignored(get_pair, tmp_path: Path) -> None:
    pair = get_pair("llama3")
    copy = tmp_path / "tied"
    shutil.copytree(pair.path, copy)
    replace_tensors(copy, **{"lm_head.weight": pair.model.embed_tokens.weight.clone()})
    assert load_model(copy).lm_head is None


def test_multimodal_checkpoint_loads_its_language_model(get_pair, tmp_path: Path) -> None:
    pair = get_pair("gemma3")
    config = json.loads((pair.path / "config.json").read_text())
    config_fields = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    config_fields |= {"dtype": config.pop("dtype"), "eos_token_id": [1, 106]}
    del config["eos_token_id"]
    state = load_file(pair.path / SINGLE_FILE)
    ids, positions = make_prompt(9), torch.arange(9)
    for prefix in ("language_model.model.", "model.language_model."):
        folder = tmp_path / prefix
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_fields))
        head = "lm_head." if prefix.startswith("model") else "language_model.lm_head."
        renamed = {
            name.replace("model.", prefix, 1).replace("lm_head.", head, 1): tensor
            for name, tensor in state.items()
        }
        renamed["vision_tower.patch.weight"] = torch.ones(2)
        save_file(renamed, folder / SINGLE_FILE)
        model = load_model(folder)
        assert torch.equal(model(ids, positions), pair.model(ids, positions))
        assert model.config.eos_token_ids == (1, 106)


def test_multi_token_prediction_layers_are_ignored(get_pair, tmp_path: Path) -> None:
    pair = get_pair("deepseek_v3")
    copy = tmp_path / "v3"
    shutil.copytree(pair.path, copy)
    replace_tensors(copy, **{"model.layers.4.eh_proj.weight": torch.ones(2)})
    load_model(copy)
    replace_tensors(copy, **{"model.layers.5.eh_proj.weight": torch.ones(2)})
    with pytest.raises(WeightsError, match=r"model\.layers\.5\.eh_proj\.weight"):
        load_model(copy)


def test_fp8_weights_are_dequantized(get_pair, tmp_path: Path) -> None:
    pair = get_pair("deepseek_v3")
    copy = tmp_path / "fp8"
    shutil.copytree(pair.path, copy)
    state = load_file(copy / SINGLE_FILE)
    name = "model.layers.1.self_attn.o_proj.weight"
    fp8_weight = state[name].to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.25]])
    replace_tensors(copy, **{name: fp8_weight, name + "_scale_inv": scale})
    edit_config(copy, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    loaded = load_model(copy).layers[1].attention.o_proj.weight
    assert torch.equal(loaded, fp8_weight.float() * 0.25)


def test_fp8_block_scales() -> None:
    weight = torch.ones(200, 300).to(torch.float8_e4m3fn)
    scale = 1 + torch.arange(6.0).view(2, 3)
    data = QuantTensor("fp8_e4m3_128x128", weight, {"scale": scale})
    tensor = CheckpointTensor("a", data)
    whole = tensor.read_all()
    assert whole[127, 127] == 1 and whole[127, 128] == 2 and whole[199, 299] == 6
    assert torch.equal(tensor.read_rows(100, 150), whole[100:150])
    scale[1, 2] = float("nan")
    with pytest.raises(WeightsError, match=r"scale(.|\n)*where   a,"):
        tensor.read_all()


def test_mxfp4_matches_transformers(get_pair, tmp_path: Path) -> None:
    pair = get_pair("gpt_oss")
    copy = tmp_path / "mxfp4"
    shutil.copytree(pair.path, copy)
    generator = torch.Generator().manual_seed(0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = torch.randint(0, 256, (6, 192, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (6, 192, 2), generator=generator, dtype=torch.uint8)
    replace_tensors(copy, **{name: None, name + "_blocks": blocks, name + "_scales": scales})
    edit_config(copy, quantization_config={"quant_method": "mxfp4"})
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    if expected.shape[1] != 64:
        expected = expected.transpose(1, 2)
    gate_up = load_model(copy).layers[0].feed_forward.experts.gate_up_proj
    assert torch.equal(gate_up[:, :96], expected[..., 0::2].transpose(1, 2))
    assert torch.equal(gate_up[:, 96:], expected[..., 1::2].transpose(1, 2))


def test_unsupported_quant_method_is_an_error(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(WeightsError, match=r"quant_method='aqlm' is not supported; supported: fp8"):
        load_model(folder)


def anonymous_megabytes() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon here")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_peak_memory_of_loading(tmp_path: Path) -> None:
    """Load 200 MB of bfloat16 as 400 MB of float32, and sample the memory meanwhile."""
    state = {"model.embed_tokens.weight": torch.ones(16_000, 3_000, dtype=torch.bfloat16)}
    state["lm_head.weight"] = torch.ones(16_000, 3_000, dtype=torch.bfloat16)
    state["model.norm.weight"] = torch.ones(3_000, dtype=torch.bfloat16)
    layer, shapes = "model.layers.0", {"mlp.gate_proj": (10, 3_000), "mlp.up_proj": (10, 3_000)}
    shapes |= {"mlp.down_proj": (3_000, 10), "input_layernorm": (3_000,)}
    shapes |= {f"self_attn.{name}_proj": (20, 3_000) for name in "qkv"}
    shapes |= {"self_attn.o_proj": (3_000, 20), "post_attention_layernorm": (3_000,)}
    state |= {f"{layer}.{k}.weight": torch.ones(v, dtype=torch.bfloat16) for k, v in shapes.items()}
    save_file(state, tmp_path / SINGLE_FILE)
    del state
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 16_000,
        "hidden_size": 3_000,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": 10,
        "head_dim": 2,
        "max_position_embeddings": 10,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    before, peak, done = anonymous_megabytes(), [0.0], threading.Event()

    def sample_memory() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous_megabytes())
            time.sleep(0.002)

    sampler = threading.Thread(target=sample_memory)
    sampler.start()
    try:
        model = load_model(tmp_path, dtype=torch.float32)
    finally:
        done.set()
        sampler.join()
    size = sum(p.numel() * 4 for p in model.parameters()) / 2**20
    assert peak[0] - before < size + 80


def test_random_model_depends_only_on_the_seed(get_pair) -> None:
    checkpoint = open_checkpoint(get_pair("mixtral").path)
    assert checkpoint.family is ARCHITECTURES["MixtralForCausalLM"]
    models = [build_random_model(checkpoint.config, checkpoint.family, seed=s) for s in (0, 0, 1)]
    ids, positions = make_prompt(5), torch.arange(5)
    first, repeated, different = (model(ids, positions) for model in models)
    assert torch.equal(first, repeated) and not torch.equal(first, different)
    assert first.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_non_float_weights_are_rejected(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    replace_tensors(folder, **{name: torch.ones(96, 64, dtype=dtype)})
    with pytest.raises(WeightsError, match=rf"{name} has dtype {dtype}"):
        load_model(folder)


def test_damaged_blocks_are_named(folder: Path) -> None:
    replace_tensors(folder, odd_blocks=torch.zeros(3), odd_scales=torch.zeros(3))
    with pytest.raises(WeightsError, match=r"(.|\n)*where   odd_blocks(.|\n)*llama"):
        load_model(folder)


def test_suggestions_without_config_json(tmp_path: Path) -> None:
    def suggestion() -> str:
        with pytest.raises(WeightsError, match=r"no config\.json") as caught:
            open_checkpoint(tmp_path)
        return str(caught.value)

    assert "or a .gguf file" in suggestion()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/config.json").write_text("{}")
    assert f"own folder: {tmp_path / 'inner'}" in suggestion()
    (tmp_path / SINGLE_FILE).touch()
    assert "download config.json from" in suggestion()
    (tmp_path / "adapter_config.json").touch()
    assert "adapters only: load their base model" in suggestion()
    (tmp_path / "a.gguf").touch()
    assert f"one of its files: {tmp_path / 'a.gguf'}" in suggestion()


def test_git_lfs_pointers_are_detected(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for name in (SINGLE_FILE, "model.gguf"):
        (folder / name).write_text(text)
    for path in (folder, folder / "model.gguf"):
        with pytest.raises(WeightsError, match=r"Git LFS pointer(.|\n)*git lfs pull"):
            open_checkpoint(path)


def test_deeply_nested_config_is_an_error(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(WeightsError, match="cannot parse config.json"):
        load_model(folder)


def test_zero_biases_of_linears_without_one_are_left_out(get_pair, tmp_path: Path) -> None:
    """GPTQ's libraries wrote them. Others would change the result: they are refused."""
    copy, pair = tmp_path / "copy", get_pair("llama_yarn")
    shutil.copytree(pair.path, copy)
    replace_tensors(copy, **{"model.layers.0.mlp.up_proj.bias": torch.zeros(96)})
    ids, positions = make_prompt(9), torch.arange(9)
    assert torch.equal(load_model(copy)(ids, positions), pair.model(ids, positions))
    replace_tensors(copy, **{"model.layers.0.mlp.up_proj.bias": torch.ones(96)})
    with pytest.raises(WeightsError, match=r"unexpected +model\.layers\.0\.mlp\.up_proj\.bias"):
        load_model(copy)


def test_a_stored_head_that_differs_is_used(get_pair, tmp_path: Path, caplog) -> None:
    """config.json ties it to the embedding, and the file has a head of its own."""
    copy, pair = tmp_path / "copy", get_pair("llama3")
    shutil.copytree(pair.path, copy)
    ids, positions = make_prompt(9), torch.arange(9)
    embedding = load_file(copy / SINGLE_FILE)["model.embed_tokens.weight"]
    replace_tensors(copy, **{"lm_head.weight": embedding.clone()})
    model = load_model(copy)
    assert model.lm_head is None
    assert torch.equal(model(ids, positions), pair.model(ids, positions))
    replace_tensors(copy, **{"lm_head.weight": 2 * embedding})
    with caplog.at_level("WARNING", logger="fulgurite"):
        own = load_model(copy)
    torch.testing.assert_close(own(ids, positions), 2 * pair.model(ids, positions))
    assert "ties the LM head" in caplog.text


def test_dtype_of_the_weights_where_config_json_names_none(folder: Path) -> None:
    edit_config(folder, dtype=None, torch_dtype=None)
    assert load_model(folder).dtype == torch.float32
    state = {name: one.bfloat16() for name, one in load_file(folder / SINGLE_FILE).items()}
    save_file({**state, "model.norm.weight": torch.ones(64)}, folder / SINGLE_FILE)
    assert load_model(folder).dtype == torch.bfloat16


def test_shards_without_an_index(get_pair, tmp_path: Path) -> None:
    pair = get_pair("llama_linear")
    pair.reference.save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / INDEX_FILE).unlink()
    ids, positions = make_prompt(9), torch.arange(9)
    assert torch.equal(load_model(tmp_path)(ids, positions), pair.model(ids, positions))
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(WeightsError, match=rf"1 of {len(shards)} shards are missing"):
        load_model(tmp_path)
    shards[0].rename(tmp_path / "model-00001-of-00099.safetensors")
    with pytest.raises(WeightsError, match="shards of 2 checkpoints"):
        load_model(tmp_path)


def test_a_single_file_is_newer_than_an_index(get_pair, tmp_path: Path) -> None:
    """transformers reads it first: the index may be what an earlier save left."""
    pair = get_pair("llama_linear")
    pair.reference.save_pretrained(tmp_path)
    stale = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(stale))
    ids, positions = make_prompt(9), torch.arange(9)
    assert torch.equal(load_model(tmp_path)(ids, positions), pair.model(ids, positions))
