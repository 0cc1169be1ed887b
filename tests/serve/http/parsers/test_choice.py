"""Formats follow from the chat template, then from the family, unless they are named."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from fulgurite.errors import ArgumentError
from fulgurite.models.families.registry import ARCHITECTURES, GGUF_ARCHITECTURES
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.http.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    choose_formats,
    plan_detokenization,
)
from fulgurite.serve.http.parsers.choice import (
    FAMILY_REASONING_FORMATS,
    FAMILY_TOOL_FORMATS,
    REASONING_ALIASES,
    TEMPLATE_REASONING_FORMATS,
    TEMPLATE_TOOL_FORMATS,
)

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        (TOOLS + "<tool_call>\n{{ call }}\n</tool_call>", "qwen3", "hermes"),
        (TOOLS + "<tool_call>\n<function=a>\n<parameter=b>", "Qwen3MoeForCausalLM", "qwen3_coder"),
        (TOOLS + "<tool_call>{{ name }}\n<arg_key>", "Glm4MoeForCausalLM", "glm45"),
        (TOOLS + "[TOOL_CALLS]", "MistralForCausalLM", "mistral"),
        (TOOLS + "<|python_tag|>", "LlamaForCausalLM", "llama3_json"),
        (TOOLS + "<tool_call>", "LlamaForCausalLM", "hermes"),
        (TOOLS + "<|python_start|>", "llama4", "llama4_pythonic"),
        (TOOLS + "<|tool_call|>", "granite", "granite"),
        (TOOLS + "<|tool_call_start|>[", "lfm2", "lfm2"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v3", "deepseek"),
        ("{{ message['tools'] }}<|tool|>{{ x }}<|/tool|>", "phi3", "phi4_mini"),
        ("<|start|><|channel|>analysis<|message|>", "gpt_oss", "harmony"),
        (TOOLS, "LlamaForCausalLM", "llama3_json"),
        (TOOLS, "Llama4ForConditionalGeneration", "llama4_pythonic"),
        (TOOLS, "Qwen3NextForCausalLM", "qwen3_coder"),
        (TOOLS, "Gemma3ForCausalLM", "generic"),
        ("{{ messages }}", "LlamaForCausalLM", "generic"),  # SmolLM2
        ("{{ messages }}", "GptOssForCausalLM", "harmony"),
        (None, "qwen3", "generic"),
        (None, "gpt-oss", "harmony"),
        ("{% broken", "qwen3", "generic"),
        ("{% broken tools", "qwen3", "hermes"),
    ],
)
def test_tool_formats(template: str | None, model_type: str, expected: str) -> None:
    choice = choose_formats(template, model_type)
    assert choice.tool_format is TOOL_FORMATS[expected]


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        ("<think>\n</think>", "qwen3", "think"),
        ("[THINK]", "mistral", "mistral"),
        ("<seed:think>", "seed_oss", "seed"),
        ("Here is my thought process:", "granite", "granite"),
        ("<|channel|>analysis", "gpt_oss", "harmony"),
        (None, "GptOssForCausalLM", "harmony"),
        ("{{ messages }}", "LlamaForCausalLM", None),
    ],
)
def test_reasoning_formats(template: str | None, model_type: str, expected: str | None) -> None:
    found = choose_formats(template, model_type).reasoning_format
    assert found is (None if expected is None else REASONING_FORMATS[expected])


def test_named_formats() -> None:
    choice = choose_formats("[TOOL_CALLS]", "mistral", "hermes", "deepseek_r1")
    assert choice.tool_format is TOOL_FORMATS["hermes"]
    assert choice.reasoning_format is REASONING_FORMATS["think"]
    choice = choose_formats("[TOOL_CALLS][THINK]", "mistral", "none", "none")
    assert choice.tool_format is None and choice.reasoning_format is None
    with pytest.raises(ArgumentError, match="nope"):
        choose_formats(None, "mistral", tool_parser="nope")
    with pytest.raises(ArgumentError, match="nope"):
        choose_formats(None, "mistral", reasoning_parser="nope")


def test_the_tables_name_formats_that_exist() -> None:
    assert {name for _, name in TEMPLATE_TOOL_FORMATS} <= set(TOOL_FORMATS)
    assert set(FAMILY_TOOL_FORMATS.values()) <= set(TOOL_FORMATS)
    names = {name for _, name in TEMPLATE_REASONING_FORMATS}
    assert names <= set(REASONING_FORMATS)
    assert {*FAMILY_REASONING_FORMATS.values(), *REASONING_ALIASES.values()} <= set(
        REASONING_FORMATS
    )


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *GGUF_ARCHITECTURES])
def test_every_family_has_a_format(architecture: str) -> None:
    assert choose_formats(TOOLS, architecture).tool_format is not None


def tokenizer_with(*special: str, normal: tuple[str, ...] = ()) -> Tokenizer:
    backend = Backend(BPE({"a": 0}, []))
    backend.add_tokens([AddedToken(text, special=False) for text in normal])
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    return Tokenizer(backend, None, (), None, {})


def test_markers_that_are_special_tokens_stay_visible() -> None:
    tokenizer = tokenizer_with("<s>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "</s>")
    plan = plan_detokenization(tokenizer, TOOL_FORMATS["mistral"])
    assert not plan.skip_special_tokens
    assert plan.hidden_texts == ("<s>", "[THINK]", "</s>")
    assert plan.hidden_ids == {tokenizer.token_id(text) for text in plan.hidden_texts}
    both = plan_detokenization(tokenizer, TOOL_FORMATS["mistral"], REASONING_FORMATS["mistral"])
    assert both.hidden_texts == ("<s>", "</s>")
    ids = [tokenizer.token_id(text) for text in ("[TOOL_CALLS]", "a", "[ARGS]", "</s>")]
    kept = [id for id in ids if id is not None and id not in both.hidden_ids]
    assert (
        tokenizer.decode(kept, both.skip_special_tokens).replace(" ", "") == "[TOOL_CALLS]a[ARGS]"
    )


def test_special_tokens_are_skipped_if_no_marker_is_one() -> None:
    tokenizer = tokenizer_with("<s>", "[TOOL_CALLS]", normal=("<tool_call>", "<think>"))
    for formats in ((TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]), (None, None), ()):
        plan = plan_detokenization(tokenizer, *formats)
        assert plan.skip_special_tokens and not plan.hidden_ids


@pytest.mark.parametrize(
    ("format", "marker"),
    [
        ("harmony", "<|channel|>"),
        ("harmony", "<|call|>"),
        ("deepseek", "<｜tool▁sep｜>"),
        ("deepseek", "<｜tool▁calls▁end｜>"),
        ("llama3_json", "<|python_tag|>"),
        ("kimi_k2", "<|tool_call_argument_begin|>"),
        ("mistral", "[CALL_ID]"),
        ("glm45", "</arg_value>"),
        ("hermes", "</tool_call>"),
    ],
)
def test_visible_tokens(format: str, marker: str) -> None:
    assert marker in TOOL_FORMATS[format].visible_tokens
