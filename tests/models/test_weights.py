"""Checkpoints in safetensors: what loads, what is refused and what the error says."""

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

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models import ARCHITECTURES, load_model, open_checkpoint, random_model
from fulgurite.models.safetensors_file import INDEX, SINGLE
from tests.models.model_oracle import make_theirs, prompt


@pytest.fixture
def folder(get_pair, tmp_path: Path) -> Path:
    """A copy of the llama checkpoint to damage."""
    copy = tmp_path / "llama"
    shutil.copytree(get_pair("llama").path, copy)
    return copy


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Rewrite the checkpoint with some tensors replaced, added or (None) left out."""
    state = load_file(folder / SINGLE)
    for name, tensor in tensors.items():
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, folder / SINGLE)


def edit_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_one_error_names_every_missing_extra_and_misshapen_tensor(folder: Path) -> None:
    change(
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
    assert "does not fit llama: 2 missing, 1 extra, 2 misshapen" in text
    for expected in (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.3.mlp.up_proj.bias",
        "surprise.weight",
        "model.norm.weight: [63] in the checkpoint, norm.weight wants [64]",
        "model.layers.1.self_attn.k_proj.weight: [32, 65] in the checkpoint",
        str(folder),
    ):
        assert expected in text


def test_a_missing_expert_and_a_misshapen_fused_weight_are_named(get_pair, tmp_path: Path) -> None:
    for name, missing, bad in (
        ("mixtral", "model.layers.2.block_sparse_moe.experts.5.w3.weight", None),
        ("phi3", None, "model.layers.1.self_attn.qkv_proj.weight"),
        ("gpt_oss", None, "model.layers.1.mlp.experts.gate_up_proj"),
    ):
        copy = tmp_path / name
        shutil.copytree(get_pair(name).path, copy)
        changes = {missing: None} if missing else {bad: torch.ones(6, 5, 7)}
        change(copy, **changes)
        with pytest.raises(WeightsError, match=(missing or bad).replace(".", r"\.")):
            load_model(copy)


def test_shards_load_like_one_file(get_pair, tmp_path: Path) -> None:
    pair = get_pair("qwen3_moe")
    pair.theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ids, positions = prompt(9), torch.arange(9)
    assert torch.equal(load_model(tmp_path)(ids, positions), pair.ours(ids, positions))
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[0].unlink()
    shards[2].unlink()
    with pytest.raises(WeightsError) as caught:
        load_model(tmp_path)
    assert shards[0].name in str(caught.value) and shards[2].name in str(caught.value)


@pytest.mark.parametrize("name", ["../llama/model.safetensors", "/etc/passwd", "code.bin"])
def test_an_index_may_not_point_outside_its_folder(folder: Path, name: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(WeightsError, match="no safetensors file of its own folder"):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map'])
def test_a_broken_index_is_an_error(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(WeightsError, match="index can't be read"):
        load_model(folder)


@pytest.mark.parametrize("kept", [0, 5, 100, 5000, -1])
def test_a_truncated_file_is_an_error(folder: Path, kept: int) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:kept])
    with pytest.raises(WeightsError, match="damaged or cut short"):
        load_model(folder)


class Explosive:
    """What a malicious pickle looks like."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def test_pickles_are_refused_with_a_way_to_convert(folder: Path) -> None:
    (folder / SINGLE).unlink()
    file = folder / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(Explosive()))
    for path in (folder, file):
        with pytest.raises(WeightsError) as caught:
            load_model(path)
        assert "pytorch_model.bin" in str(caught.value)
        assert "save_file" in str(caught.value)


def test_a_folder_without_weights_or_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="no weights here"):
        load_model(tmp_path)


def test_the_dtype_is_the_checkpoints_or_the_one_asked_for(get_pair, tmp_path: Path) -> None:
    pair = get_pair("deepseek_v3")
    assert {p.dtype for p in pair.ours.parameters()} == {torch.float32}
    model = load_model(pair.path, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        wanted = torch.float32 if name.endswith("choice_bias") else torch.bfloat16
        assert parameter.dtype == wanted
    exact = dict(pair.ours.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, exact[name].to(parameter.dtype))
    with pytest.raises(ArgumentError, match="can't compute in"):
        load_model(pair.path, dtype=torch.int8)
    half = make_theirs("llama").half()
    half.save_pretrained(tmp_path)
    assert load_model(tmp_path).embedding.weight.dtype == torch.float16


def test_a_tied_head_in_the_file_is_not_extra(get_pair, tmp_path: Path) -> None:
    pair = get_pair("llama3")
    copy = tmp_path / "tied"
    shutil.copytree(pair.path, copy)
    change(copy, **{"lm_head.weight": pair.ours.embedding.weight.clone()})
    assert load_model(copy).head is None


def test_a_multimodal_checkpoint_gives_its_language_model(get_pair, tmp_path: Path) -> None:
    pair = get_pair("gemma3")
    config = json.loads((pair.path / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    outer |= {"dtype": config.pop("dtype"), "eos_token_id": [1, 106]}
    del config["eos_token_id"]
    state = load_file(pair.path / SINGLE)
    ids, positions = prompt(9), torch.arange(9)
    for inner in ("language_model.model.", "model.language_model."):
        folder = tmp_path / inner
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(outer))
        head = "lm_head." if inner.startswith("model") else "language_model.lm_head."
        renamed = {
            name.replace("model.", inner, 1).replace("lm_head.", head, 1): tensor
            for name, tensor in state.items()
        }
        renamed["vision_tower.patch.weight"] = torch.ones(2)
        save_file(renamed, folder / SINGLE)
        model = load_model(folder)
        assert torch.equal(model(ids, positions), pair.ours(ids, positions))
        assert model.config.eos_token_ids == (1, 106)


def test_layers_for_several_tokens_at_once_are_left_out(get_pair, tmp_path: Path) -> None:
    pair = get_pair("deepseek_v3")
    copy = tmp_path / "v3"
    shutil.copytree(pair.path, copy)
    change(copy, **{"model.layers.4.eh_proj.weight": torch.ones(2)})
    load_model(copy)
    change(copy, **{"model.layers.5.eh_proj.weight": torch.ones(2)})
    with pytest.raises(WeightsError, match=r"model\.layers\.5\.eh_proj\.weight"):
        load_model(copy)


def test_float8_blocks_are_what_they_stand_for(get_pair, tmp_path: Path) -> None:
    pair = get_pair("deepseek_v3")
    copy = tmp_path / "fp8"
    shutil.copytree(pair.path, copy)
    state = load_file(copy / SINGLE)
    name = "model.layers.1.self_attn.o_proj.weight"
    packed = state[name].to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.25]])
    change(copy, **{name: packed, name + "_scale_inv": scale})
    edit_config(copy, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    loaded = load_model(copy).layers[1].attention.output.weight
    assert torch.equal(loaded, packed.float() * 0.25)


def test_float8_scales_are_one_a_block() -> None:
    from fulgurite.models.safetensors_file import stored_fp8

    weight = torch.ones(200, 300).to(torch.float8_e4m3fn)
    scale = 1 + torch.arange(6.0).view(2, 3)
    stored = stored_fp8("a.weight", weight, scale)
    whole = stored.all()
    assert whole[127, 127] == 1 and whole[127, 128] == 2 and whole[199, 299] == 6
    assert torch.equal(stored.rows(100, 150), whole[100:150])
    scale[1, 2] = float("nan")
    with pytest.raises(WeightsError, match=r"scale(.|\n)*where   a "):
        stored_fp8("a.weight", weight, scale).all()


def test_mxfp4_is_unpacked_as_transformers_does(get_pair, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    pair = get_pair("gpt_oss")
    copy = tmp_path / "mxfp4"
    shutil.copytree(pair.path, copy)
    generator = torch.Generator().manual_seed(0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = torch.randint(0, 256, (6, 192, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (6, 192, 2), generator=generator, dtype=torch.uint8)
    change(copy, **{name: None, name + "_blocks": blocks, name + "_scales": scales})
    edit_config(copy, quantization_config={"quant_method": "mxfp4"})
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    if theirs.shape[1] != 64:
        theirs = theirs.transpose(1, 2)
    gate_up = load_model(copy).layers[0].feed_forward.experts.gate_up
    assert torch.equal(gate_up[:, :96], theirs[..., 0::2].transpose(1, 2))
    assert torch.equal(gate_up[:, 96:], theirs[..., 1::2].transpose(1, 2))


def test_an_unknown_packing_is_an_error(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(WeightsError, match=r"'gptq' is not supported; known: fp8, mxfp4"):
        load_model(folder)


def anonymous_megabytes() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon here")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_takes_little_more_memory_than_the_model(tmp_path: Path) -> None:
    """200 MB of bfloat16 into 400 MB of float32, sampled while it loads."""
    state = {"model.embed_tokens.weight": torch.ones(16_000, 3_000, dtype=torch.bfloat16)}
    state["lm_head.weight"] = torch.ones(16_000, 3_000, dtype=torch.bfloat16)
    state["model.norm.weight"] = torch.ones(3_000, dtype=torch.bfloat16)
    save_file(state, tmp_path / SINGLE)
    del state
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 16_000,
        "hidden_size": 3_000,
        "intermediate_size": 10,
        "num_hidden_layers": 0,
        "num_attention_heads": 10,
        "max_position_embeddings": 10,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    before, peak, done = anonymous_megabytes(), [0.0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous_megabytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        model = load_model(tmp_path, dtype=torch.float32)
    finally:
        done.set()
        watcher.join()
    size = sum(p.numel() * 4 for p in model.parameters()) / 2**20
    assert peak[0] - before < size + 80


def test_a_random_model_is_the_same_for_the_same_seed(get_pair) -> None:
    checkpoint = open_checkpoint(get_pair("mixtral").path)
    assert checkpoint.family is ARCHITECTURES["MixtralForCausalLM"]
    models = [random_model(checkpoint.config, checkpoint.family, seed=s) for s in (0, 0, 1)]
    ids, positions = prompt(5), torch.arange(5)
    first, same, other = (model(ids, positions) for model in models)
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert first.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_numbers_that_are_no_weights_are_refused(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change(folder, **{name: torch.ones(96, 64, dtype=dtype)})
    with pytest.raises(WeightsError, match=rf"{name} holds {dtype}"):
        load_model(folder)


def test_blocks_of_the_wrong_shape_are_extra(folder: Path) -> None:
    change(folder, odd_blocks=torch.zeros(3), odd_scales=torch.zeros(3))
    with pytest.raises(WeightsError, match=r"2 extra(.|\n)*odd_blocks(.|\n)*odd_scales"):
        load_model(folder)


def test_what_to_give_where_there_is_no_config(tmp_path: Path) -> None:
    def advice() -> str:
        with pytest.raises(WeightsError, match=r"no config\.json") as caught:
            open_checkpoint(tmp_path)
        return str(caught.value)

    assert "or a .gguf file" in advice()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/config.json").write_text("{}")
    assert f"own folder: {tmp_path / 'inner'}" in advice()
    (tmp_path / SINGLE).touch()
    assert "download config.json too" in advice()
    (tmp_path / "a.gguf").touch()
    assert f"one of its files: {tmp_path / 'a.gguf'}" in advice()


def test_a_pointer_of_git_lfs_is_told_from_damage(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for name in (SINGLE, "model.gguf"):
        (folder / name).write_text(text)
    for path in (folder, folder / "model.gguf"):
        with pytest.raises(WeightsError, match=r"pointer of Git LFS(.|\n)*git lfs pull"):
            open_checkpoint(path)


def test_a_config_nested_without_end_is_an_error(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(WeightsError, match="can't be read"):
        load_model(folder)
